"""Helpers of all benches: they call contenders by turns, read memory use, and print figures with commit and date."""

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from xlme_ds.cli import fail

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
Key = TypeVar("Key")


def stamp() -> Figures:
    """Commit, machine and date of a measurement."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": done.stdout.strip() or "not in a git checkout",
        "machine": f"{os.cpu_count()} cores, {cpu[1] if cpu else platform.machine()}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def memory(field: str) -> int:
    """A field of this process's /proc status, in bytes: VmRSS is its resident memory now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this measurement needs Linux")


def by_turns(
    contenders: Mapping[Key, Callable[[], Any]], rounds: int, warm_up: int = 1, deadline: float = math.inf
) -> list[dict[Key, Any]]:
    """Call each contender once in every round, so that other work on the machine slows all of them alike. Returns one
    dict per round, from a contender's key to its result. The results of the first `warm_up` rounds are left out; up to
    `rounds` more rounds follow. After `deadline` (in seconds of time.monotonic) no round begins, except the first."""
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}: it must be at least 1")
    turns: list[dict[Key, Any]] = []
    while len(turns) < warm_up + rounds and (not turns or time.monotonic() <= deadline):
        turns.append({key: contender() for key, contender in contenders.items()})
    return turns[warm_up:]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of `rows` under the headings `columns`."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def listing(figures: Figures, indent: str = "") -> str:
    """Figures as text: each figure has a line with its name and value, and inner dicts are indented."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", listing(value, indent + "  ")]
        else:
            shown = format(value, ",.5g") if isinstance(value, float) else str(value)
            lines.append(f"{indent}{name:<{44 - len(indent)}}{shown:>12}")
    return "\n".join(lines)


def measured(program: str, measure: Callable[[], Figures]) -> Figures:
    """The figures that `measure` returns, and `load_before`, the machine's load average before the call. During the
    call `sys.stdout` goes to stderr. ValueError or OSError ends the process with one sentence and exit code 2."""
    load = round(os.getloadavg()[0], 2)
    try:
        with redirect_stdout(sys.stderr):
            return measure() | {"load_before": load}
    except (ValueError, OSError) as error:
        fail(program, error)


def show(figures: Figures, as_json: bool, text: Callable[[Figures], str] = listing) -> None:
    """Print figures as JSON or as text, with commit, machine and date."""
    if as_json:
        print(json.dumps(figures | stamp(), indent=1))
    else:
        print(text(figures), ", ".join(stamp().values()), sep="\n\n")
