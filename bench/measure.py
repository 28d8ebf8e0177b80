"""Helpers of all benches: they run cases in processes, call contenders by turns, read times and memory use, and print
figures with commit and date."""

import atexit
import importlib
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from xlme_ds.cli import fail
from xlme_ds.io.help import call_from_command_line

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
_LOAD = round(os.getloadavg()[0], 2)  # before a measurement
Key = TypeVar("Key")


@contextmanager
def one_sentence(program: str, extra: str = "bench") -> Iterator[None]:
    """In this block, a user's mistake (ValueError or OSError) or a missing package of the extra `extra` ends the
    process with one sentence and exit code 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(program, ValueError(f'{error.name} is missing: pip install -c constraints.txt -e ".[{extra}]"'))
    except (ValueError, OSError) as error:
        fail(program, error)


def stamp() -> Figures:
    """Commit, machine and date of a measurement."""
    commit = ""
    with suppress(FileNotFoundError):  # there may be no git, as in a container
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        commit = done.stdout.strip()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": commit or "unknown to git",
        "machine": f"{os.cpu_count()} cores, {cpu[1] if cpu else platform.machine()}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def memory(field: str) -> int:
    """A field of this process's /proc status, in bytes: VmRSS is its resident memory now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this measurement needs Linux")


def timed(work: Callable[[], object]) -> Figures:
    """Run `work`. Returns its seconds: `wall`, and `cpu`, the CPU time of this process, which other work on the machine
    disturbs less."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def repeat(work: Callable[[], object], times: int) -> None:
    """Run `work` several times, which are timed together."""
    for _ in range(times):
        work()


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


def ratio(turns: Sequence[Mapping[Key, Figures]], over: Key, under: Key, figure: str) -> float:
    """Median over the rounds of (figure of contender `over` / figure of contender `under`)."""
    return statistics.median(turn[over][figure] / turn[under][figure] for turn in turns)


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


def run_bench(program: str, measure: Callable[..., str], description: str | None) -> None:
    """Call `measure` with the options of the command line, and print the text that it returns. Meanwhile `sys.stdout`
    goes to stderr."""

    @wraps(measure)
    def quiet(*arguments: Any, **options: Any) -> str:
        with redirect_stdout(sys.stderr):
            return measure(*arguments, **options)

    with one_sentence(program):
        print(call_from_command_line(quiet, program, None, description))


def printed(figures: Figures, as_json: bool, text: str = "") -> str:
    """Figures with commit, machine and date: as JSON, or as `text` or, without it, as a listing. JSON and listing have
    the load average at the start of the process."""
    with_load = figures | {"load_before": _LOAD}
    if as_json:
        return json.dumps(with_load | stamp(), indent=1)
    return f"{text or listing(with_load)}\n\n{', '.join(stamp().values())}"


class Worker:
    """A process that calls `prepare(*arguments)` of a module, and then runs cases with the function that `prepare`
    returned. The function takes a case, and returns an iterable of the case's rows."""

    def __init__(self, module: str, *arguments: str):
        self.name = " ".join([module, *arguments])
        self.connection, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, module, arguments))
        self.process.start()
        theirs.close()  # so that reading fails when the process ends
        atexit.register(self.connection.close)  # ends the process: Python waits for it at exit
        self.loaded = False

    def load(self, seconds: float) -> None:
        """Wait until `prepare` has returned in the process, at most `seconds`."""
        with suppress(EOFError):
            self.loaded = self.loaded or (self.connection.poll(max(seconds, 0)) and self.connection.recv() == {})

    def rows(self, case: Any, seconds: float) -> Iterator[Figures]:
        """Run a case, and yield its rows as they come. If the process fails or needs more than `seconds`, the last row
        has `failed`."""
        if not self.loaded:
            yield {"failed": "the process of the case did not load"}
            return
        until = time.monotonic() + seconds
        try:
            self.connection.send(case)
            while self.connection.poll(max(until - time.monotonic(), 0)):
                row: Figures = self.connection.recv()
                if not row:
                    return
                yield row
            yield {"failed": f"no end after {seconds:.0f} s"}
        except (EOFError, ConnectionError):
            self.process.join()
            yield {"failed": f"the process ended with code {self.process.exitcode}"}

    def ask(self) -> Figures:
        """Run the case None, which has one row; returns the row. Ends the program with an error if the process
        fails."""
        self.load(600)
        (row,) = self.rows(None, 3600)
        if "failed" in row:
            sys.exit(f"error: {self.name}: {row['failed']}")
        return row

    def close(self, kill: bool = False) -> None:
        """End the process and its children: at once if `kill`, otherwise after at most 10 s. Returns when their memory
        is free."""
        assert self.process.pid is not None
        self.connection.close()
        self.process.join(0 if kill else 10)
        with suppress(ProcessLookupError):  # the process has no group yet, or all of the group have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, module: str, arguments: tuple[str, ...]) -> None:
    """Answer each case with its rows, until the parent closes the connection."""
    os.setsid()
    os.dup2(2, 1)  # the prints of libraries go to the standard error
    warnings.simplefilter("ignore")
    rows_of = importlib.import_module(module).prepare(*arguments)
    with suppress(EOFError, ConnectionError):
        connection.send({})
        while True:
            for row in rows_of(connection.recv()):
                connection.send(row)
            connection.send({})
    os._exit(0)  # without cleaning up, because the next case waits for the memory
