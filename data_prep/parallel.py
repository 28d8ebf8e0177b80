"""Runs independent tasks on all processor cores: on MPI ranks under mpiexec or srun, else in local processes.

Under MPI, one rank, the root, runs the stage (`on_root`). The other ranks only run their shares of its tasks
(`run_tasks`).

An error ends the whole run, on every rank. If the user can act on it, it is printed as one sentence, else as a
traceback. Nothing hangs: after an error, local processes are ended at once, and each MPI rank finishes the task that it
is working on and begins no other.
"""

import ctypes
import fcntl
import multiprocessing
import os
import signal
import stat
import sys
import termios
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from itertools import chain
from typing import Any, TypeVar

from data_prep.progress import progress_bar
from xlme_ds.io.errors import ADVICE, in_words

T = TypeVar("T")
R = TypeVar("R")

_STOP_TAG = 1  # tag of the MPI message by which a rank that failed stops the others
_PR_SET_PDEATHSIG = 1  # Linux's prctl: choose the signal that this process gets when its parent dies

# Variables that a launcher sets for its processes. SLURM_NTASKS is not among them, because it is also set in a batch
# script, where no launcher ran.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class UserError(ValueError):
    """An error that the user has to fix; every rank raises it with the same sentence."""


class MachineError(UserError):
    """A UserError of the operating system, such as a full disk: the text allows the settings."""


class RetryError(RuntimeError):
    """An error that may not occur again, such as a network failure; every rank raises it with the same sentence."""


class TaskError(RuntimeError):
    """A bug in this program made a task fail; the text is the task's traceback, the same on every rank."""


def user_facing_error(error: BaseException) -> UserError | RetryError | None:
    """`error` as a UserError or RetryError, whose text is one sentence. None if it is a bug in this program, for which
    the traceback is wanted.

    For an error of the operating system the sentence names the file, the fault and the remedy.
    """
    # Subclasses such as UnicodeDecodeError do not match: their texts were not written for a user.
    if type(error) is ValueError:
        return UserError(str(error))
    if isinstance(error, UserError | RetryError):
        return error
    if not isinstance(error, OSError) or isinstance(error, ValueError):  # io.UnsupportedOperation is both, and a bug
        return None
    sentence = in_words(error) or type(error).__name__
    if error.errno in ADVICE:
        return MachineError(sentence)
    return RetryError(f"{sentence}: give the same command again, and check the disk or network if it fails again")


@dataclass(frozen=True)
class _Outcome:
    """The value of task `index`, or its error in a form that can be sent between processes."""

    index: int
    value: Any = None
    error: Exception | None = None


def _attempt(function: Callable[[T], R], tasks: Sequence[T], index: int) -> _Outcome:
    try:
        return _Outcome(index, function(tasks[index]))
    except TaskError as error:  # of a task, if `function` itself calls `run_tasks`, as a stage does in `on_root`
        return _Outcome(index, error=error)
    except Exception as error:
        return _Outcome(index, error=user_facing_error(error) or TaskError(traceback.format_exc()))


