"""SentencePiece's ids of text in its normal form, in a third of SentencePiece's time.

A piece has `▁` at its start only. So the best segmentation of a line (Kudo, 2018: the path with the largest sum of log
probabilities) is the best segmentations of its words, one after the other. Those of frequent words are cached.
"""

from collections.abc import Sequence
from threading import Lock

import numpy as np
import sentencepiece as spm
from numba import njit
from numba.types import Tuple, float32, int32, int64, uint8

from .compiled import compiled, reads
from .rows import PIECE_OFFSET, UNK

Array = np.ndarray
Paths = tuple[Array, Array, Array, Array]
_SPECIAL = 3  # ids of SentencePiece's special pieces, which come first
_UNKNOWN_PENALTY = 10.0  # nats below the least likely piece, as in SentencePiece
_BASE, _PARENT, _ID, _SCORE = range(4)  # columns of a unit of the trie
_FREE, _ROOT = -1, -2  # parents
_WORDS = 1 << 17  # words in a full cache, which is then emptied
_LONGEST = 32  # bytes of a cached word; longer words, as in languages without spaces, rarely occur again
_OFFSET_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # of the hash FNV-1a
# Columns of a cached word: its hash, where its bytes begin, how many; where its ids begin, how many; and `_reach`.
_COLUMNS = _HASH, _START, _SIZE, _FIRST, _NUMBER, _REACH = range(6)


@compiled(int32[:, ::1](reads(uint8), reads(int64), reads(int32), reads(float32)))
def _double_array(letters: Array, starts: Array, ids: Array, scores: Array) -> Array:
    """A trie of the sorted pieces `letters[starts[i] : starts[i + 1]]` as a double array (Aoe, 1989): int32 [units, 4].

    The child of a unit by a byte is the unit base ^ byte, if that has the unit as its parent. The other columns are the
    id of the piece that ends in the unit, or 0, and its score, as the bits of a float32.
    """
    units = np.zeros((2 * len(letters) + 1024, 4), np.int32)
    units[:, _PARENT] = _FREE
    units[0, _PARENT] = _ROOT
    # For each node, breadth first: its pieces are `low` to `high` − 1; its unit; its depth in bytes.
    low, high = np.empty(len(letters) + 1, np.int64), np.empty(len(letters) + 1, np.int64)
    unit_of, depth_of = np.zeros(len(letters) + 1, np.int64), np.zeros(len(letters) + 1, np.int64)
    low[0], high[0] = 0, len(starts) - 1
    children, borders = np.empty(256, np.int64), np.empty(257, np.int64)
    node, nodes, free, top = 0, 1, 1, 255
    while node < nodes:
        piece, depth, unit, number = low[node], depth_of[node], unit_of[node], 0
        if starts[piece + 1] - starts[piece] == depth:
            units[unit, _ID], units.view(np.float32)[unit, _SCORE] = ids[piece], scores[piece]
            piece += 1
        while piece < high[node]:
            byte = letters[starts[piece] + depth]
            if number == 0 or children[number - 1] != byte:
                children[number], borders[number] = byte, piece
                number += 1
            piece += 1
        borders[number] = high[node]
        if number:
            while units[free, _PARENT] != _FREE:
                free += 1
            at, fits = free if number == 1 else max(free, top - 4096), False
            while not fits:  # until the units of all children are free
                if at | 255 >= len(units) - 1:
                    more = np.zeros_like(units)
                    more[:, _PARENT] = _FREE
                    units = np.concatenate((units, more))
                fits, base = True, at ^ children[0]
                for child in children[:number]:
                    fits &= units[base ^ child, _PARENT] == _FREE
                at += 1
            units[unit, _BASE] = base
            for child in range(number):
                place = base ^ children[child]
                units[place, _PARENT], top = unit, max(top, place | 255)
                low[nodes], high[nodes] = borders[child], borders[child + 1]
                unit_of[nodes], depth_of[nodes] = place, depth + 1
                nodes += 1
        node += 1
    return units[: top + 1].copy()


