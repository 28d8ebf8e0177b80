"""A unigram language model over subwords (Kudo, 2018), trained from large to small: one path through all sizes.

Training begins with the characters and up to a million frequent substrings. Rounds of expectation maximisation set the
pieces' probabilities, and the pieces that the text can best do without are left out, as SentencePiece does it; every
vocabulary on the way is nested in the one before. A distinct word is trained on once, weighted by its occurrences, and
where pieces fit into it is looked up once: pruning only thins those places out.
"""

import unicodedata
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.languages import SCRIPTS, script_numbers
from data_prep.vocab.unigram_loops import (
    ANY,
    LONGEST,
    LONGEST_WORD,
    MARK,
    Numbers,
    count_characters,
    expect,
    extend,
    find_losses,
    find_reach,
    insert,
    look_up,
    segment,
    thin,
)
from data_prep.vocab.word_counts import SPACE, WordCounts

UNKNOWN_PENALTY = 10.0  # nats below the least likely piece, as in SentencePiece
_SEEDS = 1_000_000  # pieces that training begins with, or as many times the largest vocabulary as this:
_SEEDS_A_PIECE = 4  # expectation maximisation drops half of the seeds at once
_SEED_CHARACTERS = 20_000_000  # of distinct words, the most frequent ones, whose substrings are counted
_SHRINK = 0.75  # of the pieces stay in a round of pruning
_ROUNDS = 2  # of expectation maximisation after it
_LEAST_EXPECTED = 0.5  # occurrences of a longer piece, below which it is dropped: these four as in SentencePiece


@dataclass
class _Words:
    """Distinct words as character numbers, 0 unknown; word w is `characters[starts[w] : starts[w + 1]]`.

    `reach` is the length of the longest possible piece from each character on (`find_reach`).
    """

    alphabet: list[str]
    characters: Numbers
    starts: Numbers
    counts: Numbers
    reach: Numbers


@dataclass
class _Lattice:
    """The pieces that begin at each character of some texts: `fan[0]` of the `arcs` at the first one, and so on."""

    starts: Numbers
    fan: Numbers
    arcs: Numbers

    def renumber(self, numbers: Numbers) -> None:
        """Give every piece its new number; those whose is negative are left out."""
        self.arcs = self.arcs[: thin(self.fan, self.arcs, numbers)]


@dataclass(frozen=True)
class Unigrams:
    """Pieces with the natural logarithms of their probabilities, and what the words' best segmentations come to under
    them: `score` is their log-probability and `tokens` the number of their pieces, both times the words' occurrences.
    """

    pieces: dict[str, float]
    score: float
    tokens: int


