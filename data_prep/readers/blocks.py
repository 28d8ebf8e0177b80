"""An input as blocks of raw bytes: what one process reads and any other can parse. Nothing but UTF-16 is decoded here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from data_prep.readers.inputs import Input
from data_prep.readers.utf16 import as_utf8
from data_prep.streams import cut_blocks, open_stream, whole_lines

_NO_LINE = b"\n"  # behind the end of the shorter side; no line holds a LF
_BOUNDARIES = {
    "cc100": re.compile(rb"\n[ \t\r]*\n"),
    "lines": re.compile(rb"\n"),
    "wikimatrix_tsv": re.compile(rb"\n"),
    "ccaligned_tsv": re.compile(rb"\n"),
    "tmx": re.compile(rb"</tu\s*>"),
}


@dataclass(frozen=True)
class TextBlock:
    """One side of raw text, or two sides with the same number of lines; `long_lines` pairs were left out of it.

    `cut`: it ends inside of a document, which is too long to be kept whole.
    """

    sides: tuple[bytes, ...]
    long_lines: int = 0
    cut: bool = False


def text_blocks(source: Input, size: int) -> Iterator[TextBlock]:
    """Blocks of about `size` bytes, cut between documents or pairs; they depend on the input's bytes alone.

    Raises ValueError on a damaged file, or sides with different numbers of lines.
    """
    if source.format in _BOUNDARIES:
        opener = open_stream(source.paths[0])
        if source.format == "tmx":
            opener = as_utf8(opener)
        for data, cut in cut_blocks(opener, str(source.paths[0]), size, _BOUNDARIES[source.format]):
            yield TextBlock((data,), cut=cut)
    else:
        yield from _aligned_blocks(source, size)


def _aligned_blocks(source: Input, size: int) -> Iterator[TextBlock]:
    places = source.members or (None, None)
    paths = source.paths if len(source.paths) == 2 else source.paths * 2
    names = [f"{path}:{member}" if member else str(path) for path, member in zip(paths, places, strict=True)]
    sides = [
        whole_lines(open_stream(path, member), name) for path, member, name in zip(paths, places, names, strict=True)
    ]
    numbers = [0, 0]
    lines: list[tuple[bytes, bytes]] = []
    filled = long = 0
    for a, b in zip_longest(*sides, fillvalue=_NO_LINE):
        numbers[0] += a != _NO_LINE
        numbers[1] += b != _NO_LINE
        if _NO_LINE in (a, b):
            continue  # read on: the message names both counts
        if a is None or b is None:
            long += 1
            continue
        lines.append((a, b))
        filled += len(a) + len(b) + 2
        if filled >= size:
            yield _aligned(lines, long)
            lines, filled, long = [], 0, 0
    if numbers[0] != numbers[1]:
        raise ValueError(
            f"{names[0]} has {numbers[0]} lines but {names[1]} has {numbers[1]}: the sides of a pair must be "
            "line-aligned, fetch both again"
        )
    if lines or long:
        yield _aligned(lines, long)


def _aligned(lines: list[tuple[bytes, bytes]], long: int) -> TextBlock:
    a, b = (b"\n".join(side) for side in zip(*lines, strict=True)) if lines else (b"", b"")
    return TextBlock((a + b"\n", b + b"\n") if lines else (b"", b""), long)
