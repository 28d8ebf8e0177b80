"""The training order of the examples, computed by keyed hashes and keyed permutations; all keys come from the seed.

A shuffle is a keyed permutation of [0, n): a Feistel network with cycle walking, vectorised over index, n and key. Any
process can compute any part of a shuffle alone, and no table is stored. The shuffle is not cryptographic.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

Integers = np.ndarray | int | np.integer
_ROUNDS = 12  # rounds of the Feistel network; 8 would leave a bias of some percent in the smallest permutations
_MAX_SIZE = 1 << 52  # sizes of permutations are below this: `permute` takes their bit lengths from float64


def derive_key(seed: int, *names: str) -> np.uint64:
    """A 64-bit key from `seed` and `names`: each purpose of a seed has its own names, and so its own key."""
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def keyed_hash(key: Integers, counter: Integers) -> np.ndarray:
    """uint64 hashes of (key, counter), for sub-keys and random draws; key and counter broadcast."""
    return _mix64(_as_uint64(key) ^ _mix64(_as_uint64(counter) + np.uint64(0x9E3779B97F4A7C15)))


def permute(index: Integers, size: Integers, key: Integers) -> np.ndarray:
    """int64 images of `index` under the permutation of [0, size) that `key` selects; all three broadcast."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (index, size, key)))
    value, bound, keys = (array.ravel() for array in np.broadcast_arrays(*map(_as_uint64, (index, size, key))))
    assert not value.size or (bool((value < bound).all()) and int(bound.max()) < _MAX_SIZE)
    # The network permutes [0, 2^bits), which includes [0, size). `frexp` gives the bit length of size - 1; there are at
    # least 2 bits, because each half of the network needs one. Images outside [0, size) are permuted again until they
    # are inside (cycle walking). If `size` is over 1, this takes at most two permutations on average.
    bits = np.maximum(np.frexp((bound - np.uint64(1)).astype(np.float64))[1], 2).astype(np.uint64)
    value = _feistel(value, bits, keys)
    outside = np.flatnonzero(value >= bound)
    while outside.size:
        value[outside] = _feistel(value[outside], bits[outside], keys[outside])
        outside = outside[value[outside] >= bound[outside]]
    return value.astype(np.int64).reshape(shape)


