"""The inner loops of training a unigram model (`unigram.py`), compiled to machine code: counting substrings, looking
pieces up, and segmenting words.

`characters` holds the numbers of the characters of all words, one word after the other: word w is
`characters[starts[w] : starts[w + 1]]`, and 0 is the unknown character. The lattice of a text tells which pieces begin
at each character: `fan[i]` is their count for character i, and `arcs` holds their piece numbers, character by
character, the shortest piece first. Piece n has `lengths[n]` characters and the log-probability `scores[n]`.
"""

import numpy as np
from numba import njit
from numba.types import Tuple, float64, int8, int32, int64, uint8, uint64, void

from xlme_ds.data.compiled import compiled

Numbers = np.ndarray
MAX_PIECE_LENGTH = 16  # largest number of characters of a piece, as in SentencePiece
MAX_WORD_LENGTH = 1024  # characters; a longer word is cut
# Values in place of a script. In a piece, a character with ANY may come before a character of any script. A character
# with MARK takes the script of the character before it.
ANY, MARK = -1, -2
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # the key of an empty slot in a hash table


@compiled(uint8[::1](int32[::1], int64[::1], int8[::1]))
def find_reach(characters: Numbers, starts: Numbers, scripts: Numbers) -> Numbers:
    """uint8: the length of the longest piece that could begin at each character; at most MAX_PIECE_LENGTH + 1, the
    length up to which `extend_substrings` counts substrings.

    A piece lies in one word, has no unknown characters, and has letters of one script. `scripts[n]` is the script of
    character number n.
    """
    reach, word_scripts = np.zeros(len(characters), np.uint8), np.empty(MAX_WORD_LENGTH, np.int8)
    for word in range(len(starts) - 1):
        begin, size = starts[word], starts[word + 1] - starts[word]
        for j in range(size):
            script = scripts[characters[begin + j]]
            word_scripts[j] = script if script != MARK else word_scripts[j - 1] if j else ANY
        for j in range(size - 1, -1, -1):
            if characters[begin + j]:
                continues = j + 1 < size and (word_scripts[j] == word_scripts[j + 1] or word_scripts[j] == ANY)
                reach[begin + j] = 1 + (min(reach[begin + j + 1], MAX_PIECE_LENGTH) if continues else 0)
    return reach


