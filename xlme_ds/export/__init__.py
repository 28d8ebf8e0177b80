"""Write trained models as folders for Hugging Face transformers: what `xlme export` does, as functions.

xlme.export.run("runs/base", "exports/base")
"""

from pathlib import Path

from ..config import EncoderName, ModelType
from ..io.argument_types import check_argument_types

__all__ = ["from_hf", "run"]


@check_argument_types
def run(
    folder: Path | str,
    out: Path | str,
    *,
    layer: int | None = None,
    which: EncoderName | None = None,
    model_type: ModelType | None = None,
    onnx: bool = False,
) -> Path:
    """Write the model of the run in `folder` as the folder `out`, and return `out`. RUN@STEP names a checkpoint of a
    run.

    `which`: write only this encoder; `layer`: cut the encoder after this layer. `model_type`: by default `xlm-roberta`
    or `modernbert` for a model of that shape, else `xlme`. `onnx`: write model.onnx too.

    Raises ValueError when the folder holds no model, and when `out` exists.
    """
    from .export_run import export_run

    export_run(Path(folder), Path(out), layer, which, model_type, onnx)
    return Path(out)


@check_argument_types
def from_hf(
    folder: Path | str,
    out: Path | str,
    *,
    layer: int | None = None,
    model_type: ModelType | None = None,
    onnx: bool = False,
) -> Path:
    """Write the XLM-R model in `folder`, a folder in Hugging Face's form, as the folder `out`, and return `out`. The
    other arguments are those of `run`."""
    from .export_run import export_xlm_roberta

    export_xlm_roberta(Path(folder), Path(out), layer, model_type, onnx)
    return Path(out)


def __dir__() -> list[str]:
    return __all__
