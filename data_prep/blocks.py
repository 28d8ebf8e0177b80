"""Cleaned text to Arrow record batches of token ids. SentencePiece is called with many lines at once."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import pyarrow as pa

from data_prep.clean import Counts
from xlme_ds.data.schema import DOCUMENTS, EOS, PAIRS, UNK
from xlme_ds.data.vocabulary import Vocabulary

_LINES = 4_000  # of one SentencePiece call
_CHARACTERS = 1_000_000  # of one SentencePiece call, so of one record batch

T = TypeVar("T", bound=Sequence[str])
Ragged = tuple[np.ndarray, np.ndarray]
"""Sequences one behind the other: int32 values of all, and int64 lengths of each."""


def document_blocks(vocabulary: Vocabulary, documents: Iterable[list[str]], counts: Counts) -> Iterator[pa.RecordBatch]:
    """Record batches of schema DOCUMENTS; a document without a single token is dropped (no_token)."""
    for batch in _batches(documents):
        paragraphs = np.array([len(document) for document in batch])
        values, lengths = _encode(vocabulary, list(chain.from_iterable(batch)))
        per_document = np.add.reduceat(lengths, np.cumsum(paragraphs) - paragraphs)
        kept = per_document > 0
        counts.dropped.update({"no_token": int((~kept).sum())} if not kept.all() else {})
        counts.units += int(kept.sum())
        for document, keep in zip(batch, kept, strict=True):
            if keep:
                _count_text(counts, document)
        counts.unknown += int((values == UNK).sum())
        per_document = per_document[kept]
        values = np.insert(values, np.cumsum(per_document), EOS)
        counts.tokens += len(values)
        if len(per_document):
            yield pa.record_batch([_list_array((values, per_document + 1))], schema=DOCUMENTS)


def pair_blocks(
    vocabulary: Vocabulary, pairs: Iterable[tuple[str, str]], counts: Counts, max_tokens: int
) -> Iterator[pa.RecordBatch]:
    """Record batches of schema PAIRS.

    A pair is dropped when a side has no token (no_token) or both together have more than `max_tokens` (too_long).
    """
    for batch in _batches(pairs):
        sides = [_encode(vocabulary, [pair[side] for pair in batch]) for side in (0, 1)]
        a, b = sides[0][1], sides[1][1]
        empty = (a == 0) | (b == 0)
        too_long = ~empty & (a + b > max_tokens)
        kept = ~(empty | too_long)
        counts.dropped.update({r: int(m.sum()) for r, m in (("no_token", empty), ("too_long", too_long)) if m.any()})
        counts.units += int(kept.sum())
        for pair, keep in zip(batch, kept, strict=True):
            if keep:
                _count_text(counts, pair)
        sides = [(values[np.repeat(kept, lengths)], lengths[kept]) for values, lengths in sides]
        for values, _ in sides:
            counts.tokens += len(values)
            counts.unknown += int((values == UNK).sum())
        if kept.any():
            yield pa.record_batch([_list_array(side) for side in sides], schema=PAIRS)


def _batches(units: Iterable[T]) -> Iterator[list[T]]:
    """Whole documents or pairs, about one SentencePiece call's worth."""
    batch: list[T] = []
    lines = characters = 0
    for unit in units:
        batch.append(unit)
        lines += len(unit)
        characters += sum(map(len, unit))
        if lines >= _LINES or characters >= _CHARACTERS:
            yield batch
            batch, lines, characters = [], 0, 0
    if batch:
        yield batch


def _encode(vocabulary: Vocabulary, lines: list[str]) -> Ragged:
    pieces = vocabulary.processor.encode(lines, num_threads=1)  # processes are what we parallelise over
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    values = np.fromiter(chain.from_iterable(pieces), np.int32, int(lengths.sum()))
    return vocabulary.from_pieces(values), lengths


def _list_array(ragged: Ragged) -> pa.ListArray:
    values, lengths = ragged
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _count_text(counts: Counts, paragraphs: Sequence[str]) -> None:
    counts.paragraphs += len(paragraphs)
    counts.characters += sum(map(len, paragraphs))
    counts.bytes += sum(len(paragraph.encode()) for paragraph in paragraphs)
