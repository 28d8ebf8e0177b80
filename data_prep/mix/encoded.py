"""Random access to encoded shards: only the bytes that are asked for are read, and no file stays open.

A memory map reads 128 KiB and more around every row that is asked for, and a process may have 65,530 maps. So files are
opened for each read. In memory are only the positions of a shard's record batches, read once from their metadata.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from data_prep.languages import in_order
from xlme_ds.data.schema import DOCUMENTS, PAIRS, Layout
from xlme_ds.io.files import naming

# An item is a slice of a shard's whole token stream (slices), or one of its records or a piece of a record (all
# others).
Unit = Literal["slices", "sentences", "documents", "pairs"]
_CHANGED = "it was changed, delete it and give the encode command again"
_GAP = 1024  # int32 words, a page: two pieces with at most this between them are read at once, with the gap
_MOST_AT_ONCE = 1 << 18  # words of a read, about
_OFFSETS, _VALUES = 1, 3  # numbers of these buffers of a list column
_SHORT = 32  # words: pieces that are this short on average are copied by index arrays, longer ones by slices


@dataclass(frozen=True, eq=False)
class Batches:
    """Record batches of a shard: how many records and ids each has, and where those are in the file.

    `records` [batches] and `tokens` [columns, batches] are numbers of records and of ids. `offsets` and `values`
    [columns, batches] are where the buffers of a list column begin, in int32 words from the start of the file; the
    values are the ids, and an offset counts from the first id of its batch.
    """

    path: Path
    records: np.ndarray
    tokens: np.ndarray
    offsets: np.ndarray
    values: np.ndarray

    def bounds(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in the file where the ids of `records` begin, and their numbers: int64 [columns, records] each."""
        first = np.cumsum(self.records) - self.records
        batch = np.searchsorted(first, records, side="right") - 1
        at = self.offsets[:, batch] + (records - first[batch])
        ends = np.empty((*at.shape, 2), dtype=np.int32)
        copy_words(self.path, at.ravel(), np.full(at.size, 2), ends.ravel(), np.arange(0, ends.size, 2))
        begin, end = ends[..., 0].astype(np.int64), ends[..., 1]
        inside = (begin >= 0) & (begin <= end) & (end <= self.tokens[:, batch])
        if not inside.all():
            raise ValueError(f"{self.path} has a record outside of its ids: {_CHANGED}")
        return self.values[:, batch] + begin, end - begin

    def all_lengths(self) -> np.ndarray:
        """Number of ids of every record of the shard in each column, int64 [columns, records]."""
        counts = np.broadcast_to(self.records + 1, self.offsets.shape)
        ends = np.empty(int(counts.sum()), dtype=np.int32)
        copy_words(self.path, self.offsets.ravel(), counts.ravel(), ends, (np.cumsum(counts) - counts.ravel()))
        inside = np.ones(len(ends) - 1, dtype=bool)
        inside[np.cumsum(counts)[:-1] - 1] = False  # no length: from a batch's last offset to the next one's first
        lengths = np.diff(ends)[inside].astype(np.int64).reshape(len(self.offsets), -1)
        if not (lengths >= 0).all():
            raise ValueError(f"{self.path} has a record of negative length: {_CHANGED}")
        return lengths

    def copy_stream(self, starts: np.ndarray, width: int, target: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Copy `width` ids from each of `starts` to `target[place:]`; return how many were copied for each.

        A start counts in the stream of the first column's ids, which runs through all batches. At the end of the stream
        there may be fewer than `width`.
        """
        ends = np.cumsum(self.tokens[0])
        begins = ends - self.tokens[0]
        stops = np.minimum(starts + width, ends[-1])
        first = np.searchsorted(ends, starts, side="right")
        batches = np.searchsorted(ends, stops) - first + 1  # number of batches that each slice is in
        piece = np.repeat(np.arange(len(starts)), batches)
        batch = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(batches) - batches, batches)
        at = np.maximum(starts[piece], begins[batch])
        counts = np.minimum(stops[piece], ends[batch]) - at
        positions = self.values[0][batch] + at - begins[batch]
        copy_words(self.path, positions, counts, target, places[piece] + at - starts[piece])
        return stops - starts


def read_batches(path: Path) -> Batches:
    """Locate the record batches of a shard. Raises ValueError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_RANDOM)
        buffer = pa.py_buffer(pages)
        reader = pa.ipc.open_file(pa.BufferReader(buffer))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # not in full, which would read all ids
        if reader.schema not in (DOCUMENTS, PAIRS):
            raise ValueError("its columns are neither documents' nor pairs'")
        batches = [batch for batch in batches if batch.num_rows]
        columns = range(len(reader.schema))
        offsets, values = (
            np.array([[_word(batch.column(c), number, buffer) for batch in batches] for c in columns], np.int64)
            for number in (_OFFSETS, _VALUES)
        )
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: also mmap of an empty file
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # the disk failed or access was denied: the file may be undamaged
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ValueError(
            f"{path} is not a readable Arrow file ({error}): delete it and give the encode command again"
        ) from None
    records = np.array([batch.num_rows for batch in batches], np.int64)
    tokens = np.array([[len(batch.column(c).values) for batch in batches] for c in columns], np.int64)
    return Batches(path, records, tokens, offsets, values)


