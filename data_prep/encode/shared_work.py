"""Shares inputs, and blocks of large inputs, between the processes or ranks of stage `encode`."""

import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.progress import StatusLine
from data_prep.readers.reader import TextBlock
from xlme_ds.io.files import errors_naming

_WORK_FOLDER = re.compile(r"work-\d+-\d+")
# A waiting worker looks for work at intervals of 1/8 of the time that it has waited, but within these bounds (seconds).
_SHORTEST_WAIT, _LONGEST_WAIT = 0.01, 1.0
_OFFERS_PER_WORKER = 2  # most blocks that are on offer for each waiting worker
_NO_FAILURE = "no-failure"  # a file that exists as long as no worker has failed
EncodeBlock = Callable[[str, int, TextBlock], None]  # takes the input's name, the block's number in it, and the block


@dataclass(frozen=True)
class SharedWork:
    """The inputs that several processes or ranks (workers) encode together; each worker has an object of its own.

    Corpora are often a few large compressed files. One process must decompress a whole file, so dividing only the files
    among workers would leave most workers idle. Therefore:

    1. Each worker claims inputs, the largest first, and reads them block by block (`claim`).
    2. A worker that finds no input left waits for blocks (`take_until_all_finished`).
    3. A worker that reads an input offers each block to the waiting workers (`offer`). If nobody waits, or enough
       blocks are on offer, it encodes the block itself.
    4. At the end of the input, it encodes the blocks that nobody took, and waits until the taken ones are encoded
       (`drain`).

    Each of these actions creates, renames or removes one file in `folder`, which is atomic. So workers need only a
    shared file system:

        claimed/<input>           a worker reads this input
        waiting/<worker>          this worker found no input left to read
        offered/<input>.<block>   a pickled block that any worker may take
        taken/<input>.<block>     the same file, renamed by the worker that encodes it, until its shard is written
        finished/<input>          all blocks of this input are encoded
        done-<worker>             bytes of text that this worker has encoded
        no-failure                removed by a worker that fails, so that the others stop

    The output does not depend on who encodes a block. A killed run leaves its folder, which the next run removes.
    `concurrent.futures` and `mpi4py.futures` do not fit: there only the parent submits work, so it would have to read
    every file, and under MPI one of two ranks would encode nothing.
    """

    folder: Path
    worker: int = 0
    status: StatusLine = field(default_factory=StatusLine, compare=False)

    @staticmethod
    def begin(parent: Path) -> Path:
        """Remove the folders of killed runs in `parent`, and make a new folder. Only one process calls this function,
        before any worker begins. Returns the new folder.

        Every run has a folder name of its own, because processes of a killed run may live a moment longer.
        """
        for old in parent.iterdir():
            if _WORK_FOLDER.fullmatch(old.name):
                shutil.rmtree(old, ignore_errors=True)
        folder = parent / f"work-{os.getpid()}-{time.time_ns()}"
        for name in ("claimed", "waiting", "offered", "taken", "finished"):
            (folder / name).mkdir(parents=True)
        (folder / _NO_FAILURE).touch()
        return folder

    def claim(self, name: str) -> bool:
        """Claim input `name`. Returns False if another worker has claimed it."""
        try:
            (self.folder / "claimed" / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def finish(self, name: str) -> None:
        """Record that all blocks of input `name` are encoded."""
        (self.folder / "finished" / name).touch()

    @property
    def failed(self) -> bool:
        """True if any worker has failed."""
        return not (self.folder / _NO_FAILURE).exists()

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """If the `with` block raises an error, set `failed` for all workers, so that no worker waits for this one."""
        try:
            yield
        except BaseException:
            (self.folder / _NO_FAILURE).unlink(missing_ok=True)  # removing a file works even on a full disk
            raise
        finally:
            self.status.stop()

    def offer(self, name: str, number: int, block: TextBlock) -> bool:
        """Offer a block to the waiting workers. Returns False, and offers nothing, if no worker waits or if enough
        blocks are on offer already."""
        waiting = len(os.listdir(self.folder / "waiting"))
        if not waiting or len(os.listdir(self.folder / "offered")) >= _OFFERS_PER_WORKER * waiting:
            return False
        temporary = self.folder / f".{self.worker}.tmp"
        with errors_naming(temporary), open(temporary, "wb") as file:
            pickle.dump((name, number, block), file)
        os.rename(temporary, self.folder / "offered" / f"{name}.{number:06d}")
        return True

    def take(self, encode: EncodeBlock, name: str = "") -> bool:
        """Take one offered block (of input `name`, if given) and encode it. Returns False if no block is on offer."""
        for offered in sorted((self.folder / "offered").glob(f"{name or '*'}.*")):
            taken = self.folder / "taken" / offered.name
            try:
                os.rename(offered, taken)
            except FileNotFoundError:  # another worker took it first
                continue
            encode(*pickle.loads(taken.read_bytes()))
            taken.unlink()  # not after an error: the input's reader waits for this block until it sees `failed`
            return True
        return False

    def take_until_all_finished(self, input_count: int, encode: EncodeBlock) -> None:
        """Wait for blocks and encode them, until all inputs are finished or a worker has failed."""
        (self.folder / "waiting" / str(self.worker)).touch()
        self._take_until(lambda: len(os.listdir(self.folder / "finished")) == input_count, encode)

    def drain(self, name: str, encode: EncodeBlock) -> bool:
        """Encode the blocks of input `name` that are still on offer, and wait until other workers have encoded the
        blocks that they took. Returns False if a worker has failed."""
        return self._take_until(lambda: not list((self.folder / "taken").glob(f"{name}.*")), encode, name)

    def _take_until(self, is_done: Callable[[], bool], encode: EncodeBlock, name: str = "") -> bool:
        """Encode offered blocks (only of input `name`, if given) until `is_done()`. Returns False if a worker has
        failed."""
        idle_since = time.monotonic()
        while not self.failed:
            if self.take(encode, name):
                idle_since = time.monotonic()
            elif is_done():
                return True
            else:
                time.sleep(min(max(_SHORTEST_WAIT, (time.monotonic() - idle_since) / 8), _LONGEST_WAIT))
        return False

    def report(self, encoded_bytes: int, input_count: int, label: str) -> None:
        """Add `encoded_bytes` to the bytes of text that this worker has encoded. Worker 0 displays the sum over all
        workers."""
        path = self.folder / f"done-{self.worker}"
        with errors_naming(path):
            path.write_text(str(_read_encoded_bytes(path) + encoded_bytes))
        if self.worker == 0:
            self.status.show(lambda: self._progress(input_count, label))

    def _progress(self, input_count: int, label: str) -> str:
        total = sum(map(_read_encoded_bytes, self.folder.glob("done-*")))
        finished = len(os.listdir(self.folder / "finished"))
        size = f"{total / 1e9:,.2f} GB" if total >= 1e9 else f"{total / 1e6:,.0f} MB"
        return f"encode {label}: {size} of text, {finished} of {input_count} inputs finished"


def _read_encoded_bytes(path: Path) -> int:
    """Read the number of bytes that a worker has encoded; 0 if it has not reported any."""
    return int(path.read_text() or 0) if path.exists() else 0  # empty while another worker writes it
