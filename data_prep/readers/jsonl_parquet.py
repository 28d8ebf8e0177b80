"""Files of records, each a document with its text in one column: JSON Lines and Parquet."""

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pyarrow as pa
from pyarrow import parquet

from data_prep.clean import clean_lines
from data_prep.corpus_files import Place, read_text, split_lines
from data_prep.readers.cc100 import CC100
from data_prep.readers.reader import COMPRESSED, Input, TextBlock

_ADVICE = 'name the one that has the text by columns = ["NAME"] in a corpus description'
_MEND = "it is truncated or damaged, fetch it again or mend the line"
_LONGEST = 1 << 30  # bytes of a line of JSON Lines
_ROWS = 64  # of Parquet, read at once
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

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of whole documents in CC-100's format: without the empty lines inside of a document."""
        documents: list[bytes] = []
        filled, repaired = 0, Counter[str]()

        def without(empty: re.Match[str]) -> str:
            clean_lines(empty[0].encode()[1:], repaired)  # which counts their repairs
            return ""

        for text in chain(self.texts(source), [None]):
            if text is not None:
                documents.append(_EMPTY.sub(without, text).encode(errors="surrogatepass"))
                filled += len(documents[-1]) + 2
            if documents and (filled >= size or text is None):
                yield TextBlock((b"\n\n".join(documents),), repaired=Counter(repaired))
                filled = 0
                documents.clear()
                repaired.clear()


class JsonLines(RecordReader):
    """An object a line."""

    file_names = (rf"\.jsonl{COMPRESSED}", ".jsonl[.xz|.gz|.bz2|.zst]")

    def texts(self, source: Input) -> Iterator[str]:
        """The field of each object; empty lines are passed over."""
        (column,) = source.columns or self.columns
        for number, line in enumerate(split_lines(read_text(source.paths[0]), _LONGEST), 1):
            if not line or line.isspace():
                continue
            where = f"{source.paths[0]}, line {number}"
            if len(line) > _LONGEST:
                raise ValueError(f"{where} has over {_LONGEST:,} bytes: is it JSON Lines, an object a line?")
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 (byte {error.start + 1} of the line): {_MEND}") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg} at column {error.colno}): {_MEND}") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is JSON that cannot be read ({error}): {_MEND}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a JSON object: JSON Lines have one a line, with the text in a field")
            if column not in record:
                raise ValueError(f"{where} has no field {column!r}, but {', '.join(record)}: {_ADVICE}")
            if not isinstance(record[column], str):
                value = json.dumps(record[column])[:40]
                raise ValueError(f"{where}: field {column!r} is {value}, not a string: remove that line, or {_ADVICE}")
            yield record[column]


class Parquet(RecordReader):
    """A record a row, row group by row group."""

    file_names = (r"\.parquet", ".parquet")

    def texts(self, source: Input) -> Iterator[str]:
        """The column of each row."""
        (column,) = source.columns or self.columns
        path = source.paths[0]
        if path.pipe:
            raise ValueError(f"{path} is a named pipe, but a Parquet file's index is at its end: store it as a file")
        where = str(path)
        # A buffer in place of the whole row group in memory
        options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
        try:
            with path.open() as stream, parquet.ParquetFile(stream, **options) as file:
                _check_column(file.schema_arrow, column, path)
                for group in range(file.num_row_groups):
                    where = f"{path}, row group {group}"
                    batches = file.iter_batches(_ROWS, [group], [column], use_threads=False)
                    for row, value in enumerate(chain.from_iterable(batch.column(0) for batch in batches), 1):
                        where = f"{path}, row group {group}, row {row}"
                        text = value.as_py()
                        if text is None:
                            raise ValueError(f"{where}: column {column!r} is null: write the file without that row")
                        yield text
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: column {column!r} is not UTF-8 ({error}): write that row again") from None
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise ValueError(f"{where} cannot be read ({error}): it is truncated or damaged, fetch it again") from None


def _check_column(schema: pa.Schema, column: str, path: Place) -> None:
    index = schema.get_field_index(column)
    if index < 0:
        raise ValueError(f"{path} has no column {column!r}, but {', '.join(schema.names)}: {_ADVICE}")
    kind = schema.field(index).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{path}: column {column!r} has type {kind}, not string: {_ADVICE}")
