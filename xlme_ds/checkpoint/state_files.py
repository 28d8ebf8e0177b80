"""Training state in files: every rank writes the parts it owns, and any layout of ranks reads them back.

A file is in safetensors form and holds flat float32 tensors named `parameter/kind/start`: elements from `start` on of
the flattened parameter (kind `fp32`, the master weights) or of one of Adam's moments. Nothing in it depends on the
engine. What of a checkpoint folder is read without one is here too; `checkpoints.py` writes and removes them.
"""

import json
import os
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("fp32", *MOMENTS)
COMPLETE = "complete.json"
STATE = "state.json"
_PREFIX = "step_"
_NAME = re.compile(_PREFIX + r"(\d{8,})")
CHUNK = 1 << 24  # elements that are copied, written or read at once: 64 MiB


def state_file(rank: int, world: int) -> str:
    """Name of the file of one rank."""
    return f"state_{rank:05d}_of_{world:05d}.safetensors"


class StateWriter:
    """Writes one rank's file from a thread of its own, so that training goes on once all is copied to host memory.

    `buffer_bytes` bounds the copies that wait to be written: `put` blocks while they are more. Errors of the thread are
    raised by `result`, never by `put`: the ranks must not part ways in the middle of a collective.
    """

    def __init__(self, path: Path, buffer_bytes: int):
        self.path = path
        self.buffer_bytes = buffer_bytes
        self._blocks: SimpleQueue[np.ndarray | None] = SimpleQueue()
        self._waiting = 0  # bytes
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._crc = 0
        self._finite = True
        self._thread = threading.Thread(target=self._run, name=f"write {path.name}", daemon=True)
        self._thread.start()

    def begin(self, sizes: Mapping[str, int], step: int) -> None:
        """Announce the tensors that will be put, by name and in order, with their numbers of elements.

        `step`: optimizer steps that the moments come from.
        """
        header: dict[str, object] = {"__metadata__": {"step": str(step)}}
        offset = 0
        for name, numel in sizes.items():
            header[name] = {"dtype": "F32", "shape": [numel], "data_offsets": [offset, offset + 4 * numel]}
            offset += 4 * numel
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._queue(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))

    def put(self, values: Tensor) -> None:
        """Copy the next tensor (flat, any float type and device) to host memory, and return."""
        for chunk in values.detach().split(CHUNK):
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting or self._waiting + 4 * CHUNK <= self.buffer_bytes)
            self._queue(chunk.to("cpu", torch.float32, copy=True).numpy())

    def end(self) -> None:
        """All tensors are put."""
        self._blocks.put(None)

    @property
    def running(self) -> bool:
        """Whether anything has yet to be written."""
        return self._thread.is_alive()

    def result(self) -> dict[str, int]:
        """Wait for the end: `bytes` and `crc32` of the file, which is on the disk.

        Raises OSError when it could not be written, ValueError when a number in it is not finite.
        """
        self._thread.join()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))
        if not self._finite:
            raise ValueError(
                f"{self.path} would hold weights or moments that are not finite and is left out: go on from the "
                "checkpoint before with train.spike_sigma 6, or start a run with a lower optimizer.learning_rate"
            )
        return {"bytes": self.path.stat().st_size, "crc32": self._crc}

    def _queue(self, block: np.ndarray) -> None:
        with self._changed:
            self._waiting += block.nbytes
        self._blocks.put(block)

    def _let_go(self, block: np.ndarray) -> None:
        with self._changed:
            self._waiting -= block.nbytes
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with open(self.path, "wb") as file:
                while (block := self._blocks.get()) is not None:
                    try:
                        self._crc = zlib.crc32(block.data, self._crc)
                        self._finite &= bool(np.isfinite(block).all())
                        file.write(block.data)
                    finally:
                        self._let_go(block)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._error = error
            while (block := self._blocks.get()) is not None:  # what still comes, so that `put` does not wait for ever
                self._let_go(block)


