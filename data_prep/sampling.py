"""The training order of the sampled examples, from the seed alone: keyed hashes, keyed permutations, blocks of slots.

A shuffle is a keyed permutation of [0, n) in constant memory: a Feistel network with cycle walking, vectorised over n
and key. Any process can compute any part of it alone, and nothing is stored. Not cryptographic.
"""

import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np

Integers = np.ndarray | int | np.integer
_ROUNDS = 12  # 8 leave a bias of some percent in the smallest domains
_LARGEST = 1 << 52  # size of a permutation: its bit length is computed in float64, which is exact up to here


def key_of(seed: int, *names: str) -> np.uint64:
    """A 64-bit key for the use of `seed` that `names` identify."""
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def hashed(key: Integers, counter: Integers) -> np.ndarray:
    """uint64 hashes of (key, counter), which broadcast: for sub-keys and coin flips."""
    return _scramble(_as_uint64(key) ^ _scramble(_as_uint64(counter) + np.uint64(0x9E3779B97F4A7C15)))


def permute(index: Integers, size: Integers, key: Integers) -> np.ndarray:
    """int64 images of `index` under the permutation of [0, size) that `key` selects; all three broadcast."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (index, size, key)))
    value, bound, keys = (array.ravel() for array in np.broadcast_arrays(*map(_as_uint64, (index, size, key))))
    assert not value.size or (bool((value < bound).all()) and int(bound.max()) < _LARGEST)
    # At least 2 bits, one for each half. The domain is the next power of two: fewer than two rounds of cycle walking on
    # average.
    bits = np.maximum(np.frexp((bound - np.uint64(bound.size > 0)).astype(np.float64))[1], 2).astype(np.uint64)
    value = _feistel(value, bits, keys)
    outside = np.flatnonzero(value >= bound)
    while outside.size:
        value[outside] = _feistel(value[outside], bits[outside], keys[outside])
        outside = outside[value[outside] >= bound[outside]]
    return value.astype(np.int64).reshape(shape)


def _feistel(value: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """XOR each half in turn with a keyed hash of the other half: every round is its own inverse."""
    one, low = np.uint64(1), bits >> np.uint64(1)
    low_mask, high_mask = (one << low) - one, (one << (bits - low)) - one
    left, right = value >> low, value & low_mask
    for number in range(_ROUNDS):
        round_keys = hashed(keys, number)
        if number % 2 == 0:
            left = left ^ (_scramble(right + round_keys) & high_mask)
        else:
            right = right ^ (_scramble(left + round_keys) & low_mask)
    return (left << low) | right


def _scramble(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _as_uint64(x: Integers) -> np.ndarray:
    """An array, never a NumPy scalar: those warn when an unsigned product wraps around, as it must in a hash."""
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)


class SmallestHashes:
    """The `bound` smallest distinct hashes seen so far, kept in a list of fewer than 2 × `bound`. None of them is above
    `limit`."""

    def __init__(self, bound: int):
        self.bound, self.limit, self.kept, self.number = bound, np.uint64((1 << 64) - 1), [np.empty(0, np.uint64)], 0

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes; returns for each whether it may be one of the smallest `bound`, bool."""
        is_small = hashes <= self.limit
        self.kept.append(hashes[is_small])
        self.number += len(self.kept[-1])
        if self.number >= 2 * self.bound:
            smallest = np.unique(np.concatenate(self.kept))[: self.bound]
            self.limit = smallest[-1] if len(smallest) == self.bound else self.limit
            self.kept, self.number = [smallest], len(smallest)
        return is_small


