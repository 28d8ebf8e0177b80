"""Run independent tasks once each: over MPI ranks when launched by mpiexec or srun, else over local processes.

A failed task ends the whole run with its message, on every rank; tasks still running elsewhere are ended (local) or are
the last their rank runs (MPI), so nothing waits for ever.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

from data_prep.outcomes import Outcome, SharedError, SharedFault, TaskError, attempt, raise_first_error
from data_prep.processes import run_processes
from data_prep.progress import Progress
from data_prep.ranks import communicator, run_ranks, world_size

__all__ = [
    "SharedError",
    "SharedFault",
    "TaskError",
    "abort",
    "barrier",
    "is_root",
    "on_root",
    "run_tasks",
    "world_size",
]

T = TypeVar("T")
R = TypeVar("R")


def run_tasks(
    function: Callable[[T], R],
    tasks: Sequence[T],
    sizes: Sequence[int],
    processes: int,
    label: str,
    visible: bool = True,
) -> list[R]:
    """`function` of every task, in task order; every rank gets the whole list.

    `sizes` (any unit, one a task) steer the balance and, if `visible`, the progress display. `processes` local
    processes are used (1: this one); under MPI every rank runs its share itself. `function` must pickle. The first
    failed task in task order is raised: in words as SharedError or SharedFault where `outcomes.in_words` has some, else
    as TaskError.
    """
    assert len(tasks) == len(sizes)
    if processes < 1:
        raise ValueError(f"--processes is {processes}: it must be at least 1")
    if world_size() > 1:
        outcomes = run_ranks(function, tasks, sizes, label, visible)
    elif processes == 1 or len(tasks) <= 1:
        outcomes = _collect((attempt(function, task, i) for i, task in enumerate(tasks)), sizes, label, visible)
    else:
        outcomes = _collect(run_processes(function, tasks, sizes, processes), sizes, label, visible)
    raise_first_error(outcomes)
    assert [outcome.index for outcome in outcomes] == list(range(len(tasks)))
    return [outcome.value for outcome in outcomes]


def on_root(function: Callable[[], R]) -> R:
    """Run `function` on the root alone; every rank gets its value, or raises its error."""
    if world_size() == 1:
        return function()
    outcome = communicator().bcast(attempt(lambda _: function(), None, 0) if is_root() else None)
    raise_first_error([outcome])
    value: R = outcome.value
    return value


def is_root() -> bool:
    """Whether this process is the one that writes what all share."""
    return world_size() == 1 or communicator().Get_rank() == 0


def barrier() -> None:
    """Wait for every rank."""
    if world_size() > 1:
        communicator().Barrier()


def abort(code: int) -> None:
    """End every rank at once with this exit code: for an error that only this rank has."""
    if world_size() > 1:
        communicator().Abort(code)


def _collect(stream: Generator[Outcome, None, None], sizes: Sequence[int], label: str, visible: bool) -> list[Outcome]:
    """Outcomes by index, up to the first error."""
    outcomes = []
    with closing(stream), Progress(label, sum(sizes), visible) as progress:
        for outcome in stream:
            outcomes.append(outcome)
            if outcome.error is not None:
                break
            progress.advance(sizes[outcome.index])
    return sorted(outcomes, key=lambda outcome: outcome.index)
