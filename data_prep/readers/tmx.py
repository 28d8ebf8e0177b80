"""Read the segments of two languages from each translation unit of a TMX file, as a stream in bounded memory.

The reader handles events of the XML parser expat, because a tree of elements would need memory for a whole unit,
however large. Expat opens no other files. A file that is not XML or declares entities is an error. Two faults are
repaired and counted, because some tools write them and expat would fail on the whole file: bytes that are invalid in
the file's encoding, and characters that XML forbids.
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
from data_prep.readers.corpus_files import MAX_LINE, CorpusPath, read_decompressed
from data_prep.readers.reader import AlignedReader, Input, PairOrReason

# Elements in a segment that hold formatting codes, not text. Text in a <sub> inside such an element is left out too.
_INLINE_CODES = {"bpt", "ept", "it", "ph", "ut"}
_MAX_DEPTH = 100  # largest depth of nested elements; TMX needs about ten
_MAX_TAG_BYTES = 8_000_000  # largest size of a tag or a comment, which expat keeps in memory until its end
_HEAD_BYTES = 1000  # bytes at the start of a file, enough for its declaration of the encoding

# First bytes of a file -> its encoding.
_ENCODING_BY_START = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    b"<\0": "utf-16-le",
    b"\0<": "utf-16-be",
}
_ENCODING_DECLARATION = re.compile(rb"""\s*<\?xml[^>]*?\sencoding\s*=\s*["']([^"'>]+)["']""")
_FORBIDDEN = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_CHARACTER_REFERENCE = re.compile(r"&#(?:x([0-9A-Fa-f]{1,8})|([0-9]{1,8}));")
_MAX_REFERENCE = 12  # the largest number of characters that _CHARACTER_REFERENCE matches


class Tmx(AlignedReader):
    """Translation Memory eXchange."""

    has_language_tags = True

    def units(self, source: Input, repaired: Counter[str]) -> Iterator[PairOrReason]:
        """Yield each unit of a TMX file as a pair: its first segment in each of the two languages, without tags.

        For a unit to drop, yields the reason: "malformed" if it lacks a language or has an unknown entity, "long_line"
        if a segment has over MAX_LINE bytes. Raises ValueError for a file that cannot be read.
        """
        path = source.paths[0]
        handler = _UnitHandler(path, source.languages)
        parser = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.UseForeignDTD(True)  # an undeclared entity goes to SkippedEntityHandler, and is not an error
        parser.StartElementHandler = handler.start
        parser.EndElementHandler = handler.end
        parser.CharacterDataHandler = handler.characters
        parser.SkippedEntityHandler = handler.entity
        parser.EntityDeclHandler = handler.entity_declared
        bytes_parsed = 0
        try:
            for text in _texts(path, repaired):
                data = text.encode()
                bytes_parsed += len(data)
                parser.Parse(data)
                if bytes_parsed - parser.CurrentByteIndex > _MAX_TAG_BYTES:
                    raise ValueError(f"{path} has a tag or comment of over {_MAX_TAG_BYTES:,} bytes: is it a TMX file?")
                yield from handler.units
                handler.units.clear()
            if bytes_parsed:
                parser.Parse(b"", True)
        except expat.ExpatError as error:
            fault = f"is not valid XML at line {error.lineno}, column {error.offset} ({expat.ErrorString(error.code)})"
            if handler.open_tags and error.code == expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS]:
                fault = f"ends at line {error.lineno} with <{handler.open_tags[-1]}> still open"
            raise ValueError(f"{path} {fault}: it is truncated or damaged. Fetch it again or repair it there") from None


class _UnitHandler:
    """Handles expat's events, and collects complete units in `units`."""

    def __init__(self, path: CorpusPath, languages: tuple[str, ...]):
        self.path = path
        self.languages = languages
        self.units: list[PairOrReason] = []
        self.open_tags: list[str] = []
        # Depths of the open <seg> and of the outermost open element whose text is skipped; 0 if no such element is
        # open. An element's depth is the number of open tags from <tmx> to the element, both included. A <seg> whose
        # language is none of `languages` is skipped as a whole.
        self.segment_depth = self.skipped_depth = 0
        self.language = ""  # the language of the latest <tuv>; empty for an unknown one
        self.segments: dict[str, str] = {}  # segments of the open unit, by language
        self.text: list[str] = []  # text of the open segment, until it exceeds MAX_LINE characters
        self.length = 0  # number of characters in `text`
        self.valid = True  # false if the open unit has an unknown entity

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self.open_tags and tag != "tmx":
            raise ValueError(f"{self.path} is no TMX file: it begins with <{tag}>, not with <tmx>")
        self.open_tags.append(tag)
        depth = len(self.open_tags)
        if depth > _MAX_DEPTH:
            raise ValueError(f"{self.path} has over {_MAX_DEPTH} elements inside of each other: is it a TMX file?")
        if self.segment_depth:
            if tag in _INLINE_CODES and not self.skipped_depth:
                self.skipped_depth = depth
        elif tag == "tu":
            self.segments, self.valid, self.language = {}, True, ""
        elif tag == "tuv":
            self.language = _language(attributes.get("xml:lang") or attributes.get("lang") or "")
        elif tag == "seg":
            self.segment_depth = depth
            self.skipped_depth = 0 if self.language in self.languages else depth
            self.text, self.length = [], 0

    def end(self, tag: str) -> None:
        depth = len(self.open_tags)
        self.open_tags.pop()
        if self.segment_depth:
            if depth == self.segment_depth:
                self.segment_depth = 0
                if not self.skipped_depth:
                    self.segments.setdefault(self.language, "".join(self.text))
            if depth == self.skipped_depth:
                self.skipped_depth = 0
        elif tag == "tu":
            self.units.append(self._unit())
            self.segments = {}

    def characters(self, text: str) -> None:
        if self.segment_depth and not self.skipped_depth and self.length <= MAX_LINE:
            self.text.append(text)
            self.length += len(text)

    def entity(self, name: str, is_parameter: bool) -> None:
        """Handle an entity that the file does not declare: HTML's entities become text, others make the unit
        invalid."""
        if self.segment_depth and not self.skipped_depth:
            text = html.entities.html5.get(f"{name};")
            self.valid &= text is not None
            self.characters(text or "")

    def entity_declared(self, name: str, *_: object) -> NoReturn:
        raise ValueError(
            f"{self.path} declares the entity {name!r}, but declarations are not read: replace the entity by its text"
        )

    def _unit(self) -> PairOrReason:
        if not self.valid or not all(language in self.segments for language in self.languages):
            return "malformed"
        a, b = (self.segments[language].replace("\n", " ").encode() for language in self.languages)
        return "long_line" if len(a) > MAX_LINE or len(b) > MAX_LINE else (a, b)


