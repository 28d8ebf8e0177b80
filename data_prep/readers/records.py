"""Files of records, each a document with its text in one column, or a pair with its sides in two."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from data_prep.filters.clean import clean_lines
from data_prep.filters.columns import column_filters, first_reason
from data_prep.readers.corpus_files import MAX_LINE
from data_prep.readers.plain_pairs import TableReader
from data_prep.readers.reader import CC100, Input, TextBlock
from data_prep.readers.record_files import RecordFile

# Lines inside of a text that are empty once they are cleaned; they begin with the end of the line before.
_EMPTY = re.compile(
    "(?:\n[\ufeff\x00-\x09\x0b-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*)+(?=\n)"
)
_BREAK = re.compile("[\t\n]+")


class RecordDocuments(CC100):
    """Records with the text in one column. A record is a document, and never cut: a block grows for a long one."""

    columns = ("text",)

    def __init__(self, files: RecordFile):
        self.files, self.file_names = files, files.file_names

    def read_columns(self, given: Any) -> tuple[str, ...]:
        """The column that has the text. Raises ValueError for none or several."""
        if not isinstance(given, list | tuple) or len(given) != 1 or not isinstance(given[0], str):
            raise ValueError(f"columns are {given}: name the one that has the text")
        return tuple(given)

    def has_column(self, columns: tuple[str, ...], name: str) -> bool:
        """Always true: records have columns that a description does not name."""
        return True

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of whole documents in CC-100's format: without the empty lines inside of a document."""
        documents: list[bytes] = []
        filled, repaired, dropped = 0, Counter[str](), Counter[str]()

        def without(empty: re.Match[str]) -> str:
            clean_lines(empty[0].encode()[1:], repaired)  # which counts their repairs
            return ""

        filters = column_filters(source.filters)
        columns = source.columns or self.columns
        for (text,), values in self.files.records(source.paths[0], columns, [rule.column for rule in filters]):
            text = text.replace(source.line_end, "\n") if source.line_end else text
            if reason := first_reason(filters, values):
                dropped.update({reason: 1} if text.strip() else {})
                continue
            documents.append(_EMPTY.sub(without, text).encode(errors="surrogatepass"))
            filled += len(documents[-1]) + 2
            if filled >= size:
                yield TextBlock((b"\n\n".join(documents),), Counter(dropped), Counter(repaired))
                filled = 0
                for done in (documents, dropped, repaired):
                    done.clear()
        if documents or dropped:
            yield TextBlock((b"\n\n".join(documents),), dropped, repaired)


class RecordPairs(TableReader):
    """Records with the sides of a pair in two columns, and perhaps a score in a third."""

    def __init__(self, files: RecordFile):
        super().__init__("source", "target", "score")
        self.files = files

    def read_columns(self, given: Any) -> tuple[str, ...]:
        """The columns of source, target and, if there is one, score. Raises ValueError for other entries."""
        names = given if isinstance(given, dict) else {}
        if not {"source", "target"} <= set(names) <= set(self.columns) or not all(
            isinstance(name, str) for name in names.values()
        ):
            raise ValueError(
                f"columns are {given}: name those of the sides, and of the score if there is one, as in "
                'columns = {source = "translation.{src}", target = "translation.{tgt}"}'
            )
        return tuple(names[role] for role in self.columns if role in names)

    def roles(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The roles of the columns."""
        return self.columns[: len(columns)]

    def has_column(self, columns: tuple[str, ...], name: str) -> bool:
        """Always true: records have columns that a description does not name."""
        return True

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of whole pairs as rows of a table; tabs and line ends inside of a side become a space."""
        rows: list[bytes] = []
        filled, dropped = 0, Counter[str]()
        filters, sides, score = column_filters(source.filters), source.columns[:2], source.columns[2:]
        others = [*score, *(rule.column for rule in filters)]
        for texts, values in self.files.records(source.paths[0], sides, others):
            a, b = (_BREAK.sub(" ", text).encode(errors="surrogatepass") for text in texts)
            scores = [_BREAK.sub(" ", str(value)).encode(errors="surrogatepass") for value in values[: len(score)]]
            reason = first_reason(filters, values[len(score) :])
            reason = reason or ("long_line" if max(len(a), len(b)) > MAX_LINE else "")
            reason = reason or ("" if a.strip() and b.strip() else "empty_side")
            if reason:
                dropped[reason] += 1
                continue
            rows.append(b"\t".join([a, b, *scores]) + b"\n")
            filled += len(rows[-1])
            if filled >= size:
                yield TextBlock((b"".join(rows),), Counter(dropped))
                filled = 0
                rows.clear()
                dropped.clear()
        if rows or dropped:
            yield TextBlock((b"".join(rows),), dropped)

    def row_filters(self, source: Input) -> tuple[()]:
        """None: `blocks` applies the column filters."""
        return ()
