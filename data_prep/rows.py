"""Training rows made from encoded shards: any stretch of the plan's order alone, in record batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.mapped import MappedShard, mapped
from data_prep.packing import pack_shuffled
from data_prep.permutation import hashed, key_of
from data_prep.plan import Plan, pair_tokens
from xlme_ds.data.schema import EOS, PAD, Layout, row_schema

BATCH_ROWS = 1024
WINDOW = 8192  # pairs that are packed together


@dataclass
class Tally:
    """What went into the rows of a shard: examples of each group, and ids that are not padding."""

    used: np.ndarray
    tokens: int = 0


@dataclass(frozen=True)
class Window:
    """One window of sampled pairs; `starts` and `lengths` are [2, pairs] in the order the sides will stand."""

    group: np.ndarray
    source: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    swapped: np.ndarray
    specials: int
    """Special tokens of a pair."""

    @property
    def tokens(self) -> np.ndarray:
        """Ids of each pair as an item."""
        return self.lengths.sum(0) + self.specials


def mono_rows(plan: Plan, start: int, stop: int, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Rows [start, stop) of the order: what opens an item, a slice of a shard's token stream without `</s>` at its ends, `</s>`."""
    width = plan.row_tokens - 2
    group, source, example = plan.find(np.arange(start, stop))
    languages = np.array([index for (index,) in plan.group_languages])
    shards = {s: mapped(plan.path(s)) for s in np.unique(source).tolist()}
    words = {s: shard.words.data for s, shard in shards.items()}  # slices of it are made in no time
    missing = np.full(width, PAD, dtype=np.int32).data
    at = np.empty(len(source), dtype=np.int64)
    for same in _grouped(source):
        at[same] = shards[int(source[same[0]])].stretches(example[same] * width, width)
    for begin in range(0, stop - start, BATCH_ROWS):
        part = slice(begin, min(begin + BATCH_ROWS, stop - start))
        texts = [
            words[s][start : start + width] if start >= 0 else missing
            for s, start in zip(source[part].tolist(), at[part].tolist(), strict=True)
        ]
        # One copy for all rows: between two texts, and at both ends, stand the last id of a row and the first of another.
        joined = bytearray(np.array([EOS, plan.layout.opening], dtype=np.int32)).join([b"", *texts, b""])
        rows = np.frombuffer(joined, dtype=np.int32)[1:-1].reshape(len(texts), plan.row_tokens)
        lengths = np.full(len(rows), plan.row_tokens)
        whole = (at[part] >= 0) & (rows[:, 1] != EOS) & (rows[:, -2] != EOS)
        for i in np.flatnonzero(~whole).tolist():
            s = int(source[begin + i])
            lengths[i] = _fill(rows[i], plan.path(s), shards[s], int(example[begin + i]) * width)
        tally.used += np.bincount(group[part], minlength=len(tally.used))
        tally.tokens += int(lengths.sum())
        items = np.ones(len(rows), dtype=np.int64)
        yield _batch(rows, items, lengths, items, languages[group[part]])


def _fill(row: np.ndarray, path: Path, shard: MappedShard, start: int) -> int:
    """Write the row of the text that starts at token `start`, without `</s>` at its ends; its ids with specials."""
    text = shard.stream(start, start + len(row) - 2)
    text = text[int(text[0] == EOS) : len(text) - int(text[-1] == EOS)]
    if not len(text):
        raise ValueError(f"{path} has a document without text near token {start}: encode the data again")
    row[1:] = PAD
    row[1 : 1 + len(text)] = text
    row[1 + len(text)] = EOS
    return len(text) + 2


def _grouped(source: np.ndarray) -> list[np.ndarray]:
    """Positions of each value, one array a value."""
    order = np.argsort(source, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(source[order])) + 1)


def count_rows(plan: Plan, window: int) -> int:
    """Rows into which a window packs."""
    return len(_packed(plan, window, read_window(plan, window)))


