"""Processes that measure one case after another. A process receives a case, sends the rows of figures that it measures,
and then an empty row."""

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
    """A process that calls `prepare(*arguments)` of a module, and then runs cases with the function that `prepare`
    returned. The function takes a case, and returns an iterable of the case's rows."""

    def __init__(self, module: str, *arguments: str):
        self.name = " ".join([module, *arguments])
        self.connection, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=_serve, args=(theirs, module, arguments))
        self.process.start()
        theirs.close()  # so that reading fails when the process ends
        atexit.register(self.connection.close)  # ends the process: Python waits for it at exit
        self.loaded = False

    def load(self, seconds: float) -> None:
        """Wait until `prepare` has returned in the process, at most `seconds`."""
        with contextlib.suppress(EOFError):
            self.loaded = self.loaded or (self.connection.poll(max(seconds, 0)) and self.connection.recv() == {})

    def rows(self, case: Any, seconds: float) -> Iterator[Figures]:
        """Run a case, and yield its rows as they come. If the process fails or needs more than `seconds`, the last row
        has `failed`."""
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
        """Run the case None, which has one row; returns the row. Ends the program with an error if the process
        fails."""
        self.load(600)
        (row,) = self.rows(None, 3600)
        if "failed" in row:
            sys.exit(f"error: {self.name}: {row['failed']}")
        return row

    def close(self, kill: bool = False) -> None:
        """End the process and its children: at once if `kill`, otherwise after at most 10 s. Returns when their memory
        is free."""
        assert self.process.pid is not None
        self.connection.close()
        self.process.join(0 if kill else 10)
        with contextlib.suppress(ProcessLookupError):  # the process has no group yet, or all of the group have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, module: str, arguments: tuple[str, ...]) -> None:
    """Answer each case with its rows, until the parent closes the connection."""
    os.setsid()
    os.dup2(2, 1)  # the prints of libraries go to the standard error
    warnings.simplefilter("ignore")
    rows_of = importlib.import_module(module).prepare(*arguments)
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send({})
        while True:
            for row in rows_of(connection.recv()):
                connection.send(row)
            connection.send({})
    os._exit(0)  # without cleaning up, because the next case waits for the memory
