"""stdout of a command: a program whose output cannot be written ends."""

import errno
import io
import os
import signal
import sys
from typing import Any


def open_output() -> None:
    """Make a failed write to stdout end the program. Characters that stdout's encoding lacks, such as ▁ on an ASCII
    terminal, are printed as `\\u2581`.

    A stdout that the shell closed (`>&-`) becomes /dev/null; else the next file that is opened would get the output.
    """
    stdout, of_python = sys.stdout, sys.stdout is sys.__stdout__
    if stdout is None:
        _drop(1)
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    elif of_python and not isinstance(getattr(stdout.buffer, "raw", None), _Output):
        stdout.flush()
        buffer = io.BufferedWriter(_Output(stdout.fileno(), "w", closefd=False))
        # Line-buffered: a short text would otherwise be written only when Python ends, too late for the exit code.
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(buffer, stdout.encoding, line_buffering=True)  # type: ignore[misc]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Output(io.FileIO):
    """Ends the program when a write fails: with SIGPIPE's exit code if the reader has ended (`| head`), else with an
    error."""

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
    """Redirect `descriptor` to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
