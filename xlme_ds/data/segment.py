"""Segments normalised text into the same ids as SentencePiece, in a third of SentencePiece's time.

`▁`, the mark of a space, occurs in a piece only at its start. So the best segmentation of a line (Kudo, 2018: the path
with the largest sum of log probabilities) consists of the best segmentations of its words. The words' segmentations are
cached.
"""

from collections.abc import Sequence
from threading import Lock

import numpy as np
import sentencepiece as spm
from numba import njit
from numba.types import Tuple, float32, int32, int64, uint8

from .compiled import Array, compiled, readonly
from .rows import PIECE_OFFSET, UNK

Paths = tuple[Array, Array, Array, Array]
_SPECIAL_PIECES = 3  # the number of SentencePiece's special pieces, which have the first ids
_RESET = -100_000.0  # where a line's score falls below this, SentencePiece counts it from 0 again
_UNKNOWN_PENALTY = 10.0  # an unknown character scores 10 nats less than the least likely piece, as in SentencePiece
_BASE, _PARENT, _ID, _SCORE = range(4)  # columns of the trie's array, in which a row is called a unit
_FREE, _ROOT = -1, -2  # in the column _PARENT: the unit is unused, or is the root
_CACHED_WORDS = 1 << 17  # number of words at which the cache is full; it is then emptied
_LONGEST_CACHED = 32  # bytes of the longest word to cache: longer words (text without spaces) rarely occur again
_OFFSET_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # constants of the hash FNV-1a
# Columns of a cached word's row: hash, start and count of its bytes, start and count of its ids, result of `_reach`.
_COLUMNS = _HASH, _BYTES_START, _BYTE_COUNT, _IDS_START, _ID_COUNT, _REACH = range(6)


@compiled(int32[:, ::1](readonly(uint8), readonly(int64), readonly(int32), readonly(float32)))
def _double_array(letters: Array, starts: Array, ids: Array, scores: Array) -> Array:
    """A trie of pieces as a double array (Aoe, 1989), int32 [units, 4]. Piece i has the bytes
    `letters[starts[i] : starts[i + 1]]`; pieces are sorted.

    The child of unit u for a byte is unit v = base(u) ^ byte if the parent of v is u; else u has no child for the byte.
    A unit in which a piece ends has the piece's id and score (the bits of a float32); in all other units the id is 0.
    """
    units = np.zeros((2 * len(letters) + 1024, 4), np.int32)
    units[:, _PARENT] = _FREE
    units[0, _PARENT] = _ROOT
    # Nodes of the trie are numbered breadth first. Node n has the pieces low[n] to high[n] − 1, the unit unit_of[n] and
    # the depth depth_of[n] in bytes.
    low, high = np.empty(len(letters) + 1, np.int64), np.empty(len(letters) + 1, np.int64)
    unit_of, depth_of = np.zeros(len(letters) + 1, np.int64), np.zeros(len(letters) + 1, np.int64)
    low[0], high[0] = 0, len(starts) - 1
    # Child n of the current node has the pieces borders[n] to borders[n + 1] − 1.
    child_bytes, borders = np.empty(256, np.int64), np.empty(257, np.int64)
    node, nodes, first_free, top = 0, 1, 1, 255  # units before `first_free` are used, units after `top` are free
    while node < nodes:
        piece, depth, unit, child_count = low[node], depth_of[node], unit_of[node], 0
        if starts[piece + 1] - starts[piece] == depth:
            units[unit, _ID], units.view(np.float32)[unit, _SCORE] = ids[piece], scores[piece]
            piece += 1
        while piece < high[node]:
            byte = letters[starts[piece] + depth]
            if child_count == 0 or child_bytes[child_count - 1] != byte:
                child_bytes[child_count], borders[child_count] = byte, piece
                child_count += 1
            piece += 1
        borders[child_count] = high[node]
        if child_count:
            while units[first_free, _PARENT] != _FREE:
                first_free += 1
            # The search tries one unit after the other for the first child. Several children rarely fit among the units
            # far before `top`, so the search for them skips these units.
            candidate, fits = first_free if child_count == 1 else max(first_free, top - 4096), False
            while not fits:  # until the units of all children are free
                if candidate | 255 >= len(units) - 1:
                    more = np.zeros_like(units)
                    more[:, _PARENT] = _FREE
                    units = np.concatenate((units, more))
                fits, base = True, candidate ^ child_bytes[0]
                for child_byte in child_bytes[:child_count]:
                    fits &= units[base ^ child_byte, _PARENT] == _FREE
                candidate += 1
            units[unit, _BASE] = base
            for child in range(child_count):
                child_unit = base ^ child_bytes[child]
                units[child_unit, _PARENT], top = unit, max(top, child_unit | 255)
                low[nodes], high[nodes] = borders[child], borders[child + 1]
                unit_of[nodes], depth_of[nodes] = child_unit, depth + 1
                nodes += 1
        node += 1
    return units[: top + 1].copy()


