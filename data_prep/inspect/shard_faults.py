"""Faults and counts of the records of encoded and mixed shards."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from xlme_ds.data.schema import BOS, DOCUMENTS, EOS, LAYOUTS, PAD, PAIRS, UNK, Layout, Manifest, row_schema

# What shards hold, by "records", "tokens" and (in encoded text alone) "unknown" ids; in rows also the items, by the
# sorted languages of their sides, a tuple of indices.
Found = Counter[Any]
Faults = Iterator[tuple[np.ndarray, str]]  # a bool a record, and the fault where it is true


def rules_of(
    folder: Path, manifest: Manifest
) -> tuple[pa.Schema, Callable[[pa.RecordBatch], Faults], Callable[[pa.RecordBatch], Found]]:
    """The schema of a folder's shards, the faults of their records, and the counts of records without faults."""
    text_end = manifest.vocabulary_size - 1  # the last id is <mask>, which no text has
    if manifest.stage == "mix":
        sides = 2 if manifest.settings["task"] == "para" else 1
        faults = partial(
            _row_faults,
            text_end=text_end,
            sides=sides,
            languages=len(manifest.languages),
            layout=LAYOUTS[manifest.layout],
            packed=sides == 2 or bool(manifest.packed),
        )
        return row_schema(manifest.settings["row_tokens"]), faults, partial(_count_rows, sides)
    if folder.name == "para":
        return PAIRS, partial(_pair_faults, text_end=text_end), count_text
    return DOCUMENTS, partial(_document_faults, text_end=text_end), count_text


def count_text(batch: pa.RecordBatch) -> Found:
    """Counts of a record batch of documents or pairs."""
    ids = np.concatenate([column.flatten().to_numpy() for column in batch.columns])
    return Counter(records=batch.num_rows, tokens=len(ids), unknown=int((ids == UNK).sum()))


def _count_rows(sides: int, batch: pa.RecordBatch) -> Found:
    _, lengths, languages = (column.flatten().to_numpy() for column in batch.columns)
    items: Found = Counter(map(tuple, np.sort(languages.reshape(-1, sides)).tolist()))
    return items + Counter(records=batch.num_rows, tokens=int(lengths.sum(dtype=np.int64)))


def _document_faults(batch: pa.RecordBatch, text_end: int) -> Faults:
    ids, lengths, record = _flat(batch.column("tokens"))
    yield lengths < 2, "a document without text"
    yield _any(record, (ids < 0) | (ids >= text_end), batch.num_rows), f"an id outside [0, {text_end})"
    yield _any(record, (ids == BOS) | (ids == PAD), batch.num_rows), "<s> or <pad> inside a document"
    last = np.zeros(len(ids), dtype=bool)
    last[np.cumsum(lengths)[lengths > 0] - 1] = True
    yield _any(record, (ids == EOS) != last, batch.num_rows), "a document that does not have one </s>, at its end"


def _pair_faults(batch: pa.RecordBatch, text_end: int) -> Faults:
    for side in ("source", "target"):
        ids, lengths, record = _flat(batch.column(side))
        yield lengths == 0, f"an empty {side} side"
        outside = _any(record, (ids < 0) | (ids >= text_end), batch.num_rows)
        yield outside, f"an id outside [0, {text_end}) on the {side} side"
        special = (ids == BOS) | (ids == PAD) | (ids == EOS)
        yield _any(record, special, batch.num_rows), f"<s>, <pad> or </s> on the {side} side"


def _row_faults(
    batch: pa.RecordBatch, text_end: int, sides: int, languages: int, layout: Layout, packed: bool
) -> Faults:
    """Faults of training rows; `sides` 1 for monolingual rows, 2 for pairs; `packed`: a row may have several items."""
    width = batch.schema.field("tokens").type.list_size
    rows = batch.column("tokens").flatten().to_numpy().reshape(-1, width)
    lengths, items, record = _flat(batch.column("lengths"))
    codes, sides_of, code_record = _flat(batch.column("languages"))
    used = np.bincount(record, weights=lengths, minlength=len(rows)).astype(np.int64)
    yield ((rows < 0) | (rows >= text_end)).any(1), f"an id outside [0, {text_end})"
    yield (items == 0) | ((items > 1) & (not packed)), "an impossible number of items"
    yield _any(record, lengths < 1 + 2 * sides, len(rows)) | (used > width), "lengths that the row cannot have"
    padding = (np.arange(width) >= used[:, None]) != (rows == PAD)
    yield padding.any(1), "<pad> where text belongs, or text after the last item"
    yield sides_of != items * sides, "not one language a side"
    yield _any(code_record, (codes < 0) | (codes >= languages), len(rows)), f"a language index outside [0, {languages})"
    opening = "<s>" if layout.opening == BOS else "</s>"
    yield (
        _item_faults(rows, lengths.astype(np.int64), record, used, sides, layout, packed),
        f"an item that does not start with {opening}, end with </s>, or have the separators of its task",
    )


def _item_faults(
    rows: np.ndarray,
    lengths: np.ndarray,
    record: np.ndarray,
    used: np.ndarray,
    sides: int,
    layout: Layout,
    packed: bool,
) -> np.ndarray:
    """Whether a row has an item that is not laid out as its kind is; impossible lengths are left out."""
    width = rows.shape[1]
    stop = np.cumsum(lengths) - (np.cumsum(used) - used)[record]  # within the row
    start = stop - lengths
    sound = (lengths > 0) & (start >= 0) & (stop <= width)
    record, flat = record[sound], rows.ravel()
    first, last = record * width + start[sound], record * width + stop[sound] - 1  # of an item, in all rows
    begins = np.zeros(flat.size, dtype=bool)
    begins[first] = True
    bad = _any(record, (flat[first] != layout.opening) | (flat[last] != EOS), len(rows))
    bad |= ((rows == BOS) & ~begins.reshape(rows.shape)).any(1)
    if packed:
        separators = np.concatenate([[0], np.cumsum(flat == EOS)])
        expected = len(layout.between) if sides == 2 else 0
        bad |= _any(record, separators[last] - separators[first + 1] != expected, len(rows))
        bad |= _any(record, (flat[first + 1] == EOS) | (flat[last - 1] == EOS), len(rows))
    if sides == 2:
        between = np.append(np.flatnonzero(flat == EOS), flat.size)[separators[first + 1]]
        ends = np.minimum(between + len(layout.between) - 1, flat.size - 1)
        bad |= _any(record, flat[ends] != EOS, len(rows))
    return bad


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values of a list column, how many each record has, and the record of each value."""
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.flatten().to_numpy(), lengths, np.repeat(np.arange(len(lengths)), lengths)


def _any(record: np.ndarray, fault: np.ndarray, records: int) -> np.ndarray:
    return np.bincount(record[fault], minlength=records)[:records] > 0
