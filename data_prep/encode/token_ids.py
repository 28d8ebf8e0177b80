"""Turns cleaned text into Arrow record batches of token ids. Many lines are encoded at once.

A block is the part of an input that becomes a shard. A document has one side, a list of paragraphs; a pair has two, a
line each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np
import pyarrow as pa

from data_prep.encode.dedup import BlockHashes
from data_prep.encode.held_out import HELD_OUT_TEXT, OTHER_SPLIT, digest_lines
from data_prep.filters.clean import EXACT_DUPLICATES, Counts, Filters, Sides
from data_prep.readers.reader import Paragraphs, ScoredPair
from xlme_ds.data.schema import DOCUMENTS, EOS, PAIRS, UNK
from xlme_ds.data.vocabulary import Vocabulary

_BATCH_PAIRS = 4_000  # at most this many pairs are encoded at once, into one record batch
_BATCH_CHARACTERS = 1_000_000  # a batch ends with the pair that reaches this many characters

Ragged = tuple[np.ndarray, np.ndarray]  # (values of many sequences, one after the other; length of each, int64)


@dataclass(frozen=True)
class IdEncoder:
    """Filters the text of one block and encodes it to ids. `languages` are those of the sides.

    `hashes` and `in_other_split` may be None. `hashes` finds exact duplicates: repeats inside this block are dropped
    at once; repeats in other blocks are removed later, by the stored hashes of the written text. `in_other_split` takes
    texts in normal form, and tells which of them belong to the split that is not encoded, such as held-out text.
    Paragraphs whose ids have a hash (`digest_lines`) in `excluded` are dropped, and pairs with such a side.
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
        for lines, document_sizes in batches:
            document_of = np.repeat(np.arange(len(document_sizes)), document_sizes)  # each paragraph's document
            stops = np.cumsum(document_sizes)  # the index after each document's last paragraph
            reasons = _Reasons(len(lines))
            forms: dict[int, list[bytes]] = {}  # side -> the normal forms that the split needs
            # All paragraphs of a document, unfiltered, decide its split, because the paragraphs that remain after
            # filtering may depend on other documents.
            if self.in_other_split is not None:
                forms[0] = self.vocabulary.normalise(lines)
                document_forms = (b"".join(forms[0][start:stop]) for start, stop in pairwise([0, *stops.tolist()]))
                reasons.add(OTHER_SPLIT, self.in_other_split(document_forms)[document_of])
            hashes, ((ids, lengths),) = self._filter_and_encode(reasons, Sides((lines,), self.languages), forms)
            passed_lengths = lengths * reasons.passed
            document_tokens = np.bincount(document_of, weights=passed_lengths, minlength=len(stops)).astype(np.int64)
            has_tokens = document_tokens > 0  # bool for each document; one without tokens is not written
            reasons.add("no_token", ~has_tokens[document_of])
            is_written = reasons.passed  # bool for each paragraph
            counts.dropped.update(reasons.count(stops[~has_tokens] - 1))
            counts.removed.update(reasons.count(np.flatnonzero(~is_written)))
            records = counts.units + np.cumsum(has_tokens) - 1  # each written document's index in the shard
            self._add_written(is_written, hashes, (lines,), lengths, records[document_of], counts)
            record_tokens = document_tokens[has_tokens]
            written_ids = ids[np.repeat(is_written, lengths)]
            ids = np.insert(written_ids, np.cumsum(record_tokens), EOS)
            counts.units += len(record_tokens)
            counts.tokens += len(ids)
            counts.unknown += int((ids == UNK).sum())
            if len(record_tokens):
                yield pa.record_batch([list_array((ids, record_tokens + 1))], schema=DOCUMENTS)

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
            forms: dict[int, list[bytes]] = {}  # side -> the normal forms that the split needs
            if self.in_other_split is not None:
                forms[split_side] = self.vocabulary.normalise(texts[split_side])
                reasons.add(OTHER_SPLIT, self.in_other_split(forms[split_side]))
            hashes, sides = self._filter_and_encode(reasons, Sides(texts, self.languages, scores), forms)
            (_, source_lengths), (_, target_lengths) = sides
            lengths = source_lengths + target_lengths
            reasons.add("no_token", (source_lengths == 0) | (target_lengths == 0))
            reasons.add("too_long", lengths > max_tokens)
            is_written = reasons.passed  # bool for each pair
            counts.dropped.update(reasons.count(np.flatnonzero(~is_written)))
            records = counts.units + np.cumsum(is_written) - 1  # each written pair's index in the shard
            self._add_written(is_written, hashes, texts, lengths, records, counts)
            counts.units += int(is_written.sum())
            columns = []
            for ids, side_lengths in sides:
                ids = ids[np.repeat(is_written, side_lengths)]
                counts.tokens += len(ids)
                counts.unknown += int((ids == UNK).sum())
                columns.append(list_array((ids, side_lengths[is_written])))
            if is_written.any():
                yield pa.record_batch(columns, schema=PAIRS)

    def _filter_and_encode(
        self, reasons: "_Reasons", sides: Sides, known_forms: Mapping[int, list[bytes]]
    ) -> tuple[list[bytes], list[Ragged]]:
        """Encode the lines that are not dropped yet. `known_forms` has the normal forms of the lines of some sides.

        Adds to `reasons`, in this order, the reasons of text filters, of exact duplicates, of held-out text and of
        token filters. Returns (hashes, the ids of each side). A line has no ids if the split, a text filter or an equal
        line drops it. `hashes` has the hash of each paragraph or pair, b"" for those that the split or a text filter
        drops; it is [] if duplicates are not searched.
        """
        for name, text_filter in self.filters.text:
            reasons.add(name, text_filter(sides))
        forms = [
            known_forms.get(side) or self._normalise(lines, reasons.passed) for side, lines in enumerate(sides.texts)
        ]
        hashes: list[bytes] = []
        if self.hashes is not None:
            is_repeated, hashes = self.hashes.find_repeats(forms, reasons.passed)
            reasons.add(EXACT_DUPLICATES, is_repeated)
        is_encoded = reasons.passed
        encoded_sides = []
        for side_forms in forms:
            lengths = np.zeros(len(side_forms), np.int64)
            ids, lengths[is_encoded] = self.vocabulary.encode_normalised(list(compress(side_forms, is_encoded)))
            encoded_sides.append((ids, lengths))
            if self.excluded:
                is_excluded = [digest in self.excluded for digest in digest_lines(ids, lengths)]
                reasons.add(HELD_OUT_TEXT, np.array(is_excluded, bool))
        for name, token_filter in self.filters.tokens:
            reasons.add(name, token_filter([lengths for _, lengths in encoded_sides]))
        return hashes, encoded_sides

    def _normalise(self, lines: Sequence[str], is_needed: np.ndarray) -> list[bytes]:
        """The normal forms of the lines that are needed (bool for each line), b"" for the others."""
        needed_forms = iter(self.vocabulary.normalise(list(compress(lines, is_needed))))
        return [next(needed_forms) if needed else b"" for needed in is_needed.tolist()]

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

        `is_written`, `hashes`, each side of `texts`, `tokens` (numbers of tokens) and `records` (indices of records in
        the shard) have an entry for every paragraph or pair.
        """
        written = [list(compress(side, is_written)) for side in texts]
        characters, byte_counts = np.zeros((2, len(written[0])), np.int64)
        for side in written:
            characters += np.fromiter(map(len, side), np.int64, len(side))
            byte_counts += np.fromiter((len(text.encode()) for text in side), np.int64, len(side))
        counts.paragraphs += sum(map(len, written))
        counts.characters += int(characters.sum())
        counts.bytes += int(byte_counts.sum())
        if self.hashes is not None:
            written_hashes = list(compress(hashes, is_written))
            self.hashes.add(written_hashes, tokens[is_written], characters, byte_counts, records[is_written])


class _Reasons:
    """The first reason to drop each of many paragraphs or pairs. `passed` (bool) is True for those without a reason."""

    def __init__(self, count: int):
        self.names: list[str] = []
        self.codes = np.zeros(count, np.int8)  # 0 without a reason, else 1 + the index of the reason's name

    @property
    def passed(self) -> np.ndarray:
        return self.codes == 0

    def add(self, name: str, drops: np.ndarray) -> None:
        self.names.append(name)
        self.codes[drops & self.passed] = len(self.names)

    def count(self, indices: np.ndarray) -> Counter[str]:
        """Number of the paragraphs or pairs at `indices` by reason; all of them must have a reason."""
        assert not self.passed[indices].any()
        return Counter(self.names[code - 1] for code in self.codes[indices].tolist())


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
