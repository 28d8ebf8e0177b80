"""Print all settings of a recipe as TOML, each with its explanation above it:

  xlme config --recipe base > base.toml

The file is for --config. A file may also have some settings only: its line `recipe = "quickstart"` names the recipe
that gives the others, and without this line they keep their defaults.
"""

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from . import __version__
from .cli import fail, parse, program
from .config import RunConfig
from .io.toml import to_toml


@dataclass(frozen=True)
class PrintedSettings:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]


def main(arguments: list[str] | None = None) -> None:
    """Print the settings as TOML; if the user made a mistake, print one sentence on stderr and exit with code 2."""
    argv = sys.argv[1:] if arguments is None else arguments
    try:
        run = parse(program("config"), PrintedSettings, __doc__ or "", argv).run
        from .validate import validate  # it loads torch, and --help should not

        # A comment has one line.
        command = "".join(letter if letter.isprintable() else "?" for letter in shlex.join(argv))
        print(f"# xlme config {command} (xlme_ds {__version__})\n\n{to_toml(validate(run))}", end="")
    except ValueError as error:
        fail("xlme config", error)


if __name__ == "__main__":
    main()
