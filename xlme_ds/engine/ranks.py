"""The processes of a run: the launcher's variables, the process group, and errors that all ranks raise together.

DeepSpeed's launcher and torchrun set torch's five variables. Plain `srun` sets variables of its own, which are
translated into torch's. mpiexec sets no variables of torch, and in a Slurm job its processes of a node share srun's.
They would silently become several runs, so `torch_variables` raises an error.
"""

import datetime
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..config import EngineConfig, TrainConfig
from ..io.errors import in_words
from ..run_commands import FIRST_PORT, LAUNCHER_VARIABLES, MEETING_VARIABLES, PORT_COUNT, free_port

Result = TypeVar("Result")

# A Slurm job's port is computed from the job's id, so that jobs on one node have different ports.
_PORTS_TO_NEXT_TRY = 1_009  # a requeued job takes another port, because its previous one may still be in use
_DAY = datetime.timedelta(days=1)
_SLOW_SECONDS = 30.0  # a longer wait prints a message; imports take less time, even on a busy machine
_UNSET_ADVICE = f"the environment has another job's variables: unset {' '.join(LAUNCHER_VARIABLES)}"


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's five variables for this process; empty if the process runs alone, because no launcher started it.

    Raises ValueError if a launcher started several processes that would each run alone, or if a variable is wrong.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if "RANK" in environment:
        _check_torch_variables(environment, tasks)
        return {name: environment[name] for name in LAUNCHER_VARIABLES}
    launched = max(int(environment.get(name) or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if launched > tasks:  # in a Slurm job, mpiexec starts all its processes of a node below one task of srun
        raise ValueError(
            f"mpiexec started {launched} processes, but not as one run: start them with srun, deepspeed or torchrun"
        )
    if tasks > 1:
        return _translate_slurm_variables(environment)
    if "SLURM_STEP_NUM_TASKS" not in environment and int(environment.get("SLURM_NTASKS") or 1) > 1:
        raise ValueError(
            f"this job has {environment['SLURM_NTASKS']} tasks, but srun did not start this process: put srun before "
            "python, or srun --ntasks=1 to run one process"
        )
    return {}


def _check_torch_variables(environment: Mapping[str, str], tasks: int) -> None:
    """Raise ValueError if one of torch's variables is missing or wrong. `tasks`: the number of processes that srun
    started."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise ValueError(
            f"RANK is set without {' and '.join(missing)}: set all five variables as a launcher does, or unset RANK"
        )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise ValueError(f"{name} is {environment[name]!r}: set a number, or unset RANK to run one process")
    if int(environment["WORLD_SIZE"]) < tasks:
        raise ValueError(
            f"srun started {tasks} processes, but WORLD_SIZE is {environment['WORLD_SIZE']}: unset RANK and "
            "WORLD_SIZE, which srun's own variables replace"
        )
    if int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        raise ValueError(
            f"RANK is {environment['RANK']}, but WORLD_SIZE is {environment['WORLD_SIZE']}: set RANK to a number "
            "from 0 to WORLD_SIZE - 1"
        )


def _translate_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's five variables, from those that srun set."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restarts = (int(environment.get(name) or 0) for name in names)
    port = FIRST_PORT + (10 * job + step + _PORTS_TO_NEXT_TRY * restarts) % PORT_COUNT
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """The first node in Slurm's list `nodes`, on which rank 0 runs: gpu-001 of `gpu-[001-004,007],login1`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


class SharedError(ValueError):
    """A user's mistake that all ranks raise with the same message, and rank 0 prints.

    Before the process group exists, perhaps only some ranks raise the error. It is then printed by each rank that
    raises it with `prints`.
    """

    def __init__(self, message: str, prints: bool = False):
        super().__init__(message)
        self.prints = prints


@contextmanager
def process_group(
    engine: EngineConfig, watchdog_minutes: float = TrainConfig.watchdog_minutes
) -> Iterator[tuple[int, int]]:
    """Context that yields the result of `start_process_group`. On exit the process leaves the group and restores its
    environment and torch's `linear`, so that it can start another run.

    With several ranks, any error but a SharedError may be of one rank alone, so it is printed and ends the process
    with exit code 1. Under NCCL both leaving the group and Python's own exit may wait for the other ranks, and the
    error would be printed only afterwards.
    """
    linear = torch.nn.functional.linear
    variables = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield start_process_group(engine, watchdog_minutes)
    except Exception as error:
        if not isinstance(error, SharedError) and dist.is_initialized() and dist.get_world_size() > 1:
            traceback.print_exc()
            exit_now(1)
        raise
    finally:
        torch.nn.functional.linear = linear  # ZeRO-3 replaced it by a function that sums in another order
        for name in LAUNCHER_VARIABLES:  # with them, programs that this process starts would join its group
            os.environ.pop(name, None)
        os.environ.update(variables)
        if dist.is_initialized():
            from deepspeed import comm  # `comm` also destroys groups that the next run of this process must not use

            (comm if comm.is_initialized() else dist).destroy_process_group()


def _is_not_cpu_warning(record: logging.LogRecord) -> bool:
    """False for the warning, at DeepSpeed's import, that there is no GPU: a run's first line names the CPU."""
    return "Setting accelerator to CPU" not in record.getMessage()


def start_process_group(
    engine: EngineConfig, watchdog_minutes: float = TrainConfig.watchdog_minutes
) -> tuple[int, int]:
    """Join the processes that the launcher started; returns (rank, world), which is (0, 1) without a launcher.

    Collectives time out a minute later than the watchdog, so that the watchdog acts first. Without a watchdog they time
    out after a day.
    """
    if "RANK" not in os.environ:  # srun or no launcher started this process, so these are another job's
        for name in MEETING_VARIABLES:
            os.environ.pop(name, None)
    os.environ.update(on_all_ranks(lambda: torch_variables(os.environ) or _single_process_variables()))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if engine.kind == "plain" or dist.is_initialized():
        return rank, world
    logging.getLogger("DeepSpeed").addFilter(_is_not_cpu_warning)
    import deepspeed
    from deepspeed.comm.torch import build_shm_op

    from .deepspeed_compat import check_deepspeed, loading_extensions, printing_if_slow

    if on_gpu():
        torch.cuda.set_device(_gpu_index())
    timeout = datetime.timedelta(minutes=watchdog_minutes + 1) if watchdog_minutes else _DAY
    # DeepSpeed's engines make groups without a timeout, so torch takes these defaults (its own are 30 and 10 minutes).
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        check_deepspeed()
        waiting = f"rank {rank} waits for the others of {world} at {address}:{port}"
        with loading_extensions():
            build_shm_op()  # compiled here, so that the timeout below limits only the wait for other processes
            # The first process of each node prints. If each process sees only one GPU, every process prints, because
            # `_gpu_index` has set its LOCAL_RANK to 0.
            prints = os.environ["LOCAL_RANK"] == "0"
            with printing_if_slow(f"{waiting}; if no launcher started it, {_UNSET_ADVICE}", _SLOW_SECONDS, prints):
                deepspeed.init_distributed("nccl" if on_gpu() else "gloo", verbose=False, timeout=timeout)
    except ValueError as error:
        raise SharedError(str(error), prints=os.environ["LOCAL_RANK"] == "0") from None
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise SharedError(
                f"rank {rank} waited {timeout.total_seconds() / 60:g} minutes for the others of {world} at "
                f"{address}:{port}: start the other ranks too, or, if no launcher started this one, {_UNSET_ADVICE}",
                prints=True,
            ) from None
        if "EADDRINUSE" not in str(error):  # other trouble with the network may be over at the next try
            raise
        raise SharedError(
            f"port {port} of {address}, where the processes meet, is in use by another program: choose another port "
            "(deepspeed --master_port, torchrun --master-port, else MASTER_PORT)"
        ) from None
    # If a process is killed, DeepSpeed 0.19.8 leaves the process's shared buffer for reductions on CPUs (69 MB) in
    # memory, where a run on the same port would find it. After all ranks have opened the buffer, its file is not
    # needed, and without the file the system frees the buffer when the processes end.
    dist.barrier()
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)
    return rank, world


def _single_process_variables() -> dict[str, str]:
    """torch's five variables for a process that runs alone, with a free port."""
    return dict(zip(LAUNCHER_VARIABLES, ("0", "0", "1", "127.0.0.1", str(free_port())), strict=True))


def _gpu_index() -> int:
    """The index of this process's GPU: LOCAL_RANK, or 0 if the process sees only one GPU. Sets LOCAL_RANK, which
    DeepSpeed reads, to this index. Raises SharedError if no visible GPU has the index."""
    index = int(os.environ["LOCAL_RANK"])
    visible = torch.cuda.device_count()
    if visible == 1:  # a launcher may show each process only one GPU (srun --gpus-per-task=1)
        index = 0
    if index >= visible:
        raise SharedError(
            f"a node has more processes than its {visible} visible GPUs: start one process per GPU (--ntasks-per-node)",
            prints=index == visible,  # so that one process of the node prints
        )
    os.environ["LOCAL_RANK"] = str(index)
    return index


def extend_timeout() -> None:
    """Raise the timeout of collectives to a day, for work that no watchdog guards: one rank may take longer than the
    others."""
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(_DAY)


def exit_now(code: int = 0) -> NoReturn:
    """End a process that is done or has failed, at once.

    Gloo's threads may still run, because DeepSpeed still holds a process group. Python's own exit kills these threads,
    and sometimes a thread aborts ("terminate called without an active exception"). The launcher would then report that
    the run failed, although the run was saved.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def data_parallel_rank_and_size(engine: EngineConfig, rank: int, world: int) -> tuple[int, int]:
    """Returns (index, count): the rows are divided into `count` equal shares, and rank `rank` reads share `index`. The
    stages of one pipeline have the same share."""
    replicas = world // engine.processes_per_replica
    return rank % replicas, replicas  # as in DeepSpeed's PipeDataParallelTopology: ranks of one stage are consecutive


def on_gpu() -> bool:
    """Whether this run computes on GPUs: there is one, and DS_ACCELERATOR is not cpu."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def broadcast(value: Result) -> Result:
    """Returns rank 0's `value` on every rank; collective."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather(value: Result) -> list[Result]:
    """Returns the values of all ranks, in the order of the ranks, on every rank; collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Result] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(function: Callable[[], Result]) -> Result:
    """Return the result of `function` on this rank. If `function` raises ValueError or OSError on any rank, all ranks
    raise SharedError; collective."""
    result, error = None, None
    try:
        result = function()
    except (ValueError, OSError) as failure:
        error = failure
    raise_on_all_ranks(error)
    return result  # type: ignore[return-value]


def raise_on_all_ranks(error: Exception | None) -> None:
    """If any rank has an `error`, every rank raises the error of the lowest such rank as SharedError; collective."""
    for message in all_gather(None if error is None else in_words(error)):
        if message is not None:
            raise SharedError(message)