def para_rows(plan: Plan, first_rows: np.ndarray, start: int, stop: int, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Rows [start, stop) of the packed windows; `first_rows` [windows + 1] are the rows before each window."""
    return _rechunked(_window_batches(plan, first_rows, start, stop, tally), BATCH_ROWS)


def read_window(plan: Plan, number: int) -> Window:
    """Look up where the pairs of window `number` stand, without reading their ids."""
    slots = np.arange(number * WINDOW, min((number + 1) * WINDOW, plan.order.total))
    group, source, example = plan.find(slots)
    starts, lengths = np.empty((2, 2, len(slots)), dtype=np.int64)
    for at in _grouped(source):
        s = int(source[at[0]])
        records = example[at]
        if plan.sources[s].too_long:
            records = _fitting(plan.path(s), plan.row_tokens, plan.layout)[records]
        for side in (0, 1):
            starts[side, at], lengths[side, at] = mapped(plan.path(s)).bounds(side, records)
    swapped = plan.order.swapped(slots)
    starts[:, swapped], lengths[:, swapped] = starts[::-1, swapped], lengths[::-1, swapped]
    return Window(group, source, starts, lengths, swapped, plan.layout.pair_specials)


@lru_cache(maxsize=64)
def _fitting(path: Path, row_tokens: int, layout: Layout) -> np.ndarray:
    return np.flatnonzero(pair_tokens(path, layout) <= row_tokens)


def _packed(plan: Plan, number: int, window: Window) -> list[np.ndarray]:
    key = key_of(plan.order.seed, plan.order.label, "rows")
    return pack_shuffled(window.tokens, plan.row_tokens, hashed(key, number))


def _window_batches(
    plan: Plan, first_rows: np.ndarray, start: int, stop: int, tally: Tally
) -> Iterator[pa.RecordBatch]:
    for number in range(int(np.searchsorted(first_rows, start, side="right")) - 1, len(first_rows) - 1):
        first = int(first_rows[number])
        if first >= stop:
            return
        window = read_window(plan, number)
        rows = _packed(plan, number, window)[max(start - first, 0) : stop - first]
        tally.used += np.bincount(window.group[np.concatenate(rows)], minlength=len(tally.used))
        tally.tokens += int(window.tokens[np.concatenate(rows)].sum())
        yield _render(plan, window, rows)


def _render(plan: Plan, window: Window, rows: Sequence[np.ndarray]) -> pa.RecordBatch:
    """The rows with the given items of a window, each item `<s> e </s> f </s>`, or as else the plan lays them out."""
    items = np.concatenate(rows)
    counts = np.array([len(row) for row in rows])
    lengths = window.tokens[items]
    first = window.lengths[0, items]
    ends = np.cumsum(lengths)
    row_ends = ends[np.cumsum(counts) - 1]
    padding = np.arange(len(rows)) * plan.row_tokens - np.concatenate([[0], row_ends[:-1]])  # of all rows before
    at = ends - lengths + np.repeat(padding, counts)
    flat = np.full(len(rows) * plan.row_tokens, PAD, dtype=np.int32)
    flat[at] = plan.layout.opening
    behind = at + 1 + first
    for n, separator in enumerate(plan.layout.between):
        flat[behind + n] = separator
    flat[at + lengths - 1] = EOS
    files = {s: mapped(plan.path(s)).words for s in np.unique(window.source).tolist()}
    words = [files[s] for s in window.source[items].tolist()]
    for side, begin in ((0, at + 1), (1, behind + len(plan.layout.between))):
        starts, wide = window.starts[side, items].tolist(), window.lengths[side, items].tolist()
        stretches = zip(words, begin.tolist(), starts, wide, strict=True)
        for source, b, s, n in stretches:
            flat[b : b + n] = source[s : s + n]
    sides = np.array(plan.group_languages)[window.group[items]]
    sides[window.swapped[items]] = sides[window.swapped[items], ::-1]
    return _batch(flat.reshape(len(rows), -1), counts, lengths, 2 * counts, sides.ravel())


def _batch(
    rows: np.ndarray, items: np.ndarray, lengths: np.ndarray, sides: np.ndarray, languages: np.ndarray
) -> pa.RecordBatch:
    """`rows` [B, R] with `items` [B] counting into the flat `lengths`, `sides` [B] into the flat `languages`."""
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    columns = [tokens, _lists(items, lengths), _lists(sides, languages)]
    return pa.record_batch(columns, schema=row_schema(rows.shape[1]))


def _lists(counts: np.ndarray, values: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int16)))


def _rechunked(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of `size`, the last one shorter."""
    rest: pa.RecordBatch | None = None
    for batch in batches:
        rest = batch if rest is None else pa.concat_batches([rest, batch])
        while rest.num_rows >= size:
            yield rest.slice(0, size)
            rest = rest.slice(size)
    if rest is not None and rest.num_rows:
        yield rest