class UnigramPath:
    """Vocabularies from all seeds down to the characters; each call of `at` continues from the size before."""

    def __init__(self, text: WordCounts, coverage: float, largest: int = 0):
        """Train on words; characters beyond the share `coverage` of all occurrences are unknown. `largest`: pieces of
        the largest vocabulary asked for. Raises ValueError where there are no words."""
        if not len(text.words):
            raise ValueError("the sampled lines have nothing but white space and invisible characters: take more text")
        words = _read_words(text, coverage)
        self.characters = len(words.alphabet)
        longer, occurrences = _seeds(words, max(_SEEDS, _SEEDS_A_PIECE * largest))
        self._pieces = words.alphabet + longer
        self._lengths = np.array([1, *map(len, self._pieces)], np.uint8)
        self._counts = words.counts
        number = {character: n for n, character in enumerate(words.alphabet, 1)}
        spelled = np.fromiter((number[c] for piece in longer for c in piece), np.int32)
        starts = np.append(0, np.cumsum(self._lengths[1 + self.characters :], dtype=np.int64))
        trie = insert(spelled, starts, self.characters)
        self._text = _find(trie, words.characters, words.starts, words.reach)
        left = np.repeat(starts[1:], np.diff(starts)) - np.arange(len(spelled))
        self._own = _find(trie, spelled, starts, left.astype(np.uint8))  # the pieces within every longer piece
        self._scores = np.log(np.append(1.0, occurrences) / occurrences.sum())
        self._settle()

    @property
    def size(self) -> int:
        """Number of pieces left."""
        return len(self._pieces)

    def at(self, size: int, least: float = 0.0) -> Unigrams:
        """The vocabulary of `size` pieces, or of all if there are fewer; all characters are among them. `least`: longer
        pieces of fewer expected occurrences are left out, so that there may be fewer."""
        while self.size > max(size, self.characters):
            self._prune(max(size, self.characters, int(self.size * _SHRINK)), size)
            self._settle(_LEAST_EXPECTED if self.size > size else 0.0, size)
        if least:
            self._settle(least)
        pieces = dict(zip(self._pieces, self._scores[1:].tolist(), strict=True))
        return Unigrams(pieces, self._score, int(self._frequencies.sum()))

    def _settle(self, least: float = _LEAST_EXPECTED, fewest: int = 0) -> None:
        """Maximise the likelihood, without the longer pieces of fewer than `least` expected occurrences as far as
        `fewest` pieces are left, and find the best segmentations."""
        for _ in range(_ROUNDS):
            expected = np.zeros(len(self._scores))
            expect(*self._arguments(), expected)
            to_keep, first = expected >= least, 1 + self.characters
            to_keep[first + np.argsort(-expected[first:], kind="stable")[: max(fewest - self.characters, 0)]] = True
            expected = np.maximum(self._keep(to_keep, expected)[1:], _LEAST_EXPECTED)
            scores = _digamma(expected) - _digamma(expected.sum()[None])  # favours frequent pieces, as in SentencePiece
            self._scores = np.append(scores.min() - UNKNOWN_PENALTY, scores)
        self._frequencies = np.zeros(len(self._scores))
        self._score = segment(*self._arguments(), self._frequencies)

    def _arguments(self) -> tuple[Numbers, ...]:
        return self._text.starts, self._counts, self._text.fan, self._text.arcs, self._lengths, self._scores

    def _prune(self, size: int, fewest: int) -> None:
        """Keep the characters and the longer pieces without which the text's log-probability would fall most; those
        without which it would not fall only as far as `fewest` pieces need them."""
        own, first = self._own, self.characters + 1
        losses = find_losses(own.starts, own.fan, own.arcs, self._lengths, self._scores, self._frequencies, first)
        to_keep = np.zeros(len(self._scores), bool)
        best = np.argsort(-losses, kind="stable")[: size - self.characters]
        to_keep[first + best[(losses[best] > -np.inf) | (np.arange(len(best)) < fewest - self.characters)]] = True
        self._keep(to_keep, self._scores)

    def _keep(self, to_keep: Numbers, values: Numbers) -> Numbers:
        """Drop the longer pieces that are not `to_keep`; `values` of the others."""
        first = 1 + self.characters
        to_keep[:first] = True
        if to_keep.all():
            return values
        numbers = np.where(to_keep, np.cumsum(to_keep) - 1, -1).astype(np.int32)
        own, sizes = self._own, np.diff(self._own.starts)
        inside = np.repeat(to_keep[first:], sizes)
        arcs = own.arcs[np.repeat(inside, own.fan)]
        self._own = _Lattice(np.append(0, np.cumsum(sizes[to_keep[first:]])), own.fan[inside], arcs)
        self._own.renumber(numbers)
        self._text.renumber(numbers)
        self._pieces = [piece for piece, keep in zip(self._pieces, to_keep[1:].tolist(), strict=True) if keep]
        self._lengths, self._scores = self._lengths[to_keep], self._scores[to_keep]
        return values[to_keep]


def _digamma(x: Numbers) -> Numbers:
    """The derivative of the logarithm of the gamma function, by its asymptotic series from 7 on."""
    below = np.zeros_like(x)
    for _ in range(7):
        small = x < 7
        below[small] -= 1 / x[small]
        x = x + small
    squared = 1 / x**2
    return below + np.log(x) - 0.5 / x - squared * (1 / 12 - squared * (1 / 120 - squared / 252))


