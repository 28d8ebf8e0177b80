"""Count the distinct normalised words in lines of text. A unigram vocabulary is trained on these words and counts.

No piece crosses white space. So training on words and their counts equals training on the lines, and a line's best
segmentation consists of its words' best segmentations. In a language written without spaces, a word is a whole line.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece as spm

NORMALIZATION = "nmt_nfkc"
SPACE = "▁"  # SentencePiece writes it before every word
_BATCH_LINES = 20_000  # lines that are normalised in one step
# Memory of training in bytes, per distinct word and per character of the distinct words; a little more than measured.
_WORD_BYTES, _CHARACTER_BYTES = 60, 45
_TABLE = pa.schema([("word", pa.large_string()), ("count", pa.int64())])  # a row for each word, with its count


@dataclass(frozen=True)
class WordCounts:
    """Distinct words, sorted by code points. Word i occurs `counts[i]` times (int64) in `sentences` lines that are not
    empty."""

    words: pa.LargeStringArray
    counts: np.ndarray
    sentences: int


def count_words(
    lines: Iterable[str], memory: float = math.inf, normalize: Callable[[list[str]], list[str]] | None = None
) -> WordCounts:
    """Normalise lines of text and count their words. `normalize` is by default the normaliser of the vocabularies that
    we train.

    Raises MemoryError if training on the words would take more than `memory` bytes.
    """
    normalize = normalize or spm.SentencePieceNormalizer(rule_name=NORMALIZATION).normalize
    tables = [_TABLE.empty_table()]
    sentences = new_rows = 0
    lines = iter(lines)
    while batch := list(islice(lines, _BATCH_LINES)):
        texts = pa.array(normalize(batch), pa.large_string())
        sentences += pc.sum(pc.greater(pc.binary_length(texts), 0)).as_py() or 0
        counted = pc.value_counts(pc.list_flatten(pc.split_pattern(texts, SPACE)))
        tables.append(pa.table([counted.field("values"), counted.field("counts")], schema=_TABLE))
        new_rows += len(counted)
        if new_rows > tables[0].num_rows:  # merge only when the rows have doubled, so that there are few merges
            tables, new_rows = [_merged_table(tables, memory)], 0
    table = _merged_table(tables, memory).sort_by("word")
    pa.default_memory_pool().release_unused()
    return WordCounts(table["word"].combine_chunks(), table["count"].to_numpy(), sentences)


def count_words_within_memory(read: Callable[[], Iterable[str]], memory: float) -> WordCounts:
    """Count the words of all lines. If training on these words would take more than `memory` bytes, count the words of
    every second line, else of every fourth, and so on. Each call of `read` gives all lines."""
    step = 1
    while True:
        try:
            return count_words(islice(read(), 0, None, step), memory)
        except MemoryError:
            step *= 2


def _merged_table(tables: list[pa.Table], memory: float) -> pa.Table:
    """Merge the tables into one that has a row for each word, with the sum of its counts. Drops the empty word. Raises
    MemoryError if training on the words would take more than `memory` bytes."""
    rows = pa.concat_tables(tables)
    rows = rows.filter(pc.greater(pc.binary_length(rows["word"]), 0))
    grouped = rows.group_by("word", use_threads=False).aggregate([("count", "sum")])
    characters = pc.sum(pc.utf8_length(grouped["word"])).as_py() or 0
    if _WORD_BYTES * grouped.num_rows + _CHARACTER_BYTES * characters > memory:
        raise MemoryError
    return grouped.select(["word", "count_sum"]).rename_columns(["word", "count"])