def _feistel(value: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The images of `value` under the Feistel network. Each round XORs one half of the bits with a keyed hash of the
    other half. Such a round is its own inverse, so no two values have the same image."""
    one, low_bits = np.uint64(1), bits >> np.uint64(1)
    low_mask, high_mask = (one << low_bits) - one, (one << (bits - low_bits)) - one
    left, right = value >> low_bits, value & low_mask
    for network_round in range(0, _ROUNDS, 2):
        left = left ^ (_mix64(right + keyed_hash(keys, network_round)) & high_mask)
        right = right ^ (_mix64(left + keyed_hash(keys, network_round + 1)) & low_mask)
    return (left << low_bits) | right


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _as_uint64(x: Integers) -> np.ndarray:
    """`x` as a uint64 array, never as a NumPy scalar: scalars warn when an unsigned product wraps around, as it must in
    a hash."""
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)


class SmallestHashes:
    """Tells, in bounded memory, which hashes of a stream may be among its `count` smallest distinct ones: those that
    are at most `limit`. The limit falls as hashes are added."""

    def __init__(self, count: int):
        self.count, self.limit = count, np.uint64((1 << 64) - 1)
        self._small = [np.empty(0, np.uint64)]  # arrays of hashes; `add` leaves fewer than 2 × `count` in them
        self._small_count = 0

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes. Returns a bool for each: whether it may be one of the `count` smallest."""
        is_small = hashes <= self.limit
        self._small.append(hashes[is_small])
        self._small_count += len(self._small[-1])
        if self._small_count >= 2 * self.count:
            smallest = np.unique(np.concatenate(self._small))[: self.count]
            if len(smallest) == self.count:
                self.limit = smallest[-1]
            self._small, self._small_count = [smallest], len(smallest)
        return is_small


@dataclass(frozen=True)
class SampledOrder:
    """The sampled examples in training order: every example of a language comes once before any comes again.

    A slot is a position in this order, and takes one example. Language (or pair) j is called `names[j]`, has
    `examples[j]` examples and fills `quotas[j]` slots. The slots [0, total) are cut into blocks of `block_slots` slots.
    Within a block the languages are shuffled.

    Each slot that a language fills is one use of the language. The method `uses` says how many uses each language has
    in a block and before the block, so that a block can be computed without the blocks before it. The uses of a
    language are numbered from 0, block by block. Use u belongs to pass u // (number of examples): with 3 examples, uses
    0 to 2 are pass 0, and each pass uses every example once. Within a block, the uses of one language in one pass are
    in random order. A pass visits the examples in stretches, which are runs of neighbouring examples, and has its own
    order of the stretches. So a block reads few regions of the files, but mixes their examples. The length of a stretch
    is `max_stretch`, but at most 1/16 of the language's uses in an average block, or of all its uses if these take less
    than half of its examples, and at least 1.
    """

    names: tuple[str, ...]
    examples: tuple[int, ...]
    quotas: tuple[int, ...]
    seed: int
    task: str
    block_slots: int = 1 << 16
    max_stretch: int = 1

    @property
    def total(self) -> int:
        """Number of slots."""
        return sum(self.quotas)

    def locate(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (language, example), two int64 arrays with a value for each of `slots`: the index of its language in
        `names`, and the index of its example among the examples of that language."""
        language, example = np.empty((2, len(slots)), dtype=np.int64)
        blocks = slots // self.block_slots
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            position = slots[in_block] - block * self.block_slots
            block_languages, block_examples = _block(self, block)
            language[in_block], example[in_block] = block_languages[position], block_examples[position]
        return language, example

    def swapped(self, slots: np.ndarray) -> np.ndarray:
        """For examples that are translation pairs, a bool for each slot: whether its pair's sides change places."""
        return (keyed_hash(derive_key(self.seed, self.task, "sides"), slots) & np.uint64(1)).astype(bool)

    def uses(self, block: int) -> tuple[list[int], list[int]]:
        """Returns (before, inside): for each language, the number of its uses before the block, and in the block.

        The range of all blocks is halved, and then the half with this block, until only this block is left. The uses in
        a range are divided between its halves in proportion to the halves' slots, so a language's number of uses in the
        left half need not be whole. Therefore the cumulative sums of these numbers over the languages are rounded, all
        with the same random offset, and each language gets the difference of two neighbouring sums. The last sum is the
        number of slots of the left half, so the differences add up to it. A rounding changes a number by less than one.
        So a language's uses before a block differ from its exact share by at most the number of halvings.
        """
        first, last = 0, -(-self.total // self.block_slots)  # the blocks [first, last)
        before, inside = [0] * len(self.quotas), list(self.quotas)  # uses before the range, and in the range
        while last - first > 1:
            middle = (first + last) // 2
            # slots of the left half, and of the range
            left_slots, slots = (middle - first) * self.block_slots, sum(inside)
            offset = int(keyed_hash(derive_key(self.seed, self.task, "halves"), middle)[0]) % slots
            # rounded sums of the languages' uses in the left half, and each language's uses there
            sums = [(left_slots * uses + offset) // slots for uses in accumulate(inside)]
            in_left = [end - begin for begin, end in pairwise([0, *sums])]
            if block < middle:
                inside, last = in_left, middle
            else:
                before = [a + b for a, b in zip(before, in_left, strict=True)]
                inside = [a - b for a, b in zip(inside, in_left, strict=True)]
                first = middle
        return before, inside

    def examples_of_uses(self, language: np.ndarray, use: np.ndarray) -> np.ndarray:
        """The index of each use's example among the examples of its language, int64. `language[i]` is the index of a
        language in `names`, and `use[i]` the number, from 0, of a use of this language."""
        # Each language's uses in an average block; at most all uses, if these leave out more than half of the examples:
        # a small sample, as of held-out text, is of many places.
        mean_uses = [
            min(quota * self.block_slots // max(self.total, 1), quota if 2 * quota < examples else self.block_slots)
            for quota, examples in zip(self.quotas, self.examples, strict=True)
        ]
        stretch_size = np.array([min(self.max_stretch, max(uses // 16, 1)) for uses in mean_uses])[language]
        examples = np.array(self.examples)[language]
        language_key = np.array([derive_key(self.seed, self.task, name) for name in self.names])[language]
        pass_key, position = keyed_hash(language_key, use // examples), use % examples
        stretch, stretches = position // stretch_size, examples // stretch_size
        in_stretch = stretch < stretches  # false at the end of a pass, where too few positions are left for a stretch
        # Consecutive uses are often in the same stretch. Only the first of them permutes the stretch's index.
        first = np.flatnonzero(np.append(True, (np.diff(stretch) != 0) | (np.diff(pass_key) != 0)))
        permuted = permute(np.where(in_stretch, stretch, 0)[first], np.maximum(stretches, 1)[first], pass_key[first])
        permuted_stretch = np.repeat(permuted, np.diff(np.append(first, len(use))))
        unrotated = np.where(in_stretch, permuted_stretch * stretch_size + position % stretch_size, position)
        # Each pass is rotated by its own random amount. So passes differ in where their stretches begin, and in which
        # examples are the last. The permutation hashes `pass_key` with the counters 0 to 11, so -1 is free.
        rotation = (keyed_hash(pass_key, -1) % examples.astype(np.uint64)).astype(np.int64)
        return (unrotated + rotation) % examples


@lru_cache(maxsize=2)
def _block(order: SampledOrder, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The language and the example of every slot of a block, as `SampledOrder.locate` returns them."""
    before, inside = order.uses(block)
    slots = block * order.block_slots + np.arange(sum(inside))
    draws = keyed_hash(derive_key(order.seed, order.task, "slots"), slots)
    language = np.empty(len(slots), dtype=np.int16 if len(inside) < 1 << 15 else np.int64)  # NumPy radix-sorts int16
    language[np.argsort(draws, kind="stable")] = np.repeat(np.arange(len(inside)), inside)  # a shuffle by the draws
    by_language = np.argsort(language, kind="stable")  # the block's slots, sorted by language, then by position
    sorted_language, counts = language[by_language], np.array(inside)
    starts = np.cumsum(counts) - counts  # where each language starts in `by_language`
    uses = np.arange(len(slots)) + np.repeat(np.array(before) - starts, counts)  # numbers of uses, by language
    passes = uses // np.array(order.examples)[sorted_language]
    # A portion is all uses of one language in one pass in this block. The portion's slots are sorted by their random
    # draws, and its k-th use takes the k-th of them. The sort key has the portion's number in its upper 24 bits, and
    # the upper 40 bits of the draw in its lower 40.
    portion = np.cumsum(np.append(False, (np.diff(sorted_language) != 0) | (np.diff(passes) != 0)))
    portion_and_draw = (portion << 40).astype(np.uint64) | (draws[by_language] >> np.uint64(24))
    slot_of_use = by_language[np.argsort(portion_and_draw, kind="stable")]
    example = np.empty_like(uses)
    example[slot_of_use] = order.examples_of_uses(sorted_language, uses)
    return language, example
