"""Prints results on stdout, and warnings and the progress of long work on stderr.

On a terminal, progress is a bar or a line that updates; elsewhere a new line is printed at most every ten seconds.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

_SECONDS_BETWEEN_LINES = 10.0  # least time between two lines of progress where stderr is no terminal


def printable(text: str) -> str:
    """Make text safe to print on one line of a terminal. Characters that are not printable, such as line ends, control
    characters and the lone surrogates of file names, become Python escapes."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def print_stdout(text: str) -> None:
    """Print a result on stdout."""
    print(printable(text), flush=True)


def warn(text: str) -> None:
    """Print a warning on stderr; the work continues."""
    print_stderr(f"warning: {printable(text)}")


def print_stderr(text: str) -> None:
    """Print a line on stderr in one write. On an unbuffered stderr, `print` would write the text and its line end
    separately, and another process could write between them."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


class StatusLine:
    """Shows the progress of work of unknown length as text: on a terminal a line that updates, elsewhere a new line at
    most every 10 s."""

    def __init__(self) -> None:
        self.printed_at = time.monotonic()
        self.live: Live | None = None

    def show(self, text: Callable[[], str]) -> None:
        """On a terminal, the first call starts a line that shows a new `text()` every second until `stop`; later calls
        do nothing. Elsewhere, a call prints `text()` if 10 s have passed since the last print, or since `__init__`."""
        if sys.stderr.isatty():
            if self.live is None:
                self.live = Live(
                    get_renderable=lambda: Text(text()), console=Console(stderr=True), refresh_per_second=1
                )
                self.live.start(refresh=True)
        elif time.monotonic() - self.printed_at >= _SECONDS_BETWEEN_LINES:
            print_stderr(text())
            self.printed_at = time.monotonic()

    def stop(self) -> None:
        """End the display; its last line stays."""
        if self.live is not None:
            self.live.stop()


@contextmanager
def progress_bar(label: str, total: int, visible: bool = True) -> Iterator[Callable[[int], None]]:
    """Show the progress of work of known length, if `visible`, in the `with` block. Yields a function that adds an
    amount to the work that is done; the work is complete at `total`."""
    plain = visible and not sys.stderr.isatty()  # show lines of text in place of the bar
    status = StatusLine()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=plain or not visible,
    )
    bar.add_task(label, total=total)

    def advance(amount: int) -> None:
        (task,) = bar.tasks
        bar.advance(task.id, amount)
        if plain:
            status.show(lambda: f"{task.description}: {task.percentage:.0f}%")

    with bar:
        yield advance
