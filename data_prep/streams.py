"""Bytes of plain, compressed and zipped files as lines, in bounded memory.

Only LF ends a line. A damaged or truncated file is a ValueError that names the file and the line reached.
"""

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

MAX_LINE = 100_000  # bytes
_CHUNK = 1 << 18
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, pa.ArrowException)
Opener = Callable[[], IO[bytes]]


def open_stream(path: Path, member: str | None = None) -> Opener:
    """How to open a file by its ending (.xz .gz .bz2 .zst, else plain), or a member of a zip file.

    A file of zero bytes is empty text, whatever its ending.
    """
    if member is not None:
        return lambda: zipfile.ZipFile(path).open(member)
    if path.stat().st_size == 0:
        return io.BytesIO
    openers: dict[str, Callable[[Path], Any]] = {
        ".xz": lzma.open,
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".zst": _open_zst,
    }
    return partial(openers.get(path.suffix, partial(open, mode="rb")), path)


def _open_zst(path: Path) -> Any:
    return pa.input_stream(str(path), compression="zstd")


def cut_lines(opener: Opener, name: str, repaired: Counter[str]) -> Iterator[bytes]:
    """Lines without LF; one over MAX_LINE bytes comes in pieces, cut behind white space where there is some."""
    inside = False
    for piece, ended in _segments(opener, name):
        if not ended and not inside:
            repaired["long_line"] += 1
        inside = not ended
        yield piece


def whole_lines(opener: Opener, name: str) -> Iterator[bytes | None]:
    """Lines without LF; None for one over MAX_LINE bytes."""
    inside = False
    for piece, ended in _segments(opener, name):
        if ended:
            yield None if inside else piece
        inside = not ended


def _segments(opener: Opener, name: str) -> Iterator[tuple[bytes, bool]]:
    """Pieces of lines, none over MAX_LINE bytes, and whether the line ends behind them."""
    rest, number = b"", 0
    try:
        with opener() as stream:
            while chunk := stream.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    *head, last = _cut(line)
                    yield from ((piece, False) for piece in head)
                    yield last, True
                number += len(lines)
                *head, rest = _cut(rest)
                yield from ((piece, False) for piece in head)
            if rest:
                yield rest, True
    except _DAMAGED as error:
        reached = f"{name} cannot be read behind line {number} ({error})"
        raise ValueError(f"{reached}: it is truncated or damaged, fetch it again") from None


def _cut(line: bytes) -> list[bytes]:
    """A line in pieces of at most MAX_LINE bytes: a piece ends behind white space, or else between two characters."""
    pieces = []
    while len(line) > MAX_LINE:
        end = max(line.rfind(b" ", 0, MAX_LINE), line.rfind(b"\t", 0, MAX_LINE)) + 1
        if not end:
            end = next((i for i in range(MAX_LINE, MAX_LINE - 4, -1) if line[i] & 0xC0 != 0x80), MAX_LINE)
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]
