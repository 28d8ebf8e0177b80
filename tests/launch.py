"""Starting the ranks of a test as a launcher would."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def distributed(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables by which torch's process group finds its other ranks on this machine."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def environment(**variables: object) -> dict[str, str]:
    """This environment with one thread a process and the tools of this interpreter on the PATH."""
    base = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        PYTHONWARNINGS="ignore",
        PYTHONPATH=str(ROOT),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    return base | {key: str(value) for key, value in variables.items()}


def run_ranks(world: int, arguments: list[str], timeout: float = 600) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` on `world` ranks and wait for all."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(**distributed(rank, world, port)),
        )
        for rank in range(world)
    ]
    done = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done
