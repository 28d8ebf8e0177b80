"""Makes training rows from encoded shards: chooses the number of sampled examples, and writes any shard of rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.encode.token_ids import list_array
from data_prep.mix.encoded import EncodedShard, copy_words, run_starts
from data_prep.sampling import Integers, SampledOrder, derive_key, keyed_hash, permute
from data_prep.shares import Sampling, apportion
from data_prep.store import Stage, write_arrow, write_file
from xlme_ds.data.schema import EOS, PAD, Layout, row_schema

BATCH_ROWS = 1024  # rows per record batch of a shard
WINDOW_SLOTS = 8192  # number of consecutive slots whose items are packed into rows together
_WINDOWS_PER_TASK = 64  # windows whose rows one task counts
_MAX_ROUNDS = 20  # rounds of refining the number of sampled examples
_IDS_IN_MEMORY = 1 << 25  # most ids that are read at once (128 MiB)


@dataclass(frozen=True)
class MixPlan:
    """The sampled order of a task's examples, and the shards that they are in.

    A group is a language or a pair of languages. `language_indices` has the language indices of each group, and
    `tokens` the number of tokens of all its examples. `mean_tokens` is the mean number of tokens of an example, over
    all groups. `shards` are sorted by group, then by name.
    """

    row_tokens: int
    layout: Layout
    language_indices: tuple[tuple[int, ...], ...]
    shards: tuple[EncodedShard, ...]
    tokens: tuple[int, ...]
    mean_tokens: float
    order: SampledOrder
    sampling: Sampling
    into: int | None  # index of a language: it becomes the second side of every pair that has it

    @property
    def specials(self) -> int:
        """The number of special tokens of an item."""
        return self.layout.pair_specials if len(self.language_indices[0]) == 2 else 2

    def locate(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Locate the example of each slot. Returns (index of its group, index of its shard, index of the example in
        the shard), int64 [slots] each."""
        groups, examples_in_group = self.order.locate(slots)
        examples = run_starts(np.array(self.order.examples))[groups] + examples_in_group  # among all groups' examples
        examples_before = np.cumsum([0, *(shard.examples for shard in self.shards)])  # in the shards before each shard
        shards = np.searchsorted(examples_before, examples, side="right") - 1
        return groups, shards, examples - examples_before[shards]

    def by_shard(self, shard_indices: np.ndarray) -> Iterator[tuple[EncodedShard, np.ndarray]]:
        """Group examples by shard; `shard_indices` has the index of each example's shard. Yields (shard, positions in
        `shard_indices` of the shard's examples)."""
        sorted_positions = np.argsort(shard_indices, kind="stable")
        next_shards = np.flatnonzero(np.diff(shard_indices[sorted_positions])) + 1  # where another shard begins
        for positions in np.split(sorted_positions, next_shards):
            yield self.shards[int(shard_indices[positions[0]])], positions


class SampledItems(NamedTuple):
    """Where the ids of sampled items are. `groups` and `shards` are the indices of each item's group and shard.

    `starts` and `lengths` are [sides, items]: one side, or the two sides of pairs in their order in the row. `starts`
    are positions in the shard's file, in int32 words; `lengths` are numbers of ids. `languages` [items, sides] has the
    language index of each side. `tokens` is the number of tokens of each item, special tokens included.
    """

    groups: np.ndarray
    shards: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    languages: np.ndarray
    tokens: np.ndarray


def with_total(plan: MixPlan, total: int) -> MixPlan:
    """A copy of `plan` with `total` sampled examples. Raises ValueError if a bound on repeats makes that impossible."""
    shares = plan.sampling.shares(plan.order.names, plan.order.examples, total)
    return replace(plan, order=replace(plan.order, quotas=tuple(apportion(total, shares))))


