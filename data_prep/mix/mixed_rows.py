"""Training rows from encoded shards: the sampled order of their examples, and any range of rows as record batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.encode.token_ids import list_array
from data_prep.mix.encoded import EncodedShard, Unit, copy_words, group_languages
from data_prep.mix.packing import pack_shuffled
from data_prep.sampling import Order, hashed, key_of
from data_prep.shares import Sampling, apportion
from data_prep.store import Stage, write_arrow, write_file
from xlme_ds.data.schema import EOS, LAYOUTS, PAD, Layout, row_schema

# Slots that are shuffled together: a slot is a row that is cut from a stream of text, or an item of a packed row. Each
# block has about 30,000 rows or more.
BLOCK = {"cut": 1 << 16, "packed": 1 << 18}
STRETCH = 8192  # about as many ids of a side are neighbours in a file and used in the same block, so one read gets them
# Part of the settings: an output folder with another order is not continued.
ORDER = "every example of a language once a pass, pass after pass; blocks of {} slots, stretches of {} ids"
BATCH_ROWS = 1024
WINDOW = 8192  # slots whose items are packed together
_IDS_IN_MEMORY = 1 << 25  # at once, 128 MiB


@dataclass(frozen=True)
class MixPlan:
    """The sampled order of a task's examples, and where each is. `shards` are sorted by group, then name.

    `tokens`: ids of all examples of each group; `mean_tokens`: mean ids of an example over all groups.
    """

    row_tokens: int
    layout: Layout
    group_languages: tuple[tuple[int, ...], ...]
    shards: tuple[EncodedShard, ...]
    tokens: tuple[int, ...]
    mean_tokens: float
    order: Order
    sampling: Sampling
    into: int | None = None  # index of the language that is the second side of every pair that has it

    @property
    def specials(self) -> int:
        """Special tokens of an item."""
        return self.layout.pair_specials if len(self.group_languages[0]) == 2 else 2

    @cached_property
    def _examples_before(self) -> np.ndarray:
        """Number of examples before each shard, over all groups, and of all examples."""
        return np.cumsum([0] + [shard.examples for shard in self.shards])

    def find(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(group, shard, example within the shard) of each slot of the order, int64."""
        group, example = self.order.locate(slots)
        examples = np.array(self.order.examples)
        at = (np.cumsum(examples) - examples)[group] + example
        shard = np.searchsorted(self._examples_before, at, side="right") - 1
        return group, shard, at - self._examples_before[shard]

    def by_shard(self, numbers: np.ndarray) -> Iterator[tuple[EncodedShard, np.ndarray]]:
        """Group shard `numbers`: yield each shard among them, and the positions of its number in `numbers`."""
        order = np.argsort(numbers, kind="stable")
        for at in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            yield self.shards[int(numbers[at[0]])], at


def plan_rows(
    shards: Sequence[EncodedShard],
    row_tokens: int,
    layout: str,
    languages: Sequence[str],
    task: str,
    sampling: Sampling,
    seed: int,
    unit: Unit,
    into: int | None = None,
) -> MixPlan:
    """The plan of a task that samples nothing yet: `with_total` sets how many examples."""
    shards = sorted(shards, key=lambda shard: (shard.group, shard.batches.path.name))
    by_group = {group: list(same) for group, same in groupby(shards, key=lambda shard: shard.group)}
    examples = tuple(sum(shard.examples for shard in same) for same in by_group.values())
    tokens = tuple(sum(shard.tokens for shard in same) for same in by_group.values())
    shares = tuple(sampling.shares(tuple(by_group), examples))
    members = tuple(group_languages(group, languages) for group in by_group)
    mean_tokens = max(sum(tokens), 1) / max(sum(examples), 1)
    block = BLOCK["cut" if unit == "slices" else "packed"]
    neighbours = max(int(STRETCH * len(members[0]) / mean_tokens), 1)
    order = Order(tuple(by_group), examples, shares, (), seed, task, block, neighbours)
    return MixPlan(row_tokens, LAYOUTS[layout], members, tuple(shards), tokens, mean_tokens, order, sampling, into)


