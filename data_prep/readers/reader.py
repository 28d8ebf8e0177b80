"""The base classes of the readers of corpus formats, which cut files into blocks and parse blocks to documents or
pairs; and the reader of CC-100's format."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data_prep.filters.clean import Counts, clean_line, clean_lines
from data_prep.readers.corpus_files import MAX_LINE, CorpusPath, cut_blocks, cut_line, read_decompressed

_PIECE_BYTES = 1 << 20  # about this many bytes are cleaned and tokenized in one step
MAX_DOCUMENT = 1_000_000  # characters; a longer document is split

# Both sides of a pair in UTF-8 without LF, or the reason to drop the pair.
PairOrReason = tuple[bytes, bytes] | str
ScoredPair = tuple[str, str, float | None]  # both sides, and the score if the file has one


@dataclass(frozen=True)
class Input:
    """One file of documents (`languages` has one code) or one set of pairs (two codes).

    `paths`: one file, or a file for each side of the pairs. `members`: the names of both sides in a zip file. The codes
    in `name` and `languages` are CC-100's, in the order of `data_prep.languages.english_first`. `swapped`: in the
    files, the sides are in the opposite order to `languages`. `columns`: the columns to read, in formats with columns
    (`Reader.read_columns`). `filters`: settings by filter. `line_end`: text that ends a line inside a record, as LF
    does.
    """

    name: str
    languages: tuple[str, ...]
    paths: tuple[CorpusPath, ...]
    members: tuple[str, ...] = ()
    format: str = "cc100"
    corpus: str = ""
    columns: tuple[str, ...] = ()
    filters: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    line_end: str = ""
    swapped: bool = False

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name of every file, and its size in bytes."""
        return [(path.name, path.size) for path in self.paths]

    @property
    def size(self) -> int:
        """Bytes of all files on disk."""
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class TextBlock:
    """Raw text of documents or of a table's rows (one side), or of pairs (two sides with the same number of lines).

    `dropped` counts the documents or pairs left out while the block was read, `repaired` the faults repaired, both by
    reason. `is_cut`: the block ends inside a document that is too long for one block.
    """

    sides: tuple[bytes, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    is_cut: bool = False


class Paragraphs(NamedTuple):
    """The paragraphs of whole documents, none of them empty, and each document's number of paragraphs (int64)."""

    lines: list[str]
    document_sizes: np.ndarray


class Reader(ABC):
    """A corpus format of documents (`task` mono) or pairs (`task` para).

    `columns`: the columns to read if the description of the corpus names none.
    """

    task: ClassVar[str]
    has_language_tags: ClassVar[bool] = False  # whether the files themselves mark the language of each text
    any_column: ClassVar[bool] = False  # whether the filter `column` may use columns that `columns` does not name
    columns: tuple[str, ...] = ()

    def read_columns(self, columns: Any) -> tuple[str, ...]:
        """Check a description's `columns`; returns the `columns` of an `Input`. Raises ValueError for unusable ones."""
        if columns not in ((), []):
            raise ValueError(f"columns are {columns}: files of this format have none, so take `columns` out")
        return ()

    def roles(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The role of each of an input's columns: source, target, score, or another name."""
        return columns

    def members(self, path: CorpusPath, codes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the two sides' files in an archive; empty if the format is no archive."""
        return ()

    def lines_cleaned(self, read: int, dropped: Mapping[str, int]) -> int:
        """About how many lines were cleaned. `read` is the number of paragraphs or pairs that were read, and `dropped`
        counts the dropped documents or pairs by reason."""
        return read

    @abstractmethod
    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Yield blocks of about `size` bytes. A block ends between documents or pairs, or inside a document that is too
        long for one block. Where blocks end depends on `size` and the input's bytes alone.

        Raises ValueError on a damaged file.
        """


class DocumentReader(Reader):
    """CC-100's format: one paragraph per line, an empty line between documents. The base class of all formats of
    documents."""

    task = "mono"
    boundary = re.compile(rb"\n[ \t\r]*\n")  # separates two documents
    line_is_document = False

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Yield blocks that end after a document, if one ends near enough (see `cut_blocks`)."""
        for data, is_cut in cut_blocks(read_decompressed(source.paths[0]), size, self.boundary):
            yield TextBlock((data,), is_cut=is_cut)

    def paragraphs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[Paragraphs]:
        """Yield the documents of one block in groups of about `_PIECE_BYTES`; no group is empty."""
        counts.units_in += block.dropped.total()
        counts.dropped.update(block.dropped)
        counts.repaired.update(block.repaired)
        unfinished: list[str] = []  # the paragraphs so far of a document that may continue in the next piece
        for cleaned, more_follow in _cleaned_pieces(block.sides[0], counts.repaired):
            lines = unfinished + cleaned
            unfinished = []
            characters = np.fromiter(map(len, lines), np.int64, len(lines))
            has_text = characters > 0
            if not has_text.any():
                continue
            starts_document = has_text.copy()
            if not self.line_is_document:  # only a line after an empty one starts a document
                starts_document[1:] &= ~has_text[:-1]
            ends_in_text = bool(has_text[-1])
            if block.is_cut and ends_in_text and not more_follow:
                counts.repaired["long_document"] += 1  # the next block has its rest, as another document
            paragraphs = list(filter(None, lines))
            starts = _split_long(np.flatnonzero(starts_document[has_text]), characters[has_text], counts.repaired)
            if more_follow and ends_in_text and not self.line_is_document:
                unfinished = paragraphs[starts[-1] :]
                paragraphs, starts = paragraphs[: starts[-1]], starts[:-1]
            if paragraphs:
                counts.units_in += len(starts)
                counts.paragraphs_in += len(paragraphs)
                yield Paragraphs(paragraphs, np.diff(starts, append=len(paragraphs)))


class LineDocuments(DocumentReader):
    """One document per line."""

    boundary = re.compile(rb"\n")
    line_is_document = True


def _split_long(starts: np.ndarray, characters: np.ndarray, repaired: Counter[str]) -> np.ndarray:
    """Split documents over MAX_DOCUMENT characters; returns the index of each document's first paragraph, int64.

    `starts` holds these indices before the split, `characters` the number of characters of every paragraph.
    """
    ends = np.append(starts[1:], len(characters))
    is_long = np.add.reduceat(characters, starts) > MAX_DOCUMENT
    new_starts = []
    for start, end in zip(starts[is_long], ends[is_long], strict=True):
        size = 0
        for index in range(start, end):
            if size and size + characters[index] > MAX_DOCUMENT:
                new_starts.append(index)
                size = 0
            size += characters[index]
    repaired += Counter(long_document=len(new_starts))  # `+=` of a Counter adds no key for a count of 0
    return np.union1d(starts, new_starts).astype(np.int64)


def _cleaned_pieces(data: bytes, repaired: Counter[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield (the cleaned lines of about `_PIECE_BYTES` of `data`, whether more lines follow).

    A line over MAX_LINE bytes is cut into several lines, after white space where `cut_point` finds any.
    """
    begin = 0
    in_long_line = False  # `begin` is inside a long line, which `repaired` has counted
    while begin < len(data):
        piece = data[begin : begin + _PIECE_BYTES]
        piece = piece[: piece.rfind(b"\n") + 1] or piece  # whole lines or, if no line ends in it, a part of one line
        more_follow = begin + len(piece) < len(data)
        raw_lines = piece.removesuffix(b"\n").split(b"\n")
        if max(map(len, raw_lines)) <= MAX_LINE:
            lines = clean_lines(piece, repaired)
        else:
            cut_lines = [cut_line(line) for line in raw_lines]
            uncounted = cut_lines[1:] if in_long_line else cut_lines
            repaired["long_line"] += sum(len(parts) > 1 for parts in uncounted)
            if more_follow and not piece.endswith(b"\n"):  # the last part of the line may continue in the next piece
                piece = piece.removesuffix(cut_lines[0].pop())
            lines = []
            for parts in cut_lines:
                # An empty line ends a document, so parts without text are left out. A line without any text stays.
                lines += [line for part in parts if (line := clean_line(part, repaired))] or [""]
        if in_long_line and not lines[0]:
            del lines[0]  # the rest of a long line has no text; an empty line would end the document
        in_long_line = not piece.endswith(b"\n")
        begin += len(piece)
        yield lines, more_follow


class PairReader(Reader):
    """A format of pairs of sentences."""

    task = "para"

    @abstractmethod
    def scored_pairs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair | str]:
        """Yield the pairs of one block in the order of the file, including pairs without text. For a pair to drop,
        yields the reason."""

    def pairs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """Yield the pairs of one block that have text on both sides; the sides are in the order of `source.languages`.

        `counts.dropped` counts the other pairs by reason: a line is too long (long_line), a side has no text
        (empty_side), a row of a table or a unit of a TMX file does not fit the format (malformed).
        """
        counts.units_in += block.dropped.total()
        counts.dropped.update(block.dropped)
        counts.repaired.update(block.repaired)
        for pair in self.scored_pairs(source, block, counts):
            counts.units_in += 1
            if isinstance(pair, str):
                counts.dropped[pair] += 1
            elif not (pair[0] and pair[1]):
                counts.dropped["empty_side"] += 1
            else:
                a, b, score = pair
                yield (b, a, score) if source.swapped else pair


class AlignedReader(PairReader):
    """A format of pairs without scores. Each side of a block has one line per pair."""

    def lines_cleaned(self, read: int, dropped: Mapping[str, int]) -> int:
        """The number of lines of both sides."""
        return 2 * read

    @abstractmethod
    def units(self, source: Input, repaired: Counter[str]) -> Iterator[PairOrReason]:
        """Yield each pair in the order of the file, or the reason to drop it; adds repairs to `repaired`."""

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Yield blocks of about `size` bytes of both sides together."""
        repaired = Counter[str]()
        return in_blocks(self.units(source, repaired), (b"\n", b"\n"), size, repaired)

    def scored_pairs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """Yield the pairs of one block, without a score."""

        def cleaned(side: bytes) -> Iterator[str]:
            for piece in pieces(side):
                yield from clean_lines(piece, counts.repaired)

        for a, b in zip(*map(cleaned, block.sides), strict=True):
            yield a, b, None


def in_blocks(
    units: Iterable[tuple[bytes, ...] | str],
    terminators: tuple[bytes, ...],
    size: int,
    repaired: Counter[str],
    terminate_last: bool = True,
) -> Iterator[TextBlock]:
    """Yield blocks of about `size` bytes, all sides together. A unit is a text for each side, or the reason to drop it.
    In a block, each text is followed by its side's terminator, the last text only if `terminate_last` is true. `units`
    counts its repairs in `repaired`."""
    block_units: list[tuple[bytes, ...]] = []
    block_bytes, dropped = 0, Counter[str]()
    last = [b""] if terminate_last else []  # `join` puts a terminator before this empty text
    for unit in chain(units, [None]):  # None: the file has ended
        if isinstance(unit, str):
            dropped[unit] += 1
        elif unit is not None:
            block_units.append(unit)
            block_bytes += sum(map(len, unit + terminators))
        if block_bytes >= size or (unit is None and (block_units or dropped or repaired)):
            sides = tuple(
                terminator.join([texts[side] for texts in block_units] + last)
                for side, terminator in enumerate(terminators)
            )
            block_units, block_bytes = [], 0  # frees the texts, because the use of the block may take long
            yield TextBlock(sides, dropped, Counter(repaired))
            del sides
            dropped = Counter()
            repaired.clear()  # `units` continues to count in this object


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield `data` in pieces of whole lines, at most `_PIECE_BYTES` each; a longer line is a piece of its own."""
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + _PIECE_BYTES) + 1 or data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end