def with_enough_examples(plan: MixPlan, rows: int) -> MixPlan:
    """Returns a copy of the plan whose sampled examples, at their mean length, fill `rows` rows without gaps.

    Raises ValueError if --max-repeats allows too few examples.
    """
    order = plan.order
    shares = plan.sampling.shares(order.names, order.examples)
    # (index, number of tokens, number of examples) of each group that is sampled: `--share` may give a group 0
    groups = [(j, plan.tokens[j], examples) for j, examples in enumerate(order.examples) if shares[j]]
    limits = plan.sampling.limits(order.examples)  # the most examples that may be sampled from each group
    if limits is not None:
        possible_rows = sum(limits[j] * tokens // examples for j, tokens, examples in groups) // plan.row_tokens
        if possible_rows < rows:
            raise ValueError(
                f"--{order.task}-rows is {rows:,}, but with --max-repeats {plan.sampling.max_repeats:g} the "
                f"{'pairs' if order.task == 'para' else 'texts'} fill {possible_rows:,} rows without gaps: raise "
                "--max-repeats, or ask for fewer rows"
            )
    # With limits, the shares depend on the total, and the total on the shares. Repeat until the total stays the same.
    total = 0
    for _ in range(_MAX_ROUNDS):
        mean_tokens = sum(float(shares[j]) * tokens / examples for j, tokens, examples in groups)
        # Nearly always enough: packing leaves gaps, so these examples take more than `rows` rows.
        previous, total = total, int(rows * plan.row_tokens / mean_tokens) + 1
        total = min(total, sum(limits[j] for j, _, _ in groups)) if limits is not None else total
        if total == previous:
            break
        shares = plan.sampling.shares(order.names, order.examples, total)
    return with_total(plan, total)


def increase_total(stage: Stage, plan: MixPlan, rows: int, processes: int) -> tuple[MixPlan, np.ndarray]:
    """Increase the plan's total until its examples pack into at least `rows` rows.

    Returns (plan, rows_before). `rows_before` has the number of rows before each window, int64 [windows + 1]. Raises
    ValueError if --max-repeats allows too few examples.
    """
    while True:
        total = plan.order.total
        windows = -(-total // WINDOW_SLOTS)
        firsts = range(0, windows, _WINDOWS_PER_TASK)
        tasks = {f"windows-{total}-{first}": (first, min(first + _WINDOWS_PER_TASK, windows)) for first in firsts}
        sizes = [end - first for first, end in tasks.values()]
        results = stage.run_unfinished(partial(_count_rows, plan), tasks, sizes, processes, f"pack {plan.order.task}")
        rows_before = np.cumsum([0] + [window_rows for result in results for window_rows in result["rows"]])
        if rows_before[-1] >= rows:
            return plan, rows_before
        # Multiply the total by the ratio of the rows wanted to the rows made, and add 0.2%, so that one more round is
        # nearly always enough.
        try:
            plan = with_total(plan, int(total * 1.002 * rows / max(int(rows_before[-1]), 1)) + 1)
        except ValueError:  # more than --max-repeats allows: the folder must accept other settings
            stage.forget_settings()
            raise


def _count_rows(plan: MixPlan, windows: tuple[int, int]) -> dict[str, Any]:
    """Count the rows of each of the `windows` [first, end)."""
    return {"rows": [len(rows) for _, _, packed in packed_windows(plan, *windows) for rows in packed]}


def write_shard(stage: Stage, plan: MixPlan, rows_before: np.ndarray | None, shard_number: int) -> dict[str, Any]:
    """Write a shard of rows, and the shard's index. Returns the result that `stage` stores.

    `rows_before` [windows + 1] has the number of rows before each window; it is None if rows are cut, not packed.
    """
    from xlme_ds.data.shards import INDEX_SUFFIX, group_checksums, index_bytes  # imported late: it loads numba

    path = stage.folder / f"{shard_number:05d}.arrow"
    start = shard_number * stage.settings["rows_per_shard"]
    stop = min(start + stage.settings["rows_per_shard"], stage.settings["rows"])
    used = np.zeros(len(plan.order.names), dtype=np.int64)  # number of examples of each group, which the batches add
    schema = row_schema(plan.row_tokens)
    if rows_before is None:
        batches = _cut_rows(plan, start, stop, used)
    else:
        batches = _rechunked(_packed_rows(plan, rows_before, start, stop, used), BATCH_ROWS, schema)
    checksums: list[np.ndarray] = []
    tokens: list[int] = []  # of each batch, without padding

    def counted() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            checksums.append(group_checksums(batch))
            tokens.append(int(batch.column("lengths").flatten().to_numpy().sum(dtype=np.int64)))
            yield batch

    shard = write_arrow(path, schema, counted(), stage.folder)
    assert shard.rows == stop - start
    index = write_file(path.with_suffix(INDEX_SUFFIX), index_bytes(path, shard.sha256, checksums), stage.folder)
    return {"shard": asdict(shard), "files": [asdict(index)], "used": used.tolist(), "tokens": sum(tokens)}


def _cut_rows(plan: MixPlan, start: int, stop: int, used: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the slots [start, stop) as record batches, and add the number of rows of each group to `used`.

    A row is the layout's opening token, a slice of a shard's token stream, and `</s>`; a `</s>` that begins or ends the
    slice is left out.
    """
    batches_in_memory = max(_IDS_IN_MEMORY // (plan.row_tokens * BATCH_ROWS), 1)
    rows_at_once = min(plan.order.block_slots, batches_in_memory * BATCH_ROWS)
    languages = np.array([index for (index,) in plan.language_indices])
    for first in range(start, stop, rows_at_once):
        groups, shards, examples = plan.locate(np.arange(first, min(first + rows_at_once, stop)))
        ids, lengths = _cut_texts(plan, shards, examples)
        used += np.bincount(groups, minlength=len(used))
        for begin in range(0, len(ids), BATCH_ROWS):
            part = slice(begin, begin + BATCH_ROWS)
            ones = np.ones(len(ids[part]), dtype=np.int64)  # each row has one item of one side
            yield _batch(ids[part], ones, lengths[part] + 2, ones, languages[groups[part]])


def _cut_texts(plan: MixPlan, shards: np.ndarray, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read the slice of each example. Returns (the ids of its row, int32 [examples, row tokens]; the number of ids of
    the row's text, int64 [examples]).

    `shards` has the index of each example's shard, and `examples` the example's index in that shard.
    """
    ids = np.empty((len(shards), plan.row_tokens), dtype=np.int32)
    lengths = np.empty(len(shards), dtype=np.int64)
    width = plan.row_tokens - 2
    for shard, indices in plan.by_shard(shards):
        text_starts = plan.row_tokens * indices + 1  # indices in the flattened ids
        lengths[indices] = shard.batch_index.copy_stream(examples[indices] * width, width, ids.ravel(), text_starts)
    ids[:, 0], ids[:, -1] = plan.layout.opening, EOS
    first_ids, last_ids = ids[:, 1], ids[np.arange(len(ids)), lengths]  # of each text, which begins in column 1
    is_shorter = (lengths < width) | (first_ids == EOS) | (last_ids == EOS)
    for i in np.flatnonzero(is_shorter).tolist():
        text = ids[i, 1 : 1 + lengths[i]].copy()
        text = text[int(text[0] == EOS) : len(text) - int(text[-1] == EOS)]
        if not len(text):
            path = plan.shards[int(shards[i])].batch_index.path
            raise ValueError(f"{path} has a document without text: encode the data again")
        lengths[i] = len(text)
        ids[i, 1:] = PAD
        ids[i, 1 : 1 + len(text)] = text
        ids[i, 1 + len(text)] = EOS
    return ids, lengths


def _packed_rows(
    plan: MixPlan, rows_before: np.ndarray, start: int, stop: int, used: np.ndarray
) -> Iterator[pa.RecordBatch]:
    """Yield rows [start, stop) of the packed windows as record batches, and add the number of items of each group to
    `used`."""
    first_window = int(np.searchsorted(rows_before, start, side="right")) - 1
    end_window = int(np.searchsorted(rows_before, stop))
    for window, sampled, packed in packed_windows(plan, first_window, end_window):
        before = int(rows_before[window])
        rows = list(chain.from_iterable(packed))[max(start - before, 0) : stop - before]
        used += np.bincount(sampled.groups[np.concatenate(rows)], minlength=len(used))
        yield _assemble_rows(plan, sampled, rows)


def packed_windows(plan: MixPlan, first: int, end: int) -> Iterator[tuple[int, SampledItems, list[list[np.ndarray]]]]:
    """Pack the items of each of the windows [first, end) into rows, a chunk of consecutive windows at a time.

    Yields (the index of the chunk's first window, the chunk's items, the rows of each window of the chunk). A row is an
    array of the indices of its items in the chunk. A chunk has about `_IDS_IN_MEMORY` ids at most. Its items come from
    one or two blocks of the order, so their ids are near one another in the files.
    """
    windows_at_once = int(min(plan.order.block_slots, _IDS_IN_MEMORY / plan.mean_tokens)) // WINDOW_SLOTS or 1
    key = derive_key(plan.order.seed, plan.order.task, "rows")
    while first < end:
        # A chunk ends at a multiple of `windows_at_once`. If that many windows are a block, the chunk is in one block.
        stop = min(first - first % windows_at_once + windows_at_once, end)
        sampled = _locate_items(plan, np.arange(first * WINDOW_SLOTS, min(stop * WINDOW_SLOTS, plan.order.total)))
        packed = []
        for window in range(first, stop):
            begin = (window - first) * WINDOW_SLOTS
            rows = pack_shuffled(sampled.tokens[begin : begin + WINDOW_SLOTS], plan.row_tokens, keyed_hash(key, window))
            packed.append([begin + row for row in rows])
        yield first, sampled, packed
        first = stop


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items of these lengths into bins of `capacity`. Returns (bin of each item, int64 [items]; number of bins).

    Best-fit decreasing: the items are packed from long to short, each into the fullest bin in which it fits. There is a
    list of open bins for each amount of room that is left in them, and the bits of one big integer mark the lists that
    are not empty. So an item takes a few operations, however many bins there are.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    assert order.size == 0 or (lengths[order[-1]] > 0 and lengths[order[0]] <= capacity)
    bins_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms = 0  # bit r is set while a bin with room r is open
    bins = 0
    bin_of_sorted_item = []  # from the longest item to the shortest
    for length in lengths[order].tolist():
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the fullest bin that fits
            same_room = bins_by_room[room]
            item_bin = same_room.pop()
            if not same_room:
                open_rooms ^= 1 << room
        else:
            room, item_bin = capacity, bins
            bins += 1
        bin_of_sorted_item.append(item_bin)
        room -= length
        if room:  # a full bin is never open
            bins_by_room[room].append(item_bin)
            open_rooms |= 1 << room
    bin_of_item = np.empty(order.size, dtype=np.int64)
    bin_of_item[order] = bin_of_sorted_item
    return bin_of_item, bins


def pack_shuffled(lengths: np.ndarray, capacity: int, key: Integers) -> list[np.ndarray]:
    """Pack items of these lengths into rows; returns the indices of the items in each row.

    The rows are shuffled by `key`, because packing puts the longest items into the first rows.
    """
    row_of_item, rows = pack(lengths, capacity)
    row_of_item = permute(row_of_item, max(rows, 1), key)
    items = np.argsort(row_of_item, kind="stable")
    return np.split(items, np.searchsorted(row_of_item[items], np.arange(1, rows)))


def _locate_items(plan: MixPlan, slots: np.ndarray) -> SampledItems:
    """Find where the items of these slots are in the encoded shards, without reading their ids."""
    groups, shards, examples = plan.locate(slots)
    languages = np.array(plan.language_indices)[groups]  # [items, sides]
    starts, lengths = np.empty((2, languages.shape[1], len(slots)), dtype=np.int64)
    for shard, indices in plan.by_shard(shards):
        records, pieces = shard.locate(examples[indices])
        starts[:, indices], lengths[:, indices] = shard.batch_index.id_ranges(records)
        if len(starts) == 1:  # monolingual: an item is a piece of a record, without the `</s>` that ends the record
            room = plan.row_tokens - plan.specials
            starts[0, indices] += pieces * room
            lengths[0, indices] = (lengths[0, indices] - 1 - pieces * room).clip(max=room)
    swapped = plan.order.swapped(slots)  # has no effect on the single side of monolingual items
    if plan.into is not None:  # a pair with this language has it as its second side
        swapped = np.where((languages == plan.into).any(1), languages[:, 0] == plan.into, swapped)
    starts[:, swapped], lengths[:, swapped] = starts[::-1, swapped], lengths[::-1, swapped]
    languages[swapped] = languages[swapped, ::-1]
    return SampledItems(groups, shards, starts, lengths, languages, lengths.sum(0) + plan.specials)


def _assemble_rows(plan: MixPlan, sampled: SampledItems, rows: Sequence[np.ndarray]) -> pa.RecordBatch:
    """Read the ids of the rows' items, and put the layout's special tokens around the sides of each item. A row is an
    array of the indices of its items in `sampled`.

    In the layout xlme a pair is `<s> e </s> f </s>`, and a monolingual item is `<s> x </s>`.
    """
    items = np.concatenate(rows)
    item_counts = np.array([len(row) for row in rows])
    lengths = sampled.tokens[items]
    # An item's position in the flat rows = its position without padding + the padding of all rows before.
    unpadded = run_starts(lengths)
    padding_before = np.arange(len(rows)) * plan.row_tokens - unpadded[run_starts(item_counts)]
    item_starts = unpadded + np.repeat(padding_before, item_counts)
    side_starts, side_lengths = sampled.starts[:, items], sampled.lengths[:, items]
    separator_starts = item_starts + 1 + side_lengths[0]
    flat = np.full(len(rows) * plan.row_tokens, PAD, dtype=np.int32)
    flat[item_starts] = plan.layout.opening
    if len(side_starts) == 2:
        for offset, separator in enumerate(plan.layout.between):
            flat[separator_starts + offset] = separator
    flat[item_starts + lengths - 1] = EOS
    target_starts = np.stack([item_starts + 1, separator_starts + len(plan.layout.between)])[: len(side_starts)]
    for shard, indices in plan.by_shard(sampled.shards[items]):
        starts, id_counts = side_starts[:, indices].ravel(), side_lengths[:, indices].ravel()
        copy_words(shard.batch_index.path, starts, id_counts, flat, target_starts[:, indices].ravel())
    languages = sampled.languages[items].ravel()
    return _batch(flat.reshape(len(rows), -1), item_counts, lengths, len(side_starts) * item_counts, languages)


def _batch(
    ids: np.ndarray, item_counts: np.ndarray, lengths: np.ndarray, side_counts: np.ndarray, languages: np.ndarray
) -> pa.RecordBatch:
    """A record batch of rows; `ids` is [rows, row tokens]. `lengths` and `languages` are flat: row after row, with
    `item_counts[i]` lengths and `side_counts[i]` languages for row i."""
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), ids.shape[1])
    lengths_column = list_array((lengths.astype(np.int16), item_counts))
    languages_column = list_array((languages.astype(np.int16), side_counts))
    return pa.record_batch([tokens, lengths_column, languages_column], schema=row_schema(ids.shape[1]))


def _rechunked(batches: Iterable[pa.RecordBatch], size: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Cut `batches` anew into batches of `size` rows; the last one may be shorter.

    `concat_batches` of a single slice copies it, so that the copy's buffers hold nothing else. Without the copy, Arrow
    would pad the buffers in the file with whatever follows the slice in memory.
    """
    rest = pa.RecordBatch.from_pylist([], schema)
    for batch in batches:
        missing = size - rest.num_rows
        first = pa.concat_batches([rest, batch.slice(0, missing)])
        *full, rest = [first, *(batch.slice(begin, size) for begin in range(missing, batch.num_rows, size))]
        yield from (pa.concat_batches([part]) for part in full)
    if rest.num_rows:
        yield pa.concat_batches([rest])