def with_total(plan: MixPlan, total: int) -> MixPlan:
    """`plan` with `total` sampled examples. Raises ValueError if a bound on repeats makes that impossible."""
    shares = tuple(plan.sampling.shares(plan.order.names, plan.order.examples, total))
    return replace(plan, order=replace(plan.order, shares=shares, quotas=tuple(apportion(total, shares))))


@dataclass
class Tally:
    """Counts of a shard's rows: the examples used of each group, and ids that are not padding."""

    used: np.ndarray
    tokens: int = 0


class SampledItems(NamedTuple):
    """Positions of sampled items, pairs or monolingual ones, in the encoded shards.

    `starts` and `lengths` are [2, pairs], in the order of the sides in the row, or [1, items]. `tokens` counts the ids
    of each item with its special tokens.
    """

    group: np.ndarray
    shard: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    swapped: np.ndarray
    tokens: np.ndarray


def write_shard(
    stage: Stage, plan: MixPlan, first_rows: np.ndarray | None, rows_per_shard: int, rows: int, number: int
) -> dict[str, Any]:
    """Write shard `number` of `rows_per_shard` rows, the last one shorter, with its index, unless that is done. Returns
    the task's result."""
    from xlme_ds.data.shards import SUFFIX, index_of  # imported late: it loads numba, which other stages do not need

    name = f"{number:05d}"
    path = stage.folder / f"{name}.arrow"
    result = stage.task_result(f"shard-{name}")
    if result is None:
        start, stop = number * rows_per_shard, min((number + 1) * rows_per_shard, rows)
        tally = Tally(np.zeros(len(plan.order.names), dtype=np.int64))
        schema = row_schema(plan.row_tokens)
        if first_rows is None:
            batches = _cut_rows(plan, start, stop, tally)
        else:
            batches = _rechunked(_packed_rows(plan, first_rows, start, stop, tally), BATCH_ROWS, schema)
        checks: list[np.ndarray] = []
        shard = write_arrow(path, schema, _checked(batches, checks), stage.folder)
        assert shard.rows == stop - start
        index = write_file(path.with_suffix(SUFFIX), index_of(path, shard.sha256, checks), stage.folder)
        result = {"shard": asdict(shard), "files": [asdict(index)], "used": tally.used.tolist(), "tokens": tally.tokens}
        stage.finish_task(f"shard-{name}", result)
    return result


def _checked(batches: Iterable[pa.RecordBatch], checks: list[np.ndarray]) -> Iterator[pa.RecordBatch]:
    """Pass on `batches`; the checksums of each are appended to `checks` while it is in memory."""
    from xlme_ds.data.shards import group_checks

    for batch in batches:
        checks.append(group_checks(batch))
        yield batch


