"""What ends a run early: signals, the end of its launcher, and a watchdog where it hangs.

Nothing here loads torch: a signal may come while it is still being loaded.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

# Slurm sends SIGUSR1 some time before the limit of a job (sbatch --signal), SIGTERM at it and on preemption.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


_LAUNCH = "deepspeed.launcher.launch"
_RUNNERS = ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner")


class StopRequest:
    """Remembers a signal to stop until the step is finished; a second SIGINT ends the process at once.

    The end of DeepSpeed's launcher is such a signal too. With `at_once` a signal raises SystemExit with code 0: what is
    still to be done can be done again. Made outside the main thread, which alone gets signals, it leaves them alone.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.at_once = False
        self.interrupts = 0
        main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS if main}
        _follow_launcher()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.at_once:
            sys.exit(0)
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def release(self) -> None:
        """Give the signals the meaning back that they had before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _follow_launcher() -> None:
    """Have the end of the DeepSpeed launcher that started this process, or of the `deepspeed` that started that, act as
    SIGTERM.

    Neither passes on what kills it, and the processes of the run would train on as nobody's. Other parents may go: a
    shell does.
    """
    launch = os.getppid()
    if _LAUNCH not in _words(launch):
        return
    above = _parent(launch)
    runner = above if any(Path(word).name in _RUNNERS for word in _words(above)[:3]) else None

    def follow() -> None:
        while os.getppid() == launch and (runner is None or _parent(launch) == runner):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _words(process: int) -> list[str]:
    """The command line of a process; empty when it has ended, or where there is no /proc."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _parent(process: int) -> int:
    """The parent of a process; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


# Where even Python's threads hang, faulthandler's own, which needs no interpreter, ends the process this much
# later.
_GRACE = 30.0
_STDERR = 2  # the descriptor: sys.stderr may be replaced


class Watchdog:
    """Ends this process, with the stacks of all its threads on stderr, when `beat` is not called for `minutes`; 0:
    never.

    The launcher (`srun --kill-on-bad-exit`, DeepSpeed's, torchrun) then ends the other ranks.
    """

    def __init__(self, minutes: float, rank: int, doing: str = "starting"):
        self.minutes = minutes
        self.rank = rank
        self._ended = threading.Event()
        self.beat(doing)
        if minutes:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str) -> None:
        """Something was finished; `doing`: what comes next, in words that fit after `while`."""
        self._doing, self._last = doing, time.monotonic()
        if self.minutes and not self._ended.is_set():
            faulthandler.dump_traceback_later(60 * self.minutes + _GRACE, exit=True, file=_STDERR)

    def close(self) -> None:
        """The run is over."""
        self._ended.set()
        if self.minutes:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, 10 * self.minutes)):
            if time.monotonic() - self._last > 60 * self.minutes:
                print(
                    f"rank {self.rank} stood still for {self.minutes:g} minutes (train.watchdog_minutes) while "
                    f"{self._doing}: it ends here, and its launcher ends the others; the same command goes on from "
                    "the last checkpoint. Its stacks:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=_STDERR, all_threads=True)
                os._exit(1)
