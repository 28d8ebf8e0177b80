"""The protocol of a corpus format: file names, cutting into blocks of bytes, parsing to documents or pairs."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data_prep.filters.clean import Counts, clean_lines
from data_prep.languages import language_of
from data_prep.readers.corpus_files import Place

COMPRESSED = r"(?:\.(?:xz|gz|bz2|zst))?"
PIECE = 1 << 20  # bytes that are cleaned, and tokenized, at once

# Both sides of a pair in UTF-8 without LF, or the reason for which the pair is dropped.
Unit = tuple[bytes, bytes] | str
ScoredPair = tuple[str, str, float | None]


@dataclass(frozen=True)
class Input:
    """One file of documents (`languages` has one code) or one set of pairs (two codes).

    `paths`: one file, or the two sides. `members`: the two sides inside a zip file. The codes in `name` and `languages`
    are CC-100's, in the order of `languages.in_order`; the files of a `swapped` input have them the other way.
    `columns` name the columns of a file that has some, see `Reader.read_columns`; `filters` are settings by name.
    `line_end`: what ends a line inside of a record's text besides LF.
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
    """One side of raw text, or two sides with the same number of lines.

    `dropped` documents or pairs were left out, by reason.

    `repaired` counts what was repaired on the way, by reason. `cut`: the block ends inside of a document, which is too
    long to be read whole.
    """

    sides: tuple[bytes, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    cut: bool = False


class Paragraphs(NamedTuple):
    """Whole documents, one after the other: their paragraphs, none empty, and how many each has (int64)."""

    lines: list[str]
    of_document: np.ndarray


class Reader(ABC):
    """A corpus format of task mono (documents, see `CC100`) or para (pairs).

    `columns` are those of its files where a description names none.
    """

    task: ClassVar[str]
    says_languages: ClassVar[bool] = False  # of its text, in the files themselves
    columns: tuple[str, ...] = ()

    def read_columns(self, given: Any) -> tuple[str, ...]:
        """A description's `columns` as an `Input` has them. Raises ValueError for what this format cannot use."""
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            raise ValueError(f"columns are {given}: list their names")
        return tuple(given)

    def has_column(self, columns: tuple[str, ...], name: str) -> bool:
        """Whether a filter can look at the column `name` of a file."""
        return False

    def members(self, place: Place, codes: tuple[str, ...]) -> tuple[str, ...]:
        """The two sides inside of an archive; none in other formats."""
        return ()

    @abstractmethod
    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of about `size` bytes, cut between documents or pairs; they depend on the input's bytes alone.

        Raises ValueError on a damaged file.
        """


class PairReader(Reader):
    """A format of pairs of sentences."""

    task = "para"

    @abstractmethod
    def scored(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """The pairs of one block, also those without text, with their scores."""

    def pairs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """The pairs of one block with text on both sides, in the order of the input's languages, and the score that
        came with each, where there is one.

        Dropped are pairs with a long line (long_line), without text on a side (empty_side), and rows or units that do
        not have what their format says (malformed).
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
        """The pairs in the order of the file; repairs are counted in `repaired`."""

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
        a, b = (_cleaned(side, counts.repaired) for side in block.sides)
        yield from ((line, other, None) for line, other in zip(a, b, strict=True))


def _cleaned(data: bytes, repaired: Counter[str]) -> Iterator[str]:
    for piece in pieces(data):
        yield from clean_lines(piece, repaired)


def pieces(data: bytes) -> Iterator[bytes]:
    """Whole lines, about PIECE bytes of them at a time."""
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + PIECE) + 1 or data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def named_code(code: str, where: object) -> str:
    """`language_of`, with an error that names `where` and explains names."""
    try:
        return language_of(code)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; a name begins with its language's code, as en.txt") from None


def check_twins(files: Iterable[tuple[Place, str]]) -> None:
    """Raise ValueError where two files, or members of files, have the same name but for compression and case."""
    by_name: dict[str, Place] = {}
    for path, name in files:
        key = re.sub(COMPRESSED + "$", "", name.rpartition("/")[2]).lower()
        if key in by_name:
            raise ValueError(twins(by_name[key], path))
        by_name[key] = path


def twins(first: Place, second: Place) -> str:
    """Why two files cannot both be read."""
    return (
        f"{first} and {second} are the same text by their names, which would count twice: remove one of them, or "
        "rename it if it is another text"
    )
