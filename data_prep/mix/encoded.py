"""Random access to encoded shards: only the bytes that are asked for are read, and no file stays open.

A memory map reads 128 KiB and more around every row that is asked for, and a process may have 65,530 maps. What is kept
of a shard is where its record batches begin, found by one look at the metadata of each.
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

# What becomes an item: slices of all text of a shard, or its records.
Unit = Literal["slices", "sentences", "documents", "pairs"]
_CHANGED = "it was changed, delete it and give the encode command again"
_NEAR = 1024  # int32 words, a page: a gap as small as this is read too
_AT_ONCE = 1 << 18  # words that are read at once, about
_OFFSETS, _VALUES = 1, 3  # buffers of a list column
_SHORT = 32  # words of a piece, below which all pieces are copied by their indices


@dataclass(frozen=True, eq=False)
class Batches:
    """Positions of a shard's ids in its file, in int32 words.

    `records` are [batches], the others [columns, batches]: `tokens`, where the list `offsets` begin (each counts from
    the `values` of its batch), and where the ids, the `values`, begin.
    """

    path: Path
    records: np.ndarray
    tokens: np.ndarray
    offsets: np.ndarray
    values: np.ndarray

    def bounds(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, length) in words of the ids of `records` in each column, int64 [columns, records]."""
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
        """Ids of every record of the shard in each column, int64 [columns, records]."""
        counts = np.broadcast_to(self.records + 1, self.offsets.shape)
        ends = np.empty(int(counts.sum()), dtype=np.int32)
        copy_words(self.path, self.offsets.ravel(), counts.ravel(), ends, (np.cumsum(counts) - counts.ravel()))
        inside = np.ones(len(ends) - 1, dtype=bool)
        inside[np.cumsum(counts)[:-1] - 1] = False  # from the last offset of a batch to the first of the next
        lengths = np.diff(ends)[inside].astype(np.int64).reshape(len(self.offsets), -1)
        if not (lengths >= 0).all():
            raise ValueError(f"{self.path} has a record of less than no ids: {_CHANGED}")
        return lengths

    def copy_stream(self, starts: np.ndarray, width: int, target: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Copy ids [start, start + width) of the first column's stream, which runs through all batches, to
        `target[place:]`.

        Returns the number of each, for the last ids of a shard may be fewer.
        """
        ends = np.cumsum(self.tokens[0])
        begins = ends - self.tokens[0]
        stops = np.minimum(starts + width, ends[-1])
        first = np.searchsorted(ends, starts, side="right")
        batches = np.searchsorted(ends, stops) - first + 1  # that each of them is in
        piece = np.repeat(np.arange(len(starts)), batches)
        batch = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(batches) - batches, batches)
        at = np.maximum(starts[piece], begins[batch])
        counts = np.minimum(stops[piece], ends[batch]) - at
        positions = self.values[0][batch] + at - begins[batch]
        copy_words(self.path, positions, counts, target, places[piece] + at - starts[piece])
        return stops - starts


def read_batches(path: Path) -> Batches:
    """Look up the record batches of a shard. Raises ValueError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_RANDOM)
        buffer = pa.py_buffer(pages)
        reader = pa.ipc.open_file(pa.BufferReader(buffer))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # not in full, for that reads all that is there
        if reader.schema not in (DOCUMENTS, PAIRS):
            raise ValueError("its columns are neither documents' nor pairs'")
        batches = [batch for batch in batches if batch.num_rows]
        columns = range(len(reader.schema))
        offsets, values = (
            np.array([[_word(batch.column(c), number, buffer) for batch in batches] for c in columns], np.int64)
            for number in (_OFFSETS, _VALUES)
        )
    except (pa.ArrowException, OSError, ValueError) as error:  # the last is an empty file's
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or of access, not of the bytes
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ValueError(
            f"{path} is not a readable Arrow file ({error}): delete it and give the encode command again"
        ) from None
    records = np.array([batch.num_rows for batch in batches], np.int64)
    tokens = np.array([[len(batch.column(c).values) for batch in batches] for c in columns], np.int64)
    return Batches(path, records, tokens, offsets, values)


