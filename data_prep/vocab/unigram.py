"""A unigram language model over subwords (Kudo, 2018), pruned from the largest vocabulary down to the smallest.

Training begins with the characters and about a million frequent substrings as pieces. As in SentencePiece, rounds of
expectation maximisation set the pieces' probabilities, and pruning drops the pieces whose removal lowers the text's
likelihood least. So every vocabulary is a subset of all larger ones. Each distinct word is stored once, and weighted by
its occurrences. All pieces in a word are looked up once, at the beginning; when a piece is dropped, it is deleted from
every word's list.

Pieces have numbers from 1 on: first the characters, by falling frequency, then the longer pieces, which have two
characters or more. Number 0 is the unknown character.
"""

import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.languages import SCRIPTS, script_numbers
from data_prep.vocab.unigram_loops import (
    ANY,
    MARK,
    MAX_PIECE_LENGTH,
    MAX_WORD_LENGTH,
    Numbers,
    build_trie,
    expect,
    extend_substrings,
    fill_lattice,
    find_losses,
    find_reach,
    renumber_arcs,
    segment,
)
from data_prep.vocab.word_counts import SPACE, WordCounts

# The unknown character's log-probability is this many nats below that of the least likely piece, as in SentencePiece.
UNKNOWN_PENALTY = 10.0
# Training begins with at most max(_SEEDS, _SEEDS_PER_PIECE × size of the largest vocabulary) pieces, the seeds. The
# first expectation maximisation drops about half of them.
_SEEDS = 1_000_000
_SEEDS_PER_PIECE = 4
# Seeds are substrings of the most frequent distinct words, which together have at most this many characters.
_SEED_CHARACTERS = 20_000_000
# SentencePiece has the same values of _SHRINK, _ROUNDS, _MIN_EXPECTED and _SEEDS.
_SHRINK = 0.75  # share of the pieces that a round of pruning keeps
_ROUNDS = 2  # rounds of expectation maximisation after each pruning
_MIN_EXPECTED = 0.5  # a longer piece with fewer expected occurrences is dropped
_CODE_POINTS = 0x110000  # number of Unicode's code points


@dataclass
class _Words:
    """Distinct words, stored as the numbers of their characters.

    Word w is `characters[starts[w] : starts[w + 1]]` and occurs `counts[w]` times. `reach[i]` is the length of the
    longest piece that could begin at `characters[i]` (`find_reach`).
    """

    alphabet: list[str]
    characters: Numbers
    starts: Numbers
    counts: Numbers
    reach: Numbers


class _Lattice(NamedTuple):
    """The pieces that begin at each character of some texts. `arcs` has their numbers: first those of the `fan[0]`
    pieces that begin at the first character, then those of the `fan[1]` pieces at the second, and so on. Text t begins
    at character `starts[t]`."""

    starts: Numbers
    fan: Numbers
    arcs: Numbers

    def renumbered(self, numbers: Numbers) -> "_Lattice":
        """The lattice in which piece n has the number `numbers[n]`, or is dropped if this number is negative. The
        arrays of this lattice are overwritten."""
        return self._replace(arcs=self.arcs[: renumber_arcs(self.fan, self.arcs, numbers)])


@dataclass(frozen=True)
class UnigramModel:
    """Pieces with the natural logarithms of their probabilities.

    `log_likelihood` is the log-probability of the best segmentations of all words, and `tokens` the number of pieces in
    these segmentations; each word is weighted by its occurrences.
    """

    pieces: dict[str, float]
    log_likelihood: float
    tokens: int