@njit
def _best_path(
    text: Array, first: int, size: int, total: np.float32, units: Array, log_probs: Array, unknown: float, paths: Paths
) -> tuple[int, int, float]:
    """Find the best path through a word, `size` bytes from `first` on. Returns the number of ids, the number of
    characters, and the smallest difference of compared scores.

    `total`: the score before the word. Sums are rounded to float32, as in SentencePiece. `paths`: for each byte where a
    path ends, its score, the id of its last piece, and the byte where that piece begins; the last array gets the ids of
    the best path, at its end.
    """
    best, last, starts, ids = paths
    for at in range(size + 1):
        starts[at] = -1
    best[0] = total
    begin, characters, margin = 0, 0, np.inf
    while begin < size:
        byte = text[first + begin]
        end = begin + 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)  # of the first character
        unit, before, single = 0, best[begin], False
        for at in range(begin, size):
            child = units[unit, _BASE] ^ np.int32(text[first + at])
            if units[child, _PARENT] != unit:
                break
            unit = child
            if units[unit, _ID]:
                score = np.float32(before + log_probs[unit, _SCORE])
                difference = np.float64(score) - np.float64(best[at + 1])
                if starts[at + 1] >= 0 and abs(difference) < margin:
                    margin = abs(difference)
                if starts[at + 1] < 0 or difference > 0.0:
                    best[at + 1], last[at + 1], starts[at + 1] = score, units[unit, _ID], begin
                single |= at + 1 == end
        if not single:
            score = np.float32(before + unknown)
            difference = np.float64(score) - np.float64(best[end])
            if starts[end] >= 0 and abs(difference) < margin:
                margin = abs(difference)
            if starts[end] < 0 or difference > 0.0:
                best[end], last[end], starts[end] = score, UNK, begin
        characters += 1
        begin = end
    number = 0
    while size > 0:
        number += 1
        ids[len(ids) - number] = last[size]
        size = starts[size]
    return number, characters, margin


@njit(inline="always")
def _reach(margin: float, characters: int, total: float, unknown: float) -> int:
    """How far below 0 the score before a word may be for a cached segmentation to be right.

    It was found after the score `total`, with the smallest difference `margin` between compared scores. The further a
    sum is below 0, the more coarsely float32 rounds it. Up to the result, rounding sums of up to `characters` numbers
    cannot outweigh the margin.
    """
    longest = -unknown * characters
    safe = margin - characters * (longest - total) * 2.0**-23
    return int(min(max(safe * 2.0**23 / characters - longest, -1.0), 1e9))


@njit(inline="always")
def _slot(key: np.uint64, text: Array, begin: int, size: int, table: Array, rows: Array, letters: Array) -> int:
    """The slot of a word in the hash table, or a free slot if the word is not there."""
    mask = np.uint64(len(table) - 1)
    slot = (key ^ key >> np.uint64(32)) & mask
    while table[slot]:
        row = rows[table[slot] - 1]
        if row[_HASH] == np.int64(key) and row[_SIZE] == size:
            start, same = row[_START], True
            for i in range(size):
                same &= letters[start + i] == text[begin + i]
            if same:
                break
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)  # type: ignore[return-value]


