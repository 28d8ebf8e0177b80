"""A run that hangs ends, and says where: a rank that waits for ever holds all the others' machines."""

import faulthandler
import os
import sys
import threading
import time

# Where even Python's threads stand still, faulthandler's own, which needs no interpreter, ends the process this much
# later.
_GRACE = 30.0
_STDERR = 2  # the descriptor: sys.stderr may be replaced


class Watchdog:
    """Ends this process, with the stacks of all its threads on stderr, when `beat` is not called for `minutes`; 0:
    never.

    The launcher (`srun --kill-on-bad-exit`, DeepSpeed's, torchrun) then ends the other ranks.
    """

    def __init__(self, minutes: float, rank: int):
        self.minutes = minutes
        self.rank = rank
        self._ended = threading.Event()
        self.beat("starting")
        if minutes:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str) -> None:
        """Something was finished; `doing`: what comes next, in words that fit behind `while`."""
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
                self._end()

    def _end(self) -> None:
        print(
            f"rank {self.rank} stood still for {self.minutes:g} minutes (train.watchdog_minutes) while {self._doing}: it ends "
            "here, and its launcher ends the others; the same command goes on from the last checkpoint. Its stacks:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        os._exit(1)
