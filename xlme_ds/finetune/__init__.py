"""Fine-tuning on XTREME's tasks: what `xlme finetune` does, as a function.

scores = xlme.finetune.run("ner", "runs/base", "xtreme/panx", "runs/base-ner", learning_rate=7e-6)
"""

from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ..io.argument_types import check_argument_types
from ..io.errors import no_such

__all__ = ["run"]


@check_argument_types
def run(
    task: Literal["pos", "ner", "conll", "xquad", "mlqa", "tydiqa", "xnli", "pawsx"],
    model: Path | str,
    data: Path | str | Sequence[Path | str],
    out: Path | str,
    seed: int = 1,
    split: Literal["test", "dev"] = "test",
    **tuning: Any,
) -> dict[str, Any] | None:
    """Fine-tune `model` (a run, RUN@STEP, or an export) on `task` with XTREME's files in the folders `data`, on the GPU
    if there is one.

    Returns the scores as in `out`/scores.json, such as `languages` (the metrics of each language) and `mean` (of each
    metric, over the languages); None if a signal stopped the run. `split` dev scores the dev sets of all languages in
    place of the tests, which have no labels in XTREME's download. `tuning`: settings of `xlme finetune --tuning.…`,
    such as learning_rate, batch, epochs, warmup, dropout and train_languages; all others have their defaults. A second
    call with the same `out` resumes the run. Raises ValueError for a mistake in the settings or the data.
    """
    from ..engine.ranks import SharedError
    from ..train.stop import StopRequest
    from .__main__ import run_all
    from .settings import FinetuneSettings, TuningConfig, jobs

    names = [field.name for field in fields(TuningConfig)]
    for name in tuning:
        if name not in names:
            raise no_such("argument", name, names)
    folders = tuple(map(Path, [data] if isinstance(data, str | PathLike) else data))
    settings = FinetuneSettings(
        task, Path(model), folders, Path(out), split=split, seeds=(seed,), tuning=TuningConfig(**tuning)
    )
    stop = StopRequest()
    try:
        return run_all(settings, jobs(settings), stop)[0]
    except SharedError as error:
        raise ValueError(str(error)) from None
    finally:
        stop.release()


def __dir__() -> list[str]:
    return __all__
