"""UTF-16 files, as some tools write TMX, as a stream of UTF-8: the blocks behind it are cut as in any other file."""

import codecs
from types import TracebackType
from typing import IO

from data_prep.streams import Opener

# The first bytes of a file in UTF-16: a byte-order mark, or the `<` of XML without one.
_STARTS = {
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    b"<\0": "utf-16-le",
    b"\0<": "utf-16-be",
}
_UNIT = 2  # bytes


def as_utf8(opener: Opener) -> Opener:
    """The same bytes, or, of a file that begins as UTF-16 does, its text in UTF-8.

    A surrogate without its other half becomes three bytes that are no UTF-8, for the cleaning to repair and count.
    """
    return lambda: _Utf8(opener())  # type: ignore[return-value]  # reads, and that is all that is asked of it


class _Utf8:
    def __init__(self, stream: IO[bytes]):
        self.stream = stream
        self.head = b""
        while len(self.head) < _UNIT and (more := stream.read(_UNIT - len(self.head))):
            self.head += more
        name = _STARTS.get(self.head)
        self.decoder = codecs.getincrementaldecoder(name)("surrogatepass") if name else None

    def __enter__(self) -> "_Utf8":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stream.close()

    def read(self, size: int) -> bytes:
        """Some bytes, from `size` of the file's; none at its end. Raises EOFError where it ends inside of a character."""
        data, self.head = self.head, b""
        data = data or self.stream.read(size)
        while data and self.decoder:
            if text := self.decoder.decode(data):
                return text.encode("utf-8", "surrogatepass")
            data = self.stream.read(size)
        if self.decoder and not data and self.decoder.getstate()[0]:
            raise EOFError("it ends inside of a character of UTF-16")
        return data
