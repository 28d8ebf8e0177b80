"""Processes that measure one case after the other: a line of JSON asks, lines of JSON answer, an empty object ends."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.measure import ROOT, Figures


class Worker:
    """A process of `python -m MODULE ARGUMENTS`, which calls `answer`."""

    def __init__(self, module: str, *arguments: str, **environment: str):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *arguments], cwd=ROOT, text=True, start_new_session=True,
            env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.answers: queue.Queue[str] = queue.Queue()
        self.loaded = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def load(self, seconds: float) -> None:
        """Wait at most so long until the process has loaded what it needs."""
        with contextlib.suppress(queue.Empty):
            self.loaded = self.loaded or self.answers.get(timeout=max(seconds, 0.01)) != ""

    def rows(self, case: Any, seconds: float) -> Iterator[Figures]:
        """The rows of a case as they come; if the process fails or takes longer, the last row has `failed`."""
        assert self.process.stdin is not None
        if not self.loaded:
            yield {"failed": "the process of the case did not load"}
            return
        until = time.monotonic() + seconds
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            while line := self.answers.get(timeout=max(until - time.monotonic(), 0.01)):
                row: Figures = json.loads(line)
                if not row:
                    return
                yield row
            yield {"failed": f"the process ended with code {self.process.wait()}"}
        except queue.Empty:
            yield {"failed": f"no end after {seconds:.0f} s"}
        except BrokenPipeError:
            yield {"failed": f"the process ended with code {self.process.wait()} before this case"}

    def ask(self) -> Figures:
        """The one row of the next case; ends the program if the process fails."""
        self.load(600)
        (row,) = self.rows(None, 3600)
        if "failed" in row:
            sys.exit(f"error: {' '.join(map(str, self.process.args))}: {row['failed']}")  # type: ignore[arg-type]
        return row

    def close(self, kill: bool = False) -> None:
        """End the process and its children; returns when they hold no memory."""
        assert self.process.stdin is not None
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self.process.stdin.close()
            self.process.wait(0 if kill else 10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def answer(prepare: Callable[[], Callable[[Any], Iterable[Figures]]]) -> None:
    """Answer each line of the standard input with the rows that the function made by `prepare` returns for it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the standard error
    rows_of = prepare()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        for row in rows_of(json.loads(line)):
            print(json.dumps(row), file=answers, flush=True)
        print("{}", file=answers, flush=True)
    answers.flush()
    os._exit(0)  # at once: the next case waits for the memory
