"""Reads JSON Lines, Parquet and Arrow files, one record at a time, in bounded memory. A record is a document, with its
text in one column, or a pair, with its sides in two columns.

A column named `a.b` is the column of that name or else the field `b` of the column `a`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from data_prep.filters.clean import clean_lines
from data_prep.filters.columns import COLUMN, column_filters, first_reason
from data_prep.readers.corpus_files import (
    MAX_LINE,
    CorpusPath,
    check_unchanged,
    is_read_failure,
    read_decompressed,
    split_lines,
)
from data_prep.readers.plain_pairs import TableReader
from data_prep.readers.reader import DocumentReader, Input, TextBlock, in_blocks

_CORRECT_NAME = "correct the name in columns or filters.column of the corpus description"
_REPAIR_LINE = "it is truncated or damaged. Fetch it again or repair the line"
_MAX_JSON_LINE = 1 << 30  # bytes
_PARQUET_ROWS = 64  # rows read in one step; few, because a text may be long
_SHORT_FLOATS = {pa.FloatScalar: np.float32, pa.HalfFloatScalar: np.float16}
# Consecutive lines inside a text that are empty after cleaning. A match begins with the LF before the first of these
# lines and ends before the LF of the last.
_EMPTY_LINES = re.compile(
    "(?:\n[\ufeff\x00-\x09\x0b-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*)+(?=\n)"
)
_TABS_OR_LINE_ENDS = re.compile("[\t\n]+")
_ARROW_FILE_START, _ARROW_STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"

# One record: its values in the columns of text, and its values in the other columns that were asked for.
Record = tuple[list[str], list[Any]]
# A function of (file, names of the columns of text, names of other columns) that yields each record of the file. A
# record without a value in one of the other columns has None there. The function raises ValueError if a column is
# missing, a text is no string or the file is damaged.
ReadRecords = Callable[[CorpusPath, Sequence[str], Sequence[str]], Iterator[Record]]
# A function that takes names of columns and yields the parts of a file (row groups or record batches) in order. A part
# is given as batches of rows, which have at least these columns.
_Parts = Callable[[list[str]], Iterator[Iterable[pa.RecordBatch]]]


def json_records(path: CorpusPath, texts: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
    """Read JSON Lines: one object per line; blank lines are skipped. A column `a.b` may be a nested field."""
    # Column of `others` -> error message for the first record without the column. It is raised if no record has it.
    absent = dict[str, str]()
    columns_seen = set[str]()
    advice = _name_texts(texts)
    for line_number, line in enumerate(split_lines(read_decompressed(path), _MAX_JSON_LINE), 1):
        if not line or line.isspace():
            continue
        where = f"{path}, line {line_number}"
        if len(line) > _MAX_JSON_LINE:
            raise ValueError(f"{where} has over {_MAX_JSON_LINE:,} bytes: is it JSON Lines, one object per line?")
        try:
            record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_json_object)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 (byte {error.start + 1} of the line): {_REPAIR_LINE}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error.msg} at column {error.colno}): {_REPAIR_LINE}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is JSON that cannot be read ({error}): {_REPAIR_LINE}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object: each line must be an object, with the text in a field")
        values: list[Any] = []
        for column in others:
            try:
                values.append(_field(record, column, where))
                columns_seen.add(column)
            except KeyError as error:
                absent.setdefault(column, f"{error.args[0]}: {_CORRECT_NAME}")
                values.append(None)
        yield [_text(record, column, where, advice) for column in texts], values
    for column, message in absent.items():
        if column not in columns_seen:
            raise ValueError(message)


class _AmbiguousObject(dict[str, Any]):
    """A JSON object in which some fields have the same name. `repeated` holds these names; `_field` raises an error
    only for a field that has one of them."""

    def __init__(self, fields: Sequence[tuple[str, Any]]):
        super().__init__(fields)
        self.repeated = {name for name, times in Counter(name for name, _ in fields).items() if times > 1}


def _json_object(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(fields)
    return unique if len(unique) == len(fields) else _AmbiguousObject(fields)


def _field(record: dict[str, Any], column: str, where: str) -> Any:
    """The value of a column. Raises KeyError if the record lacks it, ValueError if a field on the way occurs twice."""
    current: Any = record
    remaining = column  # the rest of the column's name, to look up in `current`
    while isinstance(current, dict):
        is_field = remaining in current  # a field's own name may have dots
        name, _, rest = (remaining, "", "") if is_field else remaining.partition(".")
        if isinstance(current, _AmbiguousObject) and name in current.repeated:
            raise ValueError(f"{where} has the field {name!r} twice in one object: remove one of them")
        if is_field:
            return current[name]
        current, remaining = current.get(name), rest
    raise KeyError(f"{where} has no field {remaining or name!r}, but {', '.join(record)}")


def _name_texts(texts: Sequence[str]) -> str:
    """The advice for a column of `texts`, the text of documents or the two sides of pairs, that holds no text."""
    if len(texts) == 1:
        return 'name the column that has the text by columns = ["NAME"] in a corpus description'
    return 'name the columns that have the text by columns = {source = "NAME", target = "NAME"} in a corpus description'


def _text(record: dict[str, Any], column: str, where: str, advice: str) -> str:
    try:
        text = _field(record, column, where)
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: {advice}") from None
    if not isinstance(text, str):
        value = json.dumps(text)[:40]
        raise ValueError(f"{where}: field {column!r} is {value}, not a string: remove the line, or {advice}")
    return text


def _open_parquet(stream: Any) -> tuple[pa.Schema, _Parts]:
    # Read through a small buffer (`buffer_size`), because `pre_buffer` would hold a whole row group in memory.
    file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
    return file.schema_arrow, lambda names: (
        file.iter_batches(_PARQUET_ROWS, [group], names, use_threads=False) for group in range(file.num_row_groups)
    )


def _open_arrow(stream: Any) -> tuple[pa.Schema, _Parts]:
    """Returns (schema, parts). Raises ArrowInvalid if the end of a stream is missing, because Arrow itself accepts a
    stream that was cut off after a batch."""
    is_file = stream.read(len(_ARROW_FILE_START)) == _ARROW_FILE_START
    if not is_file:
        stream.seek(max(stream.seek(0, 2) - len(_ARROW_STREAM_END), 0))
        if stream.read(len(_ARROW_STREAM_END)) != _ARROW_STREAM_END:
            raise pa.ArrowInvalid("neither an Arrow file nor the end of an Arrow stream")
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    return reader.schema, lambda _: ([batch] for batch in batches)


def _table_records(
    path: CorpusPath,
    texts: Sequence[str],
    others: Sequence[str],
    open_table: Callable[[Any], tuple[pa.Schema, _Parts]],
    kind: str,
    part_name: str,
) -> Iterator[Record]:
    """Yield the values of each row, part by part. `open_table` returns (schema, parts) of an open file. `kind` and
    `part_name` are what messages call the format (with its article) and a part."""
    if path.is_pipe:
        raise ValueError(f"{path} is a named pipe, but {kind} file is read from its end: store it as a file")
    where = str(path)
    try:
        with path.open() as stream:
            schema, parts_of = open_table(stream)
            field_paths = [_field_path(schema, column, path, texts) for column in (*texts, *others)]
            parts = parts_of(list(dict.fromkeys(field_path[0] for field_path in field_paths)))
            for index in count():  # not `for part in parts`: `where` must name a part before it is read
                where = f"{path}, {part_name} {index}"
                if (part := next(parts, None)) is None:
                    break
                for row, values in enumerate(_rows(part, field_paths), 1):
                    where = f"{path}, {part_name} {index}, row {row}"
                    row_values = [_value(value) for value in values]
                    for column, text in zip(texts, row_values, strict=False):
                        if text is None:
                            raise ValueError(f"{where}: column {column!r} is null: write the file without this row")
                    yield row_values[: len(texts)], row_values[len(texts) :]
    except UnicodeDecodeError as error:
        names = ", ".join(map(repr, texts))
        raise ValueError(f"{where}: column {names} is not UTF-8 ({error}): write this row again") from None
    except (pa.ArrowException, OSError) as error:
        if is_read_failure(path, error):
            raise
        raise ValueError(f"{where} cannot be read ({error}): it is truncated or damaged. Fetch it again") from None
    check_unchanged(path)


# Reads the rows of a Parquet file, one row group after another.
parquet_records = partial(_table_records, open_table=_open_parquet, kind="a Parquet", part_name="row group")
# Reads the rows of an Arrow stream, such as Hugging Face's `save_to_disk` writes, or of an Arrow file.
arrow_records = partial(_table_records, open_table=_open_arrow, kind="an Arrow", part_name="record batch")


def _field_path(schema: pa.Schema, column: str, path: CorpusPath, texts: Sequence[str]) -> tuple[str, ...]:
    """The names of the nested fields that lead to `column`, from the outermost one to the column itself.

    Raises ValueError if the column is missing or ambiguous, or if it is one of `texts` and its type is not string.
    """
    advice = _name_texts(texts) if column in texts else _CORRECT_NAME
    outer, fields, rest = tuple[str, ...](), list(schema), column
    while True:
        types = {field.name: field.type for field in fields}
        names = [field.name for field in fields]
        if repeated := [name for name in (rest, rest.partition(".")[0]) if names.count(name) > 1]:
            raise ValueError(f"{path} has several columns {'.'.join((*outer, repeated[0]))!r}: rename all but one")
        if rest in types:
            break
        name, dot, rest = rest.partition(".")
        if not dot or name not in types or not pa.types.is_struct(types[name]):
            raise ValueError(f"{path} has no column {column!r}, but {', '.join(schema.names)}: {advice}")
        outer, fields = (*outer, name), list(types[name].fields)
    dtype = types[rest].value_type if pa.types.is_dictionary(types[rest]) else types[rest]
    is_string = pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype)
    if column in texts and not is_string:
        raise ValueError(f"{path}: column {column!r} has type {dtype}, not string: {advice}")
    return (*outer, rest)


def _value(scalar: pa.Scalar) -> Any:
    """The Python value of a scalar. A 16- or 32-bit float becomes the shortest decimal that rounds to it: 0.1, not
    0.10000000149."""
    value = scalar.as_py()
    float_type = _SHORT_FLOATS.get(type(scalar))
    return value if float_type is None or value is None else float(str(float_type(value)))


def _rows(batches: Iterable[pa.RecordBatch], field_paths: Sequence[tuple[str, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield for each row its Arrow scalars, one for each of the `field_paths` (see `_field_path`). Raises ArrowInvalid
    if a column is damaged, for example if an offset points outside the column's memory."""
    for batch in batches:
        for column in batch.columns:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                is_string = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
                if "UTF8" not in str(error) or not is_string:  # `_value` raises that error when the row is known
                    raise
        columns = [
            pc.struct_field(batch.column(outermost), list(nested)) if nested else batch.column(outermost)
            for outermost, *nested in field_paths
        ]
        yield from zip(*columns, strict=True)


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
        return in_blocks(self._documents(source, repaired), (b"\n\n",), size, repaired, terminate_last=False)

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
