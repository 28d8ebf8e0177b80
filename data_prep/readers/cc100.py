"""CC-100's format (a paragraph a line, an empty line between documents), and a document a line."""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from data_prep.filters.clean import Counts, clean_line, clean_lines
from data_prep.readers.corpus_files import MAX_LINE, cut_blocks, cut_line, read_text
from data_prep.readers.reader import COMPRESSED, PIECE, Input, Paragraphs, Reader, TextBlock

MAX_DOCUMENT = 1_000_000  # characters


class CC100(Reader):
    """A paragraph a line, an empty line between documents; the class of all formats of documents.

    `file_names` in a folder of files by language: a regular expression, and in words.
    """

    task = "mono"
    file_names = (rf"\.txt{COMPRESSED}", ".txt[.xz|.gz|.bz2|.zst]")
    boundary = re.compile(rb"\n[ \t\r]*\n")
    line_is_document = False

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks that end after a document, if one ends near enough."""
        for data, cut in cut_blocks(read_text(source.paths[0]), size, self.boundary):
            yield TextBlock((data,), cut=cut)

    def paragraphs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[Paragraphs]:
        """The documents of one block, those of about PIECE bytes at a time; at least one each time."""
        counts.units_in += block.dropped.total()
        counts.dropped.update(block.dropped)
        counts.repaired.update(block.repaired)
        opened: list[str] = []  # paragraphs of the last document, which continues
        for cleaned, rest in _short_lines(block.sides[0], counts.repaired):
            lines = opened + cleaned
            sizes = np.fromiter(map(len, lines), np.int64, len(lines))
            text = sizes > 0
            begins = text.copy()
            if not self.line_is_document:
                begins[1:] &= ~text[:-1]
            opened = []
            if not text.any():
                continue
            ends_open = bool(text[-1])
            counts.repaired.update({"long_document": 1} if block.cut and not rest and ends_open else {})
            lines, sizes, starts = list(filter(None, lines)), sizes[text], np.flatnonzero(begins[text])
            starts = _split_long(starts, sizes, counts.repaired)
            if rest and ends_open and not self.line_is_document:
                opened = lines[starts[-1] :]
                lines, starts = lines[: starts[-1]], starts[:-1]
            if lines:
                counts.units_in += len(starts)
                counts.paragraphs_in += len(lines)
                yield Paragraphs(lines, np.diff(starts, append=len(lines)))


class Lines(CC100):
    """A document a line."""

    boundary = re.compile(rb"\n")
    line_is_document = True


def _split_long(starts: np.ndarray, sizes: np.ndarray, repaired: Counter[str]) -> np.ndarray:
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
    return np.union1d(starts, extra).astype(np.int64)


def _short_lines(data: bytes, repaired: Counter[str]) -> Iterator[tuple[list[str], bool]]:
    """Cleaned lines, those of about PIECE bytes at once, and whether more follow.

    A line over MAX_LINE bytes comes in pieces, cut after white space where there is some.
    """
    begin, inside = 0, False  # inside of a line of which some pieces are taken
    while begin < len(data):
        piece = data[begin : begin + PIECE]
        if end := piece.rfind(b"\n") + 1 or len(piece) * (begin + len(piece) == len(data)):
            piece = piece[:end]
            raw = piece.removesuffix(b"\n").split(b"\n")
            if max(map(len, raw)) <= MAX_LINE:
                lines = clean_lines(piece, repaired)
            else:
                cut = [cut_line(line) for line in raw]
                repaired["long_line"] += sum(len(parts) > 1 for parts in cut[inside:])
                lines = [clean_line(part, repaired) for parts in cut for part in parts]
        else:  # a line of more than that
            parts = cut_line(piece)[:-1]  # the last one may continue
            end = sum(map(len, parts))
            repaired["long_line"] += not inside
            lines = [clean_line(part, repaired) for part in parts]
        inside = not piece.endswith(b"\n")
        begin += end
        yield lines, begin < len(data)
