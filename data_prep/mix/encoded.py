"""Reads ids from any place in encoded shards. Little more than the needed bytes is read, and no file stays open.

Ids are not read through memory maps, because the kernel would read 128 KiB or more around every id, and a process may
have only 65,530 maps. Instead, each call of `copy_words` opens the file. Only the sizes and positions of a shard's
record batches stay in memory; `index_batches` reads them once from the file's metadata.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from data_prep.languages import english_first
from xlme_ds.data.schema import DOCUMENTS, PAIRS, Layout
from xlme_ds.io.files import errors_naming

# `mix` samples examples. With unit "slices", an example is a slice of a shard's token stream, and becomes a training
# row. With all other units, an example is a record or a piece of a record, and a training row packs several examples.
ExampleUnit = Literal["slices", "sentences", "documents", "pairs"]
_ENCODE_AGAIN = "the file was changed after encode wrote it. Delete it and give the encode command again"
_LARGEST_GAP = 1024  # int32 words (4 KiB): spans with at most this gap between them are read in one call
_READ_WORDS = 1 << 18  # int32 words (1 MiB): a call reads spans that begin in the same MiB, so that no call is huge
_OFFSETS, _IDS = 1, 3  # indices of these buffers in `pa.ListArray.buffers()`
_SHORT_SPAN = 32  # int32 words: up to this mean length of the spans, index arrays copy faster than slices


@dataclass(frozen=True, eq=False)
class BatchIndex:
    """The size and the position of every record batch of a shard.

    `record_counts` [batches] and `id_counts` [columns, batches] are the sizes. `offset_positions` and `id_positions`
    [columns, batches] are the positions at which a list column's offsets and ids begin. A position counts int32 words
    from the start of the file. An offset, as Arrow stores it, counts ids from the first id of the batch.
    """

    path: Path
    record_counts: np.ndarray
    id_counts: np.ndarray
    offset_positions: np.ndarray
    id_positions: np.ndarray

    def id_ranges(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (position of the first id, number of ids) for the records with the indices `records`, int64
        [columns, records] each."""
        first_records = run_starts(self.record_counts)
        batch = np.searchsorted(first_records, records, side="right") - 1
        positions = self.offset_positions[:, batch] + (records - first_records[batch])
        offsets = np.empty((*positions.shape, 2), dtype=np.int32)  # the offsets at which a record's ids begin and end
        offset_starts = np.arange(0, offsets.size, 2)
        copy_words(self.path, positions.ravel(), np.full(positions.size, 2), offsets.ravel(), offset_starts)
        begin, end = offsets[..., 0].astype(np.int64), offsets[..., 1]
        valid = (begin >= 0) & (begin <= end) & (end <= self.id_counts[:, batch])
        if not valid.all():
            raise ValueError(f"{self.path} has a record outside of its ids: {_ENCODE_AGAIN}")
        return self.id_positions[:, batch] + begin, end - begin

    def all_lengths(self) -> np.ndarray:
        """Number of ids of every record of the shard in each column, int64 [columns, records]."""
        offset_counts = self.record_counts + 1  # each batch has one more offset than it has records
        counts = np.broadcast_to(offset_counts, self.offset_positions.shape).ravel()
        offsets = np.empty(int(counts.sum()), dtype=np.int32)
        copy_words(self.path, self.offset_positions.ravel(), counts, offsets, run_starts(counts))
        differences = np.diff(offsets.reshape(len(self.offset_positions), -1))
        across_batches = np.cumsum(offset_counts)[:-1] - 1  # a difference across two batches is not a length
        lengths = np.delete(differences, across_batches, axis=1).astype(np.int64)
        if not (lengths >= 0).all():
            raise ValueError(f"{self.path} has a record of negative length: {_ENCODE_AGAIN}")
        return lengths

    def copy_stream(self, starts: np.ndarray, width: int, target: np.ndarray, target_starts: np.ndarray) -> np.ndarray:
        """Copy slices of the token stream: for each slice i, the `width` ids from `starts[i]` on, to
        `target[target_starts[i]:]`. Returns the number of ids of each slice.

        `starts` are indices in the token stream, which is the first column's ids of all batches, one after the other.
        A slice has fewer than `width` ids only at the end of the stream.
        """
        batch_starts, batch_stops = run_starts(self.id_counts[0]), np.cumsum(self.id_counts[0])
        stops = np.minimum(starts + width, batch_stops[-1])
        first_batch = np.searchsorted(batch_stops, starts, side="right")
        batch_counts = np.searchsorted(batch_stops, stops) - first_batch + 1  # number of batches that each slice is in
        # The arrays below have one value for each part, which is the ids of one slice in one batch.
        slice_of = np.repeat(np.arange(len(starts)), batch_counts)
        batch = first_batch[slice_of] + run_indices(batch_counts)
        begin = np.maximum(starts[slice_of], batch_starts[batch])
        end = np.minimum(stops[slice_of], batch_stops[batch])
        positions = self.id_positions[0][batch] + (begin - batch_starts[batch])
        part_targets = target_starts[slice_of] + (begin - starts[slice_of])
        copy_words(self.path, positions, end - begin, target, part_targets)
        return stops - starts


