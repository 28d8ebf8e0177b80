"""What became of a task: the value or the error, in a form that travels between processes."""

import errno
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class SharedError(ValueError):
    """What a user has to mend first, in words that every rank raises."""


class SharedFault(RuntimeError):
    """A fault that is worth another try, such as a network's, in words that every rank raises."""


class TaskError(RuntimeError):
    """A task ended by a mistake of ours; carries its traceback."""


@dataclass(frozen=True)
class Outcome:
    """What became of task `index`: a value, or the words of an error and what they are raised as."""

    index: int
    value: Any = None
    error: str | None = None
    kind: type[Exception] = TaskError


def attempt(function: Callable[[T], R], task: T, index: int) -> Outcome:
    """Run one task; an exception becomes its words, or its traceback where it is a mistake of ours."""
    try:
        return Outcome(index, value=function(task))
    except Exception as error:
        told = in_words(error)
        return Outcome(index, None, str(told), type(told)) if told else Outcome(index, error=traceback.format_exc())


_CHOOSE = "choose another output folder"
_PERMIT = "give this user the permission, or choose another place"
_ADVICE = {
    errno.ENOSPC: "make room there and give the same command again: what is finished is kept",
    errno.EDQUOT: "make room in the quota and give the same command again: what is finished is kept",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f) and give the same command again: what is finished is kept",
    errno.EACCES: _PERMIT,
    errno.EPERM: _PERMIT,
    errno.EROFS: _CHOOSE,
    errno.EEXIST: f"it is in the way of a folder: remove it, or {_CHOOSE}",
    errno.ENOTDIR: _CHOOSE,
    errno.EISDIR: "remove it, or name a file",
    errno.ELOOP: "remove the link, or name what it should point to",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "somebody removed it, or the name is wrong: see to it and give the same command again",
}


def in_words(error: BaseException) -> SharedError | SharedFault | None:
    """The error in one sentence, as what all ranks raise; None for a mistake of ours, which keeps its traceback.

    Of an error of the operating system the sentence has the file, what is wrong, and what to do.
    """
    # UnicodeDecodeError and its like are ValueErrors too, but their words were not written for a user
    if type(error) in (ValueError, SharedError):
        return SharedError(str(error))
    if isinstance(error, SharedFault):
        return error
    if not isinstance(error, OSError) or isinstance(error, ValueError):
        return None
    words = error.strerror or str(error) or type(error).__name__
    words = words if error.filename is None else f"{error.filename!s}: {words}"
    if advice := _ADVICE.get(error.errno or 0):
        return SharedError(f"{words}: {advice}")
    return SharedFault(f"{words}: give the same command again, and have a look at the disk or network if it comes back")


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices by falling size."""
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def raise_first_error(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the lowest index, if there is one."""
    for outcome in sorted(outcomes, key=lambda outcome: outcome.index):
        if outcome.error is not None:
            raise outcome.kind(outcome.error)
