"""Processes for the fault campaign: forked from one that has loaded torch and DeepSpeed already, so that a start costs
a second.

What a rank runs is the command itself, `xlme_ds.pretrain.main`. `Ranks` acts as the launcher: it ends the others when
one dies. `Launched` is DeepSpeed's own launcher and what it starts, with all that they load.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

PATIENCE = 240.0  # seconds; a run that takes longer hangs
_PARTING = 20.0  # what a rank has to end by itself after another ended with an error


@dataclass(frozen=True)
class Result:
    """How the processes ended."""

    codes: list[int]
    """Exit codes; of a process that a signal ended, minus its number."""
    said: list[str]
    """stdout and stderr of each."""
    hung: bool
    """Whether they were ended from outside because they did not end."""

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


class Ranks:
    """Processes that run `function(rank)`; `environment` gives each its variables."""

    def __init__(self, function: Callable[[int], None], world: int, logs: Path, distributed: bool = True):
        self.logs = [logs / f"{time.monotonic_ns()}.{rank}.log" for rank in range(world)]
        port = str(_free_port())
        self.codes: dict[int, int] = {}
        self.pids = []
        for rank, log in enumerate(self.logs):
            names = dict(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            )
            self.pids.append(_fork(partial(function, rank), log, names if distributed else {}))
        self.started = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def poll(self) -> bool:
        """Whether any still runs."""
        for pid in self.pids:
            if pid not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait for `condition`; False when the processes ended first."""
        while self.poll() and self.age < PATIENCE:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank that still runs, or to all and what they started."""
        for pid in self.pids if rank is None else [self.pids[rank]]:
            if pid not in self.codes:
                (os.killpg if rank is None else os.kill)(pid, number)

    def wait(self) -> Result:
        """Wait for the end, as a launcher does: a rank that a signal ended ends all at once, one that failed a little
        later."""
        failed_at, hung = None, False
        while self.poll():
            now = time.monotonic()
            if failed_at is None and any(self.codes.values()):
                failed_at = now - (_PARTING if any(code < 0 for code in self.codes.values()) else 0)
            late = failed_at is not None and now - failed_at > _PARTING
            hung = hung or now - self.started > PATIENCE
            if late or hung:
                self.signal(signal.SIGKILL)
            time.sleep(0.002)
        self.signal_leftovers()
        said = [log.read_text(errors="replace") for log in self.logs]
        return Result([self.codes[pid] for pid in self.pids], said, hung)

    def signal_leftovers(self) -> None:
        """End what the processes started and left behind."""
        for pid in self.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class Launched(Ranks):
    """`deepspeed --module WORDS` on two ranks: `pids` has the runner alone, `members` all."""

    def __init__(self, words: list[str], logs: Path):
        command = ["deepspeed", "--num_gpus", "2", "--master_port", str(_free_port()), "--module", *words]
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        super().__init__(lambda rank: os.execvp(command[0], command), 1, logs, distributed=False)
        self.seen: dict[int, psutil.Process] = {}

    def members(self) -> dict[str, psutil.Process]:
        """Those that live now: `runner`, `launch`, and `0` and `1` once they are ranks."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            runner = psutil.Process(self.pids[0])
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
        """As of `Ranks`; those that come and go are noted on the way."""
        return super().until(lambda: (self.members(), condition())[1])

    def leftovers(self, seconds: float = 60.0) -> list[str]:
        """The command lines of those that outlive the runner by `seconds`; they are ended."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=seconds)
        words = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                words.append(" ".join(process.cmdline()))
                process.kill()
        return words


def _fork(function: Callable[[], None], log: Path, variables: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(variables)
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def obey_permissions() -> None:
    """Have root in this process be held to the permissions of files as any user is (capset of Linux)."""
    may_override, words = (
        0b1110,
        3,
    )  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER; effective, permitted, inheritable
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    held = (ctypes.c_uint32 * (2 * words))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    for word in range(words):
        held[word] &= ~may_override
    if libc.capset(header, held):
        raise OSError(ctypes.get_errno(), "capset")