class UnigramTrainer:
    """Trains ever smaller vocabularies, from all seeds down to the characters. Each call of `prune_to` prunes the
    vocabulary that the previous call left."""

    def __init__(self, text: WordCounts, coverage: float, largest: int = 0):
        """Train on the words of `text`. Raises ValueError if there are none.

        The vocabulary has the most frequent characters, which make up the share `coverage` of all occurrences of
        characters; other characters are unknown. `largest` is the size of the largest vocabulary that `prune_to` will
        be asked for.
        """
        if not len(text.words):
            raise ValueError("the sampled lines have nothing but white space and invisible characters: take more text")
        words = _read_words(text, coverage)
        self.characters = len(words.alphabet)
        self._first_longer = 1 + self.characters  # number of the first longer piece
        longer, occurrences = _seeds(words, max(_SEEDS, _SEEDS_PER_PIECE * largest))
        self._pieces = words.alphabet + longer
        self._lengths = np.array([1, *map(len, self._pieces)], np.uint8)
        self._word_counts = words.counts
        number_of = {character: number for number, character in enumerate(words.alphabet, 1)}
        characters = np.fromiter((number_of[c] for piece in longer for c in piece), np.int32)  # longer pieces, joined
        starts = _starts(self._lengths[self._first_longer :])
        trie = build_trie(characters, starts, self.characters)
        self._text_lattice = _find_pieces(trie, words.characters, words.starts, words.reach)
        to_end = np.repeat(starts[1:], np.diff(starts)) - np.arange(len(characters))  # characters to the piece's end
        # The pieces that occur in each longer piece. If the longer piece is removed, some of them replace it.
        self._nested = _find_pieces(trie, characters, starts, to_end.astype(np.uint8))
        self._scores = np.log(np.append(1.0, occurrences) / occurrences.sum())
        self._reestimate()

    @property
    def size(self) -> int:
        """Number of pieces that are left."""
        return len(self._pieces)

    def prune_to(self, size: int, min_expected: float = 0.0) -> UnigramModel:
        """The vocabulary of `size` pieces, or of all pieces that are left, if these are fewer. All characters stay,
        even if they are more than `size`. At the end, longer pieces with fewer than `min_expected` expected occurrences
        are dropped, so the vocabulary may be smaller than `size`."""
        while self.size > max(size, self.characters):
            next_size = max(size, self.characters, int(self.size * _SHRINK))
            self._prune(next_size, size)
            self._reestimate(min_size=size)
        if min_expected:
            self._reestimate(min_expected)
        pieces = dict(zip(self._pieces, self._scores[1:].tolist(), strict=True))
        return UnigramModel(pieces, self._log_likelihood, int(self._frequencies.sum()))

    def _reestimate(self, min_expected: float = _MIN_EXPECTED, min_size: int = 0) -> None:
        """Set the scores by rounds of expectation maximisation, and find the best segmentations.

        Longer pieces with fewer than `min_expected` expected occurrences are dropped; at least `min_size` pieces stay.
        """
        for _ in range(_ROUNDS):
            expected = np.zeros(len(self._scores))
            expect(*self._text_lattice, self._word_counts, self._lengths, self._scores, expected)
            to_keep = expected >= min_expected
            by_expected = np.argsort(-expected[self._first_longer :], kind="stable")
            to_keep[self._first_longer + by_expected[: max(min_size - self.characters, 0)]] = True
            self._keep(to_keep)
            expected = np.maximum(expected[to_keep][1:], _MIN_EXPECTED)  # without the unknown character
            # Digamma instead of the logarithm favours frequent pieces, as in SentencePiece.
            scores = _digamma(expected) - _digamma(expected.sum()[None])
            self._scores = np.append(scores.min() - UNKNOWN_PENALTY, scores)
        self._frequencies = np.zeros(len(self._scores))
        self._log_likelihood = segment(
            *self._text_lattice, self._word_counts, self._lengths, self._scores, self._frequencies
        )

    def _prune(self, size: int, min_size: int) -> None:
        """Keep at most `size` pieces: the characters, and the longer pieces whose removal would lower the text's
        log-likelihood most.

        Pieces whose removal would not lower the log-likelihood are kept only to reach `min_size` pieces.
        """
        losses = find_losses(*self._nested, self._lengths, self._scores, self._frequencies, self._first_longer)
        to_keep = np.zeros(len(self._scores), bool)
        by_loss = np.argsort(-losses, kind="stable")[: size - self.characters]
        lowers_likelihood = losses[by_loss] > -np.inf
        is_needed = lowers_likelihood | (np.arange(len(by_loss)) < min_size - self.characters)
        to_keep[self._first_longer + by_loss[is_needed]] = True
        self._keep(to_keep)

    def _keep(self, to_keep: Numbers) -> None:
        """Drop the longer pieces for which `to_keep` is False. `to_keep` has one entry for each number of a piece, from
        0 on; the entries of the unknown character and of the characters become True."""
        to_keep[: self._first_longer] = True
        if to_keep.all():
            return
        new_numbers = np.where(to_keep, np.cumsum(to_keep) - 1, -1).astype(np.int32)
        nested, sizes = self._nested, np.diff(self._nested.starts)
        longer_to_keep = to_keep[self._first_longer :]
        characters_to_keep = np.repeat(longer_to_keep, sizes)  # bool for each character of the longer pieces
        arcs = nested.arcs[np.repeat(characters_to_keep, nested.fan)]
        nested = _Lattice(_starts(sizes[longer_to_keep]), nested.fan[characters_to_keep], arcs)
        self._nested, self._text_lattice = nested.renumbered(new_numbers), self._text_lattice.renumbered(new_numbers)
        self._pieces = [piece for piece, keep in zip(self._pieces, to_keep[1:].tolist(), strict=True) if keep]
        self._lengths, self._scores = self._lengths[to_keep], self._scores[to_keep]


