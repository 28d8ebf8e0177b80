"""Readers of pairs in plain text: Moses' line-aligned files, OPUS's zip files of them, and tables (WikiMatrix)."""

import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from data_prep.filters.clean import Counts, clean_line, clean_lines
from data_prep.filters.columns import ColumnFilter, column_filters, first_reason
from data_prep.readers.corpus_files import (
    MAX_LINE,
    MAX_ROW,
    CorpusPath,
    clip_lines,
    cut_blocks,
    is_read_failure,
    read_decompressed,
    split_lines,
)
from data_prep.readers.reader import AlignedReader, Input, PairOrReason, PairReader, ScoredPair, TextBlock, pieces

_HIDDEN = re.compile(r"__MACOSX/|(.*/)?\.(?!\.?/)")  # files that operating systems add, such as __MACOSX/._X.en-de.de
# A zip file's last record: its signature, and the number of bytes between signature and comment.
_END_SIGNATURE, _END_FIELD_BYTES = b"PK\5\6", 18
_MAX_COLUMNS = 1000  # largest column number that the description of a `NumberedTable` may give


class Moses(AlignedReader):
    """Two line-aligned files, one for each side."""

    def units(self, source: Input, repaired: Counter[str]) -> Iterator[PairOrReason]:
        """Yield each pair of lines, or the reason to drop it. Raises ValueError if one side has more lines."""
        paths = source.paths * 2 if source.members else source.paths
        members = source.members or (None, None)
        sides = [split_lines(read_decompressed(*side), MAX_LINE) for side in zip(paths, members, strict=True)]
        line_counts = [0, 0]  # lines read of each side
        for a, b in zip_longest(*sides):  # to the end of the longer side, because the error message has both counts
            line_counts[0] += a is not None
            line_counts[1] += b is not None
            if a is not None and b is not None:
                yield "long_line" if len(a) > MAX_LINE or len(b) > MAX_LINE else (a, b)
        if line_counts[0] != line_counts[1]:
            names = [f"{path}:{member}" if member else path for path, member in zip(paths, members, strict=True)]
            lines = f"{line_counts[0]} line{'s' * (line_counts[0] != 1)}"
            raise ValueError(
                f"{names[0]} has {lines} but {names[1]} has {line_counts[1]}: fetch both again, because "
                "the sides of a pair must be line-aligned"
            )


