"""Reads settings from TOML, JSON or a run's config.json, and checks them against their types and ranges."""

import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .config import Range, Settings
from .io.errors import near_settings, no_such
from .io.files import read_json, read_versioned


def read_values(path: Path) -> dict[str, Any]:
    """The settings in a TOML or JSON file, or in a run's config.json. Raises ValueError for any other file."""
    try:
        if path.suffix != ".json":
            return tomllib.loads(path.read_text(encoding="utf-8-sig"))
        values: dict[str, Any] = read_json(path, dict)
        if "config" in values:
            values = read_versioned(path)["config"]  # a run's file: `read_versioned` also checks its format
            if not isinstance(values, dict):
                raise ValueError(f"{path} has no settings under `config`: restore the file")
        return values
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except FileNotFoundError:
        advice = f"`xlme config --recipe NAME > {path}` writes such a file"
        if path.suffix == ".json":
            advice = "name a run's config.json"
        raise ValueError(f"{path} does not exist: {advice}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): `xlme config` writes such a file") from None


def with_values(settings: Settings, values: Mapping[str, Any], path: Path | str, section: str = "") -> Settings:
    """`settings` changed by `values`. `path`: the file with the values, or, as a str, the function that got them.

    `section`: the beginning of the settings' names in messages, such as `model.`. Raises ValueError for a value of the
    wrong type or out of range, and for an unknown setting; the latter error names the nearest setting.
    """
    hints, ranges = get_type_hints(type(settings)), get_type_hints(type(settings), include_extras=True)
    changed = {}
    for key, value in values.items():
        if key not in hints:
            raise ValueError(f"{path}: {_unknown(key, hints, path, section)}")
        if is_dataclass(hints[key]):
            if isinstance(value, hints[key]):
                changed[key] = value
                continue
            if not isinstance(value, dict):
                kind = (
                    f"dictionary or an instance of {hints[key].__name__}"
                    if isinstance(path, str)
                    else "section of settings"
                )
                raise ValueError(f"{path}: {key} is {value!r}, but it must be a {kind}")
            changed[key] = with_values(getattr(settings, key), value, path, f"{key}.")
        else:
            changed[key] = _typed(value, hints[key], f"{path}: {section}{key} is {value!r}")
            check_value(f"{path}: {section}{key}", changed[key], ranges[key])
    return replace(settings, **changed)  # type: ignore[type-var]


def _unknown(key: str, hints: Mapping[str, Any], path: Path | str, section: str) -> ValueError:
    """The error of `with_values` for a `key` that is none of `hints`."""
    in_python = not section and isinstance(path, str)
    near = near_settings(section + key, [*(section + name for name in hints), *dotted(hints)])
    if in_python and key in dotted(hints):
        near = [key]
    if not near:
        return no_such("setting", key, hints, section)
    if in_python:
        near = ['{}={{"{}": ...}}'.format(*setting.split(".")) for setting in near]
    return ValueError(f"there is no setting {section + key!r}: did you mean {' or '.join(near)}?")


def dotted(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The types of the settings in all sections among `hints`, by dotted names such as model.width."""
    sections = {name: get_type_hints(hint) for name, hint in hints.items() if is_dataclass(hint)}
    return {f"{section}.{name}": kind for section, kinds in sections.items() for name, kind in kinds.items()}


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raise ValueError for a setting of a dataclass, or of one of its sections, that is outside the choices or the
    range in its type. `prefix`, such as `model.`, precedes the setting's name in an error."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            check_ranges(value, f"{prefix}{name}.")
        else:
            check_value(f"{prefix}{name}", value, hint)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError if a setting, or a number of a tuple, is outside the choices or the range in its type `hint`."""
    if get_origin(hint) is Union:  # the setting may be None
        if value is None:
            return
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name} {value} is not known: choose one of {', '.join(get_args(hint))}")
    is_tuple = get_origin(hint) is tuple
    if is_tuple and not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}: it must be a list")
    must = "each must" if is_tuple else "it must"
    hint = get_args(hint)[0] if is_tuple else hint
    for allowed in (entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, Range)):
        whole = get_args(hint)[0] is int
        for number in value if is_tuple else (value,):
            is_number = isinstance(number, int if whole else int | float) and not isinstance(number, bool)
            if not is_number or number != number:  # not a number (nan)
                raise ValueError(f"{name} is {value!r}: {must} be a {'whole ' if whole else ''}number")
            if not allowed.contains(number):
                raise ValueError(f"{name} is {value}: {must} {allowed.wording}")
            if number > allowed.most:
                raise ValueError(f"{name} is {value}: {must} be at most {int(allowed.most):,}")


def _typed(value: Any, hint: Any, problem: str, subject: str = "it") -> Any:
    """`value`, converted to the type `hint`. Raises ValueError for a value of another type: the message is `problem`,
    then what `subject` must be. `check_value` checks choices and ranges."""
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{problem}, but it must be a list")
        return tuple(_typed(element, get_args(hint)[0], problem, "each element") for element in value)
    expected = str if get_origin(hint) is Literal else hint
    if expected is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{problem}, but {subject} must be smaller") from None
    if type(value) is not expected:
        names = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        raise ValueError(f"{problem}, but {subject} must be {names[expected]}")
    return value