@dataclass(frozen=True)
class Order:
    """The sampled examples in training order: every example of a language comes once before any comes again.

    A slot is the place of one example in this order. The slots [0, total) are cut into blocks of `block` slots. Halving
    the range of blocks again and again gives the number of slots that each language has in a block and before it; in a
    block the languages are shuffled. So a block can be computed without those before it.

    Use u of a language belongs to its pass u // examples, and the uses of one pass in one block are shuffled. Each pass
    goes through stretches of neighbouring examples in an order of its own, so the examples of a block are neighbours in
    the files, but not in the block. A stretch has at most `neighbours` examples, and so few that a block has at least
    16 stretches of a language, or stretches are single examples.
    """

    names: tuple[str, ...]
    examples: tuple[int, ...]
    shares: tuple[Fraction, ...]
    quotas: tuple[int, ...]
    seed: int
    label: str
    block: int = 1 << 16
    neighbours: int = 1

    @property
    def total(self) -> int:
        """Number of slots."""
        return sum(self.quotas)

    def locate(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(language, example) of each slot, int64; an example is a number in [0, examples[language])."""
        language, example = np.empty((2, len(slots)), dtype=np.int64)
        blocks = slots // self.block
        for number in np.unique(blocks).tolist():
            here = blocks == number
            at = slots[here] - number * self.block
            language[here], example[here] = (values[at] for values in _block(self, number))
        return language, example

    def swapped(self, slots: np.ndarray) -> np.ndarray:
        """bool: whether the pair in this slot has its target side first."""
        return (hashed(key_of(self.seed, self.label, "sides"), slots) & np.uint64(1)).astype(bool)

    def uses(self, block: int) -> tuple[list[int], list[int]]:
        """(uses before the block, uses in it) of each language.

        The uses in a range of blocks are divided between its halves in proportion to their slots. All languages are
        rounded by one draw, so that both sums are exact. Each rounding is off by at most one, so the uses before a
        block differ from their exact share by at most the number of halvings.
        """
        first, last = 0, -(-self.total // self.block)
        before, inside = [0] * len(self.quotas), list(self.quotas)
        while last - first > 1:
            middle = (first + last) // 2
            left, size = (middle - first) * self.block, sum(inside)
            draw = int(hashed(key_of(self.seed, self.label, "halves"), middle)[0]) % size
            ends = [(left * end + draw) // size for end in accumulate(inside)]
            halves = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
            if block < middle:
                inside, last = halves, middle
            else:
                before = [a + b for a, b in zip(before, halves, strict=True)]
                inside = [a - b for a, b in zip(inside, halves, strict=True)]
                first = middle
        return before, inside

    def example(self, language: np.ndarray, use: np.ndarray) -> np.ndarray:
        """The example of each use of a language, int64."""
        in_block = [quota * self.block // max(self.total, 1) for quota in self.quotas]
        stretch = np.array([min(self.neighbours, max(uses // 16, 1)) for uses in in_block])[language]
        size = np.array(self.examples)[language]
        key = np.array([key_of(self.seed, self.label, name) for name in self.names])[language]
        key, at = hashed(key, use // size), use % size
        number, stretches = at // stretch, size // stretch
        whole = number < stretches  # the rest, shorter than a stretch, stays at the end of its pass
        # Consecutive uses are often in one stretch, which is permuted only once: by its first use.
        first = np.append(True, (np.diff(number) != 0) | (np.diff(key) != 0))
        moved = permute(np.where(whole, number, 0)[first], np.maximum(stretches, 1)[first], key[first])
        moved = np.repeat(moved, np.diff(np.append(np.flatnonzero(first), len(use))))
        # Each pass is rotated by an amount of its own, so that passes differ in their stretches and in their rest.
        turn = (hashed(key, -1) % size.astype(np.uint64)).astype(np.int64)
        return (np.where(whole, moved * stretch + at % stretch, at) + turn) % size


@lru_cache(maxsize=2)
def _block(order: Order, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(language, example) of every slot of a block."""
    before, inside = order.uses(number)
    slots = number * order.block + np.arange(sum(inside))
    draws = hashed(key_of(order.seed, order.label, "slots"), slots)
    language = np.empty(len(slots), dtype=np.int16 if len(inside) < 1 << 15 else np.int64)  # 16 bits sort fast
    language[np.argsort(draws, kind="stable")] = np.repeat(np.arange(len(inside)), inside)
    by_language = np.argsort(language, kind="stable")  # slots by language, then in order
    sorted_language, counts = language[by_language], np.array(inside)
    uses = np.arange(len(slots)) + np.repeat(np.array(before) - np.cumsum(counts) + counts, counts)
    passes = uses // np.array(order.examples)[sorted_language]
    # Parts are the uses of one language in one pass.
    part = np.cumsum(np.append(False, (np.diff(sorted_language) != 0) | (np.diff(passes) != 0)))
    mixed = by_language[
        np.argsort((part << 40).astype(np.uint64) | (draws[by_language] >> np.uint64(24)), kind="stable")
    ]
    example = np.empty_like(uses)
    example[mixed] = order.example(sorted_language, uses)
    return language, example
