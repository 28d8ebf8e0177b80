"""Tasks on MPI ranks. MPI is imported only where a launcher started more than one process."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from data_prep.outcomes import Outcome, attempt, largest_first
from data_prep.progress import Progress

T = TypeVar("T")
R = TypeVar("R")
_OUTCOME, _STOP = 1, 2  # message tags

# What a launcher tells its processes. Not SLURM_NTASKS: a batch script has it too, where nothing was launched.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


@cache
def world_size() -> int:
    """MPI ranks of this run; 1 without a launcher, and then MPI is not even imported.

    Raises ValueError when the launcher started several processes that MPI does not join.
    """
    launched = max([int(os.environ.get(name) or 1) for name in _SIZE_VARIABLES])
    if launched == 1 or multiprocessing.parent_process() is not None:
        return 1
    size: int = communicator().Get_size()
    if size == 1:
        raise ValueError(
            f"the launcher started {launched} processes but MPI sees each alone: start them with the mpiexec or srun "
            "that belongs to the MPI library mpi4py loads"
        )
    return size


def launched_rank() -> int:
    """This process's number as the launcher has it, where MPI may not work; 0 without a launcher."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name)), 0)


def communicator() -> Any:
    """MPI.COMM_WORLD. Raises ValueError where there is no MPI."""
    try:
        from mpi4py import MPI  # imported late: importing it initialises MPI
    except (ImportError, RuntimeError) as error:  # the latter where it finds no MPI library
        raise ValueError(
            f"a launcher started several processes, but mpi4py cannot be imported ({error}): install the extra `mpi` and an MPI "
            "library, or start the command without a launcher, with --processes"
        ) from None
    return MPI.COMM_WORLD


def run_ranks(
    function: Callable[[T], R], tasks: Sequence[T], sizes: Sequence[int], label: str, visible: bool = True
) -> list[Outcome]:
    """Each rank runs its share (largest task to the least loaded rank) and reports to the root as it goes."""
    comm = communicator()
    rank, ranks = comm.Get_rank(), comm.Get_size()
    sent = []
    collected: list[Outcome | None] = []  # on the root; None is a rank's last word
    with Progress(label, sum(sizes), visible=visible and rank == 0) as progress:

        def receive() -> None:
            outcome = comm.recv(tag=_OUTCOME)
            collected.append(outcome)
            progress.advance(sizes[outcome.index] if outcome else 0)

        for index in _shares(sizes, ranks)[rank]:
            if comm.iprobe(tag=_STOP):
                break
            outcome = attempt(function, tasks[index], index)
            sent.append(comm.isend(outcome, 0, tag=_OUTCOME))
            if outcome.error is not None:
                sent += [comm.isend(None, other, tag=_STOP) for other in range(ranks)]
                break
            while rank == 0 and comm.iprobe(tag=_OUTCOME):
                receive()
        sent.append(comm.isend(None, 0, tag=_OUTCOME))
        while rank == 0 and collected.count(None) < ranks:
            receive()
    outcomes = [outcome for outcome in collected if outcome is not None]
    outcomes = comm.bcast(sorted(outcomes, key=lambda outcome: outcome.index))
    for outcome in outcomes:
        if outcome.error is not None:  # one stop came from each rank that failed
            comm.recv(tag=_STOP)
    for request in sent:
        request.wait()
    return outcomes


def _shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in largest_first(sizes):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares
