"""Reads corpora in all formats. One process cuts an input into blocks of bytes; any process can parse a block to
cleaned text."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.filters.clean import Counts
from data_prep.languages import all_listed, english_first, language_of, may_be_pair
from data_prep.progress import warn
from data_prep.readers.corpus_files import CorpusPath, list_folder
from data_prep.readers.file_names import COMPRESSED, check_unique_texts, require_language
from data_prep.readers.plain_pairs import Moses, MosesZip, NumberedTable, TableReader
from data_prep.readers.reader import DocumentReader, Input, LineDocuments, PairReader
from data_prep.readers.record_files import (
    RecordDocuments,
    RecordPairs,
    arrow_records,
    json_records,
    parquet_records,
)
from data_prep.readers.tmx import Tmx

# Format -> its reader: first the readers of documents, then the readers of pairs. The compression is no part of the
# format: the ending of the file's name determines it.
READERS: dict[str, DocumentReader | PairReader] = {
    "cc100": DocumentReader(),
    "lines": LineDocuments(),
    "jsonl": RecordDocuments(json_records),
    "parquet": RecordDocuments(parquet_records),
    "arrow": RecordDocuments(arrow_records),
    "moses": Moses(),
    "moses_zip": MosesZip(),
    "wikimatrix_tsv": TableReader("score", "source", "target"),
    "ccaligned_tsv": TableReader("source", "target", "score"),
    "tsv": NumberedTable(),
    "jsonl_pairs": RecordPairs(json_records),
    "parquet_pairs": RecordPairs(parquet_records),
    "arrow_pairs": RecordPairs(arrow_records),
    "tmx": Tmx(),
}
# The names of the files that `find_documents` and `find_pairs` take, as regular expressions and as messages show them.
# The last group that matches in `_DOCUMENT` is named after the format.
_DOCUMENT = re.compile(
    rf"(?P<code>[^.]+)\.(?:(?P<cc100>txt){COMPRESSED}|(?P<jsonl>jsonl){COMPRESSED}|(?P<parquet>parquet))"
)
_DOCUMENT_NAMES = "<lang>.txt[.xz|.gz|.bz2|.zst] or <lang>.jsonl[.xz|.gz|.bz2|.zst] or <lang>.parquet"
_ZIP = re.compile(r"(?P<pair>[^.]+-[^.]+)\.txt\.zip")
_SIDE = re.compile(rf"(?P<stem>(?:.+\.)?(?P<pair>[^.]+-[^.]+))\.(?P<code>[^.]+?){COMPRESSED}")
_PAIR_NAMES = "a-b.txt.zip or X.a-b.a and X.a-b.b"
_BLOCK_BYTES = 1 << 18  # bytes of a block in `documents`


def make_input(codes: Sequence[str], paths: tuple[CorpusPath, ...], file_format: str, **described: Any) -> Input:
    """The input of a set of files. `codes` are the files' languages as the file names spell them; `described` are
    further fields of `Input`, from a corpus description."""
    reader, languages = READERS[file_format], tuple(map(language_of, codes))
    ordered = english_first(languages)
    return Input(
        name="-".join(ordered),
        languages=ordered,
        paths=paths,
        members=reader.members(paths[0], tuple(codes)),
        format=file_format,
        swapped=ordered != languages and not reader.has_language_tags,
        **described,
    )


def find_documents(folder: Path | str) -> list[Input]:
    """Make an input of each file `<lang>.txt`, `<lang>.jsonl` (compressed or not) and `<lang>.parquet` of a folder. The
    inputs are sorted by language.

    Raises ValueError on a language code that is unknown or may be a pair, two files of one text, and a folder without
    such files.
    """
    inputs = []
    for path in list_folder(str(folder)):
        match = _DOCUMENT.fullmatch(path.name)
        if match is None:
            warn(f"{path} is ignored: {'it is a folder' if path.is_folder else f'its name is not {_DOCUMENT_NAMES}'}")
            continue
        if may_be_pair(match["code"]):
            raise ValueError(
                f"{path} may be of a pair of languages: put it into --para's folder, or name it after one "
                "language, with a country in capital letters"
            )
        require_language(match["code"], path)  # raises for an unknown code
        inputs.append(make_input((match["code"],), (path,), str(match.lastgroup)))
    check_unique_texts((source.paths[0], source.paths[0].name) for source in inputs)
    return _sorted(inputs, folder, _DOCUMENT_NAMES)


def find_pairs(folder: Path | str) -> list[Input]:
    """Make an input of each file `a-b.txt.zip` of a folder, and of every two files `X.a-b.a` and `X.a-b.b`. The inputs
    are sorted by pair.

    Raises ValueError on a side without the other, a damaged zip file, an unknown language code, two files of one text,
    and a folder without such files.
    """
    inputs = []
    sides: dict[tuple[str, str], dict[str, CorpusPath]] = {}  # (X.a-b, a-b) -> code -> file
    files: list[tuple[CorpusPath, str]] = []  # each file, and a name that two files of one text share
    for path in list_folder(str(folder)):
        match = _SIDE.fullmatch(path.name)
        if zipped := _ZIP.fullmatch(path.name):
            inputs.append(make_input(split_pair(zipped["pair"], path), (path,), "moses_zip"))
            files += [(path, _undirected(path, name, zipped["pair"])) for name in (path.name, *inputs[-1].members)]
        elif match and (match["pair"].startswith(f"{match['code']}-") or match["pair"].endswith(f"-{match['code']}")):
            files.append((path, _undirected(path, path.name, match["pair"])))
            sides.setdefault((match["stem"], match["pair"]), {})[match["code"]] = path
        else:
            warn(f"{path} is ignored: {'it is a folder' if path.is_folder else f'its name is not {_PAIR_NAMES}'}")
    check_unique_texts(files)
    for (stem, pair), paths in sides.items():
        first_side = next(iter(paths.values()))
        codes = split_pair(pair, first_side)
        for code in codes:
            if code not in paths:
                raise ValueError(f"{first_side} has no other side: put {stem}.{code} next to it, or remove the file")
        inputs.append(make_input(codes, tuple(paths[code] for code in codes), "moses"))
    return _sorted(inputs, folder, _PAIR_NAMES)


def _sorted(inputs: list[Input], folder: Path | str, names: str) -> list[Input]:
    if not inputs:
        raise ValueError(f"{folder} holds no corpus file: the names must be {names}")
    return sorted(inputs, key=lambda source: (source.name, source.files))


def _undirected(path: CorpusPath, name: str, pair: str) -> str:
    """The name of the file `path`, or of a member of it, with the codes of `pair` in alphabetical order, so that `a-b`
    and `b-a` give the same name."""
    return name.replace(f"{pair}.", f"{'-'.join(sorted(split_pair(pair, path), key=str.lower))}.")


def split_pair(pair: str, where: object) -> tuple[str, str]:
    """The two codes of `a-b` as written. If several hyphens divide `pair` into known codes of two languages, codes that
    languages.py lists are preferred. Raises ValueError, naming `where`, unless exactly one division is left."""
    problems, readings = [], []
    for hyphen in re.finditer("-", pair):
        a, b = pair[: hyphen.start()], pair[hyphen.end() :]
        try:
            if language_of(a) != language_of(b):
                readings.append((a, b))
            else:
                problems.append(f"both sides are {a!r}: name two languages, as en-de")
        except ValueError as error:
            problems.append(str(error))
    readings = list(filter(all_listed, readings)) or readings  # pt-br-es: pt-br and es, not pt and br-es
    if len(readings) > 1:
        choices = " or of ".join(" and ".join(codes) for codes in readings)
        raise ValueError(f"{where} may be of {choices}: rename it, with _ inside its codes")
    if readings:
        return readings[0]
    raise ValueError(f"{where}: {problems[0] if problems else f'{pair!r} is not a pair: write two codes, as en-de'}")


def documents(source: Input, counts: Counts) -> Iterator[list[str]]:
    """Yield each document as a list of its paragraphs, none of them empty. Raises ValueError on a damaged file."""
    reader = READERS[source.format]
    assert isinstance(reader, DocumentReader), source.format
    for block in reader.blocks(source, _BLOCK_BYTES):
        for paragraphs, document_sizes in reader.paragraphs(source, block, counts):
            remaining = iter(paragraphs)
            yield from (list(islice(remaining, size)) for size in document_sizes)