def index_batches(path: Path) -> BatchIndex:
    """Locate the record batches of a shard. Raises ValueError if it is not a readable shard of `encode`."""
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
            raise ValueError("it has the columns of neither documents nor pairs")
        # `columns` has, for each column of the schema, its arrays from all batches.
        columns = [[batch.column(name) for batch in batches if batch.num_rows] for name in reader.schema.names]
        offset_positions, id_positions = (
            np.array([[_buffer_position(array, index, buffer) for array in column] for column in columns], np.int64)
            for index in (_OFFSETS, _IDS)
        )
    except (pa.ArrowException, OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        if isinstance(error, OSError) and error.errno is not None:  # the disk failed, or access was denied
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ValueError(
            f"{path} is not a readable Arrow file ({error}): delete it and give the encode command again"
        ) from None
    record_counts = np.array([len(array) for array in columns[0]], np.int64)
    id_counts = np.array([[len(array.values) for array in column] for column in columns], np.int64)
    return BatchIndex(path, record_counts, id_counts, offset_positions, id_positions)


def _buffer_position(column: pa.ListArray, index: int, file: pa.Buffer) -> int:
    """Position of buffer `index` of a column, in int32 words from the start of the file. Raises ValueError if the
    buffer is not in the file, for instance because the column is compressed."""
    buffer, byte, size = column.buffers()[index], 0, 0
    if buffer is not None and buffer.size:  # an empty buffer may have any address
        byte, size = buffer.address - file.address, buffer.size
    in_file = byte % 4 == 0 and 0 <= byte <= file.size - size
    if not in_file or column.offset or column.null_count or column.values.null_count:
        raise ValueError("its ids are not stored as plain int32")
    return byte // 4


def run_starts(counts: np.ndarray) -> np.ndarray:
    """Start of each run, if runs of `counts` elements follow one another from 0: [0, 2] for `counts` [2, 3]."""
    return np.cumsum(counts) - counts


def run_indices(counts: np.ndarray) -> np.ndarray:
    """Index of every element within its run of `counts` elements: [0, 1, 0, 1, 2] for `counts` [2, 3]."""
    return np.arange(counts.sum()) - np.repeat(run_starts(counts), counts)


def copy_words(
    path: Path, starts: np.ndarray, counts: np.ndarray, target: np.ndarray, target_starts: np.ndarray
) -> None:
    """For each span i of a file, copy its `counts[i]` int32 words, from position `starts[i]` of the file, to
    `target[target_starts[i]:]`."""
    if not len(starts):  # the code below needs at least one span
        return
    order = np.argsort(starts, kind="stable")
    starts, counts, target_starts = starts[order], counts[order], target_starts[order]
    reached = np.maximum.accumulate(starts + counts)  # an earlier span may end after a later one
    after_gap = starts[1:] > reached[:-1] + _LARGEST_GAP
    in_other_mib = starts[1:] // _READ_WORDS != starts[:-1] // _READ_WORDS
    first = np.flatnonzero(np.append(True, after_gap | in_other_mib))  # each read covers the spans [first, stop)
    stop = np.append(first[1:], len(order))
    read_starts = starts[first]
    sizes = reached[stop - 1] - read_starts
    data = _read(path, read_starts, sizes)
    data_starts = starts + np.repeat(run_starts(sizes) - read_starts, stop - first)  # where each span starts in `data`
    if counts.sum() > _SHORT_SPAN * len(counts):
        for source, count, start in zip(data_starts.tolist(), counts.tolist(), target_starts.tolist(), strict=True):
            target[start : start + count] = data[source : source + count]
    else:
        index = run_indices(counts)  # index of each word in its span
        target[np.repeat(target_starts, counts) + index] = data[np.repeat(data_starts, counts) + index]


def _read(path: Path, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """For each i, read `sizes[i]` int32 words of a file from position `starts[i]`. Returns all words in one array."""
    data = np.empty(int(sizes.sum()), dtype=np.int32)
    data_bytes = data.view(np.uint8).data
    filled = 0
    with errors_naming(path), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # keeps the kernel from reading ahead
        for start, size in zip((4 * starts).tolist(), (4 * sizes).tolist(), strict=True):
            if os.preadv(file.fileno(), [data_bytes[filled : filled + size]], start) < size:
                raise ValueError(f"{path} ends before byte {start + size}: {_ENCODE_AGAIN}")
            filled += size
    return data


@dataclass(frozen=True)
class EncodedShard:
    """The number of examples of an encoded shard, and where they are. `group` is the shard's language or pair.

    `tokens` is the number of tokens of all examples, special tokens included; for slices, the shard's number of ids. If
    the unit is not slices, most records are one example each. `irregular` has the indices of the other records,
    ascending, and `pieces` the number of examples of each of them: several, or 0 if the record is too long for a row
    and is left out.
    """

    group: str
    examples: int
    tokens: int
    batch_index: BatchIndex
    irregular: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pieces: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def too_long(self) -> int:
        """Number of records that are left out."""
        return int((self.pieces == 0).sum())

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (index of the record, index of the piece in the record) of each example, int64 [examples] each. Must
        not be called for slices."""
        # An imaginary record -1 of one piece is put first, so that every example has an irregular record before it.
        irregular, pieces = np.append(-1, self.irregular), np.append(1, self.pieces)
        # The index of each irregular record's first example: one example for each record before it, and the surplus of
        # the irregular records before it, which is -1 for a record that is left out.
        first_examples = irregular + run_starts(pieces - 1)
        # For each example, the last irregular record whose first example is at or before it, as an index in `pieces`.
        latest = np.searchsorted(first_examples, examples, side="right") - 1
        steps, latest_pieces = examples - first_examples[latest], pieces[latest]
        # The example is piece number `steps` of the irregular record, or else a whole record after it.
        records = irregular[latest] + np.maximum(steps - latest_pieces + 1, 0)
        return records, np.where(steps < latest_pieces, steps, 0)


def scan_shard(
    folder: Path, row_tokens: int, layout: Layout, max_pair_tokens: int | None, unit: ExampleUnit, name: str
) -> EncodedShard:
    """Count the examples of the encoded shard `name` (`group/file-block.arrow`) of task folder `folder`.

    A token stream is cut every `row_tokens` - 2 ids; a last slice of one id is left out, because it is the last
    document's `</s>`. A document that is longer than a row is several examples; a sentence or pair that is longer than
    a row is left out. `encode` has dropped every pair of more than `max_pair_tokens` ids (None: it dropped none). If a
    pair of this length fits into a row, no pair is too long, and the lengths are not read.
    """
    group = name.split("/")[0]
    index = index_batches(folder / name)
    ids, records = int(index.id_counts.sum()), int(index.record_counts.sum())
    if unit == "slices":
        rows, rest = divmod(ids, row_tokens - 2)
        return EncodedShard(group, rows + (rest > 1), ids, index)
    specials = layout.pair_specials if unit == "pairs" else 2
    if unit == "pairs" and max_pair_tokens is not None and max_pair_tokens + specials <= row_tokens:
        return EncodedShard(group, records, ids + specials * records, index)
    lengths = index.all_lengths().sum(0)
    if unit != "pairs":
        lengths -= 1  # `specials` already counts the `</s>` at the end of a monolingual record
    room = row_tokens - specials
    pieces = -(-lengths // room) if unit == "documents" else (lengths <= room).astype(np.int64)
    tokens = lengths[pieces > 0].sum() + specials * pieces.sum()
    irregular = np.flatnonzero(pieces != 1)
    return EncodedShard(group, int(pieces.sum()), int(tokens), index, irregular, pieces[irregular])


def group_languages(group: str, languages: Sequence[str]) -> tuple[int, ...]:
    """Indices in `languages` of the languages of a group: one index for a language, two for a pair `a-b`.

    Raises ValueError for an unknown group, and for a pair `b-a` whose name in the order of `english_first` is `a-b`: if
    the data have groups of both names, the pair's text would count twice.
    """
    if group in languages:
        return (languages.index(group),)
    hyphens = [i for i, character in enumerate(group) if character == "-"]  # codes may have a hyphen of their own
    for left, right in ((group[:i], group[i + 1 :]) for i in hyphens):
        if left in languages and right in languages:
            if (left, right) != english_first((left, right)):
                raise ValueError(f"{group} is another name of the pair {right}-{left}: encode the data again")
            return languages.index(left), languages.index(right)
    raise ValueError(
        f"{group!r} is neither one of the encoded languages nor a pair of two of them: encode the data again"
    )
