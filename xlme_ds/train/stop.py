"""Stopping a run before its last step: on a signal, when its launcher ends, or by a watchdog if it hangs.

This module does not load torch, because a signal may come while torch is being loaded.
"""

import errno
import faulthandler
import io
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

# Slurm sends SIGUSR1 before a job's time limit (sbatch --signal), SIGTERM at the limit and on preemption; a terminal
# that closes sends SIGHUP.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

_LAUNCHER = "deepspeed.launcher.launch"  # starts the processes of one machine
_LAUNCHER_COMMANDS = ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner")  # they start the launcher
_PATIENCE = 3.0  # seconds within which Python's handler of a signal should run
_HEAD_START = 1.0  # another thread may take a signal, and write its number this many seconds after the handler ran
_HANDLED = 0x80  # added to the number that the handler writes


class StopRequest:
    """Stores a signal to stop until the step is finished; a second SIGINT ends the process at once.

    `received`: the signal's name. The end of DeepSpeed's launcher counts as a signal. If `at_once` is set, a signal
    raises SystemExit with code 0: the program sets `at_once` when the rest of its work can be repeated. `has_work`:
    whether there is something to save. Signals are handled only if the object is made in the main thread; signals that
    were ignored before, such as SIGHUP under nohup, stay ignored. Once the terminal has closed, output is dropped.

    Python runs a handler only between two Python instructions, so no handler runs while the main thread waits in C++
    for other processes. Then a second thread, which reads the numbers of all signals, acts instead of the handler.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.at_once = False
        self.has_work = False
        self.interrupts = 0
        self._pipe: int | None = None  # where the numbers of signals are written
        self._handled_at: dict[int, float] = {}  # signal -> time at which its handler's number was last read
        self._released = False
        self._acting_lock = threading.Lock()  # lets only one signal print and end the process
        in_main = threading.current_thread() is threading.main_thread()
        numbers = [number for number in _STOP_SIGNALS if in_main and signal.getsignal(number) != signal.SIG_IGN]
        self._former_handlers = {number: signal.signal(number, self._receive) for number in numbers}
        if self._former_handlers:
            self._listen()
            self._streams = sys.stdout, sys.stderr
            if self._streams == (sys.__stdout__, sys.__stderr__):  # else a notebook has replaced them
                sys.stdout, sys.stderr = (stream and _unbreakable(stream) for stream in self._streams)
        _follow_launcher()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._pipe is not None:
            with suppress(BlockingIOError):  # it is full
                os.write(self._pipe, bytes([_HANDLED | number]))
        if self.at_once:
            sys.exit(0)
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def release(self) -> None:
        """Restore the handlers of the signals, and the streams."""
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        if self._former_handlers:
            signal.set_wakeup_fd(self._former_fd)
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the shell, as in >&-
                stream.flush()
            sys.stdout, sys.stderr = self._streams
        self._released = True

    def _listen(self) -> None:
        """Start a thread that reads the number of every signal from a pipe, into which Python's C handler writes it,
        and `_receive` afterwards. The thread may read both late: the machine is busy, or a library is being loaded."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._pipe = write_end  # first, because a signal may come between these lines
        # `set_wakeup_fd` returns the former descriptor, such as a notebook's, which `release` sets again.
        self._former_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

        def leave() -> None:
            self._pipe = None
            signal.set_wakeup_fd(-1)

        os.register_at_fork(after_in_child=leave)  # else signals of a forked child would be written to our pipe

        def listen() -> None:
            interrupts_read = 0
            while byte := os.read(read_end, 1):
                number, read_at = byte[0] & ~_HANDLED, time.monotonic()
                if byte[0] & _HANDLED:
                    self._handled_at[number] = read_at
                    continue
                if number == signal.SIGINT:
                    interrupts_read += 1
                if number in self._former_handlers:
                    arguments = signal.Signals(number), read_at, interrupts_read > 1
                    threading.Thread(target=self._act_if_unhandled, args=arguments, daemon=True).start()

        threading.Thread(target=listen, name="signals", daemon=True).start()

    def _act_if_unhandled(self, number: signal.Signals, read_at: float, is_second_interrupt: bool) -> None:
        """Act on a signal if Python's handler does not run in time. Act on a second SIGINT even if the handler runs."""
        for _ in range(round(_PATIENCE / 0.05)):  # of this thread's own time: the process may be stopped
            if self._handled_at.get(number, -math.inf) > read_at - _HEAD_START and not is_second_interrupt:
                return
            time.sleep(0.05)
        if self._released:  # the run is over, such as after a KeyboardInterrupt that the program caught
            return
        with self._acting_lock:
            if is_second_interrupt or not self.has_work or self.at_once:
                outcome = "ended" if is_second_interrupt else "stopped with nothing to save"
                print(f"{number.name}: {outcome}, while it waited for other processes", file=sys.stderr, flush=True)
                os._exit(128 + number)
            self.received = number.name
            print(
                f"{number.name}: this process waits for other processes, and saves and stops when they have come; a "
                "second SIGINT ends it at once",
                file=sys.stderr,
                flush=True,
            )