def _starts(sizes: Numbers) -> Numbers:
    """The positions, int64, where joined sequences of these sizes start, and the position where the last one ends."""
    return np.append(0, np.cumsum(sizes, dtype=np.int64))


def _digamma(x: Numbers) -> Numbers:
    """ψ(x), the derivative of ln Γ(x). ψ(x) = ψ(x + 1) - 1/x is applied until x >= 7, then the asymptotic series."""
    recurrence = np.zeros_like(x)
    for _ in range(7):
        small = x < 7
        recurrence[small] -= 1 / x[small]
        x = x + small
    squared = 1 / x**2
    return recurrence + np.log(x) - 0.5 / x - squared * (1 / 12 - squared * (1 / 120 - squared / 252))


def _read_words(text: WordCounts, coverage: float) -> _Words:
    """The words of `text`, as numbers of characters; SPACE is before each word. At least one word is needed. Words over
    MAX_WORD_LENGTH characters are cut into several, and consecutive unknown characters become a single one.

    The alphabet holds the most frequent characters, up to the share `coverage` of all occurrences of characters.
    """
    space, no_separator = pa.scalar(SPACE, pa.large_string()), pa.scalar("", pa.large_string())
    spaced = pc.binary_join_element_wise(space, text.words, no_separator)
    utf8 = spaced.buffers()[2][: pc.sum(pc.binary_length(spaced)).as_py()]  # all words, one after the other
    codes = np.frombuffer(str(utf8, "utf-8").encode("utf-32-le"), np.uint32)  # the code point of each character
    sizes = pc.utf8_length(spaced).to_numpy().astype(np.int64)
    counts = text.counts.astype(np.float64)
    occurrences = np.bincount(codes, np.repeat(counts, sizes), minlength=_CODE_POINTS)
    ranked = np.argsort(-occurrences, kind="stable")[: np.count_nonzero(occurrences)]
    before = np.cumsum(occurrences[ranked]) - occurrences[ranked]  # occurrences of all more frequent characters
    alphabet = ranked[before < coverage * occurrences.sum()]
    number_of = np.zeros(_CODE_POINTS, np.int32)
    number_of[alphabet] = np.arange(1, 1 + len(alphabet))
    characters = number_of[codes]
    # Cut the long words.
    parts = -(-sizes // MAX_WORD_LENGTH)  # number of parts that each word is cut into
    last_sizes = sizes - (parts - 1) * MAX_WORD_LENGTH
    sizes = np.full(parts.sum(), MAX_WORD_LENGTH)
    sizes[np.cumsum(parts) - 1] = last_sizes
    counts = np.repeat(counts, parts)
    # Keep only the first of consecutive unknown characters in a word.
    to_keep = characters > 0
    to_keep[1:] |= characters[:-1] > 0
    word_starts = _starts(sizes)[:-1]
    to_keep[word_starts] = True
    characters, sizes = characters[to_keep], np.add.reduceat(to_keep, word_starts, dtype=np.int64)
    starts = _starts(sizes)
    letters = list(map(chr, alphabet.tolist()))
    return _Words(letters, characters, starts, counts, find_reach(characters, starts, _scripts(letters)))


def _scripts(alphabet: list[str]) -> Numbers:
    """For each number of a character, int8: the character's script, or else ANY or MARK. The unknown character, number
    0, has ANY. Digits and signs share script 0."""
    scripts = script_numbers()[[ord(character) for character in alphabet]].astype(np.int8)
    scripts[scripts == 1 + SCRIPTS.index("Kana")] = 1 + SCRIPTS.index("Han")  # Japanese words mix the two
    for i, character in enumerate(alphabet):
        if character == SPACE:
            scripts[i] = ANY
        elif not scripts[i] and (character in "\u200c\u200d" or unicodedata.category(character)[0] == "M"):
            scripts[i] = MARK
    return np.append(np.int8(ANY), scripts)


def _seeds(words: _Words, max_pieces: int) -> tuple[list[str], Numbers]:
    """Returns (pieces, occurrences). `pieces` are the longer pieces with which training begins, by falling score;
    together with the characters they are at most `max_pieces`. `occurrences` holds a first guess for every piece,
    characters first: for a character its true occurrences, for a longer piece its score.

    The score is occurrences × length. The pieces are chosen from the substrings that occur at least twice and do not
    always have the same character after them. SentencePiece chooses in the same way, from the inner nodes of a suffix
    tree.
    """
    reach = _reach_in_frequent_words(words)
    character_occurrences = np.bincount(words.characters, np.repeat(words.counts, np.diff(words.starts)))[1:]
    # When a pass of the loop begins, these arrays describe the substrings of `length - 1` characters: `ids` has, by
    # position, the id of the substring that begins there; `occurrences` and `positions` have, by id, the substring's
    # occurrences and first position. `length` goes up to MAX_PIECE_LENGTH + 1, because the characters after a substring
    # of MAX_PIECE_LENGTH characters decide whether it is a candidate.
    ids, occurrences, positions = words.characters, np.append(0.0, character_occurrences), np.zeros(0, np.int64)
    candidates: list[tuple[Numbers, Numbers, Numbers]] = []
    for length in range(2, MAX_PIECE_LENGTH + 2):
        ids, longer_occurrences, prefixes, longer_positions = extend_substrings(
            words.characters, words.starts, words.counts, reach, ids, occurrences, length
        )
        if length > 2:
            with_usual_next = np.zeros(len(occurrences))  # occurrences with the most frequent next character
            np.maximum.at(with_usual_next, prefixes, longer_occurrences)
            is_candidate = (occurrences >= 2) & (with_usual_next < occurrences)
            scores = occurrences[is_candidate] * (length - 1)
            candidates.append((scores, positions[is_candidate], np.full(len(scores), length - 1)))
        occurrences, positions = longer_occurrences, longer_positions
    scores, positions, sizes = (np.concatenate(column) for column in zip(*candidates, strict=True))
    ranked = np.argsort(-scores, kind="stable")[: max(max_pieces - len(words.alphabet), 0)]
    letters = ["", *words.alphabet]
    pieces = [
        "".join([letters[number] for number in words.characters[position : position + size].tolist()])
        for position, size in zip(positions[ranked].tolist(), sizes[ranked].tolist(), strict=True)
    ]
    return pieces, np.concatenate([character_occurrences, scores[ranked]])


def _reach_in_frequent_words(words: _Words) -> Numbers:
    """`words.reach`, but 0 for the characters of rare words: of all words but the most frequent ones that together have
    at most _SEED_CHARACTERS characters."""
    sizes = np.diff(words.starts)
    ranked = np.argsort(-words.counts, kind="stable")
    is_frequent = np.zeros(len(sizes), bool)
    is_frequent[ranked[np.cumsum(sizes[ranked]) <= _SEED_CHARACTERS]] = True
    return words.reach * np.repeat(is_frequent, sizes)


def _find_pieces(trie: tuple[Numbers, ...], characters: Numbers, starts: Numbers, reach: Numbers) -> _Lattice:
    """The lattice of the texts in `characters`, made by looking up the pieces of the trie. No piece that begins at
    character i is longer than `reach[i]`."""
    fan = np.empty(len(characters), np.uint8)
    # The array has room for all possible arcs. The operating system allocates its memory only as it is filled.
    arcs = np.empty(int(np.clip(reach, 1, MAX_PIECE_LENGTH).sum(dtype=np.int64)), np.int32)
    return _Lattice(starts, fan, arcs[: fill_lattice(*trie, characters, reach, fan, arcs)])