def run_tasks(
    function: Callable[[T], R],
    tasks: Sequence[T],
    sizes: Sequence[int],
    processes: int,
    label: str,
    show_progress: bool = True,
) -> list[R]:
    """Apply `function` to every task; returns the values in task order. Under MPI, only the root may call it, inside
    `on_root`.

    `sizes` has the size of each task, in any unit. Sizes serve to balance the work and, if `show_progress`, to show
    progress. The tasks run in `processes` local processes (1: in this process); under MPI each rank runs its share of
    the tasks. `function` must be picklable. If a task fails, its error is raised: the UserError or RetryError that
    `user_facing_error` returns, or else a TaskError. If tasks fail on several ranks, the error of the first one in task
    order is raised.
    """
    assert len(tasks) == len(sizes)
    if processes < 1:
        raise UserError(f"--processes is {processes}: it must be at least 1")
    if world_size() > 1:
        job = function, tasks, sizes, label, show_progress
        communicator().bcast(job)
        try:
            outcomes = _run_share(*job)
        except Exception:  # of the root alone, outside a task: the other ranks would wait for its outcomes
            try:
                traceback.print_exc()
            finally:
                abort(1)
            raise
    else:
        if processes > 1 and len(tasks) > 1:
            finished = _run_in_processes(function, tasks, sizes, processes, label)
        else:
            finished = (_attempt(function, tasks, index) for index in range(len(tasks)))
        outcomes = []
        with closing(finished), progress_bar(label, sum(sizes), show_progress) as advance:
            for outcome in finished:
                outcomes.append(outcome)
                if outcome.error is not None:
                    break
                advance(sizes[outcome.index])
    outcomes.sort(key=lambda outcome: outcome.index)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Task indices, the largest task first."""
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def _run_in_processes(
    function: Callable[[T], R], tasks: Sequence[T], sizes: Sequence[int], processes: int, label: str
) -> Generator[_Outcome, None, None]:
    """Yield outcomes in the order of completion; the largest task begins first. Closing the generator ends the
    processes."""
    other_children = multiprocessing.active_children()
    # Function and tasks are sent once per worker. Later messages are only indices, too small to block the pipe.
    pool = ProcessPoolExecutor(
        min(processes, len(tasks)), multiprocessing.get_context("spawn"), _begin_worker, (function, tasks)
    )
    workers: list[multiprocessing.process.BaseProcess] = []
    try:
        futures = []
        for index in _largest_first(sizes):
            futures.append(pool.submit(_run_task, index))
            if len(workers) < processes:  # the pool starts a process for each of the first tasks
                workers = [child for child in multiprocessing.active_children() if child not in other_children]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        pool.shutdown()
        # The pool ended the other workers by SIGTERM. Look for the worker that died for another reason.
        codes = [worker.exitcode for worker in workers]
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
        raise RetryError(
            f"a worker of {label} died with exit code {code}: -9 means out of memory, use fewer processes"
        ) from None
    finally:
        for worker in workers:
            worker.terminate()
        pool.shutdown(cancel_futures=True)


_worker_job: tuple[Callable[[Any], Any], Sequence[Any]]  # (function, tasks); only worker processes set it


def _begin_worker(function: Callable[[T], R], tasks: Sequence[T]) -> None:
    global _worker_job
    _worker_job = function, tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # A worker must die when its parent is killed, because the next run may already write into the same folder.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)


def _run_task(index: int) -> _Outcome:
    return _attempt(*_worker_job, index)


def _run_share(
    function: Callable[[T], R], tasks: Sequence[T], sizes: Sequence[int], label: str, show_progress: bool
) -> list[_Outcome]:
    """Run this rank's share of the tasks until a task fails on any rank; returns the outcomes of all ranks. The root
    shows the progress of its own share."""
    comm = communicator()
    share = _balanced_shares(sizes, comm.Get_size())[comm.Get_rank()]
    outcomes, stop_requests = [], []
    with progress_bar(label, sum(sizes[index] for index in share), show_progress and is_root()) as advance:
        for index in share:
            if comm.iprobe(tag=_STOP_TAG):
                break
            outcomes.append(_attempt(function, tasks, index))
            if outcomes[-1].error is not None:
                stop_requests = [comm.isend(None, rank, tag=_STOP_TAG) for rank in range(comm.Get_size())]
                break
            advance(sizes[index])
        all_outcomes = list(chain.from_iterable(comm.allgather(outcomes)))
    for outcome in all_outcomes:
        if outcome.error is not None:  # receive the stop message that the failed rank sent to every rank
            comm.recv(tag=_STOP_TAG)
    for request in stop_requests:
        request.wait()
    return all_outcomes


def _balanced_shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The task indices of each rank. Tasks go, the largest first, to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in _largest_first(sizes):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares


def on_root(function: Callable[[], R]) -> R:
    """Run `function` on the root alone. Until it ends, the other ranks run their shares of the tasks that it gives to
    `run_tasks`. At the end, every rank gets its value, or raises its error."""
    if world_size() == 1:
        return function()
    if is_root():
        outcome = communicator().bcast(_attempt(lambda _: function(), [None], 0))
    else:
        while not isinstance(outcome := communicator().bcast(None), _Outcome):
            _run_share(*outcome)
            del outcome  # a job may be large
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def is_root() -> bool:
    """Whether this process is the root (rank 0), which writes the files that all ranks share."""
    return world_size() == 1 or communicator().Get_rank() == 0


def abort(code: int) -> None:
    """End all ranks immediately with this exit code: for an error that only this rank has."""
    if world_size() > 1:
        try:
            # mpiexec passes on what was printed a moment later, and drops what is left when a rank aborts.
            time.sleep(1)
            end = time.monotonic() + 30
            while any(map(_unread, (1, 2))) and time.monotonic() < end:  # on a busy machine mpiexec may be late
                time.sleep(0.1)
        finally:  # also after a second Ctrl-C
            communicator().Abort(code)


def _unread(descriptor: int) -> bool:
    """Whether `descriptor` is a pipe that holds something its reader has not taken yet."""
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        return is_pipe and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:  # it is closed
        return False


@cache
def world_size() -> int:
    """The number of MPI ranks of this run. It is 1 without a launcher and in a worker process; in both cases MPI is not
    imported.

    Raises ValueError when the launcher started several processes that MPI does not connect.
    """
    launched = max(int(os.environ.get(name) or 1) for name in _SIZE_VARIABLES)
    if launched == 1 or multiprocessing.parent_process() is not None:
        return 1
    size: int = communicator().Get_size()
    if size == 1:
        raise ValueError(
            f"the launcher started {launched} processes, but MPI does not connect them: start them with the mpiexec or "
            "srun that belongs to the MPI library that mpi4py loads"
        )
    return size


def launched_rank() -> int:
    """This process's rank from the launcher's variables, for use where MPI may not work; 0 without a launcher."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name)), 0)


def communicator() -> Any:
    """MPI.COMM_WORLD. Raises ValueError where there is no MPI."""
    # With its network module UCX, the mpich wheel sends Slurm a line that holds the rank's address and then some
    # uninitialised memory. If the line is longer than Slurm reads at once, no rank starts. With OFI the line is short.
    if os.environ.get("SLURM_STEP_NUM_TASKS") and any(distributions(name="mpich")):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    try:
        from mpi4py import MPI  # imported late: importing it initialises MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        raise ValueError(
            f"a launcher started several processes, but mpi4py cannot be imported ({error}): install the extra `mpi` "
            "and an MPI library, or start the command without a launcher, with --processes"
        ) from None
    return MPI.COMM_WORLD
