"""How tyro shows and reads the options of all commands."""

import functools
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin


@functools.cache
def prepare_tyro() -> None:
    """Change two things in tyro, for the options of all commands.

    The help shows the docstring of a setting as one line; tyro itself joins only unindented lines that begin with a
    letter. A value that should be a number and is not causes an error sentence that names the value (`number_of`).
    """
    from docstring_parser import attrdoc
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    attrdoc.ast_get_constant_value = lambda node: " ".join(str(getattr(node, "value", "")).split())
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _number(option: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        types = get_args(option.type) if get_origin(option.type) in (Union, UnionType) else (option.type,)
        if [kind for kind in types if kind is not NoneType] not in ([int], [float]):
            return None
        kind, optional = float if float in types else int, NoneType in types
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper(),
            instance_from_str=lambda texts: None if optional and texts[0] == "None" else number_of(texts[0], kind),
            is_instance=lambda value: isinstance(value, (int, *types)),
            str_from_instance=lambda value: [str(value)],
        )

    registry.__enter__()  # for all calls of tyro


def number_of(text: str, kind: type[int] | type[float]) -> int | float:
    """`text` as a number. Raises ValueError if it is not one of this kind. If a whole number is asked for and `text` is
    1e6, the error advises to write 1000000."""
    try:
        return kind(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        advice = f": write {int(value)}" if value.is_integer() else ""
        raise ValueError(f"{text} is not a {'whole ' if kind is int else ''}number{advice}") from None