def copy_words(path: Path, starts: np.ndarray, counts: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
    """Copy `counts` int32 words from each of `starts` in a file to `target[place:]`; neighbours are read at once."""
    order = np.argsort(starts, kind="stable")
    begins, counts, places = starts[order], counts[order], places[order]
    reach = np.maximum.accumulate(begins + counts)
    apart = (begins[1:] > reach[:-1] + _GAP) | (begins[1:] // _MOST_AT_ONCE != begins[:-1] // _MOST_AT_ONCE)
    first = np.flatnonzero(np.append(True, apart))
    sizes = reach[np.append(first[1:], len(order)) - 1] - begins[first]
    data = _read(path, begins[first], sizes)
    shift = np.cumsum(sizes) - sizes - begins[first]  # of positions in the file to those in `data`
    at = begins + np.repeat(shift, np.diff(np.append(first, len(order))))
    if counts.sum() > _SHORT * len(counts):
        for a, n, place in zip(at.tolist(), counts.tolist(), places.tolist(), strict=True):
            target[place : place + n] = data[a : a + n]
    else:
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        target[np.repeat(places, counts) + inside] = data[np.repeat(at, counts) + inside]


def _read(path: Path, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Read `sizes` words from each of `starts` in a file; return them one after the other."""
    data = np.empty(int(sizes.sum()), dtype=np.int32)
    memory, filled = data.view(np.uint8).data, 0
    with naming(path), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads ahead
        for start, size in zip((4 * starts).tolist(), (4 * sizes).tolist(), strict=True):
            if os.preadv(file.fileno(), [memory[filled : filled + size]], start) < size:
                raise ValueError(f"{path} ends before byte {start + size}: {_CHANGED}")
            filled += size
    return data


def _word(column: pa.ListArray, number: int, file: pa.Buffer) -> int:
    """Position of buffer `number` of a column, in int32 words from the start of the file. Raises ValueError where it
    is outside of the file, as the buffer of a compressed column is."""
    part = column.buffers()[number]
    byte = part.address - file.address if part and part.size else 0  # an empty buffer may be anywhere
    inside = column.offset == 0 and byte % 4 == 0 and 0 <= byte <= file.size - (part.size if part else 0)
    if not inside or column.null_count or column.values.null_count:
        raise ValueError("its ids are not where they must be")
    return byte // 4


@dataclass(frozen=True)
class EncodedShard:
    """An encoded shard as `examples` of one group (a language, or a language pair); `batches` locate its ids.

    If the unit is slices, an example is a training row, and `tokens` counts the ids of the stream. Else an example is
    an item to pack, and `tokens` counts the ids of all items with their special tokens. Most records are one item.
    `irregular` are the numbers of the other records, ascending, and `pieces` how many items each of these is: several,
    or 0 if it is too long for a row and left out.
    """

    group: str
    examples: int
    tokens: int
    batches: Batches
    irregular: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pieces: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def too_long(self) -> int:
        """Number of records that are left out."""
        return int((self.pieces == 0).sum())

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(record, piece of the record) of each example; for records that are packed."""
        first = np.append(-1, self.irregular + np.cumsum(self.pieces - 1) - (self.pieces - 1))  # first example of each
        last = np.searchsorted(first, examples, side="right") - 1  # the last irregular record that begins no later
        record, pieces = np.append(-1, self.irregular)[last], np.append(1, self.pieces)[last]
        past = examples - first[last]
        return np.where(past < pieces, record, record + 1 + past - pieces), np.where(past < pieces, past, 0)


def survey(folder: Path, row_tokens: int, layout: Layout, longest: int | None, unit: Unit, name: str) -> EncodedShard:
    """Count the examples of the encoded shard `name` (`group/number.arrow`) of task folder `folder`.

    A token stream is cut every `row_tokens` - 2 ids. A last slice of one id is no row: it is the last document's
    `</s>`. A document is one item, or several if it is longer than a row. `longest`: a bound on the ids of a pair, if
    there is one; where such a pair fits into a row, the lengths are not read.
    """
    group = name.split("/")[0]
    batches = read_batches(folder / name)
    tokens, records = int(batches.tokens.sum()), int(batches.records.sum())
    if unit == "slices":
        rows, rest = divmod(tokens, row_tokens - 2)
        return EncodedShard(group, rows + (rest > 1), tokens, batches)
    if unit == "pairs" and longest is not None and longest + layout.pair_specials <= row_tokens:
        return EncodedShard(group, records, tokens + layout.pair_specials * records, batches)
    specials, ends = (layout.pair_specials, 0) if unit == "pairs" else (2, 1)  # a monolingual record ends with `</s>`
    texts = batches.all_lengths().sum(0) - ends
    width = row_tokens - specials
    pieces = -(-texts // width) if unit == "documents" else (texts <= width).astype(np.int64)
    items = texts[pieces > 0].sum() + specials * pieces.sum()
    irregular = np.flatnonzero(pieces != 1)
    return EncodedShard(group, int(pieces.sum()), int(items), batches, irregular, pieces[irregular])


def group_languages(group: str, languages: Sequence[str]) -> tuple[int, ...]:
    """Indices of a group's languages: one for a language, two for a pair `a-b`.

    Raises ValueError for a pair whose name is not in the order of `in_order`: its text may be there under both names.
    """
    if group in languages:
        return (languages.index(group),)
    cuts = [i for i, character in enumerate(group) if character == "-"]  # codes may have a hyphen of their own
    for left, right in ((group[:i], group[i + 1 :]) for i in cuts):
        if left in languages and right in languages:
            if (left, right) != in_order((left, right)):
                raise ValueError(f"{group} is another name of the pair {right}-{left}: encode the data again")
            return languages.index(left), languages.index(right)
    raise ValueError(
        f"{group!r} is neither one of the encoded languages nor a pair of two of them: encode the data again"
    )
