"""Cleaned text to Arrow record batches of token ids. SentencePiece is called with many lines at once."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa

from data_prep.encode.dedup import BlockHashes
from data_prep.encode.held_out import HELD_OUT_TEXT, OTHER_SPLIT, HeldOutText, Split, lines_of
from data_prep.filters.clean import EXACT_DUPLICATES, Counts, Filters, Sides
from data_prep.readers.reader import Paragraphs, ScoredPair
from xlme_ds.data.schema import DOCUMENTS, EOS, PAIRS, UNK
from xlme_ds.data.vocabulary import Vocabulary

_BATCH_PAIRS = 4_000  # in one SentencePiece call, and so in one record batch
_BATCH_CHARACTERS = 1_000_000  # in one call

T = TypeVar("T")
Ragged = tuple[np.ndarray, np.ndarray]  # the values of all sequences in a row, and the int64 length of each


@dataclass(frozen=True)
class IdEncoder:
    """Encodes the text of one input to ids, with a vocabulary, the languages of the sides, and filters.

    `hashes` notes the written text, to remove duplicates later; `split` selects a part of the text; lines of `without`
    are dropped. Each is None where it is not used.
    """

    vocabulary: Vocabulary
    languages: tuple[str, ...]
    filters: Filters = Filters()  # noqa: RUF009 - frozen
    hashes: BlockHashes | None = None
    split: Split | None = None
    without: HeldOutText | None = None

    def documents(self, paragraphs: Iterable[Paragraphs], counts: Counts) -> Iterator[pa.RecordBatch]:
        """Record batches of schema DOCUMENTS.

        Filters remove paragraphs. A document that loses all of them is dropped for the reason of its last paragraph; a
        paragraph that no filter removes has the reason no_token if its document has no token.
        """
        for lines, of_document in paragraphs:
            owner = np.repeat(np.arange(len(of_document)), of_document)
            reasons = _Reasons(len(lines))
            forms = self._normal_forms((lines,), split=0)
            if self.split is not None:  # before the filters, because some depend on the other text that is read
                ends = np.cumsum(of_document).tolist()
                documents = (b"".join(forms[0][first:last]) for first, last in pairwise([0, *ends]))
                reasons.add(OTHER_SPLIT, self.split.left_out(documents)[owner])
            self._text_filters(reasons, Sides((lines,), self.languages), forms)
            ((values, lengths),) = self._encode(reasons, (lines,), forms)
            passed = reasons.kept
            per_document = np.bincount(owner[passed], weights=lengths, minlength=len(of_document)).astype(np.int64)
            reasons.add("no_token", passed & (per_document == 0)[owner])
            last_paragraph = np.cumsum(of_document) - 1
            written = per_document > 0
            counts.dropped.update(reasons.of(last_paragraph[~written]))
            counts.removed.update(reasons.of(np.flatnonzero(~reasons.kept)))
            records = counts.units + np.cumsum(written) - 1  # record number of each written document
            self._note(reasons.kept, (lines,), lengths[written[owner[passed]]], records[owner[reasons.kept]], counts)
            counts.units += int(written.sum())
            counts.unknown += int((values == UNK).sum())
            per_document = per_document[written]
            values = np.insert(values, np.cumsum(per_document), EOS)
            counts.tokens += len(values)
            if len(per_document):
                yield pa.record_batch([list_array((values, per_document + 1))], schema=DOCUMENTS)

    def pairs(self, pairs: Iterable[ScoredPair], counts: Counts, max_tokens: int) -> Iterator[pa.RecordBatch]:
        """Record batches of schema PAIRS.

        A pair is dropped when a side has no token (no_token), both together have more than `max_tokens` (too_long), or
        a filter says so.
        """
        for scored in _batches(pairs):
            batch: tuple[list[str], list[str]] = ([a for a, _, _ in scored], [b for _, b, _ in scored])
            scores = np.array([np.nan if score is None else score for _, _, score in scored])
            reasons = _Reasons(len(scored))
            # The split goes by the English side, whose sentences have translations in several languages.
            side = self.languages.index("en" if "en" in self.languages else min(self.languages))
            forms = self._normal_forms(batch, split=side)
            if self.split is not None:
                reasons.add(OTHER_SPLIT, self.split.left_out(forms[side]))
            self._text_filters(reasons, Sides(batch, self.languages, scores), forms)
            sides = self._encode(reasons, batch, forms)
            a, b = (lengths for _, lengths in sides)
            empty = (a == 0) | (b == 0)
            passed = reasons.kept
            reasons.add("no_token", _spread(empty, passed))
            reasons.add("too_long", _spread(~empty & (a + b > max_tokens), passed))
            final = reasons.kept[passed]
            sides = _keep(sides, final)
            counts.dropped.update(reasons.of(np.flatnonzero(~reasons.kept)))
            self._note(reasons.kept, batch, a[final] + b[final], counts.units + np.arange(final.sum()), counts)
            counts.units += int(final.sum())
            for values, _ in sides:
                counts.tokens += len(values)
                counts.unknown += int((values == UNK).sum())
            if final.any():
                yield pa.record_batch([list_array(side) for side in sides], schema=PAIRS)

    def _normal_forms(self, texts: Sequence[list[str]], split: int) -> list[list[bytes]]:
        """Normal forms of the lines: of all sides to remove duplicates, or of side `split` to split by it; else []."""
        return [
            self.vocabulary.normal_forms(lines) if self.hashes or (self.split and side == split) else []
            for side, lines in enumerate(texts)
        ]

    def _text_filters(self, reasons: "_Reasons", sides: Sides, forms: Sequence[list[bytes]]) -> None:
        """Add the reasons of text filters and of exact duplicates."""
        for name, text_filter in self.filters.text:
            reasons.add(name, text_filter(sides))
        if self.hashes is not None:
            reasons.add(EXACT_DUPLICATES, self.hashes.repeated(forms, reasons.kept))

    def _encode(self, reasons: "_Reasons", texts: Sequence[list[str]], forms: Sequence[list[bytes]]) -> list[Ragged]:
        """Encode each side's lines that are left, then drop those of held-out text and of token filters."""
        passed, encode, encode_normal = reasons.kept, self.vocabulary.encode_lines, self.vocabulary.encode_normal
        sides = [
            encode_normal(_select(normal, passed)) if normal else encode(_select(lines, passed))
            for lines, normal in zip(texts, forms, strict=True)
        ]
        if self.without is not None:
            by_side = [self.without.left_out(lines_of(*side)) for side in sides]
            reasons.add(HELD_OUT_TEXT, _spread(np.logical_or.reduce(by_side), passed))
        for name, token_filter in self.filters.tokens:
            reasons.add(name, _spread(token_filter([lengths for _, lengths in sides]), passed))
        return _keep(sides, reasons.kept[passed])

    def _note(
        self, written: np.ndarray, texts: Sequence[list[str]], tokens: np.ndarray, records: np.ndarray, counts: Counts
    ) -> None:
        """Count the lines of `texts` (by side) that are `written`; `tokens` and `records` have an entry for each."""
        texts = [_select(side, written) for side in texts]
        counts.paragraphs += sum(map(len, texts))
        for side in texts:
            text = "".join(side)
            counts.characters += len(text)
            counts.bytes += len(text.encode())
        if self.hashes is not None:
            self.hashes.note(written, texts, tokens, records)


