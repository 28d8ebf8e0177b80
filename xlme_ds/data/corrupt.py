"""The masked positions and the uniforms that drive the sampling: a pure function of (seed, task, row number).

Counter-based randomness (Philox4x32-10; Salmon et al. 2011), evaluated for every token from its own counter, so that
the corruption of a row is the same on any rank, at any time and in any batch. B rows, T tokens, M masked
positions.
"""

import numpy as np
from numba import njit
from numba.types import float32, float64, int32, int64, uint64

from .compiled import compiled, reads
from .rows import EOS, TASKS, UNK, Rows

Array = np.ndarray
Word = np.uint64
# For every task: its index, its rows, and their row numbers (int64 [B]; see `order.py`).
TaskRows = list[tuple[int, Rows, np.ndarray]]
TOO_LONG = "the items of a row are empty or longer than the row: mix the data again"
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_TO_24_BITS = np.uint64(8)
_MONO = TASKS.index("mono")
# A token's bucket is the top 7 bits of word 0, the leading bits of its key; special tokens are in bucket 128.
_TO_BUCKET, _SPECIAL_BUCKET = np.uint64(32 - 7), np.uint64(1 << 7)


@njit(inline="always")
def philox(c0: Word, c1: Word, c2: Word, c3: Word, seed: Word) -> tuple[Word, Word, Word, Word]:
    """Four random 32-bit words from a counter of four; the key is `seed`'s low and high half. All are uint64."""
    k0, k1 = seed & _LOW, seed >> _HALF
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


@njit(inline="always")
def masked_count(ordinary: int, fraction: float) -> int:
    """Positions to mask in an item with n `ordinary` tokens: max(1, round(fraction · n)), at most n."""
    return min(max(1, int(np.floor(fraction * ordinary + 0.5))), ordinary)


@njit
def _choose(
    keys_T: Array, buckets_T: Array, start: int, stop: int, fraction: float, counts: Array, chosen: Array, done: int
) -> int:
    """Write the columns to mask of the item [start, stop) to chosen[done:], ascending, and return where they end.

    Tokens are counted by bucket. All tokens of the lowest buckets are chosen until there are enough; then the surplus
    tokens, those with the largest keys, are removed.
    """
    counts[:] = 0
    for column in range(start, stop):
        counts[buckets_T[column]] += 1
    count = masked_count(stop - start - counts[_SPECIAL_BUCKET], fraction)
    bound, reached = 0, 0
    while reached < count:
        reached += counts[bound]
        bound += 1
    first = done
    for column in range(start, stop):
        chosen[done] = column  # overwritten if not chosen; a branch would be mispredicted
        done += buckets_T[column] < bound
    for _ in range(reached - count):
        last, largest = first, np.uint64(0)
        for at in range(first, done):
            later = keys_T[chosen[at]] >= largest
            last = at if later else last
            largest = keys_T[chosen[at]] if later else largest
        done -= 1
        for at in range(last, done):
            chosen[at] = chosen[at + 1]
    return done


@compiled(
    int64(
        *(reads(int32, 2), reads(int64), reads(int64), reads(int64), uint64, uint64, float64),
        *(int64, int64[::1], float32[::1], int64),
    )
)
def _corrupt(
    tokens_BT: Array,
    items_B: Array,
    lengths: Array,
    numbers_B: Array,
    seed: Word,
    task: Word,
    fraction: float,
    first_row: int,
    masked: Array,
    uniforms: Array,
    done: int,
) -> int:
    """Write the masked positions and their uniforms to masked[done:] and uniforms[done:], and return where they end.

    Both arrays are one longer than the tokens. `first_row`: index of the first row in the batch.
    """
    batch, width = tokens_BT.shape
    keys_T, draws_T = np.empty(width, dtype=np.uint64), np.empty(width, dtype=np.uint64)
    buckets_T, counts = np.empty(width, dtype=np.uint8), np.empty(_SPECIAL_BUCKET + 1, dtype=np.int64)
    item = 0
    for row in range(batch):
        number = np.uint64(numbers_B[row])
        for column in range(width):
            first, second, third, _ = philox(np.uint64(column), task, number & _LOW, number >> _HALF, seed)
            keys_T[column] = first << _HALF | second
            draws_T[column] = third
            buckets_T[column] = first >> _TO_BUCKET if tokens_BT[row, column] > UNK else _SPECIAL_BUCKET
        start, before = 0, done
        for _ in range(items_B[row]):
            stop = start + lengths[item]
            if not start < stop <= width:
                raise ValueError(TOO_LONG)
            if fraction == 1.0:  # the last </s> of monolingual text is where the row was cut, not a sentence's end
                for column in range(start + 1, stop - (task == _MONO)):
                    if tokens_BT[row, column] == EOS:
                        buckets_T[column] = keys_T[column] >> (_HALF + _TO_BUCKET)
            done = _choose(keys_T, buckets_T, start, stop, fraction, counts, masked, done)
            start = stop
            item += 1
        for at in range(before, done):
            uniforms[at] = np.float32(draws_T[masked[at]] >> _TO_24_BITS) * np.float32(2.0**-24)
            masked[at] += (first_row + row) * width
    return done


@compiled(uint64[::1](reads(int64), uint64, uint64, uint64))
def _row_bits(numbers_B: Array, seed: Word, task: Word, column: Word) -> Array:
    bits_B = np.empty(len(numbers_B), dtype=np.uint64)
    for row in range(len(numbers_B)):
        number = np.uint64(numbers_B[row])
        low, high, _, _ = philox(column, task, number & _LOW, number >> _HALF, seed)
        bits_B[row] = high << _HALF | low
    return bits_B


def corrupt(parts: TaskRows, seed: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Masked positions (ascending flat indices, int64 [M]) and their uniforms (float32 [M] in [0, 1)) of the rows of
    all parts.

    Of each item, max(1, round(fraction · n)) of its n ordinary tokens are chosen without replacement, every set equally
    likely (XLM-E section 3.1: uniform masking): those with the smallest keys of 64 random bits, ties by position. A
    fraction of 1, for causal models, also chooses every `</s>` of an item except the one that opens it and the last of
    monolingual text. Raises ValueError for items that are empty, or longer than their row.
    """
    positions = sum(rows.tokens.size for _, rows, _ in parts)
    masked, uniforms = np.empty(positions + 1, dtype=np.int64), np.empty(positions + 1, dtype=np.float32)
    first, done = 0, 0
    for task, rows, numbers in parts:
        done = _corrupt(*rows[:3], numbers, _unsigned(seed), np.uint64(task), fraction, first, masked, uniforms, done)
        first += len(rows.tokens)
    return masked[:done].copy(), uniforms[:done].copy()


def row_bits(numbers: np.ndarray, seed: int, task: int, column: int) -> np.ndarray:
    """64 random bits for every row, uint64 [B]: words 0 (low) and 1 (high) of the counter of one column."""
    return _row_bits(numbers, _unsigned(seed), np.uint64(task), np.uint64(column))


def _unsigned(seed: int) -> np.uint64:
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
