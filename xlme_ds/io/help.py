"""Reads a command's arguments with tyro, and makes tyro's `--help` readable: the usage line names the required flags,
the help leaves out {None} as a value and empty defaults, and its description is wrapped."""

import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import is_dataclass, replace
from functools import reduce
from inspect import Parameter, isfunction, signature
from itertools import takewhile
from operator import or_
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import attrdoc, parse_from_object
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from .arguments import HELP_FLAGS, join_lists, refuse_mistakes

Command = TypeVar("Command")
READABLE = ConstructorRegistry()
"""In a `with READABLE:` block, tyro's help names an option's value once, and leaves out a default that is None or
empty."""
_LONGEST_USAGE = 80  # characters; tyro abbreviates the options of a usage line to [OPTIONS] from this length on
_INPUTS = "--run", "--data", "--mono", "--para", "--encoded"  # suggested by an error for a first word without a flag
_inner_calls: list[StructTypeInfo] = []


def call_from_command_line(
    command: Callable[..., Command],
    prog: str,
    arguments: Sequence[str] | None,
    description: str | None = None,
    usage: str = "",
    **options: Any,
) -> Command:
    """Parse `arguments` (if None, those of the process), call `command` with them, and return the result.

    `command` is a dataclass or a function. The usage line that --help prints names the required flags, unless `usage`
    replaces it, and the help has no --no-FLAG. `options` are passed on to `tyro.cli`. A mistake that
    `checked_arguments` finds ends the process with a sentence and exit code 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not HELP_FLAGS.isdisjoint(takewhile("--".__ne__, arguments)):
        flags = [shown for _, _, shown in flags_of(command)]
        if len(" ".join(flags)) >= _LONGEST_USAGE:
            prog = " ".join([prog, *(shown for shown in flags if shown[0] != "[")])
        options["config"] = (tyro.conf.FlagCreatePairsOff,)
        with READABLE, wrapped_help(usage):
            return tyro.cli(command, prog=prog, description=description, args=["--help"], **options)
    try:
        arguments = checked_arguments(command, arguments)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    with READABLE:
        return tyro.cli(command, prog=prog, description=description, args=arguments, **options)


@contextmanager
def wrapped_help(usage: str = "") -> Iterator[None]:
    """In this block, a help text that tyro prints has its description wrapped to the terminal's width, except for
    example commands: tyro itself wraps only its boxes. `usage` replaces the usage line."""
    # The help of a setting is its docstring as one line; tyro itself joins only unindented lines that begin with a
    # letter.
    read_docstring = attrdoc.ast_get_constant_value
    attrdoc.ast_get_constant_value = lambda node: " ".join(str(getattr(node, "value", "")).split())
    text = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding, sys.stdout.errors)
    text.isatty = sys.stdout.isatty  # type: ignore[method-assign]  # with the encoding, decides about frames and colours
    try:
        with redirect_stdout(text):
            yield
    finally:
        attrdoc.ast_get_constant_value = read_docstring
        width = shutil.get_terminal_size().columns
        text.seek(0)
        for index, line in enumerate(text.read().replace("\n\n\n", "\n\n").splitlines()):
            if index == 0:
                print(f"usage: {usage}" if usage else line)
            elif line.startswith("xlme ") or "\x1b" in line:  # only boxes have colours
                print(line)
            else:
                print(textwrap.fill(line, width, break_on_hyphens=False) if len(line) > width else line)


def checked_arguments(
    command: Callable[..., Any],
    arguments: Sequence[str],
    also_missing: Mapping[str, str] = MappingProxyType({}),
    optional: Sequence[str] = (),
) -> list[str]:
    """`arguments` as tyro can read them (see `join_lists`). Raises ValueError if the first argument is not a flag, for
    a mistake that `refuse_mistakes` finds, and if a required flag that is not in `optional` is missing. `also_missing`:
    flags that the caller misses, with what to write."""
    flags = list(flags_of(command))
    kinds = {flag: kind for flag, kind, _ in flags}
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    missing = {flag: shown for flag, _, shown in flags if shown[0] != "[" and flag not in {*given, *optional}}
    missing = {**also_missing, **missing}
    if arguments and not arguments[0].startswith("-"):
        likely = [flag for flag in (*_INPUTS, *missing) if flag in kinds and flag not in given]
        likely = likely or list(kinds)[: len(kinds) == 1]
        advice = f"did you mean {likely[0]} {arguments[0]}?" if likely else "every value follows its flag"
        raise ValueError(f"unexpected argument {arguments[0]}: {advice}")
    refuse_mistakes(arguments, kinds)
    if missing:
        *others, last = missing
        named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise ValueError(f"{named} missing: add {' '.join(missing.values())}")
    return join_lists(arguments, kinds)


def flags_of(command: Callable[..., Any], prefix: str = "--") -> Iterator[tuple[str, Any, str]]:
    """Yields (flag, type of its value, text in the usage line) for each flag of `command`. The text is `--out PATH`, or
    `[--out PATH]` if there is a default. Flags begin with `prefix`."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        kind, marks = _split(hints[name])
        named = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), name)
        flag = f"{prefix}{named.replace('_', '-')}"
        if is_dataclass(kind):
            yield from flags_of(kind, f"{flag}." if named else prefix)  # type: ignore[arg-type]
        else:
            value = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None) or _value_name(kind)
            shown = flag if kind is bool else f"{flag} {value}"
            yield flag, kind, shown if parameter.default is Parameter.empty else f"[{shown}]"


