"""Decompression of xz, gzip, bzip2 and Zstandard in pieces. The error for a damaged file says where the damage is."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

import pyarrow as pa

CHUNK = 1 << 18  # bytes that are read or decompressed at a time


class _Damage(OSError):
    """A compressed file is damaged; the message says where."""


class _GzipMember:
    """Decompressor of one gzip member, with the interface of `lzma.LZMADecompressor`."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)  # gzip format

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)

    needs_input = property(lambda self: not self._inflate.unconsumed_tail)
    eof = property(lambda self: self._inflate.eof)
    unused_data = property(lambda self: self._inflate.unused_data)


# File ending -> (first bytes of a stream, function that makes its decompressor, unit of padding in bytes). Zero bytes
# after a stream are padding if their count is a multiple of the unit. A unit of 0 means that the format has no padding.
_FORMATS: dict[str, tuple[bytes, Callable[[], Any], int]] = {
    ".xz": (b"\xfd7zXZ\0", partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4),
    ".gz": (b"\x1f\x8b", _GzipMember, 1),
    ".bz2": (b"BZh", bz2.BZ2Decompressor, 0),
}
ENDINGS = {*_FORMATS, ".zst"}


class _CountingFile:
    """A binary file that counts in `taken` the bytes read from it, and keeps in `error` the error of a failed read.
    pyarrow closes this object, but the file inside stays open."""

    def __init__(self, file: IO[bytes]):
        self.file, self.taken, self.closed = file, 0, False
        self.error: OSError | None = None

    def close(self) -> None:
        self.closed = True

    def read(self, size: int) -> bytes:
        try:
            data = self.file.read(size)
        except OSError as error:
            self.error = error
            raise
        self.taken += len(data)
        return data


def decompressed(file: IO[bytes], ending: str) -> Iterator[bytes]:
    """Yield the contents of a file that is compressed in the format of `ending`. Raises OSError if it is damaged or
    cannot be read."""
    source = _CountingFile(file)
    return _zstandard(source) if ending == ".zst" else _all_streams(source, *_FORMATS[ending])


def _all_streams(
    source: _CountingFile, magic: bytes, new_decompressor: Callable[[], Any], padding_unit: int
) -> Iterator[bytes]:
    """Yield the contents of all streams of a file, one after the other.

    `lzma.open` and `bz2.open` would end silently where bytes after the first stream are damaged.
    """
    data = b""  # bytes read from the file but not yet decompressed
    padding = b""  # the byte that may be before the next stream; the first stream has no padding
    while True:
        last_end = source.taken - len(data)  # where the last stream ended
        data = data.lstrip(padding)
        while len(data) < len(magic) and (more := source.read(CHUNK)):
            data = (data + more).lstrip(padding)
        start = source.taken - len(data)
        zeros = start - last_end
        if zeros and zeros % padding_unit:
            raise _Damage(f"{zeros} zero bytes before byte {start} are no padding, which is a multiple of 4")
        if not data:
            return
        if not data.startswith(magic):
            raise _Damage(f"byte {start} begins neither a stream of this format nor padding")
        stream = new_decompressor()
        while not stream.eof:
            if stream.needs_input and not data and not (data := source.read(CHUNK)):
                raise _Damage(f"it ends at byte {source.taken}, inside the stream that begins at byte {start}")
            try:
                piece = stream.decompress(data, CHUNK)
            except (lzma.LZMAError, zlib.error, OSError) as error:
                raise _Damage(
                    f"{error}, before byte {source.taken} in the stream that begins at byte {start}"
                ) from None
            data = b""
            if piece:
                yield piece
        data, padding = stream.unused_data, b"\0" if padding_unit else b""


def _zstandard(source: _CountingFile) -> Iterator[bytes]:
    # Arrow reads all frames of a file, and raises an error for bytes that belong to no frame.
    stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), "zstd")
    try:
        yield from iter(partial(stream.read, CHUNK), b"")
    except (OSError, pa.ArrowException) as error:
        if source.error is not None:  # the read failed: the data need not be damaged
            raise source.error from None
        raise _Damage(f"{error}, before byte {source.taken}") from None
