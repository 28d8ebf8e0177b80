"""`xlme export --run PATH --out PATH` writes a trained model as a Hugging Face folder.

`--from-hf PATH` in place of `--run` exports an XLM-R in Hugging Face's form. The commands that evaluate or fine-tune a
run also take an export.
"""

from ..cli import fail, program
from ..io.help import call_from_command_line
from .settings import ExportSettings

_USAGE = "xlme export (--run PATH | --from-hf PATH) --out PATH [OPTIONS]"


def main(arguments: list[str] | None = None) -> None:
    """Write the folder and print its name; a user's mistake ends in one line on stderr and exit code 2."""
    config = call_from_command_line(ExportSettings, program("export"), arguments, usage=_USAGE)
    try:
        if (config.run is None) == (config.from_hf is None):
            raise ValueError("name what to export: either --run PATH or --from-hf PATH")
        if config.which is not None and config.from_hf is not None:
            raise ValueError("--which works only with --run, because XLM-R has one encoder: leave --which out")
        from .export_run import export_run, export_xlm_roberta  # it loads torch, and --help should not

        if config.run is not None:
            export_run(config.run, config.out, config.layer, config.which, config.model_type, config.onnx)
        elif config.from_hf is not None:
            export_xlm_roberta(config.from_hf, config.out, config.layer, config.model_type, config.onnx)
        print(config.out)
    except (ValueError, OSError) as error:
        fail("xlme export", error)


if __name__ == "__main__":
    main()
