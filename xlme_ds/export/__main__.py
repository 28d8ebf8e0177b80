"""`xlme export --run PATH --out PATH` writes a trained model as a Hugging Face folder.

`--from-hf PATH` in place of `--run` exports an XLM-R in Hugging Face's form. The commands that evaluate or fine-tune a
run also take an export.
"""

from pathlib import Path

from ..cli import fail, note, program
from ..config import EncoderName, ModelType
from ..io.help import call_from_command_line

_USAGE = "xlme export (--run PATH | --from-hf PATH) --out PATH [OPTIONS]"


def main(arguments: list[str] | None = None) -> None:
    """Write the folder and print its name; a user's mistake ends in one line on stderr and exit code 2."""
    try:
        out = call_from_command_line(export, program("export"), arguments, usage=_USAGE)
        print(out)
        note(f"{out / 'README.md'} shows how to load it")
    except (ValueError, OSError) as error:
        fail("xlme export", error)


def export(
    out: Path,
    run: Path | None = None,
    from_hf: Path | None = None,
    layer: int | None = None,
    which: EncoderName | None = None,
    model_type: ModelType | None = None,
    onnx: bool = False,
) -> Path:
    """Write a trained model as a folder for Hugging Face transformers.

    xlme export --run runs/base --out exports/base

    Args:
        out: Folder to make.
        run: Folder of a run, pre-trained or fine-tuned; required without --from-hf. RUN@STEP names a checkpoint of
            pre-training; for a run that is not finished, the newest checkpoint is taken.
        from_hf: Folder of an XLM-R model: config.json, model.safetensors or pytorch_model.bin,
            sentencepiece.bpe.model.
        layer: Cut the encoder after this layer, for sentence vectors (the paper's retrieval reads layer 9 of 12).
        which: Export only this encoder of `--run`, without a head; by default the whole model is exported.
        model_type: `xlm-roberta` and `modernbert` load everywhere without our code; `xlme` has its code in the folder
            (trust_remote_code). By default `xlm-roberta` for every model of XLM-R's shape: post-LN, learned positions,
            no relative bias, no languages; `modernbert` for model.body modern; `xlme` for all other models.
        onnx: Write model.onnx too. Its output is the last hidden states, or the logits if the model was fine-tuned.
            Needs onnx and onnxscript.

    Returns:
        `out`.
    """
    if (run is None) == (from_hf is None):
        raise ValueError("name what to export: either --run PATH or --from-hf PATH")
    if which is not None and from_hf is not None:
        raise ValueError("--which works only with --run, because XLM-R has one encoder: leave --which out")
    from .export_run import export_run, export_xlm_roberta  # it loads torch, and --help should not

    if run is not None:
        export_run(run, out, layer, which, model_type, onnx)
    elif from_hf is not None:
        export_xlm_roberta(from_hf, out, layer, model_type, onnx)
    return out


if __name__ == "__main__":
    main()
