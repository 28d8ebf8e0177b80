"""Output for the user: messages on stdout and stderr, errors, and the progress of long work.

Progress is a bar on a terminal, else a plain line every few seconds.
"""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

_PLAIN_SECONDS = 10.0


def shown(words: str) -> str:
    """`words` on one line that does nothing to a terminal: line ends, escapes and broken characters, as names of files
    may have them, are written as Python would."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in words)


def say(words: str) -> None:
    """Print a result on stdout."""
    print(shown(words), flush=True)


def warn(words: str) -> None:
    """Print a warning on stderr; the work continues."""
    print(f"warning: {shown(words)}", file=sys.stderr, flush=True)


class Progress:
    """`with Progress("encode", total) as progress: progress.advance(amount)`; silent where `visible` is false."""

    def __init__(self, label: str, total: int, visible: bool = True):
        self.plain, self.status = visible and not sys.stderr.isatty(), Status()
        self.bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=self.plain or not visible,
        )
        self.task = self.bar.add_task(label, total=total)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, amount: int) -> None:
        """Count `amount` of `total` as done."""
        self.bar.advance(self.task, amount)
        if self.plain:
            (task,) = self.bar.tasks
            self.status.show(lambda: f"{task.description}: {task.percentage:.0f}%")


class Status:
    """Progress of work whose end is not known, as text: a line that changes on a terminal, else one now and then."""

    def __init__(self) -> None:
        self.said = time.monotonic()
        self.live: Live | None = None

    def show(self, words: Callable[[], str]) -> None:
        """Print `words()`; on a terminal they are asked for again every second until `stop`."""
        if sys.stderr.isatty():
            if self.live is None:
                self.live = Live(
                    get_renderable=lambda: Text(words()), console=Console(stderr=True), refresh_per_second=1
                )
                self.live.start(refresh=True)
        elif time.monotonic() - self.said >= _PLAIN_SECONDS:
            print(words(), file=sys.stderr, flush=True)
            self.said = time.monotonic()

    def stop(self) -> None:
        """End the display; its last words stay."""
        if self.live is not None:
            self.live.stop()
            self.live = None
