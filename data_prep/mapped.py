"""Random access to encoded shards through one memory map, without copies and without opening record batches again."""

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa


class MappedShard:
    """The list<int32> columns of an Arrow file, seen as one int32 array over the whole file.

    `words[start : start + length]` is a record's ids for the (start, length) that `bounds` gives. For documents the ids
    of a record batch stand one after the other, and `stream` reads across batches.
    """

    def __init__(self, path: Path):
        try:
            with pa.memory_map(str(path)) as file:
                # the buffer outlives the file object, so that thousands of open shards cost no file descriptors
                buffer = file.read_buffer()
            reader = pa.ipc.open_file(pa.BufferReader(buffer))
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{path} is not a readable Arrow file ({error}): delete it and give the encode command again"
            ) from None
        batches = [batch for batch in batches if batch.num_rows]
        self.path = path
        self.words = np.frombuffer(buffer, dtype=np.int32, count=buffer.size // 4)
        self._first = np.cumsum([0] + [batch.num_rows for batch in batches])
        self.columns = len(reader.schema)
        self._offsets = np.array(
            [[_word(batch, c, 1, buffer) for batch in batches] for c in range(self.columns)], dtype=np.int64
        )
        self._values = np.array(
            [[_word(batch, c, 3, buffer) for batch in batches] for c in range(self.columns)], dtype=np.int64
        )
        ends = [
            int(self.words[offsets + batch.num_rows]) for offsets, batch in zip(self._offsets[0], batches, strict=True)
        ]
        self._stream = np.cumsum([0, *ends])

    @property
    def records(self) -> int:
        """Documents or pairs."""
        return int(self._first[-1])

    @property
    def tokens(self) -> int:
        """Ids of the first column."""
        return int(self._stream[-1])

    def bounds(self, column: int, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, length) in `words` of the ids of `records`, int64 each."""
        batch = np.searchsorted(self._first, records, side="right") - 1
        at = self._offsets[column][batch] + (records - self._first[batch])
        begin = self.words[at].astype(np.int64)
        return self._values[column][batch] + begin, self.words[at + 1] - begin

    def stream(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of the first column's token stream."""
        stop = min(stop, self.tokens)
        batch = int(np.searchsorted(self._stream, start, side="right")) - 1
        pieces = []
        while start < stop:
            end = min(stop, int(self._stream[batch + 1]))
            base = int(self._values[0][batch] - self._stream[batch])
            pieces.append(self.words[base + start : base + end])
            start, batch = end, batch + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def stretches(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Where in `words` the ids [start, start + width) of `stream` stand; −1 for those that are not in one piece."""
        batch = np.searchsorted(self._stream, starts, side="right") - 1
        inside = starts + width <= self._stream[batch + 1]
        return np.where(inside, self._values[0][batch] - self._stream[batch] + starts, -1)


@cache
def mapped(path: Path) -> MappedShard:
    """The map of a shard, made once in a process; it holds addresses, not data."""
    return MappedShard(path)


def _word(batch: pa.RecordBatch, column: int, buffer: int, file: pa.Buffer) -> int:
    """Where a buffer of a column starts, in int32 words from the start of the file (1 offsets, 3 values)."""
    assert batch.column(column).offset == 0
    part = batch.column(column).buffers()[buffer]
    byte = part.address - file.address if part.size else 0  # an empty buffer may stand anywhere
    assert byte % 4 == 0 and 0 <= byte < file.size
    return byte // 4
