"""The loops of `bench.rehearsal.text`, as machine code: blocks of lines from the words of real lines.

`words` are data, starts, middles, tokens and lines (`rehearsal_text.Words`); `state` is that of a random generator.
"""

import numpy as np
from numba import njit

_DUPLICATES, _DAMAGED = 0.02, 0.001  # of the lines
_KNOWN, _NEW = 1 / 3, 1 / 6  # of the words
_HEAPS = 0.6
SHORTEST, _LONGEST = 24, 3_000  # bytes of a line
_BASIS = np.uint64(0xCBF29CE484222325)  # of FNV-1a


@njit(inline="always")
def _random(state):
    """The next 64 bits of splitmix64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    x = state[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(inline="always")
def _share(state):
    return (_random(state) >> np.uint64(11)) * (1.0 / (1 << 53))


@njit(inline="always")
def _below(state, n):
    return np.int64(_random(state) % np.uint64(n))


@njit
def _copy(out, at, data, begin, end):
    for i in range(begin, end):
        out[at] = data[i]
        at += 1
    return at


@njit
def _word(out, at, words, state, number):
    """Write word `number`, or another one in its place."""
    data, starts, middles, tokens, _ = words
    kind = _share(state)
    if number < 0 or kind < _KNOWN:
        number = np.int32(-1)
        while number < 0:
            number = tokens[_below(state, len(tokens))]
    elif kind < _KNOWN + _NEW:
        form = np.uint64(min(1e15, 100.0 * (_share(state) + 1e-12) ** (-_HEAPS / (1 - _HEAPS)) - 100.0))
        own = np.array([form * np.uint64(0xD1342543DE82EF95) + np.uint64(1)])
        count = len(middles)
        first, last = _below(own, count), _below(own, count)
        at = _copy(out, at, data, starts[first], middles[first])
        if form > 1_000_000:
            between = _below(own, count)
            at = _copy(out, at, data, starts[between], middles[between])
        return _copy(out, at, data, middles[last], starts[last + 1])
    return _copy(out, at, data, starts[number], starts[number + 1])


@njit
def _line(out, at, words, number, least, state):
    """Write a line like real line `number`, of `least` bytes or more, without a space at its end."""
    _, _, _, tokens, lines = words
    begin = at
    for i in range(lines[number], lines[number + 1]):
        at = _word(out, at, words, state, tokens[i])
        if at - begin > _LONGEST:
            break
    while at > begin and out[at - 1] == 32:
        at -= 1
    while at - begin < least:
        out[at] = 32
        at = _word(out, at + 1, words, state, np.int32(-1))
        while at > begin and out[at - 1] == 32:
            at -= 1
    return at


@njit
def _hash(out, begin, end, value):
    for i in range(begin, end):
        value = (value ^ np.uint64(out[i])) * np.uint64(0x100000001B3)
    return value ^ (value >> np.uint64(29))


@njit(cache=True)
def mono_block(out, words, documents, foreign, first, first_lines, state, size, planted):
    """Fill `out` with documents up to about `size` bytes. Returns (bytes, hashes of the lines that stay, where good
    lines begin and end). `planted`: all lines, then damaged ones by kind."""
    hashes, places = np.empty(size // 8 + 64, np.uint64), np.empty((size // 8 + 64, 2), np.int64)
    at = kept = good = left = 0
    while at < size:
        if left == 0:
            left = documents[_below(state, len(documents))]
            if at:
                out[at] = 10
                at += 1
        left -= 1
        planted[0] += 1
        begin, kind, damage = at, _share(state), -1
        if kind < _DUPLICATES and good:
            if len(first_lines) and kind < _DUPLICATES / 2:
                row = _below(state, len(first_lines))
                at = _copy(out, at, first, first_lines[row, 0], first_lines[row, 1])
            else:
                row = _below(state, good)
                at = _copy(out, at, out, places[row, 0], places[row, 1])
        elif kind < _DUPLICATES + _DAMAGED:
            damage = _below(state, 4)
            planted[1 + damage] += 1
            if damage == 0:
                for _ in range(8):
                    out[at] = 97 + _below(state, 26)
                    at += 1
            elif damage == 1:
                at = _copy(out, at, foreign, 0, len(foreign))
            else:
                at = _line(out, at, words, _below(state, len(words[4]) - 1), SHORTEST, state)
        else:
            at = _line(out, at, words, _below(state, len(words[4]) - 1), SHORTEST, state)
            places[good, 0], places[good, 1] = begin, at
            good += 1
        if damage == 2:
            out[at] = 0xFF
            at += 1
        if damage < 0 or damage > 1:
            while out[begin] == 32:  # which cleaning takes away
                begin += 1
            hashes[kept] = _hash(out, begin, at, _BASIS)
            kept += 1
        if damage == 3:
            out[at] = 1
            at += 1
        out[at] = 10
        at += 1
    return at, hashes[:kept].copy(), places[:good].copy()


@njit
def _alike(one, two):
    """Whether two sides are the same but for the case of ASCII letters."""
    if len(one) != len(two):
        return False
    for i in range(len(one)):
        a, b = one[i], two[i]
        if a != b and not (a ^ b == 32 and 97 <= a | 32 <= 122):
            return False
    return True


@njit(cache=True)
def pair_block(out, other, words, other_words, state, size, planted, low):
    """The same for pairs: sides in `out` and `other`. `low` [n] is whether a pair gets a low score; empty: no scores.
    Returns the bytes of both sides, pairs, and hashes of those that stay."""
    hashes, places = np.empty(size // 4 + 64, np.uint64), np.empty((size // 4 + 64, 4), np.int64)
    at = at2 = kept = good = n = 0
    while at + at2 < size:
        planted[0] += 1
        begin, begin2, kind, damage = at, at2, _share(state), -1
        if kind < _DUPLICATES and good:
            row = _below(state, good)
            at = _copy(out, at, out, places[row, 0], places[row, 1])
            at2 = _copy(other, at2, other, places[row, 2], places[row, 3])
        else:
            damage = _below(state, 5 if len(low) else 4) if kind < _DUPLICATES + _DAMAGED else -1
            row = _below(state, len(words[4]) - 1)
            at = _line(out, at, words, row, 3, state)
            if damage == 1:
                at2 = _copy(other, at2, out, begin, at)
            elif damage != 0:
                at2 = _line(other, at2, other_words, row, 3, state)
            if damage == -1 and _alike(out[begin:at], other[begin2:at2]):
                other[at2] = 120  # an x: equal sides are planted, and no others
                at2 += 1
            if damage == -1:
                places[good, 0], places[good, 1], places[good, 2], places[good, 3] = begin, at, begin2, at2
                good += 1
            else:
                planted[1 + damage] += 1
        if damage == -1 or damage == 2 or damage == 3:
            hashes[kept] = _hash(other, begin2, at2, _hash(out, begin, at, _BASIS) + np.uint64(1))
            kept += 1
        if damage == 2 or damage == 3:
            other[at2] = 0xFF if damage == 2 else 1
            at2 += 1
        out[at] = other[at2] = 10
        at, at2 = at + 1, at2 + 1
        if len(low):
            low[n] = damage == 4
        n += 1
    return at, at2, n, hashes[:kept].copy()