def copy_words(path: Path, starts: np.ndarray, counts: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
    """Copy `counts` int32 words from `starts` of a file to `target[places:]`; neighbours are read at once."""
    order = np.argsort(starts, kind="stable")
    begins, counts, places = starts[order], counts[order], places[order]
    reach = np.maximum.accumulate(begins + counts)
    apart = (begins[1:] > reach[:-1] + _NEAR) | (begins[1:] // _AT_ONCE != begins[:-1] // _AT_ONCE)
    first = np.flatnonzero(np.append(True, apart))
    sizes = reach[np.append(first[1:], len(order)) - 1] - begins[first]
    data = _read(path, begins[first], sizes)
    shift = np.cumsum(sizes) - sizes - begins[first]  # from the file to the words read of it
    at = begins + np.repeat(shift, np.diff(np.append(first, len(order))))
    if counts.sum() > _SHORT * len(counts):
        for a, n, place in zip(at.tolist(), counts.tolist(), places.tolist(), strict=True):
            target[place : place + n] = data[a : a + n]
    else:
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        target[np.repeat(places, counts) + inside] = data[np.repeat(at, counts) + inside]


def _read(path: Path, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`sizes` words from each of `starts` of a file, one after the other."""
    data = np.empty(int(sizes.sum()), dtype=np.int32)
    memory, filled = data.view(np.uint8).data, 0
    with naming(path), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else more is read than is asked for
        for start, size in zip((4 * starts).tolist(), (4 * sizes).tolist(), strict=True):
            if os.preadv(file.fileno(), [memory[filled : filled + size]], start) < size:
                raise ValueError(f"{path} ends before byte {start + size}: {_CHANGED}")
            filled += size
    return data


def _word(column: pa.ListArray, number: int, file: pa.Buffer) -> int:
    """The start of a column's buffer in int32 words from the start of the file. Raises ValueError where it is outside
    of the file, as in a compressed one."""
    part = column.buffers()[number]
    byte = part.address - file.address if part and part.size else 0  # an empty buffer may be anywhere
    inside = column.offset == 0 and byte % 4 == 0 and 0 <= byte <= file.size - (part.size if part else 0)
    if not inside or column.null_count or column.values.null_count:
        raise ValueError("its ids are not where they must be")
    return byte // 4


@dataclass(frozen=True)
class EncodedShard:
    """An encoded shard as examples of one group (a language, or a language pair).

    Slices of a token stream: `examples` training rows. Records that are packed: their items, with `tokens` ids in them,
    specials included. A record is one item, but for those in `others`, in order: each of them is as many items as
    `pieces` says, one that is too long for a row none. `batches` locate the ids.
    """

    group: str
    examples: int
    tokens: int
    batches: Batches
    others: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pieces: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def too_long(self) -> int:
        """Records that are left out."""
        return int((self.pieces == 0).sum())

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The records of examples that are packed, and which piece of the record each one is."""
        first = np.append(-1, self.others + np.cumsum(self.pieces - 1) - (self.pieces - 1))  # example of each
        last = np.searchsorted(first, examples, side="right") - 1  # of the others, that one or one before it
        record, pieces = np.append(-1, self.others)[last], np.append(1, self.pieces)[last]
        past = examples - first[last]
        return np.where(past < pieces, record, record + 1 + past - pieces), np.where(past < pieces, past, 0)


def survey(folder: Path, row_tokens: int, layout: Layout, longest: int | None, unit: Unit, name: str) -> EncodedShard:
    """Count the examples of the encoded shard `name` (`group/number.arrow`) of task folder `folder`.

    A token stream is cut every `row_tokens` - 2 ids. A last slice of one id is no row: it is the last document's
    `</s>`. Of documents each is an item or, if it is longer than a row, several. `longest`: ids that no pair has more
    of, where that is known; if all fit, their lengths need not be read.
    """
    group = name.split("/")[0]
    batches = read_batches(folder / name)
    tokens, records = int(batches.tokens.sum()), int(batches.records.sum())
    if unit == "slices":
        rows, rest = divmod(tokens, row_tokens - 2)
        return EncodedShard(group, rows + (rest > 1), tokens, batches)
    if unit == "pairs" and longest is not None and longest + layout.pair_specials <= row_tokens:
        return EncodedShard(group, records, tokens + layout.pair_specials * records, batches)
    # Of a record of monolingual text the last id is `</s>`.
    specials, texts = (layout.pair_specials, 0) if unit == "pairs" else (2, -1)
    texts = batches.all_lengths().sum(0) + texts
    width = row_tokens - specials
    pieces = -(-texts // width) if unit == "documents" else (texts <= width).astype(np.int64)
    items = texts[pieces > 0].sum() + specials * pieces.sum()
    others = np.flatnonzero(pieces != 1)
    return EncodedShard(group, int(pieces.sum()), int(items), batches, others, pieces[others])


def group_languages(group: str, languages: Sequence[str]) -> tuple[int, ...]:
    """Language indices of a group's sides: of a language its own, of the pair `a-b` those of a and b.

    Raises ValueError for a pair whose name has another order than that of `in_order`: its text might be there twice.
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
