"""Blocks of raw bytes to cleaned documents and pairs, with the counts of what was repaired and dropped."""

import html
import re
from collections import Counter
from collections.abc import Iterator

from data_prep.clean import Counts, clean_line, clean_lines
from data_prep.readers.blocks import TextBlock, text_blocks
from data_prep.readers.inputs import Input
from data_prep.streams import MAX_LINE, cut_line

MAX_DOCUMENT = 1_000_000  # characters
_PIECE = 1 << 18  # bytes that are cleaned at once
_READ = 1 << 18  # bytes of a block where nobody asks for blocks

_TU = re.compile(rb"<tu[\s>].*?</tu\s*>", re.S)
_TUV = re.compile(r"<tuv\s(?P<attributes>[^>]*)>(?P<content>.*?)</tuv\s*>", re.S)
_LANGUAGE = re.compile(r"""(?:xml:)?lang\s*=\s*["']([^"']+)["']""")
_SEGMENT = re.compile(r"<seg(?:\s[^>]*)?>(.*?)</seg\s*>", re.S)
# Native codes of other tools inside a segment are not text; a highlight's content is.
_INLINE = re.compile(r"<(bpt|ept|ph|it|ut)\b[^>]*?(?:/>|>.*?</\1\s*>)|</?(?:hi|sub|mrk)\b[^>]*>", re.S)


def documents(source: Input, counts: Counts) -> Iterator[list[str]]:
    """Documents as lists of non-empty paragraphs; at least one each. Raises ValueError on a damaged file."""
    for block in text_blocks(source, _READ):
        yield from block_documents(source, block, counts)


def pairs(source: Input, counts: Counts) -> Iterator[tuple[str, str]]:
    """Pairs with text on both sides. Raises ValueError on a damaged file or sides with different numbers of lines."""
    for block in text_blocks(source, _READ):
        for a, b, _ in block_pairs(source, block, counts):
            yield a, b


def block_documents(source: Input, block: TextBlock, counts: Counts) -> Iterator[list[str]]:
    """The documents of one block, as lists of non-empty paragraphs; at least one each."""
    document: list[str] = []
    size = 0
    for line in _lines(block.sides[0], counts.repaired):
        if document and (not line or source.format == "lines" or size + len(line) > MAX_DOCUMENT):
            if line and source.format != "lines":
                counts.repaired["long_document"] += 1
            yield _counted(document, counts)
            document, size = [], 0
        if line:
            document.append(line)
            size += len(line)
    if document:
        counts.repaired.update({"long_document": 1} if block.cut else {})
        yield _counted(document, counts)


def _counted(document: list[str], counts: Counts) -> list[str]:
    counts.units_in += 1
    counts.paragraphs_in += len(document)
    return document


def block_pairs(source: Input, block: TextBlock, counts: Counts) -> Iterator[tuple[str, str, float | None]]:
    """The pairs of one block with text on both sides, and the score that came with each, where there is one.

    Dropped are pairs with a long line (long_line), without text on a side (empty_side), and rows or units that do not
    have what their format says (malformed).
    """
    counts.units_in += block.long_lines
    counts.dropped.update({"long_line": block.long_lines} if block.long_lines else {})
    if source.format == "tmx":
        found = _tmx_pairs(block.sides[0], source, counts)
    elif source.format.endswith("_tsv"):
        found = _tsv_pairs(block.sides[0], source, counts)
    else:
        sides = [_aligned_lines(side, counts.repaired) for side in block.sides]
        found = ((a, b, None) for a, b in zip(*sides, strict=True))
    for a, b, score in found:
        counts.units_in += 1
        if a and b:
            yield a, b, score
        else:
            counts.dropped["empty_side"] += 1


def _lines(data: bytes, repaired: Counter[str]) -> Iterator[str]:
    """Cleaned lines; one over MAX_LINE bytes comes in pieces, cut behind white space where there is some."""
    for piece in _pieces(data):
        if len(piece) > MAX_LINE and max(map(len, piece.split(b"\n"))) > MAX_LINE:
            cut = [cut_line(line) for line in piece.removesuffix(b"\n").split(b"\n")]
            repaired["long_line"] += sum(len(pieces) > 1 for pieces in cut)
            yield from (clean_line(part, repaired) for pieces in cut for part in pieces)
        else:
            yield from clean_lines(piece, repaired)


def _aligned_lines(data: bytes, repaired: Counter[str]) -> Iterator[str]:
    for piece in _pieces(data):
        yield from clean_lines(piece, repaired)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Whole lines, about _PIECE bytes of them."""
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + _PIECE) + 1 or data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def _tsv_pairs(data: bytes, source: Input, counts: Counts) -> Iterator[tuple[str, str, float | None]]:
    columns = source.columns
    at = columns.index("source"), columns.index("target")
    score_at = columns.index("score") if "score" in columns else None
    for line in _aligned_lines(data, counts.repaired):
        fields = line.split("\t")
        if len(fields) != len(columns):  # white space at the ends was removed, and with it an empty field there
            _drop(counts, "malformed")
            continue
        score = None
        if score_at is not None:
            try:
                score = float(fields[score_at])
            except ValueError:
                _drop(counts, "malformed")
                continue
        a, b = (fields[i].strip() for i in at)
        if max(len(a.encode()), len(b.encode())) > MAX_LINE:
            _drop(counts, "long_line")
        else:
            yield a, b, score


def _tmx_pairs(data: bytes, source: Input, counts: Counts) -> Iterator[tuple[str, str, float | None]]:
    for match in _TU.finditer(data):
        text = clean_line(match[0].replace(b"\r\n", b" ").replace(b"\n", b" "), counts.repaired)
        segments = {}
        for tuv in _TUV.finditer(text):
            language, segment = _LANGUAGE.search(tuv["attributes"]), _SEGMENT.search(tuv["content"])
            if language and segment:
                segments[language[1].lower()] = html.unescape(_INLINE.sub("", segment[1])).strip()
        try:
            a, b = (segments[code.lower()] for code in source.codes)
        except KeyError:
            _drop(counts, "malformed")
            continue
        if max(len(a.encode()), len(b.encode())) > MAX_LINE:
            _drop(counts, "long_line")
        else:
            yield a, b, None


def _drop(counts: Counts, reason: str) -> None:
    counts.units_in += 1
    counts.dropped[reason] += 1
