"""Draws the masked positions of rows, and for each masked position a uniform: the random number in [0, 1) with which
the generator samples a token there. Given a row and the share to mask, both depend on (seed, task, row number)
alone.

The random numbers are counter-based (Philox4x32-10; Salmon et al. 2011). Every token has a counter of its own, so a row
gets the same masks and uniforms on any rank, at any time and in any batch. B rows, T tokens, M masked positions.
"""

import numpy as np
from numba import njit
from numba.types import float32, float64, int32, int64, uint64

from .compiled import HALF, LOW, Array, compiled, readonly
from .rows import EOS, TASKS, UNK, Rows

Word = np.uint64  # holds one of Philox's words of 32 bits, or 64 bits (a seed, a key)
# One entry per task: the task's index, its rows, and their row numbers (int64 [B]; see `order.py`).
TaskRows = list[tuple[int, Rows, np.ndarray]]
TOO_LONG = "the items of a row are empty or longer than the row: mix the data again"
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # Philox multiplies the counter by these in each round
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # Philox adds these to the key in each round
_TO_24_BITS = np.uint64(8)  # a shift to the right by this leaves the top 24 of 32 bits
_MONO = TASKS.index("mono")
# A token's key is 64 random bits, and its bucket is the top 7 of them. Special tokens are in bucket 128.
_TO_BUCKET, _SPECIAL_BUCKET = np.uint64(32 - 7), np.uint64(1 << 7)


@njit(inline="always")
def philox(c0: Word, c1: Word, c2: Word, c3: Word, seed: Word) -> tuple[Word, Word, Word, Word]:
    """Returns four random words for the counter (c0, c1, c2, c3); the key is the 64 bits of `seed`. Words and counters
    have 32 bits each, in uint64."""
    k0, k1 = seed & LOW, seed >> HALF
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + _WEYL[0]) & LOW, (k1 + _WEYL[1]) & LOW
    return c0, c1, c2, c3


@njit(inline="always")
def masked_count(ordinary: int, fraction: float) -> int:
    """The number of positions to mask in an item with n = `ordinary` ordinary tokens: max(1, round(fraction · n)), at
    most n."""
    return min(max(1, int(np.floor(fraction * ordinary + 0.5))), ordinary)


@njit
def _choose(
    keys_T: Array, buckets_T: Array, start: int, stop: int, fraction: float, sizes: Array, chosen: Array, end: int
) -> int:
    """Choose the columns to mask among the columns [start, stop) of an item, and write them to `chosen`, ascending,
    from index `end` on. Returns the index after the last chosen column.

    The masked tokens are those with the smallest keys. First all tokens of buckets 0 … b − 1 are chosen, with the
    smallest b that gives enough tokens. Then the chosen tokens with the largest keys are removed until the count is
    right. `sizes`: a buffer for the number of tokens in each bucket.
    """
    sizes[:] = 0
    for column in range(start, stop):
        sizes[buckets_T[column]] += 1
    count = masked_count(stop - start - sizes[_SPECIAL_BUCKET], fraction)
    buckets, available = 0, 0
    while available < count:
        available += sizes[buckets]
        buckets += 1
    begin = end
    for column in range(start, stop):
        chosen[end] = column  # overwritten if the column is not chosen; an `if` would be slower: it is unpredictable
        end += buckets_T[column] < buckets
    for _ in range(available - count):
        surplus, largest = begin, np.uint64(0)
        for index in range(begin, end):
            larger = keys_T[chosen[index]] >= largest
            surplus = index if larger else surplus
            largest = keys_T[chosen[index]] if larger else largest
        end -= 1
        for index in range(surplus, end):
            chosen[index] = chosen[index + 1]
    return end


