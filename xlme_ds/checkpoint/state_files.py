"""Training state in files: every rank writes the parts that it owns, and any number of ranks can read them.

A state tensor is a parameter's flattened master weights or one of its flattened optimizer states. Its kind is `fp32`
for the weights, otherwise the name of the optimizer state, such as `exp_avg`. A file has safetensors' format and holds
parts of state tensors, as flat float32 arrays named `parameter/kind/start`: the elements from `start` on. Nothing in a
file depends on the engine. This module also reads and checks checkpoint folders without an engine; `checkpoints.py`
writes and removes them.
"""

import json
import os
import re
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from errno import ENOMEM
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoint_names import checkpoint_name, saved_step
from ..io.files import read_versioned

MASTER_WEIGHTS = "fp32"  # the kind of the master weights
MARKER_FILE = "complete.json"  # the marker: it lists the files of a complete checkpoint
STATE_JSON = "state.json"
# A parameter TABLE_N is block N of a vocabulary table. Readers join the blocks, because the model that loads them may
# store the table in another number of blocks.
_BLOCK = re.compile(r"((?:.*\.)?(?:embedding|difference))_(\d+)")
_MAX_ELEMENTS = 1 << 40  # more elements than any parameter has
_NO_PARTS = np.zeros((0, 4), np.int64)  # rows of `StateReader._parts` for a tensor that no file has
CHUNK = 1 << 24  # elements that are copied, written or read in one step: 64 MiB


def state_file(rank: int, world: int) -> str:
    """The name of one rank's file."""
    return f"state_{rank:05d}_of_{world:05d}.safetensors"


class StateWriter:
    """Writes one rank's file in a thread, so that training continues once everything is copied to host memory.

    `buffer_bytes` limits the copies that wait to be written: `put` blocks until there is room for another copy. Errors
    of the thread are raised by `result`, never by `put`, because no rank may fail alone in the middle of a collective.
    """

    def __init__(self, path: Path, buffer_bytes: int):
        self.path = path
        self.buffer_bytes = buffer_bytes
        self._arrays: SimpleQueue[np.ndarray | None] = SimpleQueue()
        self._waiting = 0  # bytes of the copies that are not written yet
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._crc = 0
        self._finite = True
        self._thread = threading.Thread(target=self._run, name=f"write {path.name}", daemon=True)
        self._thread.start()

    def begin(self, sizes: Mapping[str, int], step: int) -> None:
        """Write the header. `sizes` has the element count of each tensor by name, in the order in which `put` will get
        them. `step` is the number of optimizer steps taken."""
        header: dict[str, object] = {"__metadata__": {"step": str(step)}}
        offset = 0
        for name, numel in sizes.items():
            header[name] = {"dtype": "F32", "shape": [numel], "data_offsets": [offset, offset + 4 * numel]}
            offset += 4 * numel
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes, as safetensors writes them
        self._queue(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))

    def put(self, values: Tensor) -> None:
        """Copy the next tensor (flat, any float type and device) to host memory, once there is room for the copy. After
        an error of the thread, copy nothing."""
        for chunk in values.detach().split(CHUNK):
            with self._changed:
                self._changed.wait_for(self._may_copy)
            if self._error is None:
                self._queue(chunk.to("cpu", torch.float32, copy=True).numpy())

    def end(self) -> None:
        """Tell the thread that all tensors have been put."""
        self._arrays.put(None)

    @property
    def running(self) -> bool:
        """Whether the thread is still writing."""
        return self._thread.is_alive()

    def result(self) -> dict[str, int]:
        """Wait until the file is on the disk. Returns its `bytes` and its `crc32`.

        Raises OSError if the file could not be written, ValueError if a number in it is not finite.
        """
        self._thread.join()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))
        if not self._finite:
            raise ValueError(
                f"{self.path} is not saved, because it would hold weights or moments that are not finite: continue "
                "from the checkpoint before with train.spike_sigma 6, or start a run with a lower "
                "optimizer.learning_rate (in fine-tuning tuning.learning_rate)"
            )
        return {"bytes": self.path.stat().st_size, "crc32": self._crc}

    def _may_copy(self) -> bool:
        """Whether `put` may go on. One copy may wait even if it exceeds `buffer_bytes`, else it could never be made."""
        fits = not self._waiting or self._waiting + 4 * CHUNK <= self.buffer_bytes
        return fits or self._error is not None

    def _queue(self, array: np.ndarray) -> None:
        with self._changed:
            self._waiting += array.nbytes
        self._arrays.put(array)

    def _run(self) -> None:
        try:
            with open(self.path, "wb") as file:
                while (array := self._arrays.get()) is not None:
                    self._crc = zlib.crc32(array.data, self._crc)
                    self._finite &= bool(np.isfinite(array).all())
                    file.write(array.data)
                    with self._changed:
                        self._waiting -= array.nbytes
                        self._changed.notify()
                file.flush()
                os.fsync(file.fileno())
        except (OSError, MemoryError) as error:
            with self._changed:
                self._error = error if isinstance(error, OSError) else OSError(ENOMEM, os.strerror(ENOMEM))
                self._changed.notify()  # else `put` would wait for ever


