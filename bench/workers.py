"""Processes that a bench asks for one measurement after the other; the memory of a process."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]


def memory(field: str) -> int:
    """A field of this process's /proc status, in bytes: VmRSS is its resident memory now, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this measurement needs Linux")


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def distributed(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables by which torch's process group finds its other ranks on this machine."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Workers:
    """Processes of `python -m MODULE WORDS`, one for each rank; each answers every line of JSON with a line."""

    def __init__(self, module: str, *words: str, world: int = 1):
        self.name = f"{module} {' '.join(words)}"
        threads = (os.cpu_count() or 1) if world == 1 else 1
        variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module, *words], cwd=ROOT, text=True,
                env=variables | distributed(rank, world, port), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(world)
        ]  # fmt: skip
        self._answers()

    def ask(self, asked: Any = None) -> list[Figures]:
        """Send one line to all; the answer of every rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Figures]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            sys.exit(f"error: a process of {self.name} ended: see above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End their input, and wait until they have ended."""
        for process in self.processes:
            process.communicate()


def answer(prepare: Callable[[], Callable[[Any], Figures]]) -> None:
    """The other side: answer every line of the standard input by the function that `prepare` returns."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the standard error
    respond = prepare()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(respond(json.loads(line))), file=answers, flush=True)


def listing(figures: Figures, indent: str = "") -> str:
    """Name by name, for people."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", listing(value, indent + "  ")]
        else:
            shown = format(value, ",.5g") if isinstance(value, float) else str(value)
            lines.append(f"{indent}{name:<{44 - len(indent)}}{shown:>12}")
    return "\n".join(lines)
