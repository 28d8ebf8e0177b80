"""TMX read as a stream: expat's events become the two wanted segments of each unit, in bounded memory.

We use expat itself, because a tree of elements would grow with the unit. It reads nothing but the bytes it is given,
and a file that declares entities fails. A file that is not XML is an error; but bytes that are invalid in the file's
encoding and characters that XML forbids are repaired and counted: tools do write them, and expat would fail on the
whole file.
"""

import codecs
import html.entities
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NoReturn
from xml.parsers import expat

from data_prep.languages import language_of
from data_prep.readers.corpus_files import MAX_LINE, Place, read_text
from data_prep.readers.reader import AlignedReader, Input, Unit

# Elements in a segment that hold codes of other tools, not text. A <sub> in them is not part of the sentence either.
_INLINE_CODES = {"bpt", "ept", "it", "ph", "ut"}
_MOST_OPEN = 100  # nested elements; TMX needs about ten
_LONGEST_TAG = 8_000_000  # bytes of a tag or a comment, which expat holds until its end
_HEAD = 1000  # bytes in which the encoding is declared

# Encodings of a file by its first bytes.
_STARTS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    b"<\0": "utf-16-le",
    b"\0<": "utf-16-be",
}
_DECLARED = re.compile(rb"""\s*<\?xml[^>]*?\sencoding\s*=\s*["']([^"'>]+)["']""")
_NO_XML = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_NUMBERED = re.compile(r"&#(?:x([0-9A-Fa-f]{1,8})|([0-9]{1,8}));")
_LONGEST_REFERENCE = 12  # characters of the longest text that _NUMBERED matches


class Tmx(AlignedReader):
    """Translation Memory eXchange."""

    says_languages = True

    def units(self, source: Input, repaired: Counter[str]) -> Iterator[Unit]:
        """Yield the units of a TMX file: the first segment of each language, without tags. Raises ValueError.

        Units that lack a language or have an unknown entity are dropped as malformed, units with a long segment as
        long_line.
        """
        name = str(source.paths[0])
        reader = _UnitHandler(name, source.languages)
        parser = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.UseForeignDTD(True)  # an undeclared entity goes to SkippedEntityHandler, and is not an error
        parser.StartElementHandler = reader.start
        parser.EndElementHandler = reader.end
        parser.CharacterDataHandler = reader.characters
        parser.SkippedEntityHandler = reader.entity
        parser.EntityDeclHandler = reader.entity_declared
        bytes_parsed = 0
        try:
            for text in _texts(source.paths[0], repaired):
                data = text.encode()
                bytes_parsed += len(data)
                parser.Parse(data)
                if bytes_parsed - parser.CurrentByteIndex > _LONGEST_TAG:
                    raise ValueError(f"{name} has a tag or comment of over {_LONGEST_TAG:,} bytes: is it a TMX file?")
                yield from reader.units
                reader.units.clear()
            if bytes_parsed:
                parser.Parse(b"", True)
        except expat.ExpatError as error:
            what = f"is not valid XML at line {error.lineno}, column {error.offset} ({expat.ErrorString(error.code)})"
            if reader.open and error.code == expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS]:
                what = f"ends at line {error.lineno} with <{reader.open[-1]}> still open"
            raise ValueError(f"{name} {what}: it is truncated or damaged, fetch it again or repair it there") from None


