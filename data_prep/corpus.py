"""Corpus descriptions: a TOML file says where a corpus is, its format, file names, languages and filters.

name = "cc100"                  what `--where NAME=PLACE` and messages call it
where = "s3://bucket/cc100"     a folder or a pyarrow.fs URI; relative paths are from the current folder
format = "cc100"                readers.FORMATS has all
files = "{lang}.txt.xz"         or a list, the first that exists counts; pairs have {src}, {tgt} and {side}
languages = ["af", "zh|zh_CN"]  as the files spell them (of a|b the first that has a file counts)
pairs = ["en-hi"]               the same; or pairs = "any" that the file names show
columns = ["score", "source", "target"]     of a .tsv format, from left to right; other names are not used
[filters.length]                filters.py has all
min_characters = 10
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from data_prep.corpus_files import Place, files_in
from data_prep.corpus_names import code_pairs, file_names, match_any, spelled
from data_prep.filters import make_filters
from data_prep.languages import canonical
from data_prep.progress import warn
from data_prep.readers.find import zip_members
from data_prep.readers.inputs import FORMATS, Input

_KEYS = {"name", "where", "format", "files", "languages", "pairs", "columns", "filters"}
_COLUMNS = {
    "wikimatrix_tsv": ("score", "source", "target"),
    "ccaligned_tsv": ("source", "target", "score"),
}


@dataclass(frozen=True)
class Corpus:
    """A description as read; `path` is its file."""

    path: str
    name: str
    where: str
    format: str
    files: tuple[str, ...]
    codes: tuple[str, ...] | None
    """Languages or pairs as the files spell them; None for any pair."""
    columns: tuple[str, ...]
    filters: dict[str, dict[str, Any]]

    @property
    def task(self) -> str:
        """mono or para."""
        return FORMATS[self.format]

    @property
    def settings(self) -> dict[str, Any]:
        """What shapes the bytes, besides the files: never where they are."""
        own = {"format": self.format, "columns": list(self.columns), "filters": list(self.filters), **self.filters}
        return {f"{self.name}.{key}": value for key, value in own.items()}


def ready_descriptions() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(path.name.removesuffix(".toml") for path in package_files("data_prep").joinpath("corpora").iterdir())


def read_corpora(descriptions: Sequence[str], where: Sequence[str]) -> list[Corpus]:
    """Descriptions by file or by the name of a ready one, `where` (NAME=PLACE) set in place of theirs.

    Raises ValueError for a description that cannot work, naming its file and key.
    """
    places = dict(entry.partition("=")[::2] for entry in where)
    corpora = [_read(description, places) for description in descriptions]
    names = [corpus.name for corpus in corpora]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two descriptions are named {name!r}: give one of them another name")
    for name in places.keys() - set(names):
        raise ValueError(f"--where {name}=… names no corpus that is described: the names are {', '.join(names)}")
    return corpora


def corpus_inputs(corpus: Corpus, allow_missing: bool = False) -> list[Input]:
    """The inputs of a corpus, by its file names; no content is read but zip listings.

    Raises ValueError when files of listed languages are missing, unless `allow_missing`, and when there is none at all.
    """
    listed = {place.name: place for place in files_in(corpus.where, deep=any("/" in name for name in corpus.files))}
    if corpus.codes is None:
        wanted = match_any(corpus.files, listed, corpus.name)
    else:
        single: list[tuple[str, ...]] = [
            (spelled(corpus.files, code, listed),) for code in corpus.codes if corpus.task == "mono"
        ]
        wanted = single or code_pairs(corpus.codes, corpus.path)
    found, missing = [], []
    for codes in wanted:
        names = file_names(corpus.files, codes, listed)
        if names:
            found.append(_input(corpus, codes, [listed[name] for name in names]))
        else:
            missing.append("-".join(codes))
    words = f"{len(missing)} of {len(wanted)} files of {corpus.name} are not in {corpus.where} ({_some(missing)})"
    if missing and not allow_missing:
        raise ValueError(f"{words}: fetch them, or give --allow-missing, or list fewer in a description of your own")
    if not found:
        raise ValueError(
            f"{corpus.where} holds no file of {corpus.name}: the names must be {' or '.join(corpus.files)}"
        )
    if missing:
        warn(words)
    return found


def _input(corpus: Corpus, codes: tuple[str, ...], places: list[Place]) -> Input:
    languages = tuple(canonical(code) for code in codes)
    return Input(
        name="-".join(languages),
        languages=languages,
        paths=tuple(places),
        members=zip_members(places[0], *codes) if corpus.format == "moses_zip" else (),
        format=corpus.format,
        corpus=corpus.name,
        codes=codes,
        columns=corpus.columns,
        filters=corpus.filters,
    )


def _read(description: str, places: dict[str, str]) -> Corpus:
    values = _toml(description)
    where = f"corpus description {description}"
    for key in values.keys() - _KEYS:
        raise ValueError(f"{where}: there is no key {key!r}: the keys are {', '.join(sorted(_KEYS))}")
    for key in ("name", "format", "files"):
        if not values.get(key):
            raise ValueError(f"{where}: {key} is missing: set it")
    if values["format"] not in FORMATS:
        raise ValueError(f"{where}: format {values['format']!r} is none of {', '.join(FORMATS)}")
    task = FORMATS[values["format"]]
    codes = values.get("languages" if task == "mono" else "pairs")
    if not isinstance(codes, list) and not (task == "para" and codes == "any"):
        key = 'languages = ["en", …]' if task == "mono" else 'pairs = ["en-fr", …] or pairs = "any"'
        raise ValueError(f"{where}: set {key}")
    if task == "mono":
        _check_codes(codes, where)
    place = places.get(values["name"], values.get("where", ""))
    if not place:
        raise ValueError(f"{where} does not say where the corpus is: give --where {values['name']}=FOLDER")
    columns = tuple(values.get("columns", _COLUMNS.get(values["format"], ())))
    if values["format"].endswith("_tsv") and not {"source", "target"} <= set(columns):
        raise ValueError(f"{where}: columns are {list(columns)}: 'source' and 'target' must be among them")
    filters = values.get("filters", {})
    make_filters(filters, task, where)
    if "score" in filters and "score" not in columns:
        raise ValueError(f"{where}: filter score needs a column 'score': take the filter out, or name the column")
    patterns = [values["files"]] if isinstance(values["files"], str) else values["files"]
    listed = None if codes == "any" else tuple(codes)
    return Corpus(where, values["name"], place, values["format"], tuple(patterns), listed, columns, filters)


def _check_codes(codes: Sequence[str], where: str) -> None:
    for code in codes:
        try:
            languages = {canonical(spelling) for spelling in code.split("|")}
            if len(languages) > 1:
                raise ValueError(
                    f"{code!r} are spellings of {' and '.join(sorted(languages))}: they must be one language"
                )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _toml(description: str) -> dict[str, Any]:
    path: Any = Path(description)
    if "/" not in description and not description.endswith(".toml"):
        path = package_files("data_prep").joinpath("corpora", f"{description}.toml")
        if not path.is_file():
            names = ", ".join(ready_descriptions())
            raise ValueError(f"there is no ready description {description!r}: name a .toml file, or one of {names}")
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"corpus description {description} cannot be read: {error}") from None
    return values


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (" …" if len(names) > limit else "")


def inputs_of(corpora: Sequence[Corpus], task: str, allow_missing: bool) -> Iterator[Input]:
    """Inputs of all corpora of one task, in the order given."""
    for corpus in corpora:
        if corpus.task == task:
            yield from corpus_inputs(corpus, allow_missing)
