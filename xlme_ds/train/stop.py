"""Signals that ask a run to stop. Nothing here loads torch: they may come while it is still being loaded."""

import os
import signal
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

    The end of DeepSpeed's launcher is such a signal too.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.interrupts = 0
        for number in _STOP_SIGNALS:
            signal.signal(number, self._receive)
        _follow_launcher()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def release(self) -> None:
        """Give the signals their usual meaning back."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


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