class _Unbreakable(io.FileIO):
    """Drops output that cannot be written, so that a run does not end because the terminal closed, a reader such as tee
    ended, or a log's disk is full."""

    def write(self, block: Any, /) -> int:
        try:
            return super().write(block)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            return len(block)


def _unbreakable(stream: Any) -> TextIO:
    """Reopen `stream` so that writes do not fail when its reader ends. The new stream is line-buffered if `stream` was
    line-buffered or had no buffer (under `python -u`, which DeepSpeed's launcher uses)."""
    stream.flush()
    buffer = io.BufferedWriter(_Unbreakable(stream.fileno(), "w", closefd=False))
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=by_line)


def _follow_launcher() -> None:
    """Send this process SIGTERM when the DeepSpeed launcher that started it, or the launcher's parent `deepspeed`,
    ends.

    Neither of the two passes on the signal that kills it, so the run's processes would train on without control. The
    end of any other parent, such as a shell, changes nothing.
    """
    launcher = os.getppid()
    if _LAUNCHER not in _proc_file(launcher, "cmdline").split("\0"):
        return
    grandparent = _parent(launcher)
    # The command is one of the first three words, such as in `python -m deepspeed.launcher.runner`.
    first_words = _proc_file(grandparent, "cmdline").split("\0")[:3]
    watch_both = any(Path(word).name in _LAUNCHER_COMMANDS for word in first_words)

    def follow() -> None:
        while os.getppid() == launcher and (not watch_both or _parent(launcher) == grandparent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _proc_file(process: int, name: str) -> str:
    """The text of the file `name` in /proc about a process; empty when the process has ended, or where there is no
    /proc."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _parent(process: int) -> int:
    """The id of a process's parent; 0 when the process has ended."""
    # In `stat`, the program's name in parentheses is followed by the process's state and its parent's id.
    fields = _proc_file(process, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


# Seconds after the watchdog's time at which faulthandler ends the process, if the watchdog's thread hangs too:
# faulthandler's own thread needs no interpreter.
_GRACE = 30.0
_STDERR = 2  # the descriptor: sys.stderr may be replaced


class Watchdog:
    """Ends this process if `beat` is not called for `minutes` (0: never), and prints the stacks of all its threads.

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
        """Report progress; `doing` names what the process does next, in words that fit after `while`."""
        self._doing, self._last = doing, time.monotonic()
        if self.minutes and not self._ended.is_set():
            faulthandler.dump_traceback_later(60 * self.minutes + _GRACE, exit=True, file=_STDERR)

    def close(self) -> None:
        """Stop watching: the run is over."""
        self._ended.set()
        if self.minutes:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, 10 * self.minutes)):
            if time.monotonic() - self._last > 60 * self.minutes:
                print(
                    f"rank {self.rank} stood still for {self.minutes:g} minutes (train.watchdog_minutes) while "
                    f"{self._doing}: it ends here, and its launcher ends the others; the same command continues from "
                    "the last checkpoint. Its stacks:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=_STDERR, all_threads=True)
                os._exit(1)
