"""The order of the sampled examples by the seed: keyed hashes and permutations, and blocks of slots.

The shuffles are keyed permutations of [0, n) in constant memory: a Feistel network with cycle walking, vectorised over
n and key. Any process can compute any part of one alone, and nothing is stored. Not cryptographic.
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
_LARGEST = 1 << 52  # the bit length is taken through float64, which is exact up to here


def key_of(seed: int, *names: str) -> np.uint64:
    """A 64-bit key for one use of `seed`."""
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def hashed(key: Integers, counter: Integers) -> np.ndarray:
    """uint64 hash of (key, counter), broadcast: sub-keys and coin flips."""
    return _scramble(_words(key) ^ _scramble(_words(counter) + np.uint64(0x9E3779B97F4A7C15)))


def permute(index: Integers, size: Integers, key: Integers) -> np.ndarray:
    """int64 images of `index` under the permutation of [0, size) that `key` selects; the arguments broadcast."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (index, size, key)))
    value, bound, keys = (array.ravel() for array in np.broadcast_arrays(_words(index), _words(size), _words(key)))
    assert not value.size or (bool((value < bound).all()) and int(bound.max()) < _LARGEST)
    # two halves need a bit each; the domain is the next power of two, so fewer than two steps are walked on average
    bits = np.maximum(np.frexp((bound - np.uint64(bound.size > 0)).astype(np.float64))[1], 2).astype(np.uint64)
    value = _feistel(value, bits, keys)
    outside = np.flatnonzero(value >= bound)
    while outside.size:
        value[outside] = _feistel(value[outside], bits[outside], keys[outside])
        outside = outside[value[outside] >= bound[outside]]
    return value.astype(np.int64).reshape(shape)


def _feistel(value: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Alternately each half is XORed with a keyed hash of the other: every round is its own inverse."""
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


def _words(x: Integers) -> np.ndarray:
    # never a NumPy scalar: those warn when an unsigned product wraps around, as it must in a hash
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)


class Least:
    """The least different hashes of all so far: `bound` of them or more, at most twice as many and the last ones."""

    def __init__(self, bound: int):
        self.bound, self.limit, self.held, self.number = bound, np.uint64((1 << 64) - 1), [np.empty(0, np.uint64)], 0

    def among(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each of more hashes can be among the least `bound`."""
        among = hashes <= self.limit
        self.held.append(hashes[among])
        self.number += len(self.held[-1])
        if self.number >= 2 * self.bound:
            least = np.unique(np.concatenate(self.held))[: self.bound]
            self.limit = least[-1] if len(least) == self.bound else self.limit
            self.held, self.number = [least], len(least)
        return among


@dataclass(frozen=True)
class Order:
    """The sampled examples in training order: every example of a language comes once before any comes again.

    The slots [0, total) are cut into blocks of `block`. How many slots of each block a language has is computed by
    halving all blocks again and again, and in a block the languages are shuffled; so the number of a language's uses
    before any slot follows from its block alone. Use u of a language is an example of pass u // examples; the uses of
    one pass in one block are shuffled. A pass goes through stretches of neighbouring examples in an order of its own,
    so that the examples of a block are neighbours in the files, not in the block. A stretch has at most `neighbours`
    examples; a block has at least 16 stretches of a language, or single examples.
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
        """(language, example) of each slot, int64; example is in [0, examples[language])."""
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

        A part's uses are divided between its halves by their slots, rounded by a draw common to all languages, so that
        both sums are exact. Each is at most one off, so those before a block are within the number of halvings
        of their exact share.
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
        whole = number < stretches  # the rest, shorter than a stretch, stays at the end of the pass
        first = np.append(
            True, (np.diff(number) != 0) | (np.diff(key) != 0)
        )  # of equal ones in a row, to compute them once
        moved = permute(np.where(whole, number, 0)[first], np.maximum(stretches, 1)[first], key[first])
        moved = np.repeat(moved, np.diff(np.append(np.flatnonzero(first), len(use))))
        turn = (hashed(key, -1) % size.astype(np.uint64)).astype(np.int64)  # another rest, other stretches in each pass
        return (np.where(whole, moved * stretch + at % stretch, at) + turn) % size


@lru_cache(maxsize=2)
def _block(order: Order, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(language, example) of every slot of a block."""
    before, inside = order.uses(number)
    slots = number * order.block + np.arange(sum(inside))
    draws = hashed(key_of(order.seed, order.label, "slots"), slots)
    language = np.empty(len(slots), dtype=np.int16 if len(inside) < 1 << 15 else np.int64)  # 16 bits sort fast
    language[np.argsort(draws, kind="stable")] = np.repeat(np.arange(len(inside)), inside)
    by_language = np.argsort(language, kind="stable")  # and by slot
    of, counts = language[by_language], np.array(inside)
    uses = np.arange(len(slots)) + np.repeat(np.array(before) - np.cumsum(counts) + counts, counts)
    passes = uses // np.array(order.examples)[of]
    part = np.cumsum(np.append(False, (np.diff(of) != 0) | (np.diff(passes) != 0)))  # of a language, in one pass
    mixed = by_language[
        np.argsort((part << 40).astype(np.uint64) | (draws[by_language] >> np.uint64(24)), kind="stable")
    ]
    example = np.empty_like(uses)
    example[mixed] = order.example(of, uses)
    return language, example
