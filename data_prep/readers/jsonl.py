"""JSON Lines, an object a line with the text in one field; and what all formats of records share."""

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator

from data_prep.clean import clean_lines
from data_prep.corpus_files import chunks, open_stream
from data_prep.readers.cc100 import CC100
from data_prep.readers.reader import COMPRESSED, Input, TextBlock

ADVICE = 'name the one that has the text by columns = ["NAME"] in a corpus description'
_LONGEST = 1 << 30  # bytes of a line
# Lines inside of a text that are empty once they are cleaned; they begin with the end of the line before.
_EMPTY = re.compile(
    "(?:\n\ufeff*[\x00-\x09\x0b-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*)+(?=\n)"
)


class RecordReader(CC100):
    """Records with the text in one column. A record is a document, and never cut: a block grows for a long one."""

    columns = ("text",)

    @abstractmethod
    def texts(self, source: Input) -> Iterator[str]:
        """The text of each record. Raises ValueError where a record has none, and on a damaged file."""

    def columns_problem(self, columns: tuple[str, ...]) -> str:
        """There must be one."""
        return "" if len(columns) == 1 else "name the one that has the text"

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of whole documents in CC-100's format: without the empty lines inside of a document."""
        documents: list[bytes] = []
        filled, repaired = 0, Counter[str]()

        def without(empty: re.Match[str]) -> str:
            clean_lines(empty[0].encode()[1:], repaired)  # which counts their repairs
            return ""

        for text in self.texts(source):
            documents.append(_EMPTY.sub(without, text).encode(errors="surrogatepass"))
            filled += len(documents[-1]) + 2
            if filled >= size:
                yield TextBlock((b"\n\n".join(documents),), repaired=Counter(repaired))
                filled = 0
                documents.clear()
                repaired.clear()
        if documents:
            yield TextBlock((b"\n\n".join(documents),), repaired=repaired)


class JsonLines(RecordReader):
    """An object a line."""

    file_names = (rf"\.jsonl{COMPRESSED}", ".jsonl[.xz|.gz|.bz2|.zst]")

    def texts(self, source: Input) -> Iterator[str]:
        """The field of each object; empty lines are passed over."""
        (column,) = source.columns or self.columns
        for number, line in enumerate(self._lines(source), 1):
            if not line or line.isspace():
                continue
            where = f"{source.paths[0]}, line {number}"
            problem = ""
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 (byte {error.start + 1} of the line)"
            except json.JSONDecodeError as error:
                problem = f"not JSON ({error.msg} at column {error.colno})"
            except (ValueError, RecursionError) as error:
                problem = f"JSON that cannot be read ({error})"
            if problem:
                raise ValueError(f"{where} is {problem}: it is truncated or damaged, fetch it again or mend the line")
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a JSON object: JSON Lines have one a line, with the text in a field")
            if column not in record:
                raise ValueError(f"{where} has no field {column!r}, but {', '.join(record)}: {ADVICE}")
            if not isinstance(record[column], str):
                value = json.dumps(record[column])[:40]
                raise ValueError(f"{where}: field {column!r} is {value}, not a string: remove that line, or {ADVICE}")
            yield record[column]

    def _lines(self, source: Input) -> Iterator[bytes]:
        parts: list[bytes] = []  # of the line that is open
        length = number = 0
        for chunk in chunks(open_stream(source.paths[0]), str(source.paths[0])):
            first, *rest = chunk.split(b"\n")
            parts.append(first)
            length += len(first)
            for part in rest:
                yield b"".join(parts)
                parts, length = [part], len(part)
                number += 1
            if length > _LONGEST:
                where = f"{source.paths[0]}, line {number + 1}"
                raise ValueError(f"{where} has over {_LONGEST:,} bytes: is it JSON Lines, an object a line?")
        yield b"".join(parts)
