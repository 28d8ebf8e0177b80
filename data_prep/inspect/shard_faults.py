"""Finds faults in the records of encoded and mixed shards, and counts the records."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from xlme_ds.data.schema import BOS, DOCUMENTS, EOS, LAYOUTS, PAD, PAIRS, UNK, Layout, Manifest, row_schema

# The keys are "records", "tokens" and, for encoded text, "unknown" (`<unk>` ids). For training rows, the sorted tuples
# of the language indices of an item's sides are keys too; such a key has the number of the items with these languages.
RecordCounts = Counter[Any]
Faults = Iterator[tuple[np.ndarray, str]]  # (bool [records], the fault in words): True for each record with the fault


def schema_and_checks(
    folder: Path, manifest: Manifest
) -> tuple[pa.Schema, Callable[[pa.RecordBatch], Faults], Callable[[pa.RecordBatch], RecordCounts]]:
    """Returns (schema of a folder's shards, function that finds faults in records, function that counts records)."""
    mask_id = manifest.vocabulary_size - 1  # <mask> is the last id, and no text has it
    if manifest.stage == "mix":
        sides = 2 if manifest.settings["task"] == "para" else 1
        faults_of = partial(
            _row_faults,
            mask_id=mask_id,
            sides=sides,
            language_count=len(manifest.languages),
            layout=LAYOUTS[manifest.layout],
            packed=sides == 2 or bool(manifest.packed_unit),
        )
        return row_schema(manifest.settings["row_tokens"]), faults_of, partial(_count_rows, sides)
    if manifest.settings.get("task", folder.name) == "para":
        return PAIRS, partial(_pair_faults, mask_id=mask_id), count_text
    return DOCUMENTS, partial(_document_faults, mask_id=mask_id), count_text


def count_text(batch: pa.RecordBatch) -> RecordCounts:
    """Count the records, tokens and unknown ids of a batch of documents or pairs."""
    ids = np.concatenate([column.flatten().to_numpy() for column in batch.columns])
    return Counter(records=batch.num_rows, tokens=len(ids), unknown=int((ids == UNK).sum()))


def _count_rows(sides: int, batch: pa.RecordBatch) -> RecordCounts:
    _, lengths, languages = (column.flatten().to_numpy() for column in batch.columns)
    items: RecordCounts = Counter(map(tuple, np.sort(languages.reshape(-1, sides)).tolist()))
    return items + Counter(records=batch.num_rows, tokens=int(lengths.sum(dtype=np.int64)))


def _document_faults(batch: pa.RecordBatch, mask_id: int) -> Faults:
    ids, lengths, record_of = _flattened(batch.column("tokens"))
    yield lengths < 2, "a document without text"
    yield _records_with(record_of, (ids < 0) | (ids >= mask_id), batch.num_rows), f"an id outside [0, {mask_id})"
    yield _records_with(record_of, (ids == BOS) | (ids == PAD), batch.num_rows), "<s> or <pad> inside a document"
    is_last = np.zeros(len(ids), dtype=bool)
    is_last[np.cumsum(lengths)[lengths > 0] - 1] = True
    yield (
        _records_with(record_of, (ids == EOS) != is_last, batch.num_rows),
        "a document that does not have one </s>, at its end",
    )


def _pair_faults(batch: pa.RecordBatch, mask_id: int) -> Faults:
    for side in ("source", "target"):
        ids, lengths, record_of = _flattened(batch.column(side))
        yield lengths == 0, f"an empty {side} side"
        outside = _records_with(record_of, (ids < 0) | (ids >= mask_id), batch.num_rows)
        yield outside, f"an id outside [0, {mask_id}) on the {side} side"
        special = (ids == BOS) | (ids == PAD) | (ids == EOS)
        yield _records_with(record_of, special, batch.num_rows), f"<s>, <pad> or </s> on the {side} side"


def _row_faults(
    batch: pa.RecordBatch, mask_id: int, sides: int, language_count: int, layout: Layout, packed: bool
) -> Faults:
    """Yield the faults of training rows. An item has `sides` sides, 1 or 2. A row that is not `packed` has one item."""
    width = batch.schema.field("tokens").type.list_size
    rows = batch.column("tokens").flatten().to_numpy().reshape(-1, width)
    lengths, item_counts, row_of_item = _flattened(batch.column("lengths"))
    side_languages, side_counts, row_of_side = _flattened(batch.column("languages"))
    used = np.bincount(row_of_item, weights=lengths, minlength=len(rows)).astype(np.int64)  # tokens of a row's items
    yield ((rows < 0) | (rows >= mask_id)).any(1), f"an id outside [0, {mask_id})"
    yield (item_counts == 0) | ((item_counts > 1) & (not packed)), "an impossible number of items"
    yield (  # an item has at least one text token per side and 1 + `sides` special tokens
        _records_with(row_of_item, lengths < 1 + 2 * sides, len(rows)) | (used > width),
        "lengths that the row cannot have",
    )
    misplaced = (np.arange(width) >= used[:, None]) != (rows == PAD)
    yield misplaced.any(1), "<pad> where text belongs, or text after the last item"
    yield side_counts != item_counts * sides, "not one language per side"
    yield (
        _records_with(row_of_side, (side_languages < 0) | (side_languages >= language_count), len(rows)),
        f"a language index outside [0, {language_count})",
    )
    opening = "<s>" if layout.opening == BOS else "</s>"
    yield (
        _item_faults(rows, lengths.astype(np.int64), row_of_item, used, sides, layout, packed),
        f"an item that does not start with {opening}, end with </s>, or have the separators of its task",
    )


def _item_faults(
    rows: np.ndarray,
    lengths: np.ndarray,
    row_of_item: np.ndarray,
    used: np.ndarray,
    sides: int,
    layout: Layout,
    packed: bool,
) -> np.ndarray:
    """bool [rows]: the row has an item whose special tokens are not where the layout puts them.

    `lengths` and `row_of_item` have an entry for each item; `used` is the sum of each row's lengths. Items that are
    empty or extend beyond their row are skipped, because `_row_faults` itself reports their lengths.
    """
    width = rows.shape[1]
    stop = np.cumsum(lengths) - (np.cumsum(used) - used)[row_of_item]  # an item is at [start, stop) in its row
    start = stop - lengths
    possible = (lengths > 0) & (start >= 0) & (stop <= width)
    row_of_item = row_of_item[possible]
    flat = rows.ravel()
    # Positions in `flat` of each item's first and last token.
    first = row_of_item * width + start[possible]
    last = row_of_item * width + stop[possible] - 1
    is_first = np.zeros(flat.size, dtype=bool)
    is_first[first] = True
    faulty = _records_with(row_of_item, (flat[first] != layout.opening) | (flat[last] != EOS), len(rows))
    faulty |= ((rows == BOS) & ~is_first.reshape(rows.shape)).any(1)
    if packed:  # a row that is not packed is a slice of text, with a </s> wherever a document ends
        eos_before = np.concatenate([[0], np.cumsum(flat == EOS)])  # the number of </s> before each position
        expected = len(layout.between) if sides == 2 else 0  # number of </s> between an item's first and last token
        faulty |= _records_with(row_of_item, eos_before[last] - eos_before[first + 1] != expected, len(rows))
        second = np.minimum(first + 1, flat.size - 1)  # an item of one token may be the last in `flat`
        faulty |= _records_with(row_of_item, (flat[second] == EOS) | (flat[last - 1] == EOS), len(rows))
    if sides == 2:
        # For each item, the position in `flat` of the first </s> after the item's first token.
        first_separator = np.append(np.flatnonzero(flat == EOS), flat.size)[eos_before[first + 1]]
        last_separator = np.minimum(first_separator + len(layout.between) - 1, flat.size - 1)
        faulty |= _records_with(row_of_item, flat[last_separator] != EOS, len(rows))
    return faulty


def _flattened(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (values of a list column, number of values in each record, for each value the index of its record)."""
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.flatten().to_numpy(), lengths, np.repeat(np.arange(len(lengths)), lengths)


def _records_with(record_of: np.ndarray, fault: np.ndarray, records: int) -> np.ndarray:
    """bool [records]: the record has a value with a `fault`. `record_of` and `fault` have an entry for each value."""
    return np.bincount(record_of[fault], minlength=records)[:records] > 0
