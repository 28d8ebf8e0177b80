"""Checks of the records of a shard: each rule gives a bool a record, for one record batch at a time."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from xlme_ds.data.schema import BOS, EOS, PAD, Layout

Faults = Iterator[tuple[np.ndarray, str]]  # a bool a record, and the fault where it is true


def document_faults(batch: pa.RecordBatch, text_end: int) -> Faults:
    """Faults of documents."""
    tokens, ends = _flat(batch.column("tokens"))
    ids, record = tokens, np.repeat(np.arange(batch.num_rows), np.diff(ends))
    lengths = np.diff(ends)
    yield lengths < 2, "a document without text"
    yield _any(record, (ids < 0) | (ids >= text_end), batch.num_rows), f"an id outside [0, {text_end})"
    yield _any(record, (ids == BOS) | (ids == PAD), batch.num_rows), "<s> or <pad> inside a document"
    last = np.zeros(len(ids), dtype=bool)
    last[ends[1:][lengths > 0] - 1] = True
    yield _any(record, (ids == EOS) != last, batch.num_rows), "a document that does not have one </s>, at its end"


def pair_faults(batch: pa.RecordBatch, text_end: int) -> Faults:
    """Faults of pairs."""
    for side in ("source", "target"):
        ids, ends = _flat(batch.column(side))
        record = np.repeat(np.arange(batch.num_rows), np.diff(ends))
        yield np.diff(ends) == 0, f"an empty {side} side"
        yield (
            _any(record, (ids < 0) | (ids >= text_end), batch.num_rows),
            f"an id outside [0, {text_end}) on the {side} side",
        )
        special = (ids == BOS) | (ids == PAD) | (ids == EOS)
        yield _any(record, special, batch.num_rows), f"<s>, <pad> or </s> on the {side} side"


def row_faults(batch: pa.RecordBatch, text_end: int, sides: int, languages: int, layout: Layout) -> Faults:
    """Faults of training rows; `sides` 1 for monolingual rows, 2 for pairs."""
    width = batch.schema.field("tokens").type.list_size
    rows = batch.column("tokens").flatten().to_numpy().reshape(-1, width)
    lengths, ends = _flat(batch.column("lengths"))
    codes, code_ends = _flat(batch.column("languages"))
    count = np.diff(ends)
    record = np.repeat(np.arange(len(rows)), count)
    used = np.bincount(record, weights=lengths, minlength=len(rows)).astype(np.int64)
    yield ((rows < 0) | (rows >= text_end)).any(1), f"an id outside [0, {text_end})"
    yield (count == 0) | ((count > 1) & (sides == 1)), "an impossible number of items"
    yield _any(record, lengths < 1 + 2 * sides, len(rows)) | (used > width), "lengths that the row cannot have"
    yield (
        ((rows == PAD) != (np.arange(width) >= used[:, None])).any(1),
        "<pad> where text belongs, or text after the last item",
    )
    code_record = np.repeat(np.arange(len(rows)), np.diff(code_ends))
    yield np.diff(code_ends) != count * sides, "not one language a side"
    yield _any(code_record, (codes < 0) | (codes >= languages), len(rows)), f"a language index outside [0, {languages})"
    opening = "<s>" if layout.opening == BOS else "</s>"
    yield (
        _item_faults(rows, lengths.astype(np.int64), ends, used, sides, layout),
        f"an item that does not start with {opening}, end with </s>, or have the separators of its task",
    )


def _item_faults(
    rows: np.ndarray, lengths: np.ndarray, ends: np.ndarray, used: np.ndarray, sides: int, layout: Layout
) -> np.ndarray:
    """Whether a row has an item that is not laid out as its kind is; impossible lengths are left out."""
    width = rows.shape[1]
    record = np.repeat(np.arange(len(rows)), np.diff(ends))
    stop = np.cumsum(lengths) - (np.cumsum(used) - used)[record]  # within the row
    start = stop - lengths
    sound = (lengths > 0) & (start >= 0) & (stop <= width)
    record, start, stop = record[sound], start[sound], stop[sound]
    flat = rows.ravel()
    begins = np.zeros(flat.size, dtype=bool)
    begins[record * width + start] = True
    at = record * width
    bad = _any(record, (flat[at + start] != layout.opening) | (flat[at + stop - 1] != EOS), len(rows))
    bad |= ((rows == BOS) & ~begins.reshape(rows.shape)).any(1)
    if sides == 2:
        separators = np.concatenate([[0], np.cumsum(flat == EOS)])
        inside = separators[at + stop - 1] - separators[at + start + 1]
        bad |= _any(record, inside != len(layout.between), len(rows))
        bad |= _any(record, (flat[at + start + 1] == EOS) | (flat[at + stop - 2] == EOS), len(rows))
        first = np.append(np.flatnonzero(flat == EOS), flat.size)[separators[at + start + 1]]
        last = np.minimum(first + len(layout.between) - 1, flat.size - 1)
        bad |= _any(record, flat[last] != EOS, len(rows))
    return bad


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """(values, ends [records + 1] counted from 0) of a list column."""
    ends = column.offsets.to_numpy()
    return column.flatten().to_numpy(), (ends - ends[0]).astype(np.int64)


def _any(record: np.ndarray, fault: np.ndarray, records: int) -> np.ndarray:
    return np.bincount(record[fault], minlength=records)[:records] > 0
