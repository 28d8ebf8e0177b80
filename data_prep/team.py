"""How several processes or ranks share inputs, and the blocks of one input that is too large for one of them.

Each member claims inputs, the largest first, and reads each that it has. When no input is left, it waits for blocks
that the readers of the others offer: a reader that sees somebody wait writes its next blocks into the team's folder
instead of working on them itself. All is done with files that are created or renamed, so members share nothing but the
file system. Who does what changes nothing in the output.
"""

import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.progress import Status
from xlme_ds.data.schema import naming

_SHORTEST, _LONGEST = 0.01, 1.0  # seconds between two looks; in between, an eighth of what was waited so far
_AHEAD = 2  # blocks that are offered for each waiting member

_SOUND = "sound"  # a file that is there as long as no member failed


@dataclass(frozen=True)
class Team:
    """One member's view; `folder` is from `Team.prepare`."""

    folder: Path
    member: int = 0
    status: Status = field(default_factory=Status, compare=False)

    @staticmethod
    def prepare(parent: Path) -> Path:
        """A new folder in `parent`, without those of earlier runs; by one process, before the others look.

        Its name is new, for a killed run may leave processes that live a moment longer.
        """
        for old in parent.glob("team-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder = parent / f"team-{os.getpid()}-{time.time_ns()}"
        for name in ("claimed", "waiting", "offered", "taken", "finished"):
            (folder / name).mkdir(parents=True)
        (folder / _SOUND).touch()
        return folder

    def claim(self, name: str) -> bool:
        """Whether this member is the first to claim `name`."""
        try:
            os.close(os.open(self.folder / "claimed" / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def finish(self, name: str) -> None:
        """Tell that input `name` is finished."""
        (self.folder / "finished" / name).touch()

    @property
    def failed(self) -> bool:
        """Whether any member failed."""
        return not (self.folder / _SOUND).exists()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside is told to all members, so that nobody waits for this one."""
        try:
            yield
        except BaseException:
            (self.folder / _SOUND).unlink(missing_ok=True)  # to remove a file needs no room on the disk
            raise
        finally:
            self.status.stop()

    def offer(self, name: str, number: int, block: Any) -> bool:
        """Leave block `number` of input `name` to those who wait; False when nobody does, or they have enough to do."""
        waiting = len(os.listdir(self.folder / "waiting"))
        if not waiting or len(os.listdir(self.folder / "offered")) >= _AHEAD * waiting:
            return False
        temporary = self.folder / f".{self.member}.tmp"
        with naming(temporary), open(temporary, "wb") as file:
            pickle.dump((name, number, block), file)
        os.rename(temporary, self.folder / "offered" / f"{name}.{number:06d}")
        return True

    def help(self, work: Callable[[str, int, Any], None], name: str = "") -> bool:
        """Take one offered block (of input `name`, if given) and work on it; False when there is none."""
        for file in sorted(os.listdir(self.folder / "offered")):
            if file.startswith(f"{name}.") or not name:
                taken = self.folder / "taken" / file
                try:
                    os.rename(self.folder / "offered" / file, taken)
                except FileNotFoundError:
                    continue
                try:
                    with open(taken, "rb") as stream:
                        block = pickle.load(stream)
                    work(*block)
                finally:
                    taken.unlink()
                return True
        return False

    def help_until(self, inputs: int, work: Callable[[str, int, Any], None]) -> None:
        """Wait for blocks and work on them until so many `inputs` are finished, or a member failed."""
        (self.folder / "waiting" / str(self.member)).touch()
        idle = time.monotonic()
        while not self.failed:
            if self.help(work):
                idle = time.monotonic()
            elif len(os.listdir(self.folder / "finished")) == inputs:
                return
            else:
                _pause(idle)

    def settle(self, name: str, work: Callable[[str, int, Any], None]) -> bool:
        """Wait until no offered block of input `name` is left, helping with them; False when a member failed."""
        idle = time.monotonic()
        while not self.failed:
            if self.help(work, name):
                idle = time.monotonic()
            elif not any(file.startswith(f"{name}.") for file in os.listdir(self.folder / "taken")):
                return True
            else:
                _pause(idle)
        return False

    def withdraw(self, name: str) -> None:
        """Take back what is offered of input `name`, and wait for those who took some."""
        self.settle(name, lambda *_: None)

    def report(self, done: int, inputs: int, label: str) -> None:
        """Note `done` bytes of text; member 0 shows what all members have done."""
        path = self.folder / f"done-{self.member}"
        with naming(path):
            path.write_text(str(_number(path) + done))
        if self.member == 0:
            self.status.show(lambda: self._words(inputs, label))

    def _words(self, inputs: int, label: str) -> str:
        total = sum(map(_number, self.folder.glob("done-*")))
        finished = len(os.listdir(self.folder / "finished"))
        return f"encode {label}: {total / 1e9:.2f} GB of text, {finished} of {inputs} inputs finished"


def _pause(idle: float) -> None:
    """Wait before the next look, the longer the longer there was nothing to do: `idle` is when that began."""
    time.sleep(min(max(_SHORTEST, (time.monotonic() - idle) / 8), _LONGEST))


def _number(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0  # empty while another member writes it
