"""Processes for the fault campaign: forked from one that has loaded torch and DeepSpeed already, so that a start takes
a second.

A rank runs the command itself, `xlme_ds.pretrain.main`. `ForkedRanks` acts as the launcher: it ends the others when one
dies. `LaunchedRanks` is DeepSpeed's own launcher and what it starts, which load everything anew.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launch import distributed, free_port

_PATIENCE = 240.0  # seconds; a run that takes longer hangs
_PARTING = 20.0  # seconds that a rank has to end by itself after another ended with an error
_FORK = multiprocessing.get_context("fork")


class NotSurvived(Exception):
    """Why a fault was not survived; `said` has what the processes printed."""

    def __init__(self, how: str, said: list[str], lost_rows: int = 0, silent_change: bool = False):
        super().__init__(how)
        self.said, self.lost_rows, self.silent_change = said, lost_rows, silent_change


@dataclass(frozen=True)
class Ended:
    """How the processes ended."""

    codes: list[int | None]  # exit codes; of a process that a signal ended, minus its number
    said: list[str]  # stdout and stderr of each
    hung: bool  # whether they were killed because they did not end

    @property
    def finished(self) -> bool:
        """Whether all did their work."""
        return set(self.codes) == {0}

    def clear_error(self, *words: str) -> bool:
        """Whether all ended with exit code 2, and one sentence, which has one of `words`, and no traceback.

        Ranks that were done before the first, which writes the report alone, may have left with 0.
        """
        lines = [line for text in self.said for line in text.splitlines() if ": error: " in line]
        return (
            self.codes[0] == 2
            and set(self.codes) <= {0, 2}
            and len(lines) == 1
            and not any("Traceback" in text for text in self.said)
            and any(word in lines[0] for word in words)
        )

    def need(self, fine: bool, how: str = "", silent_change: bool = False) -> None:
        """Raise `NotSurvived` unless `fine`."""
        if not fine:
            raise NotSurvived(how or f"exit codes {self.codes}", self.said, silent_change=silent_change)

    def need_error(self, *words: str) -> None:
        """Raise `NotSurvived` unless they ended with one clear error that has one of `words`."""
        self.need(self.clear_error(*words), f"exit codes {self.codes}, no one clear sentence")


class ForkedRanks:
    """Processes that run `function(rank)` and print to files in `logs`; `group` makes them a process group of torch."""

    def __init__(self, function: Callable[[int], None], world: int, logs: Path, group: bool = True):
        self.logs = [logs / f"{time.monotonic_ns()}.{rank}.log" for rank in range(world)]
        port = free_port()
        self.processes = []
        for rank, log in enumerate(self.logs):
            variables = distributed(rank, world, port) if group else {}
            process = _FORK.Process(target=_rank, args=(function, rank, log, variables))
            process.start()
            self.processes.append(process)
        self.started = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def running(self) -> bool:
        """Whether any still runs."""
        return any(process.is_alive() for process in self.processes)

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait for `condition`; False when the processes ended first."""
        while self.running() and self.age < _PATIENCE:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def until_age(self, seconds: float) -> None:
        """Wait until they have run for so long, or have ended."""
        self.until(lambda: self.age > seconds)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank that still runs, or to all and what they started."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.is_alive():
                (os.killpg if rank is None else os.kill)(process.pid, number)

    def wait(self) -> Ended:
        """Wait for the end, as a launcher does: a rank that a signal ended ends all at once, one that failed a little
        later."""
        failed_at, hung = None, False
        while self.running():
            codes = [process.exitcode or 0 for process in self.processes]
            if failed_at is None and any(codes):
                failed_at = self.age - (_PARTING if min(codes) < 0 else 0)
            hung = hung or self.age > _PATIENCE
            if hung or (failed_at is not None and self.age - failed_at > _PARTING):
                self.signal(signal.SIGKILL)
            time.sleep(0.002)
        for process in self.processes:  # what they started and left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said = [log.read_text(errors="replace") if log.exists() else "" for log in self.logs]
        return Ended([process.exitcode for process in self.processes], said, hung)


def _rank(function: Callable[[int], None], rank: int, log: Path, variables: dict[str, str]) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(variables)
    function(rank)


class LaunchedRanks(ForkedRanks):
    """`deepspeed --module WORDS` on two ranks: `processes` has the runner alone, `members` finds all."""

    def __init__(self, words: list[str], logs: Path):
        command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--module", *words]
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        super().__init__(lambda rank: os.execvp(command[0], command), 1, logs, group=False)
        self.seen: dict[int, psutil.Process] = {}

    def members(self) -> dict[str, psutil.Process]:
        """Those that live now: `runner`, `launch`, and `0` and `1` once they are ranks."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            runner = psutil.Process(self.processes[0].pid)
            family = [runner, *runner.children(recursive=True)]
            self.seen |= {process.pid: process for process in family}
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = process.cmdline()
                    if process.pid == runner.pid:
                        found["runner"] = process
                    elif "deepspeed.launcher.launch" in words:
                        found["launch"] = process
                    elif "xlme_ds.pretrain" in words and (rank := process.environ().get("LOCAL_RANK")) is not None:
                        found[rank] = process  # not one that was just forked, which has the words of its parent
        return found

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait for `condition`, and note the processes that come and go on the way."""
        return super().until(lambda: (self.members(), condition())[1])

    def leftovers(self) -> list[str]:
        """The command lines of those that outlive the runner by a minute; they are killed."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=60)
        words = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                words.append(" ".join(process.cmdline()))
                process.kill()
        return words


def obey_permissions() -> None:
    """Take from root in this process what overrides the permissions of files (capset of Linux)."""
    may_override = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    for word in range(3):
        held[word] &= ~may_override
    if libc.capset(header, held):
        raise OSError(ctypes.get_errno(), "capset")
