"""Descriptions of corpora: TOML files that say where the text is, in which format, and which filters apply.

name = "cc100"                  the corpus's name in `--where NAME=PLACE` and in messages
where = "s3://bucket/cc100"     a folder or a pyarrow.fs URI; a relative path is relative to the current folder
format = "cc100"                one of readers.READERS
files = "{lang}.txt.xz"         a file name, with {lang} for the language's code; pairs have {src} and {tgt} for both
                                codes, and {side} for the code of the side that a file holds; * matches any text.
                                May be a list of names: the files of all names are read. If a text comes in several
                                compressions, only the file whose name is first in the list is read
languages = ["af", "zh|zh_CN"]  the codes as the files spell them; "zh|zh_CN" takes the first spelling that has a file;
                                languages = "any" takes all CC-100 languages in the file names
pairs = ["en-hi"]               in place of `languages`, for a corpus of pairs
columns = ["score", "source", "target"]     wikimatrix_tsv, ccaligned_tsv: the names of all columns from left to right;
                                names of your own are allowed, for filters
                                jsonl, parquet, arrow: a list of one name, the column that has the text
                                tsv: column numbers, as in {source = 1, target = 2, score = 3}
                                jsonl_pairs, parquet_pairs, arrow_pairs: column names, as in
                                {source = "text.{src}", target = "text.{tgt}"}; {src} and {tgt} are replaced by the
                                codes; `score` is optional
line_end = '\\n'                 jsonl, parquet, arrow: characters that, like a line feed, end a line inside a record
[filters.length]                settings of a filter; filters/clean.py describes the filters
min_characters = 10
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from data_prep.filters.clean import make_filters
from data_prep.filters.columns import column_filters
from data_prep.readers import READERS, split_pair
from data_prep.readers.file_names import Codes, require_language
from data_prep.readers.reader import Reader
from data_prep.readers.record_files import RecordDocuments

_KEYS = {"name", "where", "format", "files", "languages", "pairs", "columns", "filters", "line_end"}


@dataclass(frozen=True)
class CorpusDescription:
    """A checked description of a corpus. `task` is mono or para.

    `codes` has, for each language or pair, its possible spellings in the files. None means "any".
    """

    task: str
    name: str
    where: str
    format: str
    files: tuple[str, ...]
    codes: list[list[Codes]] | None
    columns: tuple[str, ...]
    filters: dict[str, dict[str, Any]]
    line_end: str = ""


def ready_descriptions() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(path.name.removesuffix(".toml") for path in package_files("data_prep").joinpath("corpora").iterdir())


def read_corpora(descriptions: Sequence[str], where: Sequence[str]) -> list[CorpusDescription]:
    """Read descriptions; each is given as a .toml file or as the name of a ready one. For an entry NAME=PLACE of
    `where`, the corpus NAME is read from PLACE instead of the place in its description.

    Raises ValueError for a description that cannot work; the message names its file and key.
    """
    places = dict(entry.partition("=")[::2] for entry in where)
    if len(places) < len(where):
        raise ValueError(f"--where names a corpus twice ({', '.join(where)}): give each one place")
    corpora = [_read_description(description, places) for description in descriptions]
    names = [corpus.name for corpus in corpora]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two descriptions are named {name!r}: give one of them another name")
    for name in places:
        if name not in names:
            advice = f"the names are {', '.join(names)}" if names else "name it by --corpus too"
            raise ValueError(f"--where {name}=… names no corpus that is described: {advice}")
    return corpora


def _read_description(description: str, places: dict[str, str]) -> CorpusDescription:
    label = f"corpus description {description}"
    values = _read_toml(description, label)
    reader = READERS[values["format"]]
    key, other_key, example = ("languages", "pairs", "en") if reader.task == "mono" else ("pairs", "languages", "en-fr")
    codes = values.get(key)
    if other_key in values:
        raise ValueError(f"{label}: format {values['format']} has no {other_key}: take {other_key} out, and set {key}")
    if codes == []:
        raise ValueError(f'{label}: {key} is an empty list: list at least one, or write "any"')
    if codes == ["any"]:
        raise ValueError(f'{label}: {key} is ["any"]: write {key} = "any", without brackets')
    if not isinstance(codes, list) and codes != "any":
        raise ValueError(f'{label}: set {key} = ["{example}", …] or {key} = "any"')
    spellings = None if codes == "any" else [_spellings(code, reader.task, label) for code in codes]
    place = places.get(values["name"], values.get("where", ""))
    if not place:
        raise ValueError(f"{label} does not say where the corpus is: give --where {values['name']}=FOLDER")
    try:
        columns = reader.read_columns(values.get("columns", reader.columns))
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None
    filters = values.get("filters", {})
    _check_filters(filters, reader, columns, label)
    line_end = values.get("line_end", "")
    if line_end and not (isinstance(line_end, str) and isinstance(reader, RecordDocuments)):
        raise ValueError(
            f"{label}: line_end is {line_end!r}: it must be a string, and only jsonl, parquet and arrow have it"
        )
    patterns = [values["files"]] if isinstance(values["files"], str) else values["files"]
    _check_files(patterns, key, codes == "any", values["format"], label)
    return CorpusDescription(
        task=reader.task,
        name=values["name"],
        where=place,
        format=values["format"],
        files=tuple(patterns),
        codes=spellings,
        columns=columns,
        filters=filters,
        line_end=line_end,
    )


def _read_toml(description: str, label: str) -> dict[str, Any]:
    path: Any = Path(description)
    if "/" not in description and not description.endswith(".toml"):
        path = package_files("data_prep").joinpath("corpora", f"{description}.toml")
        if not path.is_file():
            names = ", ".join(ready_descriptions())
            raise ValueError(f"there is no ready description {description!r}: name a .toml file, or one of {names}")
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{label} cannot be read: {error}") from None
    for key in values:
        if key not in _KEYS:
            raise ValueError(f"{label}: there is no key {key!r}: the keys are {', '.join(sorted(_KEYS))}")
    for key in ("name", "format", "files"):
        if not values.get(key):
            raise ValueError(f"{label}: {key} is missing: set it")
    for key in ("name", "where", "format", "files", "languages", "pairs"):
        value = values.get(key, "")
        may_be_list = key not in ("name", "where", "format")
        for entry in value if may_be_list and isinstance(value, list) else [value]:
            if not isinstance(entry, str):
                raise ValueError(f"{label}: {key} has {entry!r}: write a string")
    if "=" in values["name"]:
        raise ValueError(f"{label}: name {values['name']!r} has =, which --where puts after the name: leave it out")
    if values["format"] not in READERS:
        raise ValueError(f"{label}: format {values['format']!r} is none of {', '.join(READERS)}")
    return values


def _check_filters(filters: dict[str, dict[str, Any]], reader: Reader, columns: tuple[str, ...], label: str) -> None:
    make_filters(filters, reader.task, label)
    if "score" in filters and "score" not in reader.roles(columns):
        raise ValueError(f"{label}: filter score needs a column 'score': take the filter out, or name the column")
    for rule in column_filters(filters, label):
        if columns.count(rule.column) != 1 and not reader.any_column:
            raise ValueError(
                f"{label}: filter column needs a column {rule.column!r}: take the filter out, or name it in columns"
            )


def _spellings(code: str, task: str, label: str) -> list[Codes]:
    """Split `code` at | into the possible spellings of a language; a pair has one spelling. Raises ValueError for
    unknown codes, or for spellings of several languages."""
    if task == "para":
        return [split_pair(code, label)]
    languages = {require_language(spelling, label) for spelling in code.split("|")}
    if len(languages) > 1:
        raise ValueError(
            f"{label}: {code!r} are spellings of {' and '.join(sorted(languages))}: list the spellings of one language"
        )
    return [(spelling,) for spelling in code.split("|")]


def _check_files(patterns: Sequence[str], key: str, any_code: bool, file_format: str, label: str) -> None:
    """Raise ValueError for a pattern that cannot work. `key` is "languages" or "pairs", and `any_code` tells whether
    the description sets it to "any"."""
    placeholders = ("{lang}",) if key == "languages" else ("{src}", "{tgt}")
    for pattern in patterns:
        has_side = "{side}" in pattern
        unknown = [name for name in re.findall(r"\{.*?\}", pattern) if name not in (*placeholders, "{side}")]
        # For each fault that a pattern may have: whether it has it, and the end of the error message.
        faults = (
            (unknown, f", but {', '.join(unknown)} is no placeholder: write {' and '.join(placeholders)}"),
            (
                re.search(r"(^|/)\.{0,2}/", pattern),
                ", but names begin in the corpus's folder: write it without //, ./, ../ or a leading /",
            ),
            (
                any_code and not all(placeholder in pattern for placeholder in placeholders),
                f', but {key} = "any" needs {" and ".join(placeholders)} in the name',
            ),
            (
                re.search(r"\.(tar|tgz)(\.|$)", pattern),
                ", which are archives: unpack them, and name what is in them",
            ),
            ("*{" in pattern, ": put a sign between * and the code, or * could take letters of the code"),
            ("*" in pattern and has_side, ": list the names, because * and {side} cannot be in one"),
            (
                file_format == "moses" and not has_side,
                ", but format moses has a file for each side: write {side} where their names differ",
            ),
            (
                has_side and file_format != "moses",
                ", but only format moses has a file for each side: take {side} out",
            ),
        )
        for has_fault, message_end in faults:
            if has_fault:
                raise ValueError(f"{label}: files are {pattern!r}{message_end}")
