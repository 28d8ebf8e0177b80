"""Turns cleaned text into Arrow record batches of token ids. Many lines are encoded at once.

A block is the part of an input that becomes a shard. A document has one side, a list of paragraphs; a pair has two, a
line each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa

from data_prep.encode.dedup import BlockHashes
from data_prep.encode.held_out import HELD_OUT_TEXT, OTHER_SPLIT, digest, lines_of
from data_prep.filters.clean import EXACT_DUPLICATES, Counts, Filters, Sides
from data_prep.readers.reader import Paragraphs, ScoredPair
from xlme_ds.data.schema import DOCUMENTS, EOS, PAIRS, UNK
from xlme_ds.data.vocabulary import Vocabulary

_BATCH_PAIRS = 4_000  # at most this many pairs are encoded at once, into one record batch
_BATCH_CHARACTERS = 1_000_000  # a batch ends with the pair that reaches this many characters

T = TypeVar("T")
Ragged = tuple[np.ndarray, np.ndarray]  # (values of many sequences, one after the other; length of each, int64)


@dataclass(frozen=True)
class IdEncoder:
    """Filters the text of one block and encodes it to ids. `languages` are those of the sides.

    `hashes` and `in_other_split` may be None. `hashes` finds exact duplicates: repeats inside this block are dropped
    at once; repeats in other blocks are removed later, by the stored hashes of the written text. `in_other_split` takes
    texts in normal form, and tells which of them belong to the split that is not encoded, such as held-out text.
    Paragraphs whose ids have a `digest` in `excluded` are dropped, and pairs with such a side.
    """

    vocabulary: Vocabulary
    languages: tuple[str, ...]
    filters: Filters
    hashes: BlockHashes | None
    in_other_split: Callable[[Iterable[bytes]], np.ndarray] | None
    excluded: Set[bytes]

    def documents(self, batches: Iterable[Paragraphs], counts: Counts) -> Iterator[pa.RecordBatch]:
        """Yield record batches of schema DOCUMENTS, and add to `counts`.

        Filters remove paragraphs (`counts.removed`). If the remaining paragraphs of a document have no token at all,
        they are removed, too (reason no_token). A document without any remaining paragraph is dropped
        (`counts.dropped`), for the reason of its last paragraph.
        """
        for lines, paragraph_counts in batches:
            document_of = np.repeat(np.arange(len(paragraph_counts)), paragraph_counts)  # each paragraph's document
            stops = np.cumsum(paragraph_counts)  # the index after each document's last paragraph
            reasons = _Reasons(len(lines))
            forms = self._normal_forms((lines,), split_side=0)
            # All paragraphs of a document, unfiltered, decide its split, because the paragraphs that remain after
            # filtering may depend on other documents.
            if self.in_other_split is not None:
                document_forms = (b"".join(forms[0][start:stop]) for start, stop in pairwise([0, *stops.tolist()]))
                reasons.add(OTHER_SPLIT, self.in_other_split(document_forms)[document_of])
            hashes = self._apply_text_filters(reasons, Sides((lines,), self.languages), forms)
            ((values, lengths),) = self._encode(reasons, (lines,), forms)
            # Bool for each paragraph; `lengths` has an entry where it is true, `values` the ids of these paragraphs.
            is_encoded = reasons.kept
            document_tokens = np.bincount(document_of[is_encoded], weights=lengths, minlength=len(stops))
            has_tokens = document_tokens > 0  # bool for each document; one without tokens is not written
            reasons.add("no_token", ~has_tokens[document_of])  # `values` stay: these documents have none
            is_written = reasons.kept  # bool for each paragraph
            counts.dropped.update(reasons.count(stops[~has_tokens] - 1))
            counts.removed.update(reasons.count(np.flatnonzero(~is_written)))
            record_of = counts.units + np.cumsum(has_tokens) - 1  # each written document's index in the shard
            records = record_of[document_of[is_written]]
            self._add_written(is_written, hashes, (lines,), lengths[is_written[is_encoded]], records, counts)
            counts.units += int(has_tokens.sum())
            counts.unknown += int((values == UNK).sum())
            written_tokens = document_tokens[has_tokens].astype(np.int64)
            values = np.insert(values, np.cumsum(written_tokens), EOS)
            counts.tokens += len(values)
            if len(written_tokens):
                yield pa.record_batch([list_array((values, written_tokens + 1))], schema=DOCUMENTS)

    def pairs(self, pairs: Iterable[ScoredPair], counts: Counts, max_tokens: int) -> Iterator[pa.RecordBatch]:
        """Yield record batches of schema PAIRS, and add to `counts`.

        A pair is dropped for the reason of the first filter that drops it. A pair that passes all filters is dropped if
        one of its sides has no token (no_token), or if both sides together have more than `max_tokens` (too_long).
        """
        # The English side decides a pair's split, so that all translations of an English sentence are in one. Without
        # English, the side whose code is first in the alphabet decides.
        split_side = self.languages.index("en" if "en" in self.languages else min(self.languages))
        for batch in _batches(pairs):
            texts: tuple[list[str], list[str]] = ([a for a, _, _ in batch], [b for _, b, _ in batch])
            scores = np.array([np.nan if score is None else score for _, _, score in batch])
            reasons = _Reasons(len(batch))
            forms = self._normal_forms(texts, split_side)
            if self.in_other_split is not None:
                reasons.add(OTHER_SPLIT, self.in_other_split(forms[split_side]))
            hashes = self._apply_text_filters(reasons, Sides(texts, self.languages, scores), forms)
            sides = self._encode(reasons, texts, forms)
            (_, source_lengths), (_, target_lengths) = sides
            lengths = source_lengths + target_lengths
            empty = (source_lengths == 0) | (target_lengths == 0)
            is_encoded = reasons.kept  # bool for each pair; `lengths` has an entry where it is true
            reasons.add("no_token", _spread(empty, is_encoded))
            reasons.add("too_long", _spread(lengths > max_tokens, is_encoded))
            is_written = reasons.kept  # bool for each pair
            sides, lengths = _keep(sides, is_written[is_encoded]), lengths[is_written[is_encoded]]
            counts.dropped.update(reasons.count(np.flatnonzero(~is_written)))
            self._add_written(is_written, hashes, texts, lengths, counts.units + np.arange(len(lengths)), counts)
            counts.units += len(lengths)
            for values, _ in sides:
                counts.tokens += len(values)
                counts.unknown += int((values == UNK).sum())
            if len(lengths):
                yield pa.record_batch([list_array(side) for side in sides], schema=PAIRS)

    def _normal_forms(self, texts: Sequence[list[str]], split_side: int) -> list[list[bytes]]:
        """The normal forms of the lines of each side; [] for a side whose forms are not needed.

        Exact duplicates are found by the forms of all sides. The split needs only the forms of the side `split_side`.
        """
        needed = [
            self.hashes is not None or (self.in_other_split is not None and side == split_side)
            for side in range(len(texts))
        ]
        return [self.vocabulary.normalise(lines) if need else [] for lines, need in zip(texts, needed, strict=True)]

    def _apply_text_filters(self, reasons: "_Reasons", sides: Sides, forms: Sequence[list[bytes]]) -> list[bytes]:
        """Add the reasons of text filters and of exact duplicates to `reasons`. Returns the hash of each paragraph or
        pair, b"" for those that the split or a text filter drops; or [] if `self.hashes` is None."""
        for name, text_filter in self.filters.text:
            reasons.add(name, text_filter(sides))
        if self.hashes is None:
            return []
        is_repeated, hashes = self.hashes.find_repeats(forms, reasons.kept)
        reasons.add(EXACT_DUPLICATES, is_repeated)
        return hashes

    def _encode(self, reasons: "_Reasons", texts: Sequence[list[str]], forms: Sequence[list[bytes]]) -> list[Ragged]:
        """Encode the lines that are not dropped yet, and add the reasons of held-out text and of token filters to
        `reasons`. Returns the ids of each side, without the lines that the added reasons drop."""
        is_encoded = reasons.kept
        encode_lines, encode_normalised = self.vocabulary.encode_lines, self.vocabulary.encode_normalised
        sides = [
            encode_normalised(_select(normal, is_encoded)) if normal else encode_lines(_select(lines, is_encoded))
            for lines, normal in zip(texts, forms, strict=True)
        ]
        if self.excluded:
            is_excluded = [[digest(ids) in self.excluded for ids in lines_of(*side)] for side in sides]
            reasons.add(HELD_OUT_TEXT, _spread(np.logical_or.reduce(is_excluded), is_encoded))
        for name, token_filter in self.filters.tokens:
            reasons.add(name, _spread(token_filter([lengths for _, lengths in sides]), is_encoded))
        return _keep(sides, reasons.kept[is_encoded])

    def _add_written(
        self,
        is_written: np.ndarray,
        hashes: list[bytes],
        texts: Sequence[list[str]],
        tokens: np.ndarray,
        records: np.ndarray,
        counts: Counts,
    ) -> None:
        """Add the written text to `counts` (its paragraphs, characters and bytes) and to `self.hashes`.

        `is_written`, `hashes` and each side of `texts` have an entry for every paragraph or pair. `tokens` has the
        number of tokens of every written one, and `records` the index of its record in the shard.
        """
        texts = [_select(side, is_written) for side in texts]
        counts.paragraphs += sum(map(len, texts))
        for side in texts:
            text = "".join(side)
            counts.characters += len(text)
            counts.bytes += len(text.encode())
        if self.hashes is not None:
            self.hashes.add(_select(hashes, is_written), texts, tokens, records)


class _Reasons:
    """The first reason to drop each of many paragraphs or pairs. `kept` (bool) is True for those without a reason."""

    def __init__(self, units: int):
        self.names: list[str] = []
        self.codes = np.zeros(units, np.int8)  # 0 without a reason, else 1 + the index of the reason's name

    @property
    def kept(self) -> np.ndarray:
        return self.codes == 0

    def add(self, name: str, drops: np.ndarray) -> None:
        self.names.append(name)
        self.codes[drops & self.kept] = len(self.names)

    def count(self, indices: np.ndarray) -> Counter[str]:
        """Number of the paragraphs or pairs at `indices` by reason; none of them may be kept."""
        totals = np.bincount(self.codes[indices], minlength=1).tolist()
        assert totals[0] == 0
        counts = Counter[str]()
        for name, total in zip(self.names, totals[1:], strict=False):
            counts.update({name: total} if total else {})
        return counts


def _keep(sides: list[Ragged], kept: np.ndarray) -> list[Ragged]:
    """Each side with only its lines that are `kept` (bool for each line)."""
    return sides if kept.all() else [(values[np.repeat(kept, lengths)], lengths[kept]) for values, lengths in sides]


def _spread(of_selected: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Expand booleans of the `selected` lines to booleans of all lines, False for the others."""
    spread = np.zeros(len(selected), bool)
    spread[selected] = of_selected
    return spread


def _select(lines: list[T], selected: np.ndarray) -> list[T]:
    return lines if selected.all() else list(compress(lines, selected))


def _batches(pairs: Iterable[ScoredPair]) -> Iterator[list[ScoredPair]]:
    """Group the pairs into lists that are encoded at once."""
    batch: list[ScoredPair] = []
    characters = 0
    for pair in pairs:
        batch.append(pair)
        characters += len(pair[0]) + len(pair[1])
        if len(batch) >= _BATCH_PAIRS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def list_array(ragged: Ragged) -> pa.ListArray:
    """An Arrow column with one list for each sequence."""
    values, lengths = ragged
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
