"""An input as blocks of raw bytes: what one process reads and any other can clean. Of TMX, the segments, line by
line."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from data_prep.corpus_files import MAX_ROW, chunks, clip_lines, cut_blocks, open_stream, whole_lines
from data_prep.readers.inputs import Input
from data_prep.readers.tmx import Unit, units

_NO_LINE = b"\n"  # behind the end of the shorter side; no line holds a LF
_BOUNDARIES = {
    "cc100": re.compile(rb"\n[ \t\r]*\n"),
    "lines": re.compile(rb"\n"),
    "wikimatrix_tsv": re.compile(rb"\n"),
    "ccaligned_tsv": re.compile(rb"\n"),
}


@dataclass(frozen=True)
class TextBlock:
    """One side of raw text, or two sides with the same number of lines; `dropped` pairs were left out of it, by reason.

    `repaired` is what was repaired in them, by reason. `cut`: it ends inside of a document, which is too long to be
    kept whole.
    """

    sides: tuple[bytes, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    cut: bool = False


def text_blocks(source: Input, size: int) -> Iterator[TextBlock]:
    """Blocks of about `size` bytes, cut between documents or pairs; they depend on the input's bytes alone.

    Raises ValueError on a damaged file, or sides with different numbers of lines.
    """
    if source.format in _BOUNDARIES:
        text = chunks(open_stream(source.paths[0]), str(source.paths[0]))
        if source.format.endswith("_tsv"):
            text = clip_lines(text, MAX_ROW)  # it will be dropped: a row is never cut in two
        for data, cut in cut_blocks(text, size, _BOUNDARIES[source.format]):
            yield TextBlock((data,), cut=cut)
        return
    repaired: Counter[str] = Counter()
    if source.format == "tmx":
        rows = units(open_stream(source.paths[0]), str(source.paths[0]), source.languages, repaired)
    else:
        rows = _aligned_lines(source)
    yield from _aligned_blocks(rows, repaired, size)


def _aligned_blocks(rows: Iterator[Unit], repaired: Counter[str], size: int) -> Iterator[TextBlock]:
    lines: list[tuple[bytes, bytes]] = []
    filled, dropped = 0, Counter[str]()
    for row in rows:
        if isinstance(row, str):
            dropped[row] += 1
            continue
        lines.append(row)
        filled += len(row[0]) + len(row[1]) + 2
        if filled >= size:
            yield _aligned(lines, dropped, repaired)
            lines, filled, dropped = [], 0, Counter()
            repaired.clear()
    if lines or dropped or repaired:
        yield _aligned(lines, dropped, repaired)


def _aligned(lines: list[tuple[bytes, bytes]], dropped: Counter[str], repaired: Counter[str]) -> TextBlock:
    a, b = (b"".join(line + b"\n" for line in side) for side in zip(*lines, strict=True)) if lines else (b"", b"")
    return TextBlock((a, b), dropped, Counter(repaired))


def _aligned_lines(source: Input) -> Iterator[Unit]:
    """The lines of both sides."""
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
        yield "long_line" if a is None or b is None else (a, b)
    if numbers[0] != numbers[1]:
        raise ValueError(
            f"{names[0]} has {numbers[0]} lines but {names[1]} has {numbers[1]}: the sides of a pair must be "
            "line-aligned, fetch both again"
        )
