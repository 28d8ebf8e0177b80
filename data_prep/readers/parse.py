"""Blocks of raw bytes to cleaned documents and pairs, with the counts of what was repaired and dropped."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from data_prep.clean import Counts, clean_line, clean_lines
from data_prep.corpus_files import MAX_LINE, MAX_ROW, cut_line
from data_prep.readers.blocks import TextBlock, text_blocks
from data_prep.readers.inputs import Input

MAX_DOCUMENT = 1_000_000  # characters
_PIECE = 1 << 20  # bytes that are cleaned, and tokenized, at once
_READ = 1 << 18  # bytes of a block where nobody asks for blocks


def documents(source: Input, counts: Counts) -> Iterator[list[str]]:
    """Documents as lists of non-empty paragraphs; at least one each. Raises ValueError on a damaged file."""
    for block in text_blocks(source, _READ):
        yield from block_documents(source, block, counts)


def pairs(source: Input, counts: Counts) -> Iterator[tuple[str, str]]:
    """Pairs with text on both sides. Raises ValueError on a damaged file or sides with different numbers of lines."""
    for block in text_blocks(source, _READ):
        for a, b, _ in block_pairs(source, block, counts):
            yield a, b


class Paragraphs(NamedTuple):
    """Whole documents, one behind the other: their paragraphs, none empty, and how many each has (int64)."""

    lines: list[str]
    of_document: np.ndarray


def block_documents(source: Input, block: TextBlock, counts: Counts) -> Iterator[list[str]]:
    """The documents of one block, as lists of non-empty paragraphs; at least one each."""
    for lines, of_document in block_paragraphs(source, block, counts):
        ends = np.cumsum(of_document).tolist()
        yield from (lines[start:end] for start, end in pairwise([0, *ends]))


def block_paragraphs(source: Input, block: TextBlock, counts: Counts) -> Iterator[Paragraphs]:
    """The documents of one block, many at a time; at least one each time."""
    opened: list[str] = []  # of the last document, which goes on
    for cleaned, rest in _short_lines(block.sides[0], counts.repaired):
        lines = opened + cleaned
        sizes = np.fromiter(map(len, lines), np.int64, len(lines))
        text = sizes > 0
        begins = text.copy()
        if source.format != "lines":
            begins[1:] &= ~text[:-1]
        if not text.any():
            opened = []
            continue
        ends_open = bool(text[-1])
        counts.repaired.update({"long_document": 1} if block.cut and not rest and ends_open else {})
        lines, sizes, starts = list(filter(None, lines)), sizes[text], np.flatnonzero(begins[text])
        starts = _shorter(starts, sizes, counts.repaired)
        opened = []
        if rest and ends_open and source.format != "lines":
            opened = lines[starts[-1] :]
            lines, starts = lines[: starts[-1]], starts[:-1]
        if lines:
            counts.units_in += len(starts)
            counts.paragraphs_in += len(lines)
            yield Paragraphs(lines, np.diff(starts, append=len(lines)))


def _shorter(starts: np.ndarray, sizes: np.ndarray, repaired: Counter[str]) -> np.ndarray:
    """`starts` of documents, with another one wherever a document would pass MAX_DOCUMENT characters."""
    long = np.flatnonzero(np.add.reduceat(sizes, starts) > MAX_DOCUMENT)
    extra = []
    for start, end in zip(starts[long], np.append(starts, len(sizes))[long + 1], strict=True):
        size = 0
        for line in range(start, end):
            if size and size + sizes[line] > MAX_DOCUMENT:
                extra.append(line)
                size = 0
            size += sizes[line]
    repaired.update({"long_document": len(extra)} if extra else {})
    return np.union1d(starts, extra).astype(np.int64) if extra else starts


def block_pairs(source: Input, block: TextBlock, counts: Counts) -> Iterator[tuple[str, str, float | None]]:
    """The pairs of one block with text on both sides, and the score that came with each, where there is one.

    Dropped are pairs with a long line (long_line), without text on a side (empty_side), and rows or units that do not
    have what their format says (malformed).
    """
    counts.units_in += block.dropped.total()
    counts.dropped.update(block.dropped)
    counts.repaired.update(block.repaired)
    if source.format.endswith("_tsv"):
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


def _short_lines(data: bytes, repaired: Counter[str]) -> Iterator[tuple[list[str], bool]]:
    """Cleaned lines, those of about _PIECE bytes at once, and whether more follow.

    A line over MAX_LINE bytes comes in pieces, cut behind white space where there is some.
    """
    begin, inside = 0, False  # inside of a line of which some pieces are taken
    while begin < len(data):
        piece = data[begin : begin + _PIECE]
        if end := piece.rfind(b"\n") + 1 or len(piece) * (begin + len(piece) == len(data)):
            piece = piece[:end]
            if not _has_longer_line(piece, MAX_LINE):
                lines = clean_lines(piece, repaired)
            else:
                cut = [cut_line(line) for line in piece.removesuffix(b"\n").split(b"\n")]
                repaired["long_line"] += sum(len(pieces) > 1 for pieces in cut[inside:])
                lines = [clean_line(part, repaired) for pieces in cut for part in pieces]
        else:  # a line of more than that
            pieces = cut_line(piece)[:-1]  # the last one may go on
            end = sum(map(len, pieces))
            repaired["long_line"] += not inside
            lines = [clean_line(part, repaired) for part in pieces]
        inside = not piece.endswith(b"\n")
        begin += end
        yield lines, begin < len(data)


def _has_longer_line(piece: bytes, most: int) -> bool:
    start = 0
    while len(piece) - start > most:
        start = piece.rfind(b"\n", start, start + most + 1) + 1
        if not start:
            return True
    return False


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
    for line in _rows(data, counts):
        fields = line.split("\t")
        if len(fields) != len(columns):  # white space at the ends was removed, and with it an empty field there
            _drop(counts, "malformed")
            continue
        score = None
        if score_at is not None:
            try:
                score = float(fields[score_at])
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                _drop(counts, "malformed")
                continue
        a, b = (fields[i].strip() for i in at)
        if max(len(a.encode()), len(b.encode())) > MAX_LINE:
            _drop(counts, "long_line")
        else:
            yield a, b, score


def _rows(data: bytes, counts: Counts) -> Iterator[str]:
    """Cleaned lines of at most MAX_ROW bytes; the others were clipped, and are dropped."""
    for piece in _pieces(data):
        lines = clean_lines(piece, counts.repaired)
        if not _has_longer_line(piece, MAX_ROW):
            yield from lines
            continue
        for line, raw in zip(lines, piece.removesuffix(b"\n").split(b"\n"), strict=True):
            if len(raw) > MAX_ROW:
                _drop(counts, "long_line")
            else:
                yield line


def _drop(counts: Counts, reason: str) -> None:
    counts.units_in += 1
    counts.dropped[reason] += 1