class MosesZip(Moses):
    """Two line-aligned members of a zip file, one for each side."""

    def members(self, path: CorpusPath, codes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the members X.a-b.a and X.a-b.b. Raises ValueError if a side has no member or several, or if the
        zip file is damaged."""
        if path.size == 0:
            raise ValueError(f"{path} is empty: fetch it again")
        try:
            with path.open() as file, zipfile.ZipFile(file) as archive:
                leading_bytes = min((member.header_offset for member in archive.infolist()), default=0)
                if leading_bytes:
                    raise ValueError(
                        f"{path} begins with {leading_bytes} bytes of no member, as two joined zip files do: fetch "
                        "it again"
                    )
                file.seek(-len(archive.comment) - len(_END_SIGNATURE) - _END_FIELD_BYTES, 2)
                if file.read(len(_END_SIGNATURE)) != _END_SIGNATURE:
                    raise ValueError(f"{path} has bytes after the end of the archive: fetch it again")
                return tuple(_member(archive, path, f".{'-'.join(codes)}.{code}") for code in codes)
        except RuntimeError as error:  # encrypted, or packed by a method that Python does not know
            raise ValueError(
                f"{path} cannot be read ({error}): unpack it and pack it with deflate, without a password"
            ) from None
        except (zipfile.BadZipFile, OSError) as error:
            if is_read_failure(path, error):
                raise
            raise ValueError(f"{path} cannot be read ({error}): it is truncated or damaged. Fetch it again") from None


def _member(archive: zipfile.ZipFile, path: CorpusPath, ending: str) -> str:
    names = [name for name in archive.namelist() if name.endswith(ending) and not _HIDDEN.match(name)]
    if len(names) != 1:
        raise ValueError(f"{path} has {len(names)} members named X{ending}: it must have exactly one")
    archive.open(names[0]).close()  # raises zipfile's error if the member cannot be read
    return names[0]


class TableReader(PairReader):
    """A table with a pair in each row and tabs between columns. A corpus description names all columns in order."""

    boundary = re.compile(rb"\n")
    more_columns = False  # whether a row may have more columns than are named

    def __init__(self, *columns: str):
        self.columns = columns

    def read_columns(self, columns: Any) -> tuple[str, ...]:
        """The names of all columns. Raises ValueError if source or target is missing, or if source, target or score is
        named twice."""
        are_names = isinstance(columns, list | tuple) and all(isinstance(name, str) for name in columns)
        if not are_names or not {"source", "target"} <= set(columns):
            raise ValueError(f"columns are {columns}: 'source' and 'target' must be among them")
        if max(map(columns.count, ("source", "target", "score"))) > 1:
            raise ValueError(f"columns are {columns}: name each of source, target and score once")
        return tuple(columns)

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Yield blocks of whole rows. A row over MAX_ROW bytes is clipped here, so that no block ends inside it;
        `scored_pairs` drops it."""
        for data, _ in cut_blocks(clip_lines(read_decompressed(source.paths[0]), MAX_ROW), size, self.boundary):
            yield TextBlock((data,))

    def scored_pairs(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair | str]:
        """Yield (source, target, score) for each row of a block, or the reason to drop it. `score` is None if the table
        has no such column."""
        roles = self.roles(source.columns)
        # A reader that filters by any column has done so in `blocks`, which leaves out the filters' columns.
        filters = () if self.any_column else column_filters(source.filters)
        for piece in pieces(block.sides[0]):
            rows = zip(clean_lines(piece, counts.repaired), piece.removesuffix(b"\n").split(b"\n"), strict=True)
            for row, raw in rows:
                yield "long_line" if len(raw) > MAX_ROW else self._pair(row, raw, roles, filters)

    def _pair(
        self, row: str, raw: bytes, roles: tuple[str, ...], filters: tuple[ColumnFilter, ...]
    ) -> ScoredPair | str:
        """(source, target, score) of a row, or the reason to drop it. `row` is the cleaned text of the bytes `raw`."""
        cells = row.split("\t")
        if len(cells) <= raw.count(b"\t"):  # cleaning strips tabs at the ends of the row, and so loses empty cells
            cells = [clean_line(cell, Counter()) for cell in raw.split(b"\t")]
            while len(cells) > len(roles) and not cells[-1]:
                cells.pop()
        if len(cells) < len(roles) or (len(cells) > len(roles) and not self.more_columns):
            return "malformed"
        by_role = dict(zip(roles, cells, strict=False))
        try:
            score = float(by_role["score"]) if "score" in by_role else None
        except ValueError:
            return "malformed"
        if score is not None and not math.isfinite(score):
            return "malformed"
        if reason := first_reason(filters, [by_role[rule.column].strip() for rule in filters]):
            return reason
        a, b = by_role["source"].strip(), by_role["target"].strip()
        if max(len(a.encode()), len(b.encode())) > MAX_LINE:
            return "long_line"
        return a, b, score


class NumberedTable(TableReader):
    """A table whose corpus description names columns by number; a row may have more columns."""

    more_columns = True

    def read_columns(self, columns: Any) -> tuple[str, ...]:
        """The names of the columns from number 1 to the last one with a name; a column without a name has "". Raises
        ValueError unless `columns` maps names, source and target among them, to different column numbers."""
        numbers = columns if isinstance(columns, dict) else {}
        in_range = all(type(number) is int and 0 < number <= _MAX_COLUMNS for number in numbers.values())
        if not in_range or not {"source", "target"} <= set(numbers) or len(set(numbers.values())) < len(numbers):
            raise ValueError(
                f"columns are {columns}: give the columns' numbers, from 1 on, as in columns = {{source = 1, target = "
                "2, score = 3}"
            )
        by_number = {number: name for name, number in numbers.items()}
        return tuple(by_number.get(number, "") for number in range(1, max(by_number) + 1))