@compiled(
    int64(
        *(readonly(int32, 2), readonly(int64), readonly(int64), readonly(int64), uint64, uint64, float64),
        *(int64, int64[::1], float32[::1], int64),
    )
)
def _draw_masks(
    tokens_BT: Array,
    item_counts_B: Array,
    lengths: Array,
    row_numbers_B: Array,
    seed: Word,
    task: Word,
    fraction: float,
    first_row: int,
    masked: Array,
    uniforms: Array,
    end: int,
) -> int:
    """Write the masked positions of the rows of one task, and their uniforms, to `masked` and `uniforms` from index
    `end` on. Returns the index after the last position written.

    `first_row`: index in the batch of the task's first row. `masked` and `uniforms` have one element more than the
    batch has tokens, because `_choose` may write one more column, not chosen, after the last chosen one.
    """
    batch, width = tokens_BT.shape
    keys_T, draws_T = np.empty(width, dtype=np.uint64), np.empty(width, dtype=np.uint64)
    buckets_T, sizes = np.empty(width, dtype=np.uint8), np.empty(_SPECIAL_BUCKET + 1, dtype=np.int64)
    item = 0
    for row in range(batch):
        row_number = np.uint64(row_numbers_B[row])
        for column in range(width):
            word0, word1, word2, _ = philox(np.uint64(column), task, row_number & LOW, row_number >> HALF, seed)
            keys_T[column] = word0 << HALF | word1
            draws_T[column] = word2  # gives the uniform
            buckets_T[column] = word0 >> _TO_BUCKET if tokens_BT[row, column] > UNK else _SPECIAL_BUCKET
        start, begin = 0, end
        for _ in range(item_counts_B[row]):
            stop = start + lengths[item]
            if not start < stop <= width:
                raise ValueError(TOO_LONG)
            # The fraction 1 is for causal models, which also predict </s>: a </s> gets an ordinary bucket, so that it
            # is chosen. Two are not chosen: a </s> that opens the item, and the last </s> of a monolingual item. This
            # last one may mark where the text was cut, and not the end of a sentence.
            if fraction == 1.0:
                for column in range(start + 1, stop - (task == _MONO)):
                    if tokens_BT[row, column] == EOS:
                        buckets_T[column] = keys_T[column] >> (HALF + _TO_BUCKET)
            end = _choose(keys_T, buckets_T, start, stop, fraction, sizes, masked, end)
            start = stop
            item += 1
        for index in range(begin, end):
            uniforms[index] = np.float32(draws_T[masked[index]] >> _TO_24_BITS) * np.float32(2.0**-24)
            masked[index] += (first_row + row) * width  # a column becomes an index into the flattened tokens
    return end


@compiled(uint64[::1](readonly(int64), uint64, uint64, uint64))
def _row_bits(row_numbers_B: Array, seed: Word, task: Word, column: Word) -> Array:
    bits_B = np.empty(len(row_numbers_B), dtype=np.uint64)
    for row in range(len(row_numbers_B)):
        row_number = np.uint64(row_numbers_B[row])
        low, high, _, _ = philox(column, task, row_number & LOW, row_number >> HALF, seed)
        bits_B[row] = high << HALF | low
    return bits_B


def draw_masks(task_rows: TaskRows, seed: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (masked, uniforms): the masked positions, as ascending indices into the batch's flattened tokens, int64
    [M], and their uniforms, float32 [M] in [0, 1).

    An item with n ordinary tokens gets max(1, round(fraction · n)) masked positions, but at most n. All sets of this
    many ordinary tokens are equally likely (XLM-E section 3.1: uniform masking), because every token has a key of 64
    random bits and the tokens with the smallest keys are masked; of equal keys the earlier one counts as smaller. A
    fraction of 1, for causal models, also masks each `</s>`, except a `</s>` that opens an item and the last `</s>` of
    a monolingual item. Raises ValueError for items that are empty, or longer than their row.
    """
    positions = sum(rows.tokens.size for _, rows, _ in task_rows)
    masked, uniforms = np.empty(positions + 1, dtype=np.int64), np.empty(positions + 1, dtype=np.float32)
    row, end = 0, 0
    for task, rows, row_numbers in task_rows:
        arrays = rows.tokens, rows.item_counts, rows.lengths, row_numbers
        end = _draw_masks(*arrays, _unsigned(seed), np.uint64(task), fraction, row, masked, uniforms, end)
        row += len(rows.tokens)
    return masked[:end].copy(), uniforms[:end].copy()


def row_bits(row_numbers: np.ndarray, seed: int, task: int, column: int) -> np.ndarray:
    """64 random bits for every row, uint64 [B]: word 1 (high half) and word 0 (low half) of `philox` for the counter of
    the token in `column` of the row."""
    return _row_bits(row_numbers, _unsigned(seed), np.uint64(task), np.uint64(column))


def _unsigned(seed: int) -> np.uint64:
    """The lowest 64 bits of the seed, which may be negative."""
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