class StateReader:
    """Reads any part of the state from the files of a checkpoint. Raises ValueError when they do not fit together."""

    def __init__(self, files: Sequence[Path]):
        """`files`: those that the checkpoint's marker lists, all in one folder."""
        if not files:
            raise ValueError("the checkpoint lists no state files: resume from another one")
        self.folder = folder = files[0].parent
        self._parts: dict[tuple[str, str], list[tuple[int, int, Path, int]]] = {}  # start, numel, file, byte offset
        steps = {self._index(path) for path in sorted(files)}
        if len(steps) != 1:
            raise ValueError(f"{folder} holds state of steps {sorted(steps)}: resume from another checkpoint")
        (self.step,) = steps
        for parts in self._parts.values():
            parts.sort()

    def sizes(self) -> dict[str, int]:
        """Elements of every parameter."""
        return {name: max(start + numel for start, numel, *_ in self._parts[name, kind])
                for name, kind in sorted(self._parts) if kind == KINDS[0]}  # fmt: skip

    def read(self, name: str, kind: str, start: int, out: Tensor) -> None:
        """Fill `out` (flat, any float type and device) with elements from `start` on; in pieces, to need little memory.

        Raises ValueError when the files do not hold them all.
        """
        done = 0
        for first, numel, path, offset in self._parts.get((name, kind), []):
            skip = start + done - first
            count = min(first + numel - start, out.numel()) - done
            if skip < 0 or count <= 0:
                continue
            for at in range(0, count, CHUNK):
                size = min(CHUNK, count - at)
                values = np.fromfile(path, np.float32, size, offset=offset + 4 * (skip + at))
                if len(values) < size:
                    raise ValueError(f"{path} became shorter while it was read: resume from another checkpoint")
                out[done + at : done + at + size] = torch.from_numpy(values)
            done += count
        if done != out.numel():
            raise ValueError(
                f"{self.folder} has {done} of {out.numel()} elements of {kind} of {name} from {start} on: "
                "it belongs to another model, resume from another checkpoint"
            )

    def _index(self, path: Path) -> int:
        """Believes nothing: whatever a header says of places must lie inside the file."""
        try:
            end = path.stat().st_size
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if 8 + length > end:
                    raise ValueError(f"a header of {length} bytes in a file of {end}")
                header = json.loads(file.read(length))
            step = int(header.pop("__metadata__")["step"])
            for key, entry in header.items():
                name, kind, start = key.rsplit("/", 2)
                (numel,), (first, last) = entry["shape"], entry["data_offsets"]
                if entry["dtype"] != "F32" or not 0 <= first <= last <= end - 8 - length or last - first != 4 * numel:
                    raise ValueError(f"{key} is at {first} to {last}")
                self._parts.setdefault((name, kind), []).append((int(start), numel, path, 8 + length + first))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no state file ({error!r}): resume from another checkpoint") from None
        return step


def merge_state(reader: StateReader, writer: StateWriter) -> None:
    """Hand every parameter whole to `writer`, in pieces that need little memory."""
    sizes = reader.sizes()
    writer.begin({f"{name}/{kind}/0": size for name, size in sizes.items() for kind in KINDS}, reader.step)
    for name, size in sizes.items():
        for kind in KINDS:
            for start in range(0, size, CHUNK):
                values = torch.empty(min(CHUNK, size - start))
                reader.read(name, kind, start, values)
                writer.put(values)
    writer.end()


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after `step` steps."""
    return f"{_PREFIX}{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint may have it."""
    return _NAME.fullmatch(name) is not None


def saved_step(folder: Path) -> int:
    """The steps after which a checkpoint was saved, by its name."""
    return int(folder.name.removeprefix(_PREFIX))


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first; whole or not."""
    try:
        found = [path for path in (run / "checkpoints").iterdir() if is_checkpoint_name(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(found, key=saved_step)


def fault_of(folder: Path, rank: int = 0, world: int = 1, checksums: bool = True) -> str | None:
    """What is wrong with the share of rank `rank` of `world` of a checkpoint's files, in size or checksum; or None."""
    try:
        mine = list(_listed(folder).items())[rank::world]
    except (OSError, ValueError):
        return f"{COMPLETE} is missing or damaged"
    return next((found for name, what in mine if (found := _file_fault(folder / name, *what, checksums))), None)


def state_files(folder: Path) -> list[Path]:
    """The files of the ranks, of those that its marker lists. Raises ValueError where that is damaged."""
    return [folder / name for name in _listed(folder) if name != STATE]


def _listed(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes and CRC-32 of every file of a checkpoint, by name."""
    path = folder / COMPLETE
    try:
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in sorted(_json(path).items())}
    except (KeyError, TypeError):
        raise ValueError(f"{path} is damaged: resume from another checkpoint") from None
    # A checkpoint from elsewhere reaches into no other folder.
    if STATE not in files or any(Path(name).name != name for name in files):
        raise ValueError(f"{path} lists other files than a checkpoint has: resume from another checkpoint")
    return files


def _file_fault(path: Path, size: int, crc: int, checksum: bool) -> str | None:
    """What is wrong with a file; of an error of reading it, too: one rank that fails alone would leave the others
    waiting."""
    try:
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        found = 0
        if checksum:
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    found = zlib.crc32(block, found)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if found == crc or not checksum else f"{path.name} has changed since it was written (checksum)"


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: `step`, `world` (processes that saved it), `probe`, data fingerprints; since
    there are any, `run` (which one saved it) and its `settings`."""
    try:
        state: dict[str, Any] = _json(folder / STATE)
        int(state["step"]), int(state["world"]), float(state["probe"])
        for name in ("settings", "records", "guard"):
            if not isinstance(state.get(name, {}), dict):
                raise TypeError(name)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{folder / STATE} is damaged ({error!r}): resume from another checkpoint") from None
    return state


def _json(path: Path) -> dict[str, Any]:
    from ..data.schema import read_json  # here: a step runs where there is no pyarrow

    value: dict[str, Any] = read_json(path, dict)
    return value
