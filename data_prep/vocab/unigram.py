"""A unigram language model over subwords (Kudo, 2018), pruned from the largest vocabulary down to the smallest.

Training begins with the characters and about a million frequent substrings as pieces. As in SentencePiece, rounds of
expectation maximisation set the pieces' probabilities, and pruning drops the pieces whose removal lowers the text's
likelihood least. Every vocabulary on this path is a subset of the one before. Each distinct word is trained on once,
weighted by its occurrences, and the pieces that fit into it are looked up once; pruning only deletes some of them.
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
# Training begins with _SEEDS pieces or, if that is more, _SEEDS_A_PIECE for each piece of the largest vocabulary. The
# first expectation maximisation drops half of them.
_SEEDS = 1_000_000
_SEEDS_A_PIECE = 4
_SEED_CHARACTERS = 20_000_000  # at most, in the most frequent distinct words: their substrings are the seeds
# These, and _SEEDS, are SentencePiece's:
_SHRINK = 0.75  # share of the pieces that a round of pruning keeps
_ROUNDS = 2  # of expectation maximisation after each pruning
_LEAST_EXPECTED = 0.5  # a longer piece that is expected to occur less often is dropped


@dataclass
class _Words:
    """Distinct words as character numbers from 1 on, 0 for an unknown character.

    Word w is `characters[starts[w] : starts[w + 1]]` and occurs `counts[w]` times; `reach` is the length of the longest
    possible piece from each character on (`find_reach`).
    """

    alphabet: list[str]
    characters: Numbers
    starts: Numbers
    counts: Numbers
    reach: Numbers


@dataclass
class _Lattice:
    """The pieces that begin at each character of some texts: the first `fan[0]` of the `arcs` begin at the first
    character, the next `fan[1]` at the second, and so on. Text t begins at character `starts[t]`."""

    starts: Numbers
    fan: Numbers
    arcs: Numbers

    def renumber(self, numbers: Numbers) -> None:
        """Give every piece its new number from `numbers`, and drop the pieces whose new number is negative."""
        self.arcs = self.arcs[: thin(self.fan, self.arcs, numbers)]


@dataclass(frozen=True)
class Unigrams:
    """Pieces with the natural logarithms of their probabilities.

    `score` is the log-probability and `tokens` the number of pieces of the best segmentations of all words, each word
    weighted by its occurrences.
    """

    pieces: dict[str, float]
    score: float
    tokens: int


class UnigramPath:
    """Vocabularies from all seeds down to the characters; each call of `at` prunes what the one before left."""

    def __init__(self, text: WordCounts, coverage: float, largest: int = 0):
        """Train on the words of `text`. Raises ValueError if it has none.

        `coverage`: the most frequent characters that make up this share of all occurrences are in the vocabulary, the
        others are unknown. `largest`: size of the largest vocabulary that will be asked for.
        """
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
        to_end = np.repeat(starts[1:], np.diff(starts)) - np.arange(len(spelled))
        self._nested = _find(trie, spelled, starts, to_end.astype(np.uint8))  # the pieces within each longer piece
        self._scores = np.log(np.append(1.0, occurrences) / occurrences.sum())
        self._reestimate()

    @property
    def size(self) -> int:
        """Number of pieces that are left."""
        return len(self._pieces)

    def at(self, size: int, least: float = 0.0) -> Unigrams:
        """The vocabulary of `size` pieces, or of all that are left if these are fewer. All characters stay, even
        if they are more than `size`. `least`: longer pieces of fewer expected occurrences are dropped as well."""
        while self.size > max(size, self.characters):
            self._prune(max(size, self.characters, int(self.size * _SHRINK)), size)
            self._reestimate(_LEAST_EXPECTED if self.size > size else 0.0, size)
        if least:
            self._reestimate(least)
        pieces = dict(zip(self._pieces, self._scores[1:].tolist(), strict=True))
        return Unigrams(pieces, self._score, int(self._frequencies.sum()))

    def _reestimate(self, least: float = _LEAST_EXPECTED, fewest: int = 0) -> None:
        """Maximise the likelihood by expectation maximisation, and find the best segmentations.

        Longer pieces of fewer than `least` expected occurrences are dropped, but not below `fewest` pieces in all.
        """
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
        """Keep at most `size` pieces: the characters, and the longer pieces that the text needs most.

        These are the ones whose removal lowers its log-probability most. Pieces whose removal does not lower it are
        kept only as far as `fewest` pieces need them.
        """
        nested, first = (self._nested.starts, self._nested.fan, self._nested.arcs), self.characters + 1
        losses = find_losses(*nested, self._lengths, self._scores, self._frequencies, first)
        to_keep = np.zeros(len(self._scores), bool)
        best = np.argsort(-losses, kind="stable")[: size - self.characters]
        to_keep[first + best[(losses[best] > -np.inf) | (np.arange(len(best)) < fewest - self.characters)]] = True
        self._keep(to_keep, self._scores)

    def _keep(self, to_keep: Numbers, values: Numbers) -> Numbers:
        """Drop the longer pieces that are not `to_keep`; returns the `values` of the pieces that stay."""
        first = 1 + self.characters
        to_keep[:first] = True
        if to_keep.all():
            return values
        numbers = np.where(to_keep, np.cumsum(to_keep) - 1, -1).astype(np.int32)
        nested, sizes = self._nested, np.diff(self._nested.starts)
        inside = np.repeat(to_keep[first:], sizes)
        arcs = nested.arcs[np.repeat(inside, nested.fan)]
        self._nested = _Lattice(np.append(0, np.cumsum(sizes[to_keep[first:]])), nested.fan[inside], arcs)
        self._nested.renumber(numbers)
        self._text.renumber(numbers)
        self._pieces = [piece for piece, keep in zip(self._pieces, to_keep[1:].tolist(), strict=True) if keep]
        self._lengths, self._scores = self._lengths[to_keep], self._scores[to_keep]
        return values[to_keep]


def _digamma(x: Numbers) -> Numbers:
    """The derivative of ln Γ(x): raised to x >= 7 by its recurrence, then by its asymptotic series."""
    steps = np.zeros_like(x)
    for _ in range(7):
        small = x < 7
        steps[small] -= 1 / x[small]
        x = x + small
    squared = 1 / x**2
    return steps + np.log(x) - 0.5 / x - squared * (1 / 12 - squared * (1 / 120 - squared / 252))


def _read_words(words: WordCounts, coverage: float) -> _Words:
    """The words, with a space before each, as character numbers. Words over LONGEST_WORD are cut, and consecutive
    unknown characters become one."""
    empty, space = (pa.scalar(text, pa.large_string()) for text in ("", SPACE))
    spaced = pc.binary_join_element_wise(space, words.words, empty)  # `empty` joins the two
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
        uncut, sizes, counts = sizes, np.full(parts.sum(), LONGEST_WORD), np.repeat(counts, parts)
        sizes[np.cumsum(parts) - 1] = uncut - (parts - 1) * LONGEST_WORD
    if len(characters) and characters.min() == 0:  # of consecutive unknown characters only the first stays
        to_keep = characters > 0
        to_keep[1:] |= characters[:-1] > 0
        starts = np.cumsum(sizes) - sizes
        to_keep[starts] = True
        characters, sizes = characters[to_keep], np.add.reduceat(to_keep, starts, dtype=np.int64)
    starts = np.append(0, np.cumsum(sizes))
    letters = [chr(code) for code in alphabet.tolist()]
    return _Words(letters, characters, starts, counts, find_reach(characters, starts, _scripts(letters)))


def _scripts(alphabet: list[str]) -> Numbers:
    """int8 script by character number, the unknown character first. Digits and signs share a script of their own."""
    scripts = script_numbers()[[ord(character) for character in alphabet]].astype(np.int8)
    scripts[scripts == 1 + SCRIPTS.index("Kana")] = 1 + SCRIPTS.index("Han")
    for n, character in enumerate(alphabet):
        if character == SPACE:
            scripts[n] = ANY
        elif not scripts[n] and (character in "\u200c\u200d" or unicodedata.category(character)[0] == "M"):
            scripts[n] = MARK
    return np.append(np.int8(ANY), scripts)


def _seeds(text: _Words, number: int) -> tuple[list[str], Numbers]:
    """The longer pieces that training begins with, by falling score, and first guesses at the occurrences of all
    pieces, characters first. Together with the characters there are at most `number` pieces.

    The score is occurrences × length. Candidates are the substrings that occur at least twice and do not always have
    the same character after them (SentencePiece takes the inner nodes of a suffix tree).
    """
    characters, starts, counts, reach = _most_frequent(text)
    single = np.bincount(text.characters, np.repeat(text.counts, np.diff(text.starts)))[1:]
    ids, occurrences, places = characters, np.append(0.0, single), np.zeros(0, np.int64)  # of the length before
    candidates: list[tuple[Numbers, Numbers, Numbers]] = []
    for length in range(2, LONGEST + 2):
        ids, longer, parents, longer_places = extend(characters, starts, counts, reach, ids, occurrences, length)
        most = np.zeros(len(occurrences))  # occurrences with the most frequent next character
        np.maximum.at(most, parents, longer)
        if length > 2:
            branching = (occurrences >= 2) & (most < occurrences)
            scores = occurrences[branching] * (length - 1)
            candidates.append((scores, places[branching], np.full(len(scores), length - 1)))
        occurrences, places = longer, longer_places
    scores, places, sizes = (np.concatenate(column) for column in zip(*candidates, strict=True))
    ranked = np.argsort(-scores, kind="stable")[: max(number - len(text.alphabet), 0)]
    letters = ["", *text.alphabet]
    pieces = [
        "".join([letters[n] for n in characters[place : place + size].tolist()])
        for place, size in zip(places[ranked].tolist(), sizes[ranked].tolist(), strict=True)
    ]
    return pieces, np.concatenate([single, scores[ranked]])


def _most_frequent(text: _Words) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Characters, starts, counts and reach of the most frequent words, at most _SEED_CHARACTERS characters in all."""
    sizes = np.diff(text.starts)
    if sizes.sum() <= _SEED_CHARACTERS:
        return text.characters, text.starts, text.counts, text.reach
    ranked = np.argsort(-text.counts, kind="stable")
    to_keep = np.zeros(len(sizes), bool)
    to_keep[ranked[np.cumsum(sizes[ranked]) <= _SEED_CHARACTERS]] = True
    inside = np.repeat(to_keep, sizes)
    return text.characters[inside], np.append(0, np.cumsum(sizes[to_keep])), text.counts[to_keep], text.reach[inside]


def _find(trie: tuple[Numbers, Numbers, Numbers], characters: Numbers, starts: Numbers, reach: Numbers) -> _Lattice:
    """Look up the pieces of the trie that begin at each character."""
    fan = np.empty(len(characters), np.uint8)
    room = np.empty(int(np.clip(reach, 1, LONGEST).sum(dtype=np.int64)), np.int32)  # takes memory only as it is filled
    return _Lattice(starts, fan, room[: look_up(*trie, characters, reach, fan, room)])
