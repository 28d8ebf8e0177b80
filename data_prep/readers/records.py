"""Readers of files of records. Each record is a document, with its text in one column, or a pair, with its sides in two
columns."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.filters.clean import clean_lines
from data_prep.filters.columns import COLUMN, column_filters, first_reason
from data_prep.readers.corpus_files import MAX_LINE
from data_prep.readers.plain_pairs import TableReader
from data_prep.readers.reader import DocumentReader, Input, TextBlock, in_blocks
from data_prep.readers.record_files import ReadRecords

# Consecutive lines inside a text that are empty after cleaning. A match begins with the LF before the first of these
# lines and ends before the LF of the last.
_EMPTY_LINES = re.compile(
    "(?:\n[\ufeff\x00-\x09\x0b-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*)+(?=\n)"
)
_DOCUMENT_END = b"\n\n"
_TABS_OR_LINE_ENDS = re.compile("[\t\n]+")


class RecordDocuments(DocumentReader):
    """Reads records that are documents, with the text in one column. Blocks end between records, so a long record makes
    a large block."""

    columns = ("text",)
    any_column = True

    def __init__(self, records: ReadRecords):
        self.records = records

    def read_columns(self, columns: Any) -> tuple[str, ...]:
        """Returns the name of the column that has the text, in a tuple. Raises ValueError unless `columns` lists one
        name."""
        if not isinstance(columns, list | tuple) or len(columns) != 1 or not isinstance(columns[0], str):
            raise ValueError(f"columns are {columns}: name the one column that has the text")
        return tuple(columns)

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Yield blocks of whole documents in CC-100's format. Empty lines inside a document are removed, because an
        empty line ends a document."""
        repaired = Counter[str]()
        return in_blocks(self._documents(source, repaired), (_DOCUMENT_END,), size, repaired, ends_last=False)

    def _documents(self, source: Input, repaired: Counter[str]) -> Iterator[tuple[bytes] | str]:
        def remove(empty_lines: re.Match[str]) -> str:
            clean_lines(empty_lines[0].encode()[1:], repaired)  # only to count the repairs
            return ""

        filters = column_filters(source.filters)
        columns = source.columns or self.columns
        for (text,), values in self.records(source.paths[0], columns, [rule.column for rule in filters]):
            text = text.replace(source.line_end, "\n") if source.line_end else text
            reason = first_reason(filters, values)
            if not reason:
                yield (_EMPTY_LINES.sub(remove, text).encode(errors="surrogatepass"),)
            elif text.strip():  # a record without text is no document, so it does not count as dropped
                yield reason


class RecordPairs(TableReader):
    """Reads records that are pairs, with the sides in two columns, and perhaps a score in a third column."""

    any_column = True

    def __init__(self, records: ReadRecords):
        super().__init__("source", "target", "score")
        self.records = records

    def read_columns(self, columns: Any) -> tuple[str, ...]:
        """Returns the names of the columns of source, target and, if `columns` has it, score. Raises ValueError if
        `columns` lacks a side, or has another key or a name that is no string."""
        names = columns if isinstance(columns, dict) else {}
        if (
            not {"source", "target"} <= set(names) <= set(self.columns)
            or not all(isinstance(name, str) for name in names.values())
            or names["source"] == names["target"]
        ):
            raise ValueError(
                f"columns are {columns}: name the column of each side, and of the score if there is one, as in "
                'columns = {source = "translation.{src}", target = "translation.{tgt}"}'
            )
        return tuple(names[role] for role in self.columns if role in names)

    def roles(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The role of each column: source, target and, if there is a third one, score."""
        return self.columns[: len(columns)]

    def lines_cleaned(self, read: int, dropped: Mapping[str, int]) -> int:
        """The number of rows that column filters do not drop; the dropped rows are not cleaned."""
        return read - sum(count for reason, count in dropped.items() if reason.startswith(f"{COLUMN} "))

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Yield blocks of whole pairs as rows of a table. Tabs and line ends inside a side become spaces."""
        return in_blocks(self._rows(source), (b"\n",), size, Counter())

    def _rows(self, source: Input) -> Iterator[tuple[bytes] | str]:
        filters = column_filters(source.filters)
        side_columns, score_columns = source.columns[:2], source.columns[2:]  # one column of scores, or none
        others = [*score_columns, *(rule.column for rule in filters)]
        for texts, values in self.records(source.paths[0], side_columns, others):
            a, b = map(_cell, texts)
            scores = [_cell(str(value)) for value in values[: len(score_columns)]]
            if reason := first_reason(filters, values[len(score_columns) :]):
                yield reason
            elif max(len(a), len(b)) > MAX_LINE:
                yield "long_line"
            elif not (a.strip() and b.strip()):
                yield "empty_side"
            else:
                yield (b"\t".join([a, b, *scores]),)


def _cell(text: str) -> bytes:
    return _TABS_OR_LINE_ENDS.sub(" ", text).encode(errors="surrogatepass")