@lru_cache(1000)
def _language(tag: str) -> str:
    """The language code (see `language_of`) for a language tag of BCP 47: `de` for de-DE and de-CH-1901, `zh-Hant` for
    zh-Hant-TW. Returns "" for a tag without a known code."""
    parts = re.split("[-_]", tag.strip().lower())  # case means nothing in a tag
    # Leave out extensions: the first single letter and all that follows it, as in de-u-co-phonebk and de-x-mine.
    parts = parts[: next((i for i, part in enumerate(parts) if i and len(part) == 1), len(parts))]
    while parts:
        try:
            return language_of("-".join(parts))
        except ValueError:
            last = parts.pop()
            if len(last) == 4 and last.isalpha():  # a script: the tag without it would mean the language's usual script
                break
    return ""


def _texts(path: CorpusPath, repaired: Counter[str]) -> Iterator[str]:
    """Yield the file's text in pieces, repaired to be legal in XML. No piece ends inside a numeric character
    reference, so that the repair sees each reference complete."""
    chunks = read_decompressed(path)
    head = b""
    while len(head) < _HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    decoder_class = codecs.getincrementaldecoder(_encoding(head, path))
    # One decoder replaces invalid bytes by U+FFFD, the other one leaves them out: the file itself may have U+FFFD.
    replacing, ignoring = decoder_class("replace"), decoder_class("ignore")
    unfinished = ""  # the start of a character reference that may continue in the next chunk
    for chunk in chain([head], chunks, [b""]):
        decoded, valid = replacing.decode(chunk, final=not chunk), ignoring.decode(chunk, final=not chunk)
        text = unfinished + decoded
        cut = text.rfind("&", max(len(text) - _MAX_REFERENCE, 0)) if chunk else -1
        text, unfinished = (text[:cut], text[cut:]) if cut >= 0 and ";" not in text[cut:] else (text, "")
        removed = 0  # characters and references that XML forbids
        if "&#" in text or _FORBIDDEN.search(text):
            text, removed = _FORBIDDEN.subn("", _CHARACTER_REFERENCE.sub(_legal_reference, text))
        # `+=` of a Counter adds no key for a count of 0.
        repaired += Counter(invalid_utf8=decoded.count("\ufffd") - valid.count("\ufffd"), control_character=removed)
        yield text


def _legal_reference(reference: re.Match[str]) -> str:
    """The reference itself if its character is legal in XML; else NUL, which `_FORBIDDEN` removes."""
    code = int(reference[1], 16) if reference[1] else int(reference[2])
    return reference[0] if code < 0x110000 and not _FORBIDDEN.match(chr(code)) else "\0"


def _encoding(head: bytes, path: CorpusPath) -> str:
    """The encoding of a file, by its first bytes or else by its XML declaration; without either, UTF-8. Raises
    ValueError if the declared encoding is unknown."""
    for start, encoding in _ENCODING_BY_START.items():
        if head.startswith(start):
            return encoding
    declared = _ENCODING_DECLARATION.match(head)
    encoding = declared[1].decode("ascii", "replace") if declared else "utf-8"
    try:
        codec = codecs.lookup(encoding)
        # The pattern of the declaration matches only text with one byte per ASCII character. So a file that matches
        # but declares UTF-16 or UTF-32 was converted after the declaration was written, most likely to UTF-8. UTF-8 is
        # also assumed if the declared codec, such as base64, is not for text.
        return codec.name if not re.match(r"utf-?(16|32)", codec.name) and codec._is_text_encoding else "utf-8"
    except LookupError:
        raise ValueError(f"{path} declares the encoding {encoding!r}, which is unknown: convert it to UTF-8") from None