class _UnitHandler:
    """Handles expat's events, and collects complete units in `units`."""

    def __init__(self, name: str, languages: tuple[str, ...]):
        self.name = name
        self.languages = languages
        self.units: list[Unit] = []
        self.open: list[str] = []
        self.segment = self.code = 0  # number of open elements at its start; 0 outside
        self.language = ""
        self.segments: dict[str, str] = {}
        self.text: list[str] = []  # a long segment is cut soon after MAX_LINE characters
        self.length = 0
        self.valid = True

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self.open and tag != "tmx":
            raise ValueError(f"{self.name} is no TMX file: it begins with <{tag}>, not with <tmx>")
        self.open.append(tag)
        if len(self.open) > _MOST_OPEN:
            raise ValueError(f"{self.name} has over {_MOST_OPEN} elements inside of each other: is it a TMX file?")
        if self.segment:
            if tag in _INLINE_CODES and not self.code:
                self.code = len(self.open)
        elif tag == "tu":
            self.segments, self.valid, self.language = {}, True, ""
        elif tag == "tuv":
            self.language = _language(attributes.get("xml:lang") or attributes.get("lang") or "")
        elif tag == "seg":
            self.segment = len(self.open)
            self.code = 0 if self.language in self.languages else self.segment
            self.text, self.length = [], 0

    def end(self, tag: str) -> None:
        depth = len(self.open)
        self.open.pop()
        if self.segment:
            if depth == self.segment:
                self.segment = 0
                if not self.code:
                    self.segments.setdefault(self.language, "".join(self.text))
            if depth == self.code:
                self.code = 0
        elif tag == "tu":
            self.units.append(self._unit())
            self.segments = {}

    def characters(self, text: str) -> None:
        if self.segment and not self.code and self.length <= MAX_LINE:
            self.text.append(text)
            self.length += len(text)

    def entity(self, name: str, is_parameter: bool) -> None:
        """Handle an entity that is not declared: it may be one of HTML's."""
        if self.segment and not self.code:
            text = html.entities.html5.get(f"{name};")
            self.valid &= text is not None
            self.characters(text or "")

    def entity_declared(self, name: str, *_: object) -> NoReturn:
        raise ValueError(
            f"{self.name} declares the entity {name!r}: write its text in its place, because no declarations are read"
        )

    def _unit(self) -> Unit:
        if not self.valid or not all(language in self.segments for language in self.languages):
            return "malformed"
        a, b = (self.segments[language].replace("\n", " ").encode() for language in self.languages)
        return "long_line" if len(a) > MAX_LINE or len(b) > MAX_LINE else (a, b)


@lru_cache(1000)
def _language(tag: str) -> str:
    """CC-100's code of a language tag (BCP 47): `de` of de-DE and de-CH-1901, `zh-Hant` of zh-Hant-TW; empty for other
    languages. A single letter and all after it (de-u-co-phonebk, de-x-mine) are an extension and do not count."""
    parts = re.split("[-_]", tag.strip())
    parts = parts[: next((i for i, part in enumerate(parts) if i and len(part) == 1), len(parts))]
    while parts:
        try:
            return language_of("-".join(parts))
        except ValueError:
            last = parts.pop()
            if len(last) == 4 and last.isalpha():  # a script, and not the language's usual one
                break
    return ""


def _texts(place: Place, repaired: Counter[str]) -> Iterator[str]:
    """Yield the file's text, repaired to be legal in XML; no piece ends inside a numeric character reference."""
    chunks = read_text(place)
    head = b""
    while len(head) < _HEAD and (chunk := next(chunks, b"")):
        head += chunk
    decoder = codecs.getincrementaldecoder(_encoding(head, place))(_replace.__name__)
    held = ""
    for chunk in chain([head], chunks, [b""]):
        _replaced.clear()
        text = held + decoder.decode(chunk, final=not chunk)
        repaired.update({"invalid_utf8": len(_replaced)} if _replaced else {})
        cut = text.rfind("&", max(len(text) - _LONGEST_REFERENCE, 0)) if chunk else -1
        text, held = (text[:cut], text[cut:]) if cut >= 0 and ";" not in text[cut:] else (text, "")
        if "&#" in text or _NO_XML.search(text):
            text, repairs = _NO_XML.subn("", _NUMBERED.sub(_legal_reference, text))
            repaired.update({"control_character": repairs} if repairs else {})
        yield text


def _legal_reference(reference: re.Match[str]) -> str:
    """Keep a reference to a legal character; make NUL, which `_NO_XML` removes, of one to a forbidden character."""
    number = int(reference[1], 16) if reference[1] else int(reference[2])
    return reference[0] if number < 0x110000 and not _NO_XML.match(chr(number)) else "\0"


def _encoding(head: bytes, place: Place) -> str:
    """The encoding of a file, by its first bytes or else its declaration. Raises ValueError for an unknown one."""
    for start, encoding in _STARTS.items():
        if head.startswith(start):
            return encoding
    declared = _DECLARED.match(head)
    encoding = declared[1].decode("ascii", "replace") if declared else "utf-8"
    try:
        codec = codecs.lookup(encoding)
        # A declaration that matches byte by byte is not in UTF-16 or UTF-32: the file was converted since.
        return codec.name if not re.match(r"utf-?(16|32)", codec.name) and codec._is_text_encoding else "utf-8"
    except LookupError:
        raise ValueError(f"{place} declares the encoding {encoding!r}, which is unknown: convert it to UTF-8") from None


_replaced: list[int] = []  # positions of the bytes that are invalid in the encoding


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _replaced.append(error.start)
    return "\ufffd", error.end


codecs.register_error(_replace.__name__, _replace)
