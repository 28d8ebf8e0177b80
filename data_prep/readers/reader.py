"""Base classes of the corpus formats: file names, cutting into blocks of bytes, parsing to documents or pairs; and the
format of CC-100."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data_prep.filters.clean import Counts, clean_line, clean_lines
from data_prep.languages import language_of
from data_prep.readers.corpus_files import MAX_LINE, Place, cut_blocks, cut_line, read_text

COMPRESSED = r"(?:\.(?:xz|gz|bz2|zst))?"
PIECE = 1 << 20  # bytes that are cleaned, and tokenized, at once
MAX_DOCUMENT = 1_000_000  # characters

# Both sides of a pair in UTF-8 without LF, or the reason for which the pair is dropped.
Unit = tuple[bytes, bytes] | str
ScoredPair = tuple[str, str, float | None]


@dataclass(frozen=True)
class Input:
    """One file of documents (`languages` has one code) or one set of pairs (two codes).

    `paths`: one file, or a file for each side of the pairs. `members`: both sides inside one zip file. The codes in
    `name` and `languages` are CC-100's, in the order of `languages.in_order`; a `swapped` input has its sides in the
    other order in the files. `columns`: names of the columns to read, for formats with columns (`Reader.read_columns`).
    `filters`: settings by filter. `line_end`: text that ends a line inside a record, as LF does.
    """

    name: str
    languages: tuple[str, ...]
    paths: tuple[Place, ...]
    members: tuple[str, ...] = ()
    format: str = "cc100"
    corpus: str = ""
    columns: tuple[str, ...] = ()
    filters: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    line_end: str = ""
    swapped: bool = False

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and bytes of every file."""
        return [(path.name, path.size) for path in self.paths]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class TextBlock:
    """Raw text of one side, or of two sides with the same number of lines.

    `dropped` and `repaired` count, by reason, the documents or pairs that reading left out, and what it repaired.
    `cut`: the block ends inside a document that is too long to be read whole.
    """

    sides: tuple[bytes, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    cut: bool = False


class Paragraphs(NamedTuple):
    """Whole documents: the paragraphs of all, none of them empty, and the number of paragraphs of each (int64)."""

    lines: list[str]
    of_document: np.ndarray


class Reader(ABC):
    """A corpus format of task mono (documents, see `CC100`) or para (pairs).

    `columns`: the columns to read where a description names none.
    """

    task: ClassVar[str]
    says_languages: ClassVar[bool] = False  # whether the files themselves mark the language of each text
    columns: tuple[str, ...] = ()

    def read_columns(self, given: Any) -> tuple[str, ...]:
        """Check a description's `columns` and return them as in `Input`. Raises ValueError for those it cannot use."""
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            raise ValueError(f"columns are {given}: list their names")
        return tuple(given)

    def has_column(self, columns: tuple[str, ...], name: str) -> bool:
        """Whether filter `column` can read the column `name` of a file."""
        return False

    def members(self, place: Place, codes: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the two sides inside an archive; none in other formats."""
        return ()

    @abstractmethod
    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of about `size` bytes, cut between documents or pairs; they depend on the input's bytes alone.

        Raises ValueError on a damaged file.
        """


class CC100(Reader):
    """A paragraph a line, an empty line between documents; the base class of all formats of documents.

    `file_names`: endings of the files in a folder of files by language, as a regular expression and for messages.
    """

    task = "mono"
    file_names = (rf"\.txt{COMPRESSED}", ".txt[.xz|.gz|.bz2|.zst]")
    boundary = re.compile(rb"\n[ \t\r]*\n")
    line_is_document = False

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks that end after a document, if one ends near enough (see `cut_blocks`)."""
        for data, cut in cut_blocks(read_text(source.paths[0]), size, self.boundary):
            yield TextBlock((data,), cut=cut)

    def paragraphs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[Paragraphs]:
        """The documents of one block, about PIECE bytes of them at a time, but at least one."""
        counts.units_in += block.dropped.total()
        counts.dropped.update(block.dropped)
        counts.repaired.update(block.repaired)
        opened: list[str] = []  # paragraphs so far of a document that continues in the next piece
        for cleaned, rest in _short_lines(block.sides[0], counts.repaired):
            lines = opened + cleaned
            sizes = np.fromiter(map(len, lines), np.int64, len(lines))
            has_text = sizes > 0
            begins = has_text.copy()
            if not self.line_is_document:
                begins[1:] &= ~has_text[:-1]
            opened = []
            if not has_text.any():
                continue
            ends_open = bool(has_text[-1])
            counts.repaired.update({"long_document": 1} if block.cut and not rest and ends_open else {})
            lines, sizes, starts = list(filter(None, lines)), sizes[has_text], np.flatnonzero(begins[has_text])
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
    """Split long documents: add a start to `starts` wherever a document would exceed MAX_DOCUMENT characters."""
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
    """(cleaned lines, whether more follow), for about PIECE bytes at a time.

    A line over MAX_LINE bytes is cut into several, after white space where there is some.
    """
    begin, inside = 0, False  # inside: `begin` is in the middle of a long line
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
        else:  # the piece is in one line, which is longer
            parts = cut_line(piece)[:-1]  # the last one may continue in the next piece
            end = sum(map(len, parts))
            repaired["long_line"] += not inside
            lines = [clean_line(part, repaired) for part in parts]
        inside = not piece.endswith(b"\n")
        begin += end
        yield lines, begin < len(data)


class PairReader(Reader):
    """A format of pairs of sentences."""

    task = "para"

    @abstractmethod
    def scored(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """The pairs of one block with their scores, including pairs without text."""

    def pairs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """The pairs of one block that have text on both sides, in the order of the input's languages, and the score of
        each if the file has one.

        Dropped are pairs with a long line (long_line), without text on a side (empty_side), and rows or units that do
        not fit their format (malformed).
        """
        counts.units_in += block.dropped.total()
        counts.dropped.update(block.dropped)
        counts.repaired.update(block.repaired)
        for a, b, score in self.scored(source, block, counts):
            counts.units_in += 1
            if a and b:
                yield (b, a, score) if source.swapped else (a, b, score)
            else:
                counts.dropped["empty_side"] += 1


class AlignedReader(PairReader):
    """A format whose blocks are two texts with a line for each pair."""

    @abstractmethod
    def units(self, source: Input, repaired: Counter[str]) -> Iterator[Unit]:
        """The pairs in the order of the file, or why one is dropped; repairs are counted in `repaired`."""

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of about `size` bytes of both sides together."""
        pairs: list[tuple[bytes, bytes]] = []
        filled, dropped, repaired = 0, Counter[str](), Counter[str]()
        for unit in chain(self.units(source, repaired), [None]):
            if isinstance(unit, str):
                dropped[unit] += 1
            elif unit is not None:
                pairs.append(unit)
                filled += len(unit[0]) + len(unit[1]) + 2
            if filled >= size or (unit is None and (filled or dropped or repaired)):
                sides = (b"".join(pair[side] + b"\n" for pair in pairs) for side in (0, 1))
                yield TextBlock(tuple(sides), dropped, Counter(repaired))
                pairs, filled, dropped = [], 0, Counter()
                repaired.clear()

    def scored(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """The pairs of one block, which have no score."""
        a, b = (
            chain.from_iterable(clean_lines(piece, counts.repaired) for piece in pieces(side)) for side in block.sides
        )
        yield from ((line, translation, None) for line, translation in zip(a, b, strict=True))


def pieces(data: bytes) -> Iterator[bytes]:
    """Cut `data` into pieces of whole lines, about PIECE bytes each."""
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + PIECE) + 1 or data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def named_code(code: str, where: object) -> str:
    """`language_of`, with an error that names the file `where` and explains how files are named."""
    try:
        return language_of(code)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; a file name begins with its language's code, as en.txt") from None


def without_compression(name: str) -> str:
    """A file name without the ending of a compression."""
    return re.sub(COMPRESSED + "$", "", name)


def check_unique_texts(files: Iterable[tuple[Place, str]]) -> None:
    """Raise ValueError if two files, or members of files, have the same name apart from compression and case."""
    by_name: dict[str, Place] = {}
    for path, name in files:
        key = without_compression(name.rpartition("/")[2]).lower()
        if key in by_name:
            raise ValueError(same_text_error(by_name[key], path))
        by_name[key] = path


def same_text_error(first: Place, second: Place) -> str:
    """Error message for two files that seem to be the same text."""
    return (
        f"{first} and {second} are the same text by their names, which would count twice: remove one of them, "
        "or rename it if it is another text"
    )
