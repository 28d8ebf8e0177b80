"""A process that a bench asks for one measurement after the other; the memory of a process."""

import json
import os
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


class Worker:
    """A process of `python -m MODULE WORDS`, which answers every line of JSON with a line."""

    def __init__(self, module: str, *words: str):
        self.name = f"{module} {' '.join(words)}"
        command = [sys.executable, "-W", "ignore", "-m", module, *words]
        variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answer()

    def ask(self, asked: Any = None) -> Figures:
        """Send one line; the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Figures:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: the process {self.name} ended: see above")
        answer: Figures = json.loads(line)
        return answer

    def close(self) -> None:
        """End its input, and wait until it has ended."""
        self.process.communicate()


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
