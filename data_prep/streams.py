"""Bytes of plain, compressed and zipped files as blocks and lines, in bounded memory.

Only LF ends a line. A damaged or truncated file is a ValueError that names the file and the line reached.
"""

import bz2
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

import pyarrow as pa

from data_prep.places import Place

MAX_LINE = 100_000  # bytes
WINDOW = 1_000_000  # bytes behind a block's size in which its end is looked for
_CHUNK = 1 << 18
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, pa.ArrowException)
Opener = Callable[[], IO[bytes]]


def open_stream(place: Place, member: str | None = None) -> Opener:
    """How to open a file by its ending (.xz .gz .bz2 .zst, else plain), or a member of a zip file.

    A file of zero bytes is empty text, whatever its ending.
    """
    if member is not None:
        return lambda: zipfile.ZipFile(place.open()).open(member)
    if place.size == 0 and not place.pipe:
        return io.BytesIO
    openers: dict[str, Callable[[Any], Any]] = {
        ".xz": lzma.open,
        ".gz": partial(gzip.open, mode="rb"),
        ".bz2": bz2.open,
        ".zst": lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"),
    }
    decompress = openers.get(place.suffix)
    return (lambda: decompress(place.open())) if decompress else place.open


def chunks(opener: Opener, name: str) -> Iterator[bytes]:
    """The bytes in pieces. Raises ValueError on a damaged file."""
    number = 0
    try:
        with opener() as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
                number += chunk.count(b"\n")
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or of access, not of the bytes
            raise OSError(error.errno, error.strerror, error.filename or name) from None
        reached = f"{name} cannot be read behind line {number} ({error})"
        raise ValueError(f"{reached}: it is truncated or damaged, fetch it again") from None


def cut_blocks(opener: Opener, name: str, size: int, boundary: re.Pattern[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The bytes in blocks that end behind the first `boundary` from `size` on; True with one that does not.

    Where there is none within WINDOW bytes, a block ends behind a line, else as `cut_point` says. The blocks depend on
    the bytes alone.
    """
    parts: list[bytes] = []  # joined when they may hold a whole block
    held = 0
    for chunk in chunks(opener, name):
        parts.append(chunk)
        held += len(chunk)
        while held >= size:
            data = b"".join(parts)
            end = _block_end(data, size, boundary)
            if end:
                yield data[: end[0]], end[1]
                data = data[end[0] :]
            parts, held = [data], len(data)
            if not end:
                break
    data = b"".join(parts)
    while data:
        end = _block_end(data, size, boundary) or (len(data), False)
        yield data[: end[0]], end[1]
        data = data[end[0] :]


def _block_end(buffer: bytes, size: int, boundary: re.Pattern[bytes]) -> tuple[int, bool] | None:
    """Where the first block of `buffer` ends, and whether without a boundary; None when that takes more bytes to say."""
    limit = size + WINDOW
    if match := boundary.search(buffer, size - 1, limit) if len(buffer) >= size else None:
        return match.end(), False
    if len(buffer) < limit:
        return None
    line_end = buffer.rfind(b"\n", size, limit) + 1
    return line_end or size + cut_point(buffer[size : size + MAX_LINE + 1]), True


def whole_lines(opener: Opener, name: str) -> Iterator[bytes | None]:
    """Lines without LF; None for one over MAX_LINE bytes."""
    rest, long = b"", False
    for chunk in chunks(opener, name):
        first, *lines = chunk.split(b"\n")
        rest += first
        if lines:
            yield None if long or len(rest) > MAX_LINE else rest
            *middle, rest = lines
            long = False
            yield from (line if len(line) <= MAX_LINE else None for line in middle)
        if len(rest) > MAX_LINE:
            rest, long = b"", True
    if rest or long:
        yield None if long else rest


def cut_line(line: bytes) -> list[bytes]:
    """A line in pieces of at most MAX_LINE bytes, cut at `cut_point`."""
    pieces = []
    while len(line) > MAX_LINE:
        end = cut_point(line)
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]


def cut_point(line: bytes) -> int:
    """Where to cut a line over MAX_LINE bytes: behind the last white space before that, or else between characters."""
    end = max(line.rfind(b" ", 0, MAX_LINE), line.rfind(b"\t", 0, MAX_LINE)) + 1
    return end or next((i for i in range(MAX_LINE, MAX_LINE - 4, -1) if line[i] & 0xC0 != 0x80), MAX_LINE)
