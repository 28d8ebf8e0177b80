"""The stdout of a command: when output cannot be written, the program ends."""

import errno
import io
import os
import signal
import sys
from typing import Any


def guard_stdout() -> None:
    """Make a failed write to stdout end the program. A character that stdout's encoding lacks is printed as an escape,
    such as `\\u2581` for ▁ on an ASCII terminal.

    A stdout or stderr that the shell closed (`>&-`) becomes /dev/null, because the next file that is opened would
    otherwise get its descriptor, and with it the output. A second call changes nothing. If a test has replaced
    `sys.stdout`, its replacement stays.
    """
    if sys.stderr is None:
        _redirect_to_null(2)
        sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    stdout, is_replaced = sys.stdout, sys.stdout is not sys.__stdout__
    if stdout is None:
        _redirect_to_null(1)
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    elif not is_replaced and not isinstance(getattr(stdout.buffer, "raw", None), _FatalWriter):
        stdout.flush()
        buffer = io.BufferedWriter(_FatalWriter(stdout.fileno(), "w", closefd=False))
        # Line-buffered: a short text would otherwise be written only when Python ends, too late for the exit code.
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(buffer, stdout.encoding, line_buffering=True)  # type: ignore[misc]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _FatalWriter(io.FileIO):
    """A file that ends the program when a write fails: with SIGPIPE's exit code if the reader has ended (`| head`),
    else with an error message and exit code 1."""

    def write(self, block: Any, /) -> int:
        try:
            return super().write(block)
        except OSError as error:
            _redirect_to_null(self.fileno())  # Python writes the rest of the buffers at exit: that must not fail again
            if error.errno == errno.EPIPE:
                sys.exit(128 + signal.SIGPIPE)
            print(f"error: stdout cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            sys.exit(1)


def _redirect_to_null(descriptor: int) -> None:
    """Make `descriptor` write to /dev/null, in this process and in programs that it starts."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null == descriptor:  # `descriptor` was closed, so `os.open` reused it
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)
