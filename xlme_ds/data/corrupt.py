"""Which positions are masked and which uniforms drive the sampling: a pure function of (seed, task, row number).

Counter-based randomness (Philox4x32-10; Salmon et al. 2011), evaluated for every token from its own counter, so that the
corruption of a row is the same wherever, whenever and beside whatever it is computed. B rows, T tokens.
"""

import numpy as np

from .rows import UNK

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_BLOCK = 32  # rows: what is computed for them stays in the processor's cache

Word = np.ndarray | np.uint64
Key = tuple[int, int]


def philox(counter: tuple[Word, Word, Word, Word], key: Key) -> list[np.ndarray]:
    """Four 32-bit words (in uint64 arrays) for every counter of four 32-bit words; broadcasts."""
    words = [np.asarray(word, dtype=np.uint64) for word in counter]
    for keys in _keys(key):
        words = _round(words, keys)
    return words


def _keys(key: Key) -> np.ndarray:
    """The two words of every round's key, [rounds, 2]."""
    return (np.array(key, dtype=np.uint64) + np.arange(_ROUNDS, dtype=np.uint64)[:, None] * _WEYL) & _LOW


def _round(words: list[np.ndarray], keys: np.ndarray) -> list[np.ndarray]:
    c0, c1, c2, c3 = words
    p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
    return [(p1 >> _SHIFT) ^ (c1 ^ keys[0]), p1 & _LOW, (p0 >> _SHIFT) ^ (c3 ^ keys[1]), p0 & _LOW]


class _Grid:
    """The same for every column of B rows: words 0 and 1, uint64 [B, T], and word 2 where it is asked for."""

    def __init__(self, width: int, task: np.ndarray, numbers: np.ndarray, key: Key):
        keys = _keys(key)
        columns = np.arange(width, dtype=np.uint64)
        words = [columns[None], task[:, None], numbers[:, None] & _LOW, numbers[:, None] >> _SHIFT]
        for two in keys[:2]:  # operands of one value a row, or one a column, for the most part
            words = _round(words, two)
        even, odd, product = (np.empty((2, len(numbers), width), dtype=np.uint64) for _ in range(3))
        even[0], odd[0], even[1], odd[1] = words
        crossed, multipliers = product[::-1], _MULTIPLIERS[:, None, None]
        for two in keys[2:-1, :, None, None]:  # as _round, in place
            np.multiply(even, multipliers, out=product)
            np.bitwise_xor(odd, two, out=odd)
            np.right_shift(crossed, _SHIFT, out=even)
            np.bitwise_xor(even, odd, out=even)
            np.bitwise_and(crossed, _LOW, out=odd)
        last = np.multiply(even[1], _MULTIPLIERS[1], out=product[0])
        self.word0, self.word1 = (last >> _SHIFT) ^ (odd[0] ^ keys[-1, 0]), last & _LOW
        self._even, self._odd, self._key = even[0].ravel(), odd[1].ravel(), keys[-1, 1]

    def word2(self, flat: np.ndarray) -> np.ndarray:
        """Word 2 at flat positions."""
        return ((self._even[flat] * _MULTIPLIERS[0]) >> _SHIFT) ^ (self._odd[flat] ^ self._key)


def masked_count(ordinary: np.ndarray, fraction: float) -> np.ndarray:
    """Positions to mask of items with `ordinary` ordinary tokens: max(1, round(fraction · n)), but no more than n."""
    return np.minimum(np.maximum(1, np.floor(fraction * ordinary + 0.5).astype(np.int64)), ordinary)


def corrupt(
    tokens: np.ndarray, segments: np.ndarray, numbers: np.ndarray, seed: int, task: int | np.ndarray, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Masked positions (ascending flat indices, int64) and their uniforms (float32 in [0, 1)) of rows.

    `tokens` and `segments` are [B, T], the latter from 1 upwards along a row and 0 behind; `numbers` [B] are the row
    numbers, `task` one index or [B]. Of each item, max(1, round(fraction · n)) of its n ordinary tokens are chosen
    without replacement, all sets alike (XLM-E section 3.1: uniform masking): the first ones by 64 random bits, equal
    ones, if ever, by position.
    """
    width = tokens.shape[1]
    tasks = np.broadcast_to(np.asarray(task, dtype=np.uint64), numbers.shape)
    done = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))]
    for first in range(0, len(tokens), _BLOCK):
        part = slice(first, first + _BLOCK)
        grid = tasks[part], numbers[part].astype(np.uint64), _key(seed)
        chosen, uniforms = _choose(tokens[part], segments[part], *grid, fraction)
        done.append((chosen + first * width, uniforms))
    where, uniforms = (np.concatenate(group) for group in zip(*done, strict=True))
    return where, uniforms


def row_keys(numbers: np.ndarray, seed: int, tasks: np.ndarray) -> np.ndarray:
    """64 bits for each row, as int64 [B], of a counter whose column no row has."""
    counter = np.uint64(_LOW), tasks.astype(np.uint64), numbers.astype(np.uint64) & _LOW, numbers.astype(np.uint64) >> _SHIFT
    low, high, *_ = philox(counter, _key(seed))
    return (low | (high << _SHIFT)).view(np.int64)


def _key(seed: int) -> Key:
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _choose(
    tokens: np.ndarray, segments: np.ndarray, task: np.ndarray, numbers: np.ndarray, key: Key, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """`corrupt` for one block of rows."""
    grid = _Grid(tokens.shape[1], task, numbers, key)
    ordinary = tokens > UNK
    begins = np.ones(segments.shape, dtype=bool)
    np.not_equal(segments[:, 1:], segments[:, :-1], out=begins[:, 1:])
    starts = np.flatnonzero(begins)  # of items, and of padding, which has nothing ordinary
    counts = masked_count(np.add.reduceat(ordinary.ravel(), starts, dtype=np.int64), fraction)
    chosen = _up_to(_leading_bits(grid.word0, segments, ordinary), ordinary, starts, counts)
    if len(chosen) != counts.sum():  # the last to be chosen has the same leading bits as another
        chosen = _first(grid, ordinary, starts, counts)
    return chosen, (grid.word2(chosen) >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def _leading_bits(word0: np.ndarray, segments: np.ndarray, ordinary: np.ndarray) -> np.ndarray:
    """uint32 [B, T], to order a row by item and an item by word 0, as much of that as has room: sorts ten times as fast."""
    bits = int(segments.max()).bit_length()
    keys = (word0 >> np.uint64(bits)).astype(np.uint32)
    keys |= ~ordinary * np.uint32(0xFFFFFFFF >> bits)  # behind the item's ordinary tokens
    keys |= (segments - 1).astype(np.uint32) << np.uint32(32 - bits)  # padding behind all items, where it is in the row
    return keys


def _up_to(keys: np.ndarray, ordinary: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Flat positions of each item's ordinary tokens up to the `counts`-th by key, and of those with the same key."""
    ranked = np.sort(keys, axis=1).ravel()
    limits = np.repeat(ranked[starts + counts - 1], np.diff(starts, append=keys.size))
    return np.flatnonzero((keys.ravel() <= limits) & ordinary.ravel())


def _first(grid: _Grid, ordinary: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Flat positions of each item's first `counts` ordinary tokens by words 0 and 1 and position, ascending."""
    flat = np.flatnonzero(ordinary)
    item = np.searchsorted(starts, flat, side="right") - 1
    order = np.lexsort((grid.word1.ravel()[flat], grid.word0.ravel()[flat], item))
    rank = np.arange(len(flat)) - np.searchsorted(item, item)  # items ascend, so each keeps its places
    return np.sort(flat[order[rank < counts[item]]])
