"""Keyed permutations of [0, n) in constant memory: a Feistel network with cycle walking, vectorised over n and key.

Any process can compute any part of a shuffle alone, forwards or backwards, and nothing is stored. Not cryptographic.
"""

import hashlib
import json

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
    return _walk(index, size, key, range(_ROUNDS))


def inverse(index: Integers, size: Integers, key: Integers) -> np.ndarray:
    """int64 preimages: `inverse(permute(i, size, key), size, key) == i`."""
    return _walk(index, size, key, range(_ROUNDS - 1, -1, -1))


def _walk(index: Integers, size: Integers, key: Integers, rounds: range) -> np.ndarray:
    value, bound, keys = (array.ravel() for array in np.broadcast_arrays(_words(index), _words(size), _words(key)))
    assert not value.size or (bool((value < bound).all()) and int(bound.max()) < _LARGEST)
    # two halves need a bit each; the domain is the next power of two, so fewer than two steps are walked on average
    bits = np.maximum(np.frexp((bound - np.uint64(bound.size > 0)).astype(np.float64))[1], 2).astype(np.uint64)
    value = _feistel(value, bits, keys, rounds)
    outside = np.flatnonzero(value >= bound)
    while outside.size:
        value[outside] = _feistel(value[outside], bits[outside], keys[outside], rounds)
        outside = outside[value[outside] >= bound[outside]]
    return value.astype(np.int64).reshape(np.broadcast_shapes(*(np.shape(x) for x in (index, size, key))))


def _feistel(value: np.ndarray, bits: np.ndarray, keys: np.ndarray, rounds: range) -> np.ndarray:
    """Alternately each half is XORed with a keyed hash of the other: every round is its own inverse."""
    one, low = np.uint64(1), bits >> np.uint64(1)
    low_mask, high_mask = (one << low) - one, (one << (bits - low)) - one
    left, right = value >> low, value & low_mask
    for number in rounds:
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
    # never a NumPy scalar: those warn when an unsigned product wraps around, which is what a hash is for
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)
