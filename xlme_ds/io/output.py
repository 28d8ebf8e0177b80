"""stdout of a command: a program whose output cannot be written ends."""

import errno
import io
import os
import signal
import sys
from typing import Any


def open_output() -> None:
    """Have a failed write to stdout end the program, and stdout write a character that its encoding lacks, as ASCII and
    Latin-1 terminals do, as `\\u2581`.

    A stdout that the shell closed (`>&-`) becomes /dev/null: the next file that is opened would get what is printed.
    """
    stdout, of_python = sys.stdout, sys.stdout is sys.__stdout__
    if stdout is None:
        _drop(1)
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    elif of_python and not isinstance(getattr(stdout.buffer, "raw", None), _Output):
        stdout.flush()
        buffer = io.BufferedWriter(_Output(stdout.fileno(), "w", closefd=False))
        # By line: else a short text would be written when Python ends, which cannot change its exit code then.
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(buffer, stdout.encoding, line_buffering=True)  # type: ignore[misc]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Output(io.FileIO):
    """Ends the program when a write fails: as by SIGPIPE when the reader has ended (`| head`), else with a sentence."""

    def write(self, block: Any, /) -> int:
        try:
            return super().write(block)
        except OSError as error:
            _drop(self.fileno())  # what is still in the buffers
            if error.errno == errno.EPIPE:
                sys.exit(128 + signal.SIGPIPE)
            print(f"error: stdout cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            sys.exit(1)


def _drop(descriptor: int) -> None:
    """Have /dev/null take what is written to `descriptor`."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
