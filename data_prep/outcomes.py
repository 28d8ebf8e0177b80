"""What became of a task: the value or the error, in a form that travels between processes."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class SharedError(ValueError):
    """A user's mistake that every rank raises with the same words."""


class TaskError(RuntimeError):
    """A task ended by an exception that is not a ValueError, that is by a mistake of ours; carries its traceback."""


@dataclass(frozen=True)
class Outcome:
    """What became of task `index`: a value, or an error (`users` when it is the user's mistake)."""

    index: int
    value: Any = None
    error: str | None = None
    users: bool = False


def attempt(function: Callable[[T], R], task: T, index: int) -> Outcome:
    """Run one task; an exception becomes its message (a plain ValueError) or its traceback (any other)."""
    try:
        return Outcome(index, value=function(task))
    except ValueError as error:
        # UnicodeDecodeError and its like are ValueErrors too, but their words were not written for a user
        if type(error) in (ValueError, SharedError):
            return Outcome(index, error=str(error), users=True)
        return Outcome(index, error=traceback.format_exc())
    except Exception:
        return Outcome(index, error=traceback.format_exc())


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices by falling size."""
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def raise_first_error(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the lowest index, if there is one."""
    for outcome in sorted(outcomes, key=lambda outcome: outcome.index):
        if outcome.error is not None:
            raise SharedError(outcome.error) if outcome.users else TaskError(outcome.error)
