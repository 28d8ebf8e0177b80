"""`xlme config --recipe base > base.toml`: all settings of a run as a file for `--config`, each with its help."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from .cli import fail, parse, program
from .config import RunConfig
from .settings_file import to_toml
from .validate import validate


@dataclass(frozen=True)
class PrintedSettings:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]


def main(arguments: list[str] | None = None) -> None:
    """Print the file; a user's mistake ends in one sentence and exit code 2."""
    argv = sys.argv[1:] if arguments is None else arguments
    try:
        print(to_toml(validate(parse(program("config"), PrintedSettings, __doc__ or "", argv).run)), end="")
    except ValueError as error:
        fail("xlme config", error)


if __name__ == "__main__":
    main()
