"""Reads a command's arguments with tyro, and writes the help pages of all commands."""

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import groupby, takewhile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from .arguments import HELP_FLAGS, Option, join_lists, refuse_mistakes
from .toml import help_of

Command = TypeVar("Command")
_LONGEST_USAGE = 80  # characters; a usage line with longer options has only the required ones, and [OPTIONS]
_INPUTS = "--run", "--mono", "--para"  # suggested first by an error for a first word without a flag
_VALUE_NAMES = {Path: "PATH", int: "N", float: "NUMBER", str: "TEXT", bool: ""}
_POSITIONAL = get_args(tyro.conf.Positional[int])[1]  # marks arguments without a flag
_WIDEST = 34  # characters of a flag whose help is on the same line
Shown = Callable[[Option], Option | None]


def call_from_command_line(
    command: Callable[..., Command],
    prog: str,
    arguments: Sequence[str] | None,
    description: str | None = None,
    usage: str = "",
    also: Sequence[Option] = (),
    shown: Shown = lambda option: option,
) -> Command:
    """Parse `arguments` (if None, those of the process), call `command` with them, and return the result.

    `command` is a dataclass or a function. --help prints its page, with `description` in place of its docstring. The
    usage line names the required flags, unless `usage` replaces it. `also`: see `checked_arguments`. `shown` changes an
    option, or returns None for one that the command does not have. A mistake that `checked_arguments` finds ends the
    process with a sentence and exit code 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not HELP_FLAGS.isdisjoint(takewhile("--".__ne__, arguments)):
        options = [*also, *filter(None, map(shown, options_of(command)))]
        print(help_page(usage or _usage(prog, options), description or _about(command), options))
        sys.exit(0)
    try:
        arguments = checked_arguments(command, arguments, also=also, shown=shown)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    return tyro.cli(command, prog=prog, args=arguments)


def checked_arguments(
    command: Callable[..., Any],
    arguments: Sequence[str],
    missing: Sequence[str] = (),
    optional: Sequence[str] = (),
    also: Sequence[Option] = (),
    shown: Shown = lambda option: option,
) -> list[str]:
    """`arguments` as tyro can read them (see `join_lists`).

    Raises ValueError if the first argument is not a flag, for a mistake that `refuse_mistakes` finds, and if a required
    flag that is not in `optional` is missing. `missing`: what the user must write besides. `also`: flags that the
    caller has taken from the arguments already, so that one of them may be the correction of a misspelt flag.
    """
    options = [*filter(None, map(shown, options_of(command)))]
    kinds = {option.flag: option.kind for option in options}
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    required = {option.flag: str(option) for option in options if option.required}
    absent = {flag: text for flag, text in required.items() if flag not in {*given, *optional}}
    absent = {text.partition(" ")[0]: text for text in missing} | absent
    if arguments and not arguments[0].startswith("-"):
        likely = [flag for flag in (*_INPUTS, *absent) if flag in kinds and flag not in given]
        likely = likely or list(kinds)[: len(kinds) == 1]
        choices = {option.flag: get_args(option.kind) for option in options if get_origin(option.kind) is Literal}
        chosen = [flag for flag, values in choices.items() if arguments[0] in values]
        flag = next(iter(chosen or [flag for flag in likely if flag not in choices]), "")
        raise ValueError(
            f"unexpected argument {arguments[0]}: "
            + (f"did you mean {flag} {arguments[0]}?" if flag else "every value follows its flag")
        )
    refuse_mistakes(arguments, kinds, [option.flag for option in also])
    if absent:
        *others, last = absent
        named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise ValueError(f"{named} missing: add {' '.join(absent.values())}")
    return join_lists(arguments, kinds)


def options_of(command: Callable[..., Any], values: Any = None, prefix: str = "--") -> Iterator[Option]:
    """The options of a dataclass or of a function. Defaults are those of `values`, an instance of the dataclass, if it
    is given. Flags begin with `prefix`."""
    kinds, annotated = get_type_hints(command), get_type_hints(command, include_extras=True)
    helps = help_of(command)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, marks = kinds[name], getattr(annotated[name], "__metadata__", ())
        if _POSITIONAL in marks:
            continue
        named = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), name)
        flag = f"{prefix}{named.replace('_', '-')}"
        default = parameter.default if values is None else getattr(values, name)
        if is_dataclass(kind):
            section = default if is_dataclass(default) else None  # without a default, its class has the defaults
            yield from options_of(kind, section, f"{flag}." if named else prefix)  # type: ignore[arg-type]
        else:
            value = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None) or _value_name(kind)
            yield Option(flag, kind, value, helps.get(name, ""), default)


def help_page(usage: str, about: str, options: Iterable[Option], ending: str = "") -> str:
    """The page that --help prints: usage, description, and the options, those of a section (--train.steps) apart."""
    parts = [f"usage: {usage}\n", *(f"{wrap(text)}\n" for text in _paragraphs(about))]
    for section, members in groupby(options, lambda option: option.flag[2:].rpartition(".")[0]):
        parts += [f"Settings of {section}:\n"] if section else []
        parts += [*entries([option.entry for option in members]), ""]
    return "\n".join([*parts, ending]).rstrip("\n")


def group_page(prog: str, kind: str, about: str, members: Iterable[tuple[str, str]], ending: str = "") -> str:
    """The page of a command with commands of its own: its `members`, as pairs of name and description. `kind`: the word
    for a member, such as STAGE."""
    usage = f"usage: {prog} {kind} --flags    ({prog} {kind} --help lists the flags)\n"
    parts = [usage, *(f"{wrap(text)}\n" for text in _paragraphs(about)), *entries(members), "", ending]
    return "\n".join(parts).rstrip("\n")


def entries(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names and what they mean, in two columns; a long name has a line of its own."""
    pairs = list(pairs)
    column = 4 + max((len(name) for name, _ in pairs if len(name) <= _WIDEST), default=_WIDEST)
    for name, text in pairs:
        if len(name) > _WIDEST:
            yield f"  {name}"
        yield wrap(text, f"{'' if len(name) > _WIDEST else f'  {name}':<{column}}")


