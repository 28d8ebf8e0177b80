"""Corpora on disk to cleaned text, streaming: CC-100's documents, OPUS's and other line-aligned pairs.

Finding inputs (file names, no content) is apart from reading them. Memory is bounded whatever the files hold: a line
over MAX_LINE bytes is cut at white space (mono, repaired: long_line) or its pair is dropped (para, dropped: long_line),
and a document over MAX_DOCUMENT bytes is cut between paragraphs into several (repaired: long_document).
"""

import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from data_prep.clean import Counts, clean_line
from data_prep.languages import canonical
from data_prep.streams import cut_lines, open_stream, whole_lines

MAX_DOCUMENT = 1_000_000  # bytes
_NO_LINE = b"\n"  # behind the end of the shorter side; no line holds a LF
_COMPRESSED = r"(?P<compression>\.(?:xz|gz|bz2|zst))?"
_MONO = re.compile(rf"(?P<code>[^.]+)\.txt{_COMPRESSED}")
_ZIP = re.compile(r"(?P<pair>[^.]+-[^.]+)\.txt\.zip")
_SIDE = re.compile(rf"(?P<stem>(?:.+\.)?(?P<pair>[^.]+-[^.]+))\.(?P<code>[^.]+?){_COMPRESSED}")


@dataclass(frozen=True)
class Input:
    """One file of documents (`languages` has one code) or one set of pairs (two codes).

    `paths`: one file, or the two sides. `members`: the two sides inside a zip file. `codes` in `name` are CC-100's.
    """

    name: str
    languages: tuple[str, ...]
    paths: tuple[Path, ...]
    members: tuple[str, ...] = ()

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and bytes of every file."""
        return [(path.name, path.stat().st_size) for path in self.paths]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self.files)


def find_documents(folder: Path) -> list[Input]:
    """The `<lang>.txt[.xz|.gz|.bz2|.zst]` files of a folder, sorted. Raises ValueError on an unknown language code."""
    inputs = []
    for path in _files(folder):
        if match := _MONO.fullmatch(path.name):
            language = _canonical(match["code"], path)
            inputs.append(Input(language, (language,), (path,)))
        else:
            _warn_ignored(path, "<lang>.txt[.xz|.gz|.bz2|.zst]")
    return _found(inputs, folder, "<lang>.txt[.xz|.gz|.bz2|.zst]")


def find_pairs(folder: Path) -> list[Input]:
    """The `a-b.txt.zip` files and the `X.a-b.a` + `X.a-b.b` files of a folder, sorted.

    Raises ValueError on a side without the other, a damaged zip file and an unknown language code.
    """
    inputs = []
    sides: dict[tuple[str, str], dict[str, Path]] = {}
    for path in _files(folder):
        match = _SIDE.fullmatch(path.name)
        if zipped := _ZIP.fullmatch(path.name):
            a, b = _split_pair(zipped["pair"], path)
            members = _members(path, zipped["pair"], a, b)
            inputs.append(_pair_input(a, b, (path,), members))
        elif match and match["code"] in _ends(match["pair"]):
            sides.setdefault((match["stem"], match["pair"]), {})[match["code"]] = path
        else:
            _warn_ignored(path, "a-b.txt.zip or X.a-b.a and X.a-b.b")
    for (stem, pair), paths in sides.items():
        a, b = _split_pair(pair, next(iter(paths.values())))
        for code in (a, b):
            if code not in paths:
                lone = next(iter(paths.values()))
                raise ValueError(f"{lone} has no other side: put {stem}.{code} beside it, or remove it")
        inputs.append(_pair_input(a, b, (paths[a], paths[b])))
    return _found(inputs, folder, "a-b.txt.zip or X.a-b.a and X.a-b.b")


def documents(source: Input, counts: Counts) -> Iterator[list[str]]:
    """Documents as lists of non-empty paragraphs; at least one each. Raises ValueError on a damaged file."""
    document: list[str] = []
    size = 0
    for raw in cut_lines(open_stream(source.paths[0]), str(source.paths[0]), counts.repaired):
        line = clean_line(raw, counts.repaired)
        if document and (not line or size + len(raw) > MAX_DOCUMENT):
            if line:
                counts.repaired["long_document"] += 1
            counts.units_in += 1
            yield document
            document, size = [], 0
        if line:
            document.append(line)
            size += len(raw)
    if document:
        counts.units_in += 1
        yield document


def pairs(source: Input, counts: Counts) -> Iterator[tuple[str, str]]:
    """Pairs with text on both sides. Raises ValueError on a damaged file or sides with different numbers of lines."""
    places = source.members or (None, None)
    paths = source.paths if len(source.paths) == 2 else source.paths * 2
    names = [f"{path}:{member}" if member else str(path) for path, member in zip(paths, places, strict=True)]
    sides = [
        whole_lines(open_stream(path, member), name) for path, member, name in zip(paths, places, names, strict=True)
    ]
    numbers = [0, 0]
    for a, b in zip_longest(*sides, fillvalue=_NO_LINE):
        numbers[0] += a != _NO_LINE
        numbers[1] += b != _NO_LINE
        if _NO_LINE in (a, b):
            continue  # read on: the message names both counts
        counts.units_in += 1
        if a is None or b is None:
            counts.dropped["long_line"] += 1
            continue
        one, two = clean_line(a, counts.repaired), clean_line(b, counts.repaired)
        if one and two:
            yield one, two
        else:
            counts.dropped["empty_side"] += 1
    if numbers[0] != numbers[1]:
        raise ValueError(
            f"{names[0]} has {numbers[0]} lines but {names[1]} has {numbers[1]}: the sides of a pair must be "
            "line-aligned, fetch both again"
        )


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the one that holds the corpus files")
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _found(inputs: list[Input], folder: Path, layout: str) -> list[Input]:
    if not inputs:
        raise ValueError(f"{folder} holds no corpus file: the names must be {layout}")
    return sorted(inputs, key=lambda source: (source.name, source.files))


def _warn_ignored(path: Path, layout: str) -> None:
    print(f"warning: {path} is ignored: its name is not {layout}", file=sys.stderr)


def _canonical(code: str, path: Path) -> str:
    try:
        return canonical(code)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _pair_input(a: str, b: str, paths: tuple[Path, ...], members: tuple[str, ...] = ()) -> Input:
    languages = (_canonical(a, paths[0]), _canonical(b, paths[0]))
    return Input("-".join(languages), languages, paths, members)


def _ends(pair: str) -> set[str]:
    """What may be a language code at either end of `a-b`; codes may have hyphens themselves."""
    cuts = [i for i, letter in enumerate(pair) if letter == "-"]
    return {pair[:i] for i in cuts} | {pair[i + 1 :] for i in cuts}


def _split_pair(pair: str, path: Path) -> tuple[str, str]:
    """The two codes of `a-b` as written. Raises ValueError when no cut gives two known codes."""
    problems = []
    for cut in (match.start() for match in re.finditer("-", pair)):
        codes = pair[:cut], pair[cut + 1 :]
        try:
            if canonical(codes[0]) != canonical(codes[1]):
                return codes
            problems.append(f"both sides are {codes[0]!r}")
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(f"{path}: {problems[0]}")


def _members(path: Path, pair: str, a: str, b: str) -> tuple[str, ...]:
    """The two sides' members of an OPUS zip file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or damaged, fetch it again") from None
    found = []
    for code in (a, b):
        matches = [name for name in names if name.endswith(f".{pair}.{code}")]
        if len(matches) != 1:
            raise ValueError(f"{path} has {len(matches)} members named X.{pair}.{code}: it must have one a side")
        found += matches
    return tuple(found)
