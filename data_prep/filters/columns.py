"""Filters records by the value in a column of the corpus, such as a score: `[filters.column.NAME]` in a description."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

COLUMN = "column"  # the name of the filter


@dataclass(frozen=True)
class ColumnFilter:
    """Drops a record whose value in `column` is missing, outside the bounds, or not one of `one_of`."""

    column: str
    min: float = -math.inf
    max: float = math.inf
    one_of: Sequence[Any] | None = None

    def drops(self, value: Any) -> bool:
        """True if a record with this value is dropped. A text value is compared with the bounds as a number, and with
        the entries of `one_of` by `_is_equal`."""
        if self.one_of is not None and not any(_is_equal(value, entry) for entry in self.one_of):
            return True
        if (self.min, self.max) == (-math.inf, math.inf):
            return False
        try:
            return not self.min <= float(value) <= self.max
        except (TypeError, ValueError, OverflowError):
            return True


def _is_equal(value: Any, entry: Any) -> bool:
    """True if a value has the entry's `_json_text`, or is the text of an equal number, such as "1.00" for 1."""
    if _json_text(value) == _json_text(entry):
        return True
    try:
        return isinstance(value, str) and is_number(entry) and float(value) == entry
    except ValueError:
        return False


def _json_text(value: Any) -> str:
    """The text of a value, for comparisons. The numbers 1.0 and 1.00 become 1. True becomes true, which differs from 1,
    although True == 1 in Python."""
    if isinstance(value, bool) or value in ("True", "False"):
        return str(value).lower()
    if isinstance(value, float | Decimal) and math.isfinite(value):
        number = Decimal(str(value))
        return str(int(number)) if number == int(number) else f"{number.normalize():f}"
    return str(value)


def is_number(value: Any) -> bool:
    """True if a setting is a number that is finite as a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def column_filters(settings: Mapping[str, Any], where: str = "") -> tuple[ColumnFilter, ...]:
    """Make a filter for each table `[filters.column.NAME]`. Raises ValueError for a wrong setting; the message begins
    with `where`."""
    filters = []
    rules_by_column = settings.get(COLUMN, {})
    usage = (
        f"write [filters.{COLUMN}.NAME] with numbers min or max, both finite, or a list one_of of strings, finite "
        "numbers or true and false"
    )
    if not isinstance(rules_by_column, dict):
        raise ValueError(f"{where}: filters has {COLUMN} = {rules_by_column!r}: {usage}")
    for name, rules in rules_by_column.items():
        names_fit = isinstance(rules, dict) and rules and rules.keys() <= {"min", "max", "one_of"}
        bounds_fit = names_fit and all(is_number(rules[key]) for key in ("min", "max") if key in rules)
        entries = rules.get("one_of", []) if bounds_fit else None
        # A settings file in JSON cannot hold TOML's dates, and no NaN equals itself when the settings are compared.
        if not isinstance(entries, list) or not all(isinstance(x, str | bool) or is_number(x) for x in entries):
            raise ValueError(f"{where}: filter {COLUMN} has {name} = {str(rules)[:80]}: {usage}")
        if rules.get("min", -math.inf) > rules.get("max", math.inf):
            raise ValueError(
                f"{where}: filter {COLUMN} keeps {name} from {rules['min']} to {rules['max']}, which is nothing: set "
                "max to at least min"
            )
        filters.append(ColumnFilter(name, **rules))
    return tuple(filters)


def first_reason(filters: Iterable[ColumnFilter], values: Iterable[Any]) -> str:
    """The reason, "column NAME", of the first filter that drops a record, or "" if no filter drops it. The record is
    counted under the reason. `values` are the record's values in the filters' columns."""
    return next(
        (f"{COLUMN} {rule.column}" for rule, value in zip(filters, values, strict=True) if rule.drops(value)), ""
    )