def wrap(text: str, start: str = "") -> str:
    """`text` in lines as wide as the terminal, at most 120 characters. The first line begins with `start`, the others
    with as many spaces. A paragraph that is a command, which begins with `xlme ` or is indented, stays one line."""
    if not start and text.startswith(("xlme ", "  ")):
        return "\n".join(f"  {line.strip()}" for line in text.splitlines())
    width = max(min(shutil.get_terminal_size((120, 24)).columns, 120), len(start) + 30)
    indent = " " * len(start)
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring; items of a list are paragraphs of their own."""
    return [part for part in re.split(r"\n\n|\n(?=\* )", inspect.cleandoc(text)) if part.strip()]


def summary_of(command: Callable[..., Any]) -> str:
    """The first paragraph of a command's docstring, as one line."""
    return " ".join(_paragraphs(command.__doc__ or "")[0].split())


def _about(command: Callable[..., Any]) -> str:
    """The docstring of a command, without the descriptions of its arguments."""
    return inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:")[0].partition("\n\nReturns")[0]


def _usage(prog: str, options: Sequence[Option]) -> str:
    """The usage line: all options, or the required ones if all make it too long."""
    shown = [str(option) if option.required else f"[{option}]" for option in options]
    if len(" ".join(shown)) >= _LONGEST_USAGE:
        shown = [*(text for text in shown if text[0] != "["), "[OPTIONS]"]
    return " ".join([prog, *shown])


def _value_name(kind: Any) -> str:
    """The name of an option's value in the help, such as PATH or a|b; PATH [PATH ...] if it takes several values."""
    parts = [part for part in get_args(kind) if part not in (NoneType, Ellipsis)]
    if get_origin(kind) is Literal:
        return "|".join(map(str, parts))
    if get_origin(kind) in (tuple, list):
        name = _value_name(parts[0])
        return f"{name} ..." if "|" in name else f"{name} [{name} ...]"
    return "|".join(dict.fromkeys(map(_value_name, parts))) if parts else _VALUE_NAMES[kind]