@njit
def _best_path(
    text: Array, first: int, size: int, total: np.float32, units: Array, log_probs: Array, unknown: float, paths: Paths
) -> tuple[int, int, float]:
    """Find the best path through a word: `size` bytes of `text` from `first` on. Returns the number of ids, the number
    of characters, and the smallest difference between two compared scores.

    `total`: the score of the line before the word. Sums are rounded to float32 and begin at 0 again below `_RESET`, as
    in SentencePiece. `log_probs`: the memory of `units` as float32. `unknown`: score of an unknown character. `paths`
    are four buffers. The first three hold, for each byte where a path may end, the best score, the id of the last
    piece, and the byte where this last piece begins (−1: no path yet). The ids of the best path are written to the end
    of the fourth buffer.
    """
    best, last, starts, ids = paths
    for at in range(size + 1):
        starts[at] = -1
    best[0] = total
    begin, characters, margin = 0, 0, np.inf
    while begin < size:
        byte = text[first + begin]
        # The end of the character that starts here; its first byte tells how many bytes of UTF-8 it has.
        end = begin + 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
        if best[begin] < _RESET:
            offset = best[begin]
            for at in range(begin, size + 1):
                best[at] -= offset  # where no path ends yet, this value is never read
        unit, score_before, is_piece = 0, best[begin], False  # is_piece: the character alone is a piece
        for at in range(begin, size):
            child = units[unit, _BASE] ^ np.int32(text[first + at])
            if units[child, _PARENT] != unit:
                break
            unit = child
            if units[unit, _ID]:
                score = np.float32(score_before + log_probs[unit, _SCORE])
                difference = np.float64(score) - np.float64(best[at + 1])
                if starts[at + 1] >= 0 and abs(difference) < margin:
                    margin = abs(difference)
                if starts[at + 1] < 0 or difference > 0.0:
                    best[at + 1], last[at + 1], starts[at + 1] = score, units[unit, _ID], begin
                is_piece |= at + 1 == end
        if not is_piece:
            score = np.float32(score_before + unknown)
            difference = np.float64(score) - np.float64(best[end])
            if starts[end] >= 0 and abs(difference) < margin:
                margin = abs(difference)
            if starts[end] < 0 or difference > 0.0:
                best[end], last[end], starts[end] = score, UNK, begin
        characters += 1
        begin = end
    id_count = 0
    while size > 0:  # from the word's end back to its start
        id_count += 1
        ids[len(ids) - id_count] = last[size]
        size = starts[size]
    return id_count, characters, margin


@njit(inline="always")
def _reach(margin: float, characters: int, total: float, unknown: float) -> int:
    """Returns a limit r: a word's cached segmentation is right wherever the line's score before the word is above −r.

    The segmentation was found where the line's score before the word was `total`; `margin` is the smallest difference
    between compared scores. The further a sum is below 0, the more coarsely float32 rounds it. At −r the rounding
    errors of sums of up to `characters` terms could exceed the margin, or the score could fall below `_RESET` in the
    word; r is −1 if this could happen at any score. The word lowers the line's score by at most −`word_score`, where
    `word_score` is the score of `characters` unknown characters.
    """
    word_score = unknown * characters
    safe_margin = margin + characters * (word_score + total) * 2.0**-23
    return int(max(min(safe_margin * 2.0**23 / characters, -_RESET) + word_score, -1.0))


@njit(inline="always")
def _slot(key: np.uint64, text: Array, begin: int, size: int, table: Array, rows: Array, letters: Array) -> int:
    """The index of a word's slot in the hash table, or of a free slot if the word is not there. The word is `size`
    bytes of `text` from `begin` on; `key` is its hash."""
    mask = np.uint64(len(table) - 1)
    slot = (key ^ key >> np.uint64(32)) & mask
    while table[slot]:
        row = rows[table[slot] - 1]
        if row[_HASH] == np.int64(key) and row[_BYTE_COUNT] == size:
            start, same = row[_BYTES_START], True
            for i in range(size):
                same &= letters[start + i] == text[begin + i]
            if same:
                break
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)  # type: ignore[return-value]