class Headers(NamedTuple):
    """The headers of some files of a checkpoint."""

    tensors: list[tuple[str, str]]  # (parameter, kind) of each state tensor
    steps: set[int]  # the steps that the headers name; in an undamaged checkpoint all name the same step
    # [parts, 5]: index of the part's state tensor in `tensors`, first element, element count, index of the part's file
    # in the checkpoint, and first byte in that file.
    parts: np.ndarray


def read_headers(files: Sequence[Path], rank: int = 0, world: int = 1) -> Headers:
    """The headers that rank `rank` of `world` ranks reads: each rank reads an equal share of a checkpoint's `files`.
    Raises ValueError for a file that is no state file."""
    begin = len(files) * rank // world
    end = len(files) * (rank + 1) // world
    tensors: dict[tuple[str, str], int] = {}
    headers = [_read_header(files[index], index, tensors) for index in range(begin, end)]
    parts = [np.zeros((0, 5), np.int64), *(parts for _, parts in headers)]
    return Headers(list(tensors), {step for step, _ in headers}, np.concatenate(parts))


def _read_header(path: Path, file_index: int, tensors: dict[tuple[str, str], int]) -> tuple[int, np.ndarray]:
    """Returns (step, parts): the step in a file's header, and the file's rows of `Headers.parts`.

    `tensors` has the index of each (parameter, kind); new ones are added to `tensors`. Raises ValueError if a tensor's
    bytes are not all in the file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        step = int(header.pop("__metadata__")["step"])
        parts = []
        for key, entry in header.items():
            name, kind, start_text = key.rsplit("/", 2)
            start = int(start_text)
            (numel,) = entry["shape"]
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "F32" or not 0 <= begin <= end <= size - 8 - length or end - begin != 4 * numel:
                raise ValueError(f"{key} is at bytes {begin} to {end}, which hold no {numel} float32 numbers")
            if not 0 <= start < _MAX_ELEMENTS:
                raise ValueError(f"{key} begins at element {start}")
            tensor_index = tensors.setdefault((name, kind), len(tensors))
            parts.append((tensor_index, start, numel, file_index, 8 + length + begin))
        return step, np.array(parts, np.int64).reshape(-1, 5)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no state file ({error!r}): resume from another checkpoint") from None


def _block_starts(sizes: Mapping[str, int]) -> dict[str, tuple[str, int]]:
    """For every block of a vocabulary table, (name of the table, index of the block's first element in the table).
    `sizes` has the element count of every parameter."""
    blocks = sorted((match[1], int(match[2]), name) for name in sizes if (match := _BLOCK.fullmatch(name)))
    starts: dict[str, tuple[str, int]] = {}
    table_sizes: dict[str, int] = {}
    for table, _, name in blocks:
        start = table_sizes.get(table, 0)
        starts[name] = table, start
        table_sizes[table] = start + sizes[name]
    return starts


class StateReader:
    """Reads any part of the state from the files of a checkpoint. Raises ValueError if the files do not fit
    together."""

    def __init__(self, files: Sequence[Path], headers: Sequence[Headers] | None = None):
        """`files` are the state files that the checkpoint's marker lists. `headers` are the files' headers, if they
        were read already."""
        if not files:
            raise ValueError("the checkpoint lists no state files: resume from another checkpoint")
        self.files = files
        self.folder = files[0].parent
        headers = [read_headers(files)] if headers is None else headers
        steps = set[int]().union(*(header.steps for header in headers))
        if len(steps) != 1:
            raise ValueError(f"{self.folder} holds state of steps {sorted(steps)}: resume from another checkpoint")
        (self.step,) = steps
        self.sizes, self._parts = _merge_headers(headers)
        kinds = {kind for _, kind in self._parts}
        self.kinds = [MASTER_WEIGHTS, *sorted(kinds - {MASTER_WEIGHTS})]

    def read(self, parts: Iterable[tuple[str, str, int, Tensor]], sizes: Mapping[str, int] | None = None) -> None:
        """Fill tensors. Every file that is needed is opened once and read in order.

        Each of `parts` is (parameter, kind, first element, tensor). The tensor is flat, of any float type, on any
        device; it is filled with the elements from `first element` on. `sizes` has the element count of every parameter
        of the model to fill; it is needed if the model may store vocabulary tables in other blocks than the files.
        Raises ValueError if the files lack elements.
        """
        block_starts = _block_starts(self.sizes if sizes is None else sizes)
        byte_ranges = [byte_range for part in parts for byte_range in self._byte_ranges(block_starts, *part)]
        byte_ranges.sort(key=itemgetter(0, 1))
        for file_index, file_ranges in groupby(byte_ranges, itemgetter(0)):
            with open(self.files[file_index], "rb") as file:
                for _, offset, out in file_ranges:
                    file.seek(offset)
                    for chunk in out.split(CHUNK):
                        values = np.empty(len(chunk), np.float32)
                        if file.readinto(values.data) < values.nbytes:
                            raise ValueError(
                                f"{self.files[file_index]} became shorter while it was read: resume from another "
                                "checkpoint"
                            )
                        chunk.copy_(torch.from_numpy(values))

    def _byte_ranges(
        self, block_starts: Mapping[str, tuple[str, int]], name: str, kind: str, start: int, out: Tensor
    ) -> list[tuple[int, int, Tensor]]:
        """The byte ranges of files to read into `out`, each as (file index, first byte, slice of `out` to fill)."""
        table, block_start = block_starts.get(name, (name, 0))
        parts = self._parts.get((table, kind), _NO_PARTS)
        begin = block_start + start
        end = begin + out.numel()
        # Only these parts can overlap [begin, end): the last part that starts at or before `begin`, and all later parts
        # that start before `end`.
        first_part = max(int(np.searchsorted(parts[:, 0], begin, "right")) - 1, 0)
        stop_part = np.searchsorted(parts[:, 0], end)
        done = 0  # number of elements of `out` that the byte ranges found so far will fill
        byte_ranges = []
        for part_start, numel, file_index, offset in parts[first_part:stop_part].tolist():
            skip = begin + done - part_start  # elements of the part before the byte range; negative if some are missing
            count = min(part_start + numel, end) - (begin + done)  # elements of the byte range
            if skip >= 0 and count > 0:
                byte_ranges.append((file_index, offset + 4 * skip, out[done : done + count]))
                done += count
        if done != out.numel():
            raise ValueError(
                f"{self.folder} belongs to another model, because it has only {done} of {out.numel()} elements of "
                f"{kind} of {name} from {start} on: resume from another checkpoint"
            )
        return byte_ranges


def _merge_headers(headers: Sequence[Headers]) -> tuple[dict[str, int], dict[tuple[str, str], np.ndarray]]:
    """Returns (sizes, parts). `sizes` has the element count of every parameter. `parts` has, by (parameter, kind), the
    tensor's rows of `Headers.parts` without the tensor index, sorted by first element. In `parts`, the blocks of a
    vocabulary table are joined into one parameter; `sizes` still has each block."""
    indices: dict[tuple[str, str], int] = {}  # (parameter, kind) -> index of this tensor over all headers
    reindexed = []
    for tensors, _, parts in headers:
        new_indices = np.array([indices.setdefault(tensor, len(indices)) for tensor in tensors], np.int64)
        reindexed.append(np.column_stack([new_indices[parts[:, 0]], parts[:, 1:]]))
    all_parts = np.concatenate(reindexed)
    ends = np.zeros(len(indices), np.int64)  # for each tensor, the end of its last part
    np.maximum.at(ends, all_parts[:, 0], all_parts[:, 1] + all_parts[:, 2])
    sizes = {name: int(ends[index]) for (name, kind), index in sorted(indices.items()) if kind == MASTER_WEIGHTS}
    block_starts = _block_starts(sizes)
    for (name, kind), index in list(indices.items()):
        if name in block_starts:  # the parts of this block become parts of the table
            table, start = block_starts[name]
            in_block = all_parts[:, 0] == index
            all_parts[in_block, 0] = indices.setdefault((table, kind), len(indices))
            all_parts[in_block, 1] += start
    all_parts = all_parts[np.lexsort((all_parts[:, 2], all_parts[:, 1], all_parts[:, 0]))]
    present, first_rows = np.unique(all_parts[:, 0], return_index=True)  # indices of the tensors that have parts
    tensors = list(indices)
    rows_by_tensor = np.split(all_parts[:, 1:], first_rows[1:])
    # Not strict: without tensors `rows_by_tensor` still has one empty array.
    return sizes, dict(zip([tensors[index] for index in present.tolist()], rows_by_tensor, strict=False))


def merge_state(reader: StateReader, writer: StateWriter) -> None:
    """Write every parameter and its optimizer state with `writer`, each as one tensor. The tensors are copied in
    chunks, which need little memory."""
    tensors = {f"{name}/{kind}/0": size for name, size in reader.sizes.items() for kind in reader.kinds}
    writer.begin(tensors, reader.step)
    for name, size in reader.sizes.items():
        for kind in reader.kinds:
            for start in range(0, size, CHUNK):
                values = torch.empty(min(CHUNK, size - start))
                reader.read([(name, kind, start, values)])
                writer.put(values)
    writer.end()


def checkpoint_fault(folder: Path, rank: int = 0, world: int = 1, checksums: bool = True) -> str | None:
    """A sentence about the first fault of a checkpoint, or None if no fault is found. Rank `rank` of `world` checks the
    sizes and, if `checksums`, the checksums of an equal share of the files. Rank 0 also checks the step in the folder's
    name."""
    try:
        own_files = list(_read_marker(folder).items())[rank::world]
    except (OSError, ValueError):
        return f"{MARKER_FILE} is missing or damaged"
    faults = (_file_fault(folder / name, *size_and_crc, checksums) for name, size_and_crc in own_files)
    return next(filter(None, faults), None) or (_name_fault(folder) if rank == 0 else None)


def _name_fault(folder: Path) -> str | None:
    """The fault of a checkpoint whose `state.json` is damaged or has another step than the folder's name; else None."""
    try:
        step = int(read_state(folder)["step"])
    except (OSError, ValueError):
        return f"{STATE_JSON} is damaged"
    name = checkpoint_name(step)
    return None if saved_step(folder) == step else f"it holds step {step}, so its name is wrong: rename it to {name}"


def state_files(folder: Path) -> list[Path]:
    """The state files that a checkpoint's marker lists. Raises ValueError if the marker is damaged."""
    return [folder / name for name in _read_marker(folder) if name != STATE_JSON]


def _read_marker(folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes, CRC-32) of every file of a checkpoint, by the file's name."""
    path = folder / MARKER_FILE
    try:
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in sorted(read_versioned(path).items())}
    except (KeyError, TypeError):
        raise ValueError(f"{path} is damaged: resume from another checkpoint") from None
    # A marker from elsewhere must not name files in other folders.
    if STATE_JSON not in files or any(Path(name).name != name for name in files):
        raise ValueError(f"{path} does not list the files of a checkpoint: resume from another checkpoint")
    return files


def _file_fault(path: Path, size: int, crc: int, checksum: bool) -> str | None:
    """The fault of a file, or None. A read error is returned as a fault, because if one rank raised it, the other ranks
    would wait for ever."""
    try:
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        crc_now = 0
        if checksum:
            with open(path, "rb") as file:
                while data := file.read(1 << 24):
                    crc_now = zlib.crc32(data, crc_now)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if crc_now == crc or not checksum else f"{path.name} has changed since it was written (checksum)"


def read_state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's `state.json`: `step`, `world` (number of processes that saved it), `probe` (loss of
    the probe batch), and the entries that the run adds (`Trainer._state_after`): among others the run's
    identity `run`, its `settings`, and fingerprints of its data. Raises ValueError if the file is damaged."""
    try:
        state = read_versioned(folder / STATE_JSON)
        # Each conversion raises an error if the value is no number.
        int(state["step"]), int(state["world"]), int(state.get("tokens", 0)), float(state["probe"])
        for name in ("settings", "records", "guard"):
            if not isinstance(state.get(name, {}), dict):
                raise TypeError(name)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{folder / STATE_JSON} is damaged ({error!r}): resume from another checkpoint") from None
    return state
