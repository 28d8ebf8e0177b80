"""Processes that measure case after case. A process receives a case and sends the case's rows, then an empty row."""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from bench.measure import Figures


class Worker:
    """A process in which `prepare(*arguments)` of a module makes a function from a case to its rows."""

    def __init__(self, module: str, *arguments: str):
        self.name = " ".join([module, *arguments])
        self.connection, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=_serve, args=(theirs, module, arguments))
        self.process.start()
        theirs.close()  # so that reading fails when the process ends
        atexit.register(self.connection.close)  # ends the process, before Python waits for it
        self.loaded = False

    def load(self, seconds: float) -> None:
        """Wait until the process has loaded what it needs, at most `seconds`."""
        with contextlib.suppress(EOFError):
            self.loaded = self.loaded or (self.connection.poll(max(seconds, 0)) and self.connection.recv() == {})

    def rows(self, case: Any, seconds: float) -> Iterator[Figures]:
        """The rows of a case as they come. If the process fails or needs more than `seconds`, the last row has
        `failed`."""
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
        """The row of a case that has only one, and needs no description. Ends the program if the process fails."""
        self.load(600)
        (row,) = self.rows(None, 3600)
        if "failed" in row:
            sys.exit(f"error: {self.name}: {row['failed']}")
        return row

    def close(self, kill: bool = False) -> None:
        """End the process and its children; returns when their memory is free."""
        assert self.process.pid is not None
        self.connection.close()
        self.process.join(0 if kill else 10)
        with contextlib.suppress(ProcessLookupError):  # it has no group yet, or none is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, module: str, arguments: tuple[str, ...]) -> None:
    """Answer each case with its rows, until the other side closes."""
    os.setsid()
    os.dup2(2, 1)  # what libraries print goes to the standard error
    warnings.simplefilter("ignore")
    rows_of = importlib.import_module(module).prepare(*arguments)
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send({})
        while True:
            for row in rows_of(connection.recv()):
                connection.send(row)
            connection.send({})
    os._exit(0)  # without cleaning up, because the next case waits for the memory
