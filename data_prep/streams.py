"""Bytes of plain, compressed and zipped files as blocks and lines, in bounded memory.

Only LF ends a line. Every byte of a compressed file is text, padding that its format allows, or an error: a damaged or
truncated file is a ValueError that names the file, the line reached and the byte of the file.
"""

import bz2
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

import pyarrow as pa

from data_prep.places import Place

MAX_LINE = 100_000  # bytes
MAX_ROW = 500_000  # bytes of a row of a .tsv file: the URLs of pages are in it too
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
    if place.suffix == ".zst":
        return lambda: _Zstandard(place.open())  # type: ignore[return-value]  # reads, and that is all that is asked of it
    kind = _KINDS.get(place.suffix)
    return (lambda: _Streams(place.open(), kind)) if kind else place.open  # type: ignore[return-value]  # the same


class _Damage(OSError):
    """What is wrong with a compressed file, and where."""


class _Kind(NamedTuple):
    """A kind of compressed stream: what it begins with, one stream's decompressor, and how many zero bytes pad it."""

    magic: bytes
    decompressor: Callable[[], Any]
    padding: int  # a multiple of so many zero bytes may follow a stream; 0: none


class _Member:
    """A gzip member, with the attributes of `lzma.LZMADecompressor`."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)

    needs_input = property(lambda self: not self._inflate.unconsumed_tail)
    eof = property(lambda self: self._inflate.eof)
    unused_data = property(lambda self: self._inflate.unused_data)


_KINDS = {
    ".xz": _Kind(b"\xfd7zXZ\0", partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4),
    ".gz": _Kind(b"\x1f\x8b", _Member, 1),
    ".bz2": _Kind(b"BZh", bz2.BZ2Decompressor, 0),
}


class _Counted(io.RawIOBase):
    """A file that counts its bytes as they are read."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.taken = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.taken += len(data)
        return data

    def close(self) -> None:
        self.file.close()
        super().close()


class _Compressed:
    """A compressed file, closed at the end of a `with`."""

    def __init__(self, file: IO[bytes]):
        self.file = _Counted(file)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


class _Streams(_Compressed):
    """The text of all streams of a file, one after the other.

    `lzma.open` and `bz2.open` end in silence where a later stream is damaged or is none.
    """

    def __init__(self, file: IO[bytes], kind: _Kind):
        super().__init__(file)
        self.kind = kind
        self.stream: Any = None
        self.begin = 0  # of the stream
        self.data = b""  # taken, not yet decompressed

    def read(self, size: int) -> bytes:
        """Some bytes of text, at most `size`; none at the end."""
        while True:
            if (self.stream is None or self.stream.eof) and not self._next():
                return b""
            if self.stream.needs_input and not self.data and not self._fill():
                raise _Damage(f"it ends at byte {self.file.taken}, inside of the stream from byte {self.begin} on")
            data, self.data = self.data, b""
            try:
                text: bytes = self.stream.decompress(data, size)
            except (lzma.LZMAError, zlib.error, OSError) as error:
                raise _Damage(
                    f"{error}, before byte {self.file.taken} in the stream from byte {self.begin} on"
                ) from None
            if text:
                return text

    def _fill(self) -> bool:
        data = self.file.read(_CHUNK)
        self.data += data
        return bool(data)

    def _next(self) -> bool:
        """Begin the stream behind the last one and its padding; False at the file's end."""
        if self.stream is not None:
            self.data = self.stream.unused_data
            self._skip_padding()
        while len(self.data) < len(self.kind.magic) and self._fill():
            pass
        self.begin = self.file.taken - len(self.data)
        if not self.data:
            return False
        if not self.data.startswith(self.kind.magic):
            raise _Damage(f"byte {self.begin} begins neither a stream of this format nor padding")
        self.stream = self.kind.decompressor()
        return True

    def _skip_padding(self) -> None:
        zeros = 0
        while self.kind.padding and (self.data or self._fill()):
            rest = self.data.lstrip(b"\0")
            zeros += len(self.data) - len(rest)
            self.data = rest
            if rest:
                break
        if self.kind.padding and zeros % self.kind.padding:
            end = self.file.taken - len(self.data)
            raise _Damage(f"{zeros} zero bytes before byte {end} are no padding, which comes in fours")


class _Zstandard(_Compressed):
    """The text of all frames of a .zst file. Arrow reads on from frame to frame, and takes garbage as an error."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file)
        self.stream = pa.CompressedInputStream(pa.PythonFile(self.file, mode="r"), "zstd")

    def read(self, size: int) -> bytes:
        """Some bytes of text; none at the end."""
        try:
            text: bytes = self.stream.read(size)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise _Damage(f"{error}, before byte {self.file.taken}") from None
        return text


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
        reached = f"{name} cannot be read after line {number} ({error})"
        raise ValueError(f"{reached}: it is truncated or damaged, fetch it again") from None


def clip_lines(parts: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The same bytes, but `most` + 1 of a line that has more. No part has as many as `most`."""
    length = 0  # of the line that is open
    for part in parts:
        end = part.find(b"\n")
        inside = len(part) if end < 0 else end
        room = max(most + 1 - length, 0)
        yield part if inside <= room else part[:room] + part[inside:]
        length = length + len(part) if end < 0 else len(part) - part.rfind(b"\n") - 1


def cut_blocks(parts: Iterable[bytes], size: int, boundary: re.Pattern[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Bytes in blocks that end behind the first `boundary` from `size` on; True with one that does not.

    Where there is none within WINDOW bytes, a block ends behind a line, else as `cut_point` says. The blocks depend on
    the bytes alone, not on the parts that they come in.
    """
    held_parts: list[bytes] = []  # when they may hold a whole block
    held = 0
    for chunk in parts:
        held_parts.append(chunk)
        held += len(chunk)
        while held >= size:
            data = b"".join(held_parts)
            end = _block_end(data, size, boundary)
            held_parts = [data[end[0] :] if end else data]
            held = len(held_parts[0])
            if not end:
                break
            block = data[: end[0]]
            del data  # a block is large: nobody holds it twice while it is worked on
            yield block, end[1]
            del block
    data = b"".join(held_parts)
    del held_parts
    while data:
        end = _block_end(data, size, boundary) or (len(data), False)
        block, data = data[: end[0]], data[end[0] :]
        yield block, end[1]


def _block_end(buffer: bytes, size: int, boundary: re.Pattern[bytes]) -> tuple[int, bool] | None:
    """Where the first block of `buffer` ends, and whether without a boundary; None when that takes more bytes to
    say."""
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
    at = 0
    while len(line) - at > MAX_LINE:
        piece = line[at : at + MAX_LINE + 1]
        pieces.append(piece[: cut_point(piece)])
        at += len(pieces[-1])
    return [*pieces, line[at:]]


def cut_point(line: bytes) -> int:
    """Where to cut a line over MAX_LINE bytes: behind the last white space before that, or else between characters."""
    end = max(line.rfind(b" ", 0, MAX_LINE), line.rfind(b"\t", 0, MAX_LINE)) + 1
    return end or next((i for i in range(MAX_LINE, MAX_LINE - 4, -1) if line[i] & 0xC0 != 0x80), MAX_LINE)