def _read_words(words: WordCounts, coverage: float) -> _Words:
    empty, space = (pa.scalar(text, pa.large_string()) for text in ("", SPACE))
    spaced = pc.binary_join_element_wise(space, words.words, empty)  # the last one is what joins them
    utf8 = spaced.buffers()[2][: pc.sum(pc.binary_length(spaced)).as_py()] if len(spaced) else b""
    codes = np.frombuffer(str(utf8, "utf-8").encode("utf-32-le"), np.uint32)
    sizes = pc.utf8_length(spaced).to_numpy().astype(np.int64)
    counts = words.counts.astype(np.float64)
    occurrences = np.zeros(0x110000)
    count_characters(codes, np.append(0, np.cumsum(sizes)), counts, occurrences)
    ranked = np.argsort(-occurrences, kind="stable")[: np.count_nonzero(occurrences)]
    alphabet = ranked[np.cumsum(occurrences[ranked]) - occurrences[ranked] < coverage * occurrences.sum()]
    number_of = np.zeros(0x110000, np.int32)
    number_of[alphabet] = np.arange(1, 1 + len(alphabet))
    characters = number_of[codes]
    parts = -(-sizes // LONGEST_WORD)
    if len(parts) and parts.max() > 1:
        whole, sizes, counts = sizes, np.full(parts.sum(), LONGEST_WORD), np.repeat(counts, parts)
        sizes[np.cumsum(parts) - 1] = whole - (parts - 1) * LONGEST_WORD
    if len(characters) and characters.min() == 0:  # of unknown ones in a row the first stays
        to_keep = characters > 0
        to_keep[1:] |= characters[:-1] > 0
        starts = np.cumsum(sizes) - sizes
        to_keep[starts] = True
        characters, sizes = characters[to_keep], np.add.reduceat(to_keep, starts, dtype=np.int64)
    starts = np.append(0, np.cumsum(sizes))
    letters = [chr(code) for code in alphabet.tolist()]
    return _Words(letters, characters, starts, counts, find_reach(characters, starts, _scripts(letters)))


def _scripts(alphabet: list[str]) -> Numbers:
    """int8 script of the unknown character and of every other; digits and signs have one of their own."""
    scripts = script_numbers()[[ord(character) for character in alphabet]].astype(np.int8)
    scripts[scripts == 1 + SCRIPTS.index("Kana")] = 1 + SCRIPTS.index("Han")
    for n, character in enumerate(alphabet):
        if character == SPACE:
            scripts[n] = ANY
        elif not scripts[n] and (character in "\u200c\u200d" or unicodedata.category(character)[0] == "M"):
            scripts[n] = MARK
    return np.append(np.int8(ANY), scripts)


def _seeds(text: _Words, number: int) -> tuple[list[str], Numbers]:
    """The longer pieces to begin with, `number` with the characters, by falling score, and for all pieces a first guess
    at their occurrences.

    They are the substrings that occur twice and can be followed by more than one character (SentencePiece takes the
    inner nodes of a suffix tree), those of the highest product of occurrences and length.
    """
    characters, starts, counts, reach = _most_frequent(text)
    single = np.bincount(text.characters, np.repeat(text.counts, np.diff(text.starts)))[1:]
    ids, occurrences, places = characters, np.append(0.0, single), np.zeros(0, np.int64)
    candidates: list[tuple[Numbers, Numbers, Numbers]] = []
    for length in range(2, LONGEST + 2):
        ids, longer, parents, following = extend(characters, starts, counts, reach, ids, occurrences, length)
        most = np.zeros(len(occurrences))
        np.maximum.at(most, parents, longer)
        if length > 2:
            good = (occurrences >= 2) & (most < occurrences)
            scores = occurrences[good] * (length - 1)
            candidates.append((scores, places[good], np.full(len(scores), length - 1)))
        occurrences, places = longer, following
    scores, where, sizes = (np.concatenate(column) for column in zip(*candidates, strict=True))
    ranked = np.argsort(-scores, kind="stable")[: max(number - len(text.alphabet), 0)]
    letters = ["", *text.alphabet]
    pieces = [
        "".join([letters[n] for n in characters[place : place + size].tolist()])
        for place, size in zip(where[ranked].tolist(), sizes[ranked].tolist(), strict=True)
    ]
    return pieces, np.concatenate([single, scores[ranked]])


def _most_frequent(text: _Words) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Characters, starts, counts and reach of the most frequent words, up to _SEED_CHARACTERS."""
    sizes = np.diff(text.starts)
    if sizes.sum() <= _SEED_CHARACTERS:
        return text.characters, text.starts, text.counts, text.reach
    ranked = np.argsort(-text.counts, kind="stable")
    to_keep = np.zeros(len(sizes), bool)
    to_keep[ranked[np.cumsum(sizes[ranked]) <= _SEED_CHARACTERS]] = True
    inside = np.repeat(to_keep, sizes)
    return text.characters[inside], np.append(0, np.cumsum(sizes[to_keep])), text.counts[to_keep], text.reach[inside]


def _find(trie: tuple[Numbers, Numbers, Numbers], characters: Numbers, starts: Numbers, reach: Numbers) -> _Lattice:
    fan = np.empty(len(characters), np.uint8)
    room = np.empty(int(np.clip(reach, 1, LONGEST).sum(dtype=np.int64)), np.int32)  # memory is taken as it is filled
    return _Lattice(starts, fan, room[: look_up(*trie, characters, reach, fan, room)])
