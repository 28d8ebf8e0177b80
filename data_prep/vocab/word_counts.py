"""Distinct normalised words of lines of text with their occurrences: what a unigram vocabulary is trained on.

No piece crosses white space, so training on words and their counts is training on the lines, and a line's best
segmentation is that of its words. A language written without spaces has whole lines as words.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece as spm

NORMALIZATION = "nmt_nfkc"
SPACE = "▁"  # before every word, in SentencePiece's pieces
_BATCH_LINES = 20_000  # normalised at once
_WORD_BYTES, _CHARACTER_BYTES = 60, 45  # memory that training takes for each, a little more than measured


@dataclass(frozen=True)
class WordCounts:
    """Words in the order of their code points, with their occurrences; `sentences` is the number of lines with text."""

    words: pa.LargeStringArray
    counts: np.ndarray
    sentences: int


def count_words(
    lines: Iterable[str], memory: float = math.inf, normalize: Callable[[list[str]], list[str]] | None = None
) -> WordCounts:
    """Normalise lines of text, as our own models do if `normalize` is not given, and count their words.

    Raises MemoryError when training on them would take more than `memory` bytes.
    """
    normalize = normalize or spm.SentencePieceNormalizer(rule_name=NORMALIZATION).normalize
    tables = [_counted(pa.array([], pa.large_string()), np.zeros(0, np.int64))]
    sentences = new = 0
    for batch in _batches(iter(lines)):
        texts = pa.array(normalize(batch), pa.large_string())
        sentences += pc.sum(pc.greater(pc.binary_length(texts), 0)).as_py() or 0
        counted = pc.value_counts(pc.list_flatten(pc.split_pattern(texts, SPACE)))
        tables.append(_counted(counted.field("values"), counted.field("counts")))
        new += len(counted)
        if new > tables[0].num_rows:  # so that each word is merged a few times in all
            tables, new = [_merged(tables)], 0
            _check_memory(tables[0], memory)
    table = _merged(tables)
    _check_memory(table, memory)
    table = table.sort_by("word").combine_chunks()
    distinct = table["word"].combine_chunks() if table.num_rows else pa.array([], pa.large_string())
    pa.default_memory_pool().release_unused()
    return WordCounts(distinct, table["count"].to_numpy(), sentences)


def thinned_words(read: Callable[[], Iterable[str]], memory: float) -> WordCounts:
    """Count the words of all lines; if training on those takes too much memory, of every second, fourth, eighth …
    line."""
    step = 1
    while True:
        try:
            return count_words(islice(read(), 0, None, step), memory)
        except MemoryError:
            step *= 2


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(lines, _BATCH_LINES)):
        yield batch


def _counted(words: pa.Array, counts: pa.Array | np.ndarray) -> pa.Table:
    return pa.table({"word": words, "count": pa.array(counts, pa.int64())})


def _merged(tables: list[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(tables)
    rows = rows.filter(pc.greater(pc.binary_length(rows["word"]), 0))
    grouped = rows.group_by("word", use_threads=False).aggregate([("count", "sum")])
    return grouped.select(["word", "count_sum"]).rename_columns(["word", "count"])


def _check_memory(table: pa.Table, memory: float) -> None:
    characters = pc.sum(pc.utf8_length(table["word"])).as_py() or 0
    if _WORD_BYTES * table.num_rows + _CHARACTER_BYTES * characters > memory:
        raise MemoryError
