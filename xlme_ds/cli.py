"""Command lines of the form `--recipe NAME [--section.key value ...]`: a recipe with overrides."""

import inspect
import io
import os
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeVar

from .config import RunConfig
from .io.errors import in_words
from .recipes import RECIPES, recipe

Command = TypeVar("Command")


def program(command: str) -> str:
    """How `command` was called: `xlme plan`, `python -m xlme_ds plan`, or `python -m xlme_ds.plan`.

    Every command begins with this call: it has stdout write a character that an ASCII or Latin-1 terminal lacks as
    `\\u2581`, and tyro join the lines of a setting's docstring.
    """
    _join_docstring_lines()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    called = Path(sys.argv[0])
    if called.name == "xlme":
        return f"xlme {command}"
    of_package = called.parts[-2:] == ("xlme_ds", "__main__.py")
    return f"python -m xlme_ds{' ' if of_package else '.'}{command}"


def _join_docstring_lines() -> None:
    """Remove the indentation from docstrings of settings: tyro joins only lines without one."""
    from docstring_parser import attrdoc

    attrdoc.ast_get_constant_value = lambda node: inspect.cleandoc(str(getattr(node, "value", "")))


def parse(
    prog: str, command: type[Command], description: str, arguments: list[str], base: RunConfig | None = None
) -> Command:
    """Fill the dataclass `command` from `arguments`; its field `run` is the recipe's configuration with the overrides,
    or `base` with them.

    Leaves the program with one message for a value of another type, or an unknown setting (the nearest one is named).
    Raises ValueError for an unknown recipe. What the values may be is checked by `xlme_ds.validate`.
    """
    import tyro

    _join_docstring_lines()
    rest, chosen = take_flag(without_launcher(arguments), "--recipe")
    defaults = {field.name: tyro.MISSING for field in fields(command) if field.default is MISSING}  # type: ignore[arg-type]
    defaults["run"] = recipe(chosen) if chosen is not None else base or RunConfig(name="custom")
    if chosen is not None and base is not None:
        raise ValueError("--recipe and --branch exclude each other: leave one out")
    if chosen is None and base is None and not {"-h", "--help"}.intersection(rest):
        raise ValueError("--recipe is missing: name one, for example --recipe quickstart")
    return tyro.cli(
        command,
        prog=f"{prog} --branch RUN@STEP" if base is not None else f"{prog} --recipe {chosen or 'NAME'}",
        default=command(**defaults),
        args=rest,
        description=f"{description.rstrip()}\n\nRecipes: {', '.join(RECIPES)}.",
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )


def without_launcher(arguments: list[str]) -> list[str]:
    """`arguments` without the --local_rank that DeepSpeed's launcher adds; the environment says the same."""
    return [argument for argument in arguments if not argument.startswith("--local_rank")]


def take_flag(arguments: list[str], flag: str) -> tuple[list[str], str | None]:
    """`arguments` without `flag` and its value, and this value; None without the flag."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[:i] + arguments[i + 2 :], arguments[i + 1]
        if argument.startswith(f"{flag}="):
            return arguments[:i] + arguments[i + 1 :], argument.removeprefix(f"{flag}=")
    return arguments, None


def fail(program: str, error: Exception) -> None:
    """Print a user's mistake as one line, from the first process or one whose error says so, and exit with code 2."""
    note(f"{program}: error: {in_words(error)}", getattr(error, "prints", False))
    sys.exit(2)


def note(text: str, here: bool = False) -> None:
    """Print a remark for the user, from the first process, and from this one if `here`."""
    if here or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds in the largest two fitting units: `41 s`, `8 min 12 s`, `5 h 03 min`, `3 d 04 h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def number(value: float) -> str:
    """A number of three figures for people: 1.23e-05, 0.0123, 12.3, 12.3K, 1.23M, 4.56T."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if size >= limit * 0.9995:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