@njit(inline="always")
def _slot(keys: Numbers, key: np.uint64) -> np.uint64:
    """The slot that holds `key` in the hash table `keys`, or the empty slot where it would be stored."""
    mask = np.uint64(len(keys) - 1)
    mixed = (key ^ (key >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    slot = (mixed ^ (mixed >> np.uint64(32))) & mask
    while keys[slot] != key and keys[slot] != _EMPTY:
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit
def _grown(keys: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Copy the hash table into twice as many slots. Returns (keys, values)."""
    new_keys, new_values = np.full(2 * len(keys), _EMPTY), np.empty(2 * len(keys), np.int32)
    for i in range(len(keys)):
        if keys[i] != _EMPTY:
            slot = _slot(new_keys, keys[i])
            new_keys[slot], new_values[slot] = keys[i], values[i]
    return new_keys, new_values


@compiled(
    Tuple((int32[::1], float64[::1], int64[::1], int64[::1]))(
        int32[::1], int64[::1], float64[::1], uint8[::1], int32[::1], float64[::1], int64
    )
)
def extend_substrings(
    characters: Numbers,
    starts: Numbers,
    counts: Numbers,
    reach: Numbers,
    ids: Numbers,
    occurrences: Numbers,
    length: int,
) -> tuple[Numbers, ...]:
    """Give an id to every distinct substring of `length` characters.

    Returns four arrays. The first has, by position, the id of the substring that begins there, or -1. The others have,
    by id, the substring's occurrences, the id of its prefix (all but the last character) and its first position. `ids`
    and `occurrences` are the first two arrays that the call for `length` - 1 returned. A prefix that occurs less than
    twice is not extended.
    """
    keys, values = np.full(1 << 16, _EMPTY), np.empty(1 << 16, np.int32)  # (prefix, last character) -> id
    longer_ids = np.full(len(ids), np.int32(-1))
    # There may be as many ids as positions. The operating system allocates the memory only as it is filled.
    totals, prefixes, positions = np.empty(len(ids)), np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    size = 0  # number of ids given so far
    for word in range(len(counts)):
        for i in range(starts[word], starts[word + 1] - length + 1):
            prefix = ids[i]
            if prefix < 0 or reach[i] < length or occurrences[prefix] < 2:
                continue
            key = (np.uint64(prefix) << np.uint64(24)) | np.uint64(characters[i + length - 1])
            slot = _slot(keys, key)
            if keys[slot] == _EMPTY:
                if 2 * size > len(keys):
                    keys, values = _grown(keys, values)
                    slot = _slot(keys, key)
                keys[slot], values[slot] = key, size
                totals[size], prefixes[size], positions[size] = 0.0, prefix, i
                size += 1
            longer_ids[i] = values[slot]
            totals[values[slot]] += counts[word]
    return longer_ids, totals[:size].copy(), prefixes[:size].copy(), positions[:size].copy()


@compiled(Tuple((uint64[::1], int32[::1], int32[::1]))(int32[::1], int64[::1], int64))
def build_trie(characters: Numbers, starts: Numbers, singles: int) -> tuple[Numbers, Numbers, Numbers]:
    """Build a trie of the longer pieces. Here `characters` and `starts` hold these pieces, not words. `singles` is the
    number of pieces of one character, so the first longer piece has the number `singles` + 1.

    Returns (keys, values, ends). `keys` and `values` are a hash table from (node, character) to the next node;
    `ends[node]` is the number of the piece that ends at the node, or 0. The root is node 0.
    """
    keys, values = np.full(1 << 16, _EMPTY), np.empty(1 << 16, np.int32)
    ends = np.zeros(len(characters) + 1, np.int32)  # a node for each character, if no pieces begin alike
    nodes = 1
    for piece in range(len(starts) - 1):
        node = 0
        for i in range(starts[piece], starts[piece + 1]):
            key = (np.uint64(node) << np.uint64(24)) | np.uint64(characters[i])
            slot = _slot(keys, key)
            if keys[slot] == _EMPTY:
                if 2 * nodes > len(keys):
                    keys, values = _grown(keys, values)
                    slot = _slot(keys, key)
                keys[slot], values[slot] = key, nodes
                nodes += 1
            node = values[slot]
        ends[node] = 1 + singles + piece
    return keys, values, ends


@compiled(int64(uint64[::1], int32[::1], int32[::1], int32[::1], uint8[::1], uint8[::1], int32[::1]))
def fill_lattice(
    keys: Numbers,
    values: Numbers,
    ends: Numbers,
    characters: Numbers,
    reach: Numbers,
    fan: Numbers,
    arcs: Numbers,
) -> int:
    """Fill `fan` and `arcs` with the pieces that begin at each character; returns the number of arcs.

    `keys`, `values` and `ends` are the trie that `build_trie` returns.
    """
    arc_count = 0
    for i in range(len(characters)):
        first_arc = arc_count
        arcs[arc_count] = characters[i]  # a single character's number is also the number of its piece
        arc_count += 1
        node = 0
        for length in range(1, min(reach[i], MAX_PIECE_LENGTH) + 1):
            slot = _slot(keys, (np.uint64(node) << np.uint64(24)) | np.uint64(characters[i + length - 1]))
            if keys[slot] == _EMPTY:
                break
            node = values[slot]
            if ends[node]:
                arcs[arc_count] = ends[node]
                arc_count += 1
        fan[i] = arc_count - first_arc
    return arc_count


@compiled(int64(uint8[::1], int32[::1], int32[::1]))
def renumber_arcs(fan: Numbers, arcs: Numbers, numbers: Numbers) -> int:
    """In a lattice, replace each arc's piece number n by `numbers[n]`, or drop the arc if `numbers[n]` is negative.
    Returns the number of arcs that stay."""
    arc_count = arc = 0
    for i in range(len(fan)):
        first_arc = arc_count
        for _ in range(fan[i]):
            number = numbers[arcs[arc]]
            arc += 1
            if number >= 0:
                arcs[arc_count] = number
                arc_count += 1
        fan[i] = arc_count - first_arc
    return arc_count


@njit(inline="always")
def _viterbi(
    begin: int,
    size: int,
    arc: int,
    fan: Numbers,
    arcs: Numbers,
    lengths: Numbers,
    scores: Numbers,
    avoided: int,
    best: Numbers,
    back: Numbers,
) -> int:
    """Fill `best[j]` with the score of the best segmentation of a word's first j characters, and `back[j]` with the
    last piece of this segmentation.

    The word begins at character `begin`; its first arc has the index `arc`. The piece `avoided` is not used; -1 avoids
    none. Returns the index of the next word's first arc.
    """
    best[: size + 1] = -np.inf
    best[0] = 0.0
    for j in range(size):
        for _ in range(fan[begin + j]):
            piece = arcs[arc]
            arc += 1
            end = j + lengths[piece]
            score = best[j] + scores[piece]
            if score > best[end] and piece != avoided:
                best[end], back[end] = score, piece
    return arc


_LATTICE_AND_WORDS = (int64[::1], uint8[::1], int32[::1], float64[::1], uint8[::1], float64[::1])


@compiled(float64(*_LATTICE_AND_WORDS, float64[::1]))
def segment(
    starts: Numbers,
    fan: Numbers,
    arcs: Numbers,
    counts: Numbers,
    lengths: Numbers,
    scores: Numbers,
    frequencies: Numbers,
) -> float:
    """Add the occurrences of each piece in the words' best segmentations to `frequencies`; returns the log-probability
    of these segmentations."""
    best, back = np.empty(MAX_WORD_LENGTH + 1), np.empty(MAX_WORD_LENGTH + 1, np.int32)
    total, arc = 0.0, 0
    for word in range(len(counts)):
        end = starts[word + 1] - starts[word]
        arc = _viterbi(starts[word], end, arc, fan, arcs, lengths, scores, -1, best, back)
        total += best[end] * counts[word]
        while end > 0:
            frequencies[back[end]] += counts[word]
            end -= lengths[back[end]]
    return total


@compiled(void(*_LATTICE_AND_WORDS, float64[::1]))
def expect(
    starts: Numbers, fan: Numbers, arcs: Numbers, counts: Numbers, lengths: Numbers, scores: Numbers, expected: Numbers
) -> None:
    """Add the expected occurrences of each piece, over all segmentations of the words, to `expected`.

    `forward[j]` is the sum of the probabilities of all segmentations of a word's first j characters, divided by the
    probability of the best of these segmentations, so that sums neither vanish nor overflow. `backward[j]` is scaled so
    that the expected occurrences of an arc from character j to `end` are forward[j] × ratio × backward[end].
    """
    best, back = np.empty(MAX_WORD_LENGTH + 1), np.empty(MAX_WORD_LENGTH + 1, np.int32)
    forward, backward = np.empty(MAX_WORD_LENGTH + 1), np.empty(MAX_WORD_LENGTH + 1)
    # For each arc of the word: P(best path that ends with this arc) / P(best path to the end of this arc).
    ratios = np.empty(MAX_WORD_LENGTH * MAX_PIECE_LENGTH)
    next_arc = 0
    for word in range(len(counts)):
        begin, size, first_arc = starts[word], starts[word + 1] - starts[word], next_arc
        next_arc = _viterbi(begin, size, next_arc, fan, arcs, lengths, scores, -1, best, back)
        forward[: size + 1] = 0.0
        forward[0] = 1.0
        arc = first_arc
        for j in range(size):
            for _ in range(fan[begin + j]):
                end = j + lengths[arcs[arc]]
                ratio = np.exp(best[j] + scores[arcs[arc]] - best[end])
                ratios[arc - first_arc] = ratio
                forward[end] += forward[j] * ratio
                arc += 1
        backward[size] = counts[word] / forward[size]
        for j in range(size - 1, -1, -1):
            total = 0.0
            for _ in range(fan[begin + j]):
                arc -= 1
                share = ratios[arc - first_arc] * backward[j + lengths[arcs[arc]]]
                expected[arcs[arc]] += forward[j] * share
                total += share
            backward[j] = total


@compiled(float64[::1](int64[::1], uint8[::1], int32[::1], uint8[::1], float64[::1], float64[::1], int64))
def find_losses(
    starts: Numbers,
    fan: Numbers,
    arcs: Numbers,
    lengths: Numbers,
    scores: Numbers,
    frequencies: Numbers,
    first_longer: int,
) -> Numbers:
    """float64: for each longer piece, how far the text's log-probability per piece falls if the piece is removed,
    estimated as in SentencePiece.

    The occurrences of a removed piece (`frequencies`) go to the pieces of its best other segmentation. The loss is -inf
    if the piece does not occur, or if its best other segmentation has a higher score than the piece. The words of the
    lattice are the longer pieces; `first_longer` is the number of the first one.
    """
    best, back = np.empty(MAX_PIECE_LENGTH + 1), np.empty(MAX_PIECE_LENGTH + 1, np.int32)
    losses = np.full(len(starts) - 1, -np.inf)
    total, arc = frequencies.sum(), 0
    for i in range(len(losses)):
        piece, end = first_longer + i, starts[i + 1] - starts[i]
        arc = _viterbi(starts[i], end, arc, fan, arcs, lengths, scores, piece, best, back)
        if frequencies[piece] == 0.0 or best[end] > scores[piece]:
            continue
        others, pieces = 0.0, 0
        while end > 0:
            others += np.log(frequencies[back[end]] + frequencies[piece])
            pieces += 1
            end -= lengths[back[end]]
        others -= pieces * np.log(total + frequencies[piece] * (pieces - 1))
        losses[i] = frequencies[piece] / total * (np.log(frequencies[piece]) - np.log(total) - others)
    return losses