@compiled(
    int64(
        *(readonly(uint8), readonly(int64), int32[:, ::1], float32[:, ::1], float32[::1]),
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
    id_counts: Array,
) -> int:
    """Write the ids of all lines to `ids`, and the number of ids of each line to `id_counts`. Returns the total number
    of ids.

    `text`: the bytes of all lines; `ends_of_lines`: the index in `text` at which each line ends; `units` and
    `log_probs`: see `_best_path`; `scores`: log probabilities by id. `cache` has five arrays: the hash table, in which
    a slot holds 1 + the index of a word's row, or 0 if it is free; the rows of the words (`_COLUMNS`); the words'
    bytes; the words' ids; and the numbers of rows, bytes and ids in use.
    """
    table, rows, cached_bytes, cached_ids, used = cache
    longest, start_of_line = 0, 0
    for end in ends_of_lines:
        longest, start_of_line = max(longest, end - start_of_line), end
    integers = np.empty((3, longest + 1), np.int32)
    paths = np.empty(longest + 1, np.float32), integers[0], integers[1], integers[2]
    at, done = 0, 0  # number of bytes read from `text`, and of ids written
    for line in range(len(id_counts)):
        first, stop, total, previous_id = done, ends_of_lines[line], np.float32(0.0), 0
        while at < stop:
            begin, key = at, _OFFSET_BASIS
            while at == begin or (  # until ▁, which is the bytes E2 96 81, starts the next word
                at < stop and not (text[at] == 0xE2 and text[at + 1] == 0x96 and text[at + 2] == 0x81)
            ):
                key = (key ^ np.uint64(text[at])) * _PRIME
                at += 1
            size = at - begin
            slot = _slot(key, text, begin, size, table, rows, cached_bytes)
            cached = table[slot] - 1  # the row of the word, or −1
            if cached >= 0 and -total < rows[cached, _REACH]:
                start, count, path = rows[cached, _IDS_START], rows[cached, _ID_COUNT], cached_ids
                for i in range(start, start + count):
                    total = np.float32(total + scores[path[i]])
            else:
                count, characters, margin = _best_path(text, begin, size, total, units, log_probs, scores[UNK], paths)
                start, path = longest + 1 - count, paths[3]
                if cached < 0 and size <= _LONGEST_CACHED:
                    if used[0] == len(rows) or used[1] + size > len(cached_bytes) or used[2] + count > len(cached_ids):
                        table[:] = 0
                        used[:] = 0
                        slot = _slot(key, text, begin, size, table, rows, cached_bytes)
                    row = rows[used[0]]
                    row[_HASH], row[_BYTES_START], row[_BYTE_COUNT] = np.int64(key), used[1], size
                    row[_IDS_START], row[_ID_COUNT] = used[2], count
                    row[_REACH] = _reach(margin, characters, total, scores[UNK])
                    cached_bytes[used[1] : used[1] + size] = text[begin:at]
                    cached_ids[used[2] : used[2] + count] = path[start:]
                    used[0], used[1], used[2] = used[0] + 1, used[1] + size, used[2] + count
                    table[slot] = used[0]
                total = paths[0][size]
            for i in range(start, start + count):
                ids[done] = path[i]
                done += path[i] != UNK or previous_id != UNK  # adjacent unknown pieces are written as one
                previous_id = path[i]
        id_counts[line] = done - first
    return done


class Segmenter:
    """Segments text as a SentencePiece unigram model does, with a cache of up to `words` words; `words` must be a power
    of two."""

    def __init__(self, processor: spm.SentencePieceProcessor, words: int = _CACHED_WORDS):
        ordinary = list(range(_SPECIAL_PIECES, processor.get_piece_size()))
        pieces = [piece.encode() for piece in processor.id_to_piece(ordinary)]
        order = np.array(sorted(range(len(ordinary)), key=pieces.__getitem__))
        scores = np.array(processor.get_score(ordinary), np.float32)
        first_id = _SPECIAL_PIECES + PIECE_OFFSET  # the id of the first ordinary piece
        self._scores = np.zeros(first_id + len(ordinary), np.float32)  # by id
        self._scores[first_id:] = scores
        self._scores[UNK] = scores.min() - np.float32(_UNKNOWN_PENALTY)
        self._units = _double_array(
            np.frombuffer(b"".join(sorted(pieces)), np.uint8),
            np.cumsum([0, *map(len, sorted(pieces))], dtype=np.int64),
            (order + first_id).astype(np.int32),
            scores[order],
        )
        self._cache = (  # see `_segment`
            np.zeros(4 * words, np.int32),
            np.empty((words, len(_COLUMNS)), np.int64),
            np.empty(16 * words + _LONGEST_CACHED, np.uint8),
            np.empty(4 * words + _LONGEST_CACHED, np.int32),
            np.zeros(3, np.int64),
        )
        self._lock = Lock()  # calls from several threads share the cache

    def __call__(self, forms: Sequence[bytes]) -> tuple[Array, Array]:
        """The ids of all lines, concatenated (int32), and the number of ids of each line (int64). `forms`: the lines in
        their normal form, UTF-8."""
        ends = np.cumsum(np.fromiter(map(len, forms), np.int64, len(forms)))
        text = np.frombuffer(b"".join(forms), np.uint8)
        ids, id_counts = np.empty(len(text) + 1, np.int32), np.empty(len(forms), np.int64)
        log_probs = self._units.view(np.float32)
        with self._lock:
            total = _segment(text, ends, self._units, log_probs, self._scores, self._cache, ids, id_counts)
        return ids[:total].copy(), id_counts
