"""What a launcher tells this process: its rank, among how many, and where they meet.

DeepSpeed's launcher and torchrun set torch's five variables. Plain `srun` says the same in its own, and they are
translated. What would silently become several runs of one process each is refused.
"""

import re
from collections.abc import Mapping

TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
# Below the range from which systems give out ports by themselves; two jobs that share a node get different ones.
_FIRST_PORT, _PORTS = 10_000, 20_000
_TRY = 1_009  # a job that is requeued takes another: what was in the way of the last try may still be


def rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's five variables for this process; empty where no launcher started it, so that it runs alone.

    Raises ValueError when a launcher started several processes that do not know of each other.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if "RANK" in environment:
        return _given(environment, tasks)
    if tasks > 1:
        return _from_srun(environment)
    if "SLURM_STEP_NUM_TASKS" not in environment and int(environment.get("SLURM_NTASKS") or 1) > 1:
        raise ValueError(
            f"this job has {environment['SLURM_NTASKS']} tasks, but srun did not start this process: put srun before "
            "python, or srun --ntasks=1 to run on one"
        )
    launched = max(int(environment.get(name) or 1) for name in _MPI_SIZES)
    if launched > 1:
        raise ValueError(
            f"mpiexec started {launched} processes, but not as one run: start them with srun, deepspeed or torchrun"
        )
    return {}


def _given(environment: Mapping[str, str], tasks: int) -> dict[str, str]:
    missing = [name for name in TORCH_VARIABLES if name not in environment]
    if missing:
        raise ValueError(f"RANK is set, {' and '.join(missing)} not: set all five as a launcher does, or unset RANK")
    if int(environment["WORLD_SIZE"]) < tasks:
        raise ValueError(
            f"srun started {tasks} processes, but WORLD_SIZE is {environment['WORLD_SIZE']}: unset RANK and WORLD_SIZE, "
            "which srun's own variables replace"
        )
    return {name: environment[name] for name in TORCH_VARIABLES}


def _from_srun(environment: Mapping[str, str]) -> dict[str, str]:
    job, step, tries = (int(environment.get(f"SLURM_{name}") or 0) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    port = _FIRST_PORT + (10 * job + step + _TRY * tries) % _PORTS
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes: gpu-001 of `gpu-[001-004,007],login1`. Rank 0 is there."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