def _split(hint: Any) -> tuple[Any, list[Any]]:
    """Returns (type, annotations) of a type hint, which may be Annotated."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
    return kind, marks


def _value_name(kind: Any) -> str:
    """The name of an option's value in the help, such as PATH or {a,b}; PATH [PATH ...] if it takes several values."""
    parts = [part for part in get_args(kind) if part not in (NoneType, Ellipsis)]
    if get_origin(kind) in (tuple, list):
        name = _value_name(_split(parts[0])[0])
        return f"{name} [{name} ...]"
    if NoneType in get_args(kind):
        kind = reduce(or_, parts)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    assert isinstance(spec, PrimitiveConstructorSpec), kind
    return spec.metavar


@READABLE.struct_rule
def _readable_section(section: StructTypeInfo) -> StructConstructorSpec | None:
    """The options of a dataclass or a function, as help shows them; None for other types.

    To learn tyro's own reading of a dataclass, this rule asks the registry, which calls the rule again: that inner call
    returns None, so that tyro's rules apply.
    """
    if _inner_calls:
        return None
    if isfunction(section.type):
        helps = {part.arg_name: part.description for part in parse_from_object(section.type).params}
        hints = get_type_hints(section.type, include_extras=True)
        options = []
        for name, parameter in signature(section.type).parameters.items():
            default = tyro.MISSING_NONPROP if parameter.default is Parameter.empty else parameter.default
            options.append(StructFieldSpec(name, hints[name], default, " ".join((helps.get(name) or "").split())))
        return StructConstructorSpec(section.type, tuple(map(readable_option, options)))
    _inner_calls.append(section)
    try:
        spec = ConstructorRegistry.get_struct_spec(section)
    finally:
        _inner_calls.pop()
    if not isinstance(spec, StructConstructorSpec):
        return None
    return replace(spec, fields=tuple(map(readable_option, spec.fields)))


def readable_option(option: StructFieldSpec) -> StructFieldSpec:
    """`option` as the help shows it: the name of its value has no {None} and no brackets around it, and a default that
    is None or empty is not shown."""
    kind, marks = _split(option.type)
    if get_origin(kind) not in (tuple, list) and NoneType not in get_args(kind) and option.default != "":
        return option
    default_text = "" if option.default is None or option.default in ((), "") else None
    own_name = next(filter(None, (getattr(mark, "metavar", None) for mark in marks)), None)
    annotation = tyro.conf.arg(metavar=own_name or _value_name(kind), help_behavior_hint=default_text)
    return replace(option, type=Annotated[option.type, annotation])  # type: ignore[arg-type]
