"""Writes settings as TOML, with the help of each setting as a comment."""

import json
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints


def help_of(command: Callable[..., Any]) -> dict[str, str]:
    """The help text of each setting of a dataclass (the docstring below it in the source), or of each argument of a
    function (its entry under `Args:`), as one line."""
    from docstring_parser import parse_from_object

    sources = reversed(command.__mro__[:-1]) if isinstance(command, type) else [command]
    settings = [setting for source in sources for setting in parse_from_object(source).params]
    return {setting.arg_name: " ".join((setting.description or "").split()) for setting in settings}


def to_toml(config: Any) -> str:
    """All settings of `config`, a dataclass with sections, as TOML, each below its help text."""
    lines = [*_section(config)]
    for field in fields(config):
        if is_dataclass(section := getattr(config, field.name)):
            lines += [f"[{field.name}]", *_section(section)]
    return "\n".join(lines)


def _section(settings: Any) -> Iterator[str]:
    """Lines of TOML for the settings of one dataclass, without its sections."""
    helps = help_of(type(settings))
    hints = get_type_hints(type(settings))
    for name in (field.name for field in fields(settings)):
        value = getattr(settings, name)
        if is_dataclass(value):
            continue
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        about = helps[name] + (f" One of {', '.join(choices)}." if choices else "")
        default = getattr(type(settings), name, value)  # the class has no attribute for a setting without a default
        if default != value:
            about += f" Default: {json.dumps(default)}."
        yield from (f"# {line}" for line in textwrap.wrap(about, 110))
        # JSON and TOML write strings, numbers and lists alike, except infinity and the character U+007F.
        text = "inf" if value == math.inf else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        yield f"{name} = {text}\n"
