"""Filters by the value that a corpus itself has for a record, in one of its columns: `[filters.column.NAME]`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COLUMN = "column"  # what the filter is called


@dataclass(frozen=True)
class ColumnFilter:
    """Drops a record or row by its value in `column`: none, or one out of bounds, or not among `one_of`."""

    column: str
    min: float | None = None
    max: float | None = None
    one_of: tuple[Any, ...] | None = None

    @property
    def reason(self) -> str:
        """What it counts under."""
        return f"{COLUMN} {self.column}"

    def drops(self, value: Any) -> bool:
        """Whether the record goes; text is compared as the number that it says."""
        if self.one_of is not None and str(value) not in map(str, self.one_of):
            return True
        if self.min is None and self.max is None:
            return False
        try:
            number = float(value)
        except (TypeError, ValueError):
            return True
        low, high = (-math.inf if self.min is None else self.min), (math.inf if self.max is None else self.max)
        return not low <= number <= high


def column_filters(settings: Mapping[str, Any], where: str = "") -> tuple[ColumnFilter, ...]:
    """The filters of `[filters.column.NAME]`. Raises ValueError, which names `where`, for a wrong setting."""
    made = []
    for name, rules in settings.get(COLUMN, {}).items():
        known = isinstance(rules, dict) and rules and rules.keys() <= {"min", "max", "one_of"}
        bounds = [rules.get(key, 0) for key in ("min", "max")] if known else []
        numbers = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds)
        if not known or not numbers or not isinstance(rules.get("one_of", []), list):
            raise ValueError(
                f"{where}: filter {COLUMN} has {name} = {rules}: write [filters.{COLUMN}.NAME] with numbers min or "
                "max, or a list one_of"
            )
        choices = {"one_of": tuple(rules["one_of"])} if "one_of" in rules else {}
        made.append(ColumnFilter(name, **(rules | choices)))
    return tuple(made)


def first_reason(filters: Iterable[ColumnFilter], values: Iterable[Any]) -> str:
    """Why a record goes, from its value in the column of each filter; empty where it stays."""
    return next((rule.reason for rule, value in zip(filters, values, strict=True) if rule.drops(value)), "")
