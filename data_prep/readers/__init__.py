"""Reads corpora in all formats. One process cuts an input into blocks of bytes; any process can parse a block to
cleaned text."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from data_prep.filters.clean import Counts
from data_prep.languages import may_be_pair
from data_prep.progress import warn
from data_prep.readers.corpus_files import files_in
from data_prep.readers.plain_pairs import Moses, MosesZip, NumberedTable, TableReader, find_pairs, split_pair
from data_prep.readers.reader import (
    CC100,
    Input,
    Lines,
    PairReader,
    Paragraphs,
    TextBlock,
    check_unique_texts,
    named_code,
)
from data_prep.readers.record_files import Arrow, JsonLines, Parquet
from data_prep.readers.records import RecordDocuments, RecordPairs
from data_prep.readers.tmx import Tmx

__all__ = [
    "CC100",
    "READERS",
    "Input",
    "PairReader",
    "Paragraphs",
    "TextBlock",
    "documents",
    "find_documents",
    "find_pairs",
    "pairs",
    "split_pair",
]

# Format -> its reader: first the readers of documents, then the readers of pairs. The compression is no part of the
# format: the ending of the file's name determines it.
READERS: dict[str, CC100 | PairReader] = {
    "cc100": CC100(),
    "lines": Lines(),
    "jsonl": RecordDocuments(JsonLines()),
    "parquet": RecordDocuments(Parquet()),
    "arrow": RecordDocuments(Arrow()),
    "moses": Moses(),
    "moses_zip": MosesZip(),
    "wikimatrix_tsv": TableReader("score", "source", "target"),
    "ccaligned_tsv": TableReader("source", "target", "score"),
    "tsv": NumberedTable(),
    "jsonl_pairs": RecordPairs(JsonLines()),
    "parquet_pairs": RecordPairs(Parquet()),
    "arrow_pairs": RecordPairs(Arrow()),
    "tmx": Tmx(),
}
_FOLDER_FORMATS = ("cc100", "jsonl", "parquet")  # `find_documents` recognizes these by the endings of file names
_BLOCK_BYTES = 1 << 18  # bytes of a block in `documents` and `pairs`


def find_documents(folder: Path | str) -> list[Input]:
    """Make an input of each file `<lang>.txt`, `<lang>.jsonl` (compressed or not) and `<lang>.parquet` of a folder. The
    inputs are sorted by language.

    Raises ValueError on an unknown language code.
    """
    endings = {name: _document_reader(name).name_endings for name in _FOLDER_FORMATS}
    layout = " or ".join(f"<lang>{in_words}" for _, in_words in endings.values())
    inputs = []
    for path in files_in(str(folder)):
        code, dot, ending = path.name.partition(".")
        formats = [name for name, (pattern, _) in endings.items() if code and re.fullmatch(pattern, dot + ending)]
        if formats:
            if may_be_pair(code):
                raise ValueError(
                    f"{path} may be of a pair of languages: put it into --para's folder, or name it after one "
                    "language, with a country in capital letters"
                )
            language = named_code(code, path)
            inputs.append(Input(language, (language,), (path,), format=formats[0]))
        else:
            warn(f"{path} is ignored: {'it is a folder' if path.is_folder else f'its name is not {layout}'}")
    check_unique_texts((source.paths[0], source.paths[0].name) for source in inputs)
    if not inputs:
        raise ValueError(f"{folder} holds no corpus file: the names must be {layout}")
    return sorted(inputs, key=lambda source: (source.name, source.files))


def documents(source: Input, counts: Counts) -> Iterator[list[str]]:
    """Yield each document as a list of its paragraphs, none of them empty. Raises ValueError on a damaged file."""
    reader = _document_reader(source.format)
    for block in reader.blocks(source, _BLOCK_BYTES):
        for paragraphs, document_sizes in reader.paragraphs(source, block, counts):
            ends = np.cumsum(document_sizes).tolist()
            yield from (paragraphs[start:end] for start, end in pairwise([0, *ends]))


def pairs(source: Input, counts: Counts) -> Iterator[tuple[str, str]]:
    """Yield the pairs that have text on both sides. Raises ValueError on a damaged file, and if one side has more lines
    than the other."""
    reader = READERS[source.format]
    assert isinstance(reader, PairReader), source.format
    for block in reader.blocks(source, _BLOCK_BYTES):
        for a, b, _ in reader.pairs(source, block, counts):
            yield a, b


def _document_reader(name: str) -> CC100:
    reader = READERS[name]
    assert isinstance(reader, CC100), name
    return reader