class _Reasons:
    """The first reason to drop each of many paragraphs or pairs; those without a reason are `kept`."""

    def __init__(self, number: int):
        self.names: list[str] = []
        self.first = np.zeros(number, np.int8)  # 0 kept, else 1 + index of the name

    @property
    def kept(self) -> np.ndarray:
        return self.first == 0

    def add(self, name: str, drops: np.ndarray) -> None:
        self.names.append(name)
        self.first[drops & self.kept] = len(self.names)

    def of(self, indices: np.ndarray) -> Counter[str]:
        """Number of the paragraphs or pairs at `indices`, all dropped, by reason."""
        numbers = np.bincount(self.first[indices], minlength=1).tolist()
        assert numbers[0] == 0
        totals = Counter[str]()
        for name, number in zip(self.names, numbers[1:], strict=False):
            totals.update({name: number} if number else {})
        return totals


def _keep(sides: list[Ragged], kept: np.ndarray) -> list[Ragged]:
    """The lines of each side that are `kept`."""
    return sides if kept.all() else [(values[np.repeat(kept, lengths)], lengths[kept]) for values, lengths in sides]


def _spread(of_selected: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Expand booleans of the `selected` lines to all lines; False for the others."""
    spread = np.zeros(len(selected), bool)
    spread[selected] = of_selected
    return spread


def _select(lines: list[T], selected: np.ndarray) -> list[T]:
    return lines if selected.all() else list(compress(lines, selected))


def _batches(pairs: Iterable[ScoredPair]) -> Iterator[list[ScoredPair]]:
    """Group the pairs into lists of about the size of one SentencePiece call."""
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
    """An Arrow column of lists from ragged values."""
    values, lengths = ragged
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
