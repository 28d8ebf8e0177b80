"""A decorator for the functions of the Python API: it checks their arguments against their annotations."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from .errors import no_such

P = ParamSpec("P")
Result = TypeVar("Result")
# Type in an annotation -> (type of the values that are accepted, also numpy's numbers; the type's name in errors).
_TYPES: dict[Any, tuple[type, str]] = {
    Path: (os.PathLike, "path"),
    str: (str, "string"),
    int: (Integral, "whole number"),
    float: (Real, "number"),
    NoneType: (NoneType, ""),
}


def check_argument_types(function: Callable[P, Result]) -> Callable[P, Result]:
    """`function` with a check of its arguments before it runs: ValueError for one of the wrong type, TypeError for an
    unknown or missing one. The check knows None, string literals, the types of `_TYPES`, and sequences and unions of
    these; an argument with any other annotation may have any type. An argument that is a number of
    numpy becomes Python's own, which has more methods, and which JSON takes."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> Result:
        try:
            bound = signature(function).bind(*args, **options)
        except TypeError as error:
            names = ", ".join(name for name in signature(function).parameters if name != "self")
            raise TypeError(f"{function.__qualname__}() {error}: its arguments are {names}") from None
        for name, value in bound.arguments.items():
            hint = function.__annotations__.get(name)
            choices = next((get_args(kind) for kind in _kinds(hint) if get_origin(kind) is Literal), ())
            if choices and isinstance(value, str) and value not in choices:
                raise no_such(name, value, choices)
            if not _fits(value, hint):
                raise ValueError(f"{name} is {shortened(value)}: it must be a {_name(hint)}")
            if isinstance(value, Real) and not isinstance(value, int | float):
                bound.arguments[name] = int(value) if isinstance(value, Integral) else float(value)
        return function(*bound.args, **bound.kwargs)

    return call


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The members of a union; for any other `hint`, the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, str) and not value and Path in _kinds(hint):
        return False  # Path("") is the current folder
    return any(_is_of_kind(value, kind) for kind in _kinds(hint))


def _is_of_kind(value: Any, kind: Any) -> bool:
    if get_origin(kind) is not Sequence:
        is_bool_for_number = isinstance(value, bool) and kind in (int, float)
        return isinstance(value, _TYPES.get(kind, (object, ""))[0]) and not is_bool_for_number
    if isinstance(value, Mapping | Set):
        return False
    if isinstance(value, Collection):
        return all(_fits(element, get_args(kind)[0]) for element in value)
    return isinstance(value, Iterable)  # elements that can be read only once are left to the function


def _name(hint: Any) -> str:
    """The types of `hint` in words, without None. Where a path may be given as a string, only the path is named."""
    kinds = [kind for kind in _kinds(hint) if kind is not NoneType and not (kind is str and Path in _kinds(hint))]
    names = [
        f"list of {_name(get_args(kind)[0])}s" if get_origin(kind) is Sequence else _TYPES[kind][1] for kind in kinds
    ]
    return " or a ".join(names)


def require_unicode(text: str) -> str:
    """Return `text`. Raises ValueError if it contains a lone surrogate, with which Python represents a byte that is
    not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has no Unicode character at position {error.start}: decode it as UTF-8") from None
    return text
