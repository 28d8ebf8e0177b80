"""Which positions are masked and which uniforms drive the sampling: a pure function of (seed, task, row number).

Counter-based randomness (Philox4x32-10; Salmon et al. 2011), evaluated for every token from its own counter, so that the
corruption of a row is the same wherever, whenever and beside whatever it is computed.
"""

import numpy as np

from .rows import UNK

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


Word = np.ndarray | np.uint64


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> list[np.ndarray]:
    """Four 32-bit words (in uint64 arrays) for every counter of four 32-bit words; broadcasts."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def masked_count(ordinary: np.ndarray, fraction: float) -> np.ndarray:
    """Positions to mask of items with `ordinary` ordinary tokens: max(1, round(fraction · n)), but no more than n."""
    return np.minimum(np.maximum(1, np.floor(fraction * ordinary + 0.5).astype(np.int64)), ordinary)


def corrupt(
    tokens: np.ndarray, segments: np.ndarray, numbers: np.ndarray, seed: int, task: int, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Masked positions (ascending flat indices, int64) and their uniforms (float32 in [0, 1)) of rows.

    `tokens` and `segments` are [B, T]; `numbers` [B] are the row numbers. Of each item, max(1, round(fraction · n))
    of its n ordinary tokens are chosen without replacement, all sets alike (XLM-E section 3.1: uniform masking).
    """
    width = tokens.shape[1]
    flat = np.flatnonzero(tokens.ravel() > UNK)
    row, column = np.divmod(flat, width)
    number = numbers.astype(np.uint64)[row]
    words = philox(
        (column.astype(np.uint64), np.uint64(task), number & _LOW, number >> _SHIFT),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    item = row * (width + 1) + segments.ravel()[flat]
    # 64 random bits order the tokens of an item; equal ones, if ever, are ordered by position.
    order = np.lexsort(((words[0] << _SHIFT) | words[1], item))
    _, first, count = np.unique(item[order], return_index=True, return_counts=True)
    rank = np.arange(len(flat)) - np.repeat(first, count)
    chosen = np.sort(order[rank < np.repeat(masked_count(count, fraction), count)])
    uniforms = (words[2][chosen] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return flat[chosen], uniforms
