"""Tasks on local processes: plain pipes, for a pool neither ends running tasks nor survives a killed worker."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from data_prep.outcomes import Outcome, SharedFault, attempt, largest_first

T = TypeVar("T")
R = TypeVar("R")
_PDEATHSIG = 1  # of Linux's prctl: the signal that this process gets when its parent dies


def run_processes(
    function: Callable[[T], R], tasks: Sequence[T], sizes: Sequence[int], processes: int
) -> Generator[Outcome, None, None]:
    """Outcomes as they come, the largest task begun first; closing the generator ends the processes."""
    context = multiprocessing.get_context("spawn")
    pending = largest_first(sizes)[::-1]
    workers: dict[Connection, Any] = {}
    running: dict[Connection, int] = {}
    try:
        for _ in range(min(processes, len(tasks))):
            here, there = context.Pipe()
            workers[here] = context.Process(target=_serve, args=(there, function), daemon=True)
            workers[here].start()
            there.close()
        for pipe in workers:
            running[pipe] = pending.pop()
            pipe.send((running[pipe], tasks[running[pipe]]))
        while running:
            for pipe in [pipe for pipe in wait(list(running)) if isinstance(pipe, Connection)]:
                index = running.pop(pipe)
                try:
                    outcome = pipe.recv()
                except (EOFError, OSError):
                    workers[pipe].join()
                    outcome = Outcome(index, error=_death(tasks[index], workers[pipe].exitcode), kind=SharedFault)
                yield outcome
                if pending and outcome.error is None:
                    running[pipe] = pending.pop()
                    pipe.send((running[pipe], tasks[running[pipe]]))
    finally:
        for pipe, worker in workers.items():
            worker.terminate()
            worker.join()
            pipe.close()


def _death(task: object, exit_code: int) -> str:
    name = getattr(task, "name", task)
    return f"the worker of task {name} died with exit code {exit_code}: -9 means out of memory, use fewer processes"


def _serve(pipe: Connection, function: Callable[[T], R]) -> None:
    """A worker's life: take a task, send its outcome, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None
    # a killed parent must not leave workers that write into a folder which a relaunch has taken up
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # at once; the thread must wait for a long call to end
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    while True:
        try:
            index, task = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(attempt(function, task, index))


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