@compiled(
    int64(
        *(reads(uint8), reads(int64), int32[:, ::1], float32[:, ::1], float32[::1]),
        *(Tuple((int32[::1], int64[:, ::1], uint8[::1], int32[::1], int64[::1])), int32[::1], int64[::1]),
    )
)
def _segment(
    text: Array,
    ends_of_lines: Array,
    units: Array,
    log_probs: Array,
    scores: Array,
    cache: tuple[Array, Array, Array, Array, Array],
    ids: Array,
    numbers: Array,
) -> int:
    """Write the ids of all lines to `ids` and each line's number of ids to `numbers`. Returns the number of all ids.

    `cache`: the hash table, whose slots hold 1 + the row of a word, or 0; the rows, the bytes and the ids of words; and
    how many of each of these three are in use.
    """
    table, rows, letters, ids_of, used = cache
    longest, at, done = 0, 0, 0
    for end in ends_of_lines:
        longest, at = max(longest, end - at), end
    integers = np.empty((3, longest + 1), np.int32)
    paths, at = (np.empty(longest + 1, np.float32), integers[0], integers[1], integers[2]), 0
    for line in range(len(numbers)):
        first, stop, total, before = done, ends_of_lines[line], np.float32(0.0), 0
        while at < stop:
            begin, key = at, _OFFSET_BASIS
            while at == begin or (  # to the next ▁
                at < stop and not (text[at] == 0xE2 and text[at + 1] == 0x96 and text[at + 2] == 0x81)
            ):
                key = (key ^ np.uint64(text[at])) * _PRIME
                at += 1
            size = at - begin
            slot = _slot(key, text, begin, size, table, rows, letters)
            word = table[slot] - 1
            if word >= 0 and -total < rows[word, _REACH]:
                start, number, path = rows[word, _FIRST], rows[word, _NUMBER], ids_of
            else:
                number, characters, margin = _best_path(text, begin, size, total, units, log_probs, scores[UNK], paths)
                start, path = longest + 1 - number, paths[3]
                if word < 0 and size <= _LONGEST:
                    if used[0] == len(rows) or used[1] + size > len(letters) or used[2] + number > len(ids_of):
                        table[:] = 0
                        used[:] = 0
                        slot = _slot(key, text, begin, size, table, rows, letters)
                    row = rows[used[0]]
                    row[_HASH], row[_START], row[_SIZE] = np.int64(key), used[1], size
                    row[_FIRST], row[_NUMBER] = used[2], number
                    row[_REACH] = _reach(margin, characters, total, scores[UNK])
                    letters[used[1] : used[1] + size] = text[begin:at]
                    ids_of[used[2] : used[2] + number] = path[start:]
                    used[0], used[1], used[2] = used[0] + 1, used[1] + size, used[2] + number
                    table[slot] = used[0]
            for i in range(start, start + number):
                total = np.float32(total + scores[path[i]])
                ids[done] = path[i]
                done += path[i] != UNK or before != UNK  # unknown pieces that touch are one
                before = path[i]
        numbers[line] = done - first
    return done


class Segmenter:
    """Segments text as a SentencePiece unigram model does, with a cache of up to `words` words (a power of two)."""

    def __init__(self, processor: spm.SentencePieceProcessor, words: int = _WORDS):
        ordinary = list(range(_SPECIAL, processor.get_piece_size()))
        pieces = [piece.encode() for piece in processor.id_to_piece(ordinary)]
        order = np.array(sorted(range(len(ordinary)), key=pieces.__getitem__))
        scores = np.array(processor.get_score(ordinary), np.float32)
        self._scores = np.zeros(_SPECIAL + PIECE_OFFSET + len(ordinary), np.float32)  # by id
        self._scores[_SPECIAL + PIECE_OFFSET :] = scores
        self._scores[UNK] = scores.min() - np.float32(_UNKNOWN_PENALTY)
        self._units = _double_array(
            np.frombuffer(b"".join(sorted(pieces)), np.uint8),
            np.cumsum([0, *map(len, sorted(pieces))], dtype=np.int64),
            (order + _SPECIAL + PIECE_OFFSET).astype(np.int32),
            scores[order],
        )
        self._cache = (
            np.zeros(4 * words, np.int32),
            np.empty((words, len(_COLUMNS)), np.int64),
            np.empty(16 * words + _LONGEST, np.uint8),
            np.empty(4 * words + _LONGEST, np.int32),
            np.zeros(3, np.int64),
        )
        self._lock = Lock()

    def __call__(self, forms: Sequence[bytes]) -> tuple[Array, Array]:
        """int32 ids of all lines, given in their normal form (UTF-8), and int64 number of ids of each."""
        ends = np.cumsum(np.fromiter(map(len, forms), np.int64, len(forms)))
        text = np.frombuffer(b"".join(forms), np.uint8)
        ids, numbers = np.empty(len(text) + 1, np.int32), np.empty(len(forms), np.int64)
        log_probs = self._units.view(np.float32)
        with self._lock:
            done = _segment(text, ends, self._units, log_probs, self._scores, self._cache, ids, numbers)
        return ids[:done].copy(), numbers