def _cut_rows(plan: MixPlan, start: int, stop: int, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Rows [start, stop) of the order.

    A row is the token that opens an item, then a slice of a shard's token stream, then `</s>`. The slice loses a `</s>`
    at its start or end.
    """
    step = min(plan.order.block, max(_IDS_IN_MEMORY // plan.row_tokens // BATCH_ROWS, 1) * BATCH_ROWS)
    languages = np.array([index for (index,) in plan.group_languages])
    for first in range(start, stop, step):
        group, shards, example = plan.find(np.arange(first, min(first + step, stop)))
        rows, lengths = _cut_texts(plan, shards, example)
        tally.used += np.bincount(group, minlength=len(tally.used))
        tally.tokens += int((lengths + 2).sum())
        for begin in range(0, len(rows), BATCH_ROWS):
            part = slice(begin, begin + BATCH_ROWS)
            ones = np.ones(len(rows[part]), dtype=np.int64)  # an item of one side in each row
            yield _batch(rows[part], ones, lengths[part] + 2, ones, languages[group[part]])


def _cut_texts(plan: MixPlan, shards: np.ndarray, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [examples, R], and the number of ids of each row's text; the shards are read one after the other."""
    rows, lengths = np.empty((len(shards), plan.row_tokens), dtype=np.int32), np.empty(len(shards), dtype=np.int64)
    width = plan.row_tokens - 2
    for shard, at in plan.by_shard(shards):
        begin = plan.row_tokens * at + 1
        lengths[at] = shard.batches.copy_stream(examples[at] * width, width, rows.ravel(), begin)
    rows[:, 0], rows[:, -1] = plan.layout.opening, EOS
    shorter = (lengths < width) | (rows[:, 1] == EOS) | (rows[np.arange(len(rows)), lengths] == EOS)
    for i in np.flatnonzero(shorter).tolist():
        text = rows[i, 1 : 1 + lengths[i]].copy()
        text = text[int(text[0] == EOS) : len(text) - int(text[-1] == EOS)]
        if not len(text):
            raise ValueError(
                f"{plan.shards[int(shards[i])].batches.path} has a document without text: encode the data again"
            )
        lengths[i] = len(text)
        rows[i, 1:] = PAD
        rows[i, 1 : 1 + len(text)] = text
        rows[i, 1 + len(text)] = EOS
    return rows, lengths


def count_rows(plan: MixPlan, first: int, last: int) -> list[int]:
    """Number of rows that each of the windows [first, last) fills."""
    return [len(rows) for _, _, windows in _packed_windows(plan, first, last) for rows in windows]


def _packed_rows(
    plan: MixPlan, first_rows: np.ndarray, start: int, stop: int, tally: Tally
) -> Iterator[pa.RecordBatch]:
    """Rows [start, stop) of the packed windows; `first_rows` [windows + 1] counts the rows before each window."""
    first, last = int(np.searchsorted(first_rows, start, side="right")) - 1, int(np.searchsorted(first_rows, stop))
    for begin, items, windows in _packed_windows(plan, first, last):
        before = int(first_rows[begin])
        rows = list(chain.from_iterable(windows))[max(start - before, 0) : stop - before]
        used = np.concatenate(rows)
        tally.used += np.bincount(items.group[used], minlength=len(tally.used))
        tally.tokens += int(items.tokens[used].sum())
        yield _render(plan, items, rows)


def _packed_windows(plan: MixPlan, first: int, last: int) -> Iterator[tuple[int, SampledItems, list[list[np.ndarray]]]]:
    """Pack the windows [first, last), a part of them at a time: (number of its first window, its items, indices of the
    items in each row of each window).

    A part fits into memory and is at most a block of the order, whose ids are near one another in the files.
    """
    per_part = int(min(plan.order.block, _IDS_IN_MEMORY / plan.mean_tokens)) // WINDOW or 1
    key = key_of(plan.order.seed, plan.order.label, "rows")
    while first < last:
        stop = min(first - first % per_part + per_part, last)
        items = _find_items(plan, np.arange(first * WINDOW, min(stop * WINDOW, plan.order.total)))
        windows = []
        for number in range(first, stop):
            begin = (number - first) * WINDOW
            rows = pack_shuffled(items.tokens[begin : begin + WINDOW], plan.row_tokens, hashed(key, number))
            windows.append([begin + row for row in rows])
        yield first, items, windows
        first = stop


def _find_items(plan: MixPlan, slots: np.ndarray) -> SampledItems:
    """Look up where the items of these slots are in the encoded shards; their ids are not read."""
    group, shards, example = plan.find(slots)
    sides = np.array(plan.group_languages)[group]
    starts, lengths = np.empty((2, sides.shape[1], len(slots)), dtype=np.int64)
    for shard, at in plan.by_shard(shards):
        records, pieces = shard.locate(example[at])
        starts[:, at], lengths[:, at] = shard.batches.bounds(records)
        if len(starts) == 1:  # monolingual: one piece of a text, and the text's last id is `</s>`
            before = pieces * (plan.row_tokens - plan.specials)
            starts[0, at] += before
            lengths[0, at] = (lengths[0, at] - 1 - before).clip(max=plan.row_tokens - plan.specials)
    swapped = plan.order.swapped(slots) & (sides.shape[1] == 2)
    if plan.into is not None:
        swapped = np.where((sides == plan.into).any(1), sides[:, 0] == plan.into, swapped)
    starts[:, swapped], lengths[:, swapped] = starts[::-1, swapped], lengths[::-1, swapped]
    return SampledItems(group, shards, starts, lengths, swapped, lengths.sum(0) + plan.specials)


def _render(plan: MixPlan, sampled: SampledItems, rows: Sequence[np.ndarray]) -> pa.RecordBatch:
    """Read the items of these rows, and lay each out with its special tokens: by layout xlme a pair is
    `<s> e </s> f </s>`, a monolingual item `<s> x </s>`."""
    items = np.concatenate(rows)
    counts = np.array([len(row) for row in rows])
    lengths = sampled.tokens[items]
    first = sampled.lengths[0, items]
    ends = np.cumsum(lengths)
    row_ends = ends[np.cumsum(counts) - 1]
    padding = np.arange(len(rows)) * plan.row_tokens - np.concatenate([[0], row_ends[:-1]])  # of all rows before
    at = ends - lengths + np.repeat(padding, counts)
    flat = np.full(len(rows) * plan.row_tokens, PAD, dtype=np.int32)
    flat[at] = plan.layout.opening
    starts, side_lengths = sampled.starts[:, items], sampled.lengths[:, items]
    after_first = at + 1 + first
    if len(starts) == 2:
        for n, separator in enumerate(plan.layout.between):
            flat[after_first + n] = separator
    flat[at + lengths - 1] = EOS
    places = np.stack([at + 1, after_first + len(plan.layout.between)])[: len(starts)]
    for shard, of_shard in plan.by_shard(sampled.shard[items]):
        copy_words(
            shard.batches.path,
            starts[:, of_shard].ravel(),
            side_lengths[:, of_shard].ravel(),
            flat,
            places[:, of_shard].ravel(),
        )
    sides = np.array(plan.group_languages)[sampled.group[items]]
    sides[sampled.swapped[items]] = sides[sampled.swapped[items], ::-1]
    return _batch(flat.reshape(len(rows), -1), counts, lengths, len(starts) * counts, sides.ravel())


def _batch(
    rows: np.ndarray, items: np.ndarray, lengths: np.ndarray, sides: np.ndarray, languages: np.ndarray
) -> pa.RecordBatch:
    """A record batch of `rows` [B, R]. `items` [B] says how many of the flat `lengths` belong to each row, `sides` [B]
    how many of the flat `languages`."""
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    lists = [list_array((values.astype(np.int16), n)) for values, n in ((lengths, items), (languages, sides))]
    return pa.record_batch([tokens, *lists], schema=row_schema(rows.shape[1]))


def _rechunked(batches: Iterable[pa.RecordBatch], size: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Cut `batches` anew into batches of `size` rows, the last one shorter.

    A slice is copied, so that its buffers end with it. Without that, Arrow would pad the buffers in the file with
    whatever follows the slice in memory.
    """
    rest = pa.RecordBatch.from_pylist([], schema)
    for batch in batches:
        missing = size - rest.num_rows
        first = pa.concat_batches([rest, batch.slice(0, missing)])
        *whole, rest = [first, *(batch.slice(begin, size) for begin in range(missing, batch.num_rows, size))]
        yield from (pa.concat_batches([part]) for part in whole)
    if rest.num_rows:
        yield pa.concat_batches([rest])
