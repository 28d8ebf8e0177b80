"""The columns of files of records: JSON Lines, Parquet and Arrow, read record by record in bounded memory.

A column named `a.b` is the column of that name or, if there is none, the field `b` of the column `a`.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from data_prep.readers.corpus_files import Place, check_unchanged, of_network, read_text, split_lines
from data_prep.readers.reader import COMPRESSED

_ADVICE = 'name the one that has the text by columns = ["NAME"] in a corpus description'
_REPAIR = "it is truncated or damaged, fetch it again or repair the line"
_LONGEST = 1 << 30  # bytes of a line of JSON Lines
_BATCH_ROWS = 64  # of Parquet, read at once
_SHORT_FLOATS = {pa.FloatScalar: np.float32, pa.HalfFloatScalar: np.float16}
_FILE_START, _STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"

# A record: the values of its columns of text, and those of its other columns.
Record = tuple[list[str], list[Any]]


class RecordFile(ABC):
    """A kind of file. `file_names`: the endings of its files' names, as a regular expression and for messages."""

    file_names: tuple[str, str]

    @abstractmethod
    def records(self, place: Place, texts: Sequence[str], others: Sequence[str] = ()) -> Iterator[Record]:
        """Read each record's values in the columns `texts`, which are strings, and `others`, where a value may be None.

        Raises ValueError where a column is missing or has no text, and on a damaged file.
        """


class JsonLines(RecordFile):
    """JSON Lines: an object a line; empty lines are skipped."""

    file_names = (rf"\.jsonl{COMPRESSED}", ".jsonl[.xz|.gz|.bz2|.zst]")

    def records(self, place: Place, texts: Sequence[str], others: Sequence[str] = ()) -> Iterator[Record]:
        """Read the fields of each object; those of nested objects by their path."""
        absent = dict[
            str, str
        ]()  # error messages by column: a record may lack a column of `others`, but not all records may
        columns_seen = set[str]()
        for number, line in enumerate(split_lines(read_text(place), _LONGEST), 1):
            if not line or line.isspace():
                continue
            where = f"{place}, line {number}"
            if len(line) > _LONGEST:
                raise ValueError(f"{where} has over {_LONGEST:,} bytes: is it JSON Lines, an object a line?")
            try:
                record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_json_object)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 (byte {error.start + 1} of the line): {_REPAIR}") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg} at column {error.colno}): {_REPAIR}") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is JSON that cannot be read ({error}): {_REPAIR}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a JSON object: JSON Lines have one a line, with the text in a field")
            values: list[Any] = []
            for column in others:
                try:
                    values.append(_field(record, column, where))
                    columns_seen.add(column)
                except KeyError as error:
                    absent.setdefault(column, error.args[0])
                    values.append(None)
            yield [_text(record, column, where) for column in texts], values
        for column, first in absent.items():
            if column not in columns_seen:
                raise ValueError(first)


class _AmbiguousObject(dict[str, Any]):
    """A JSON object that has some field names `twice`, which is an error only for columns with those names."""

    def __init__(self, fields: Sequence[tuple[str, Any]]):
        super().__init__(fields)
        self.twice = {name for name, times in Counter(name for name, _ in fields).items() if times > 1}


def _json_object(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(fields)
    return unique if len(unique) == len(fields) else _AmbiguousObject(fields)


def _field(record: dict[str, Any], column: str, where: str) -> Any:
    """The value of a field. Raises KeyError where the record lacks it, ValueError where it has it twice."""
    current: Any = record
    while isinstance(current, dict):
        is_field = column in current
        name, _, column = (column, "", column) if is_field else column.partition(".")
        if isinstance(current, _AmbiguousObject) and name in current.twice:
            raise ValueError(f"{where} has the field {name!r} twice in one object: remove one of them")
        if is_field:
            return current[name]
        current = current.get(name)
    raise KeyError(f"{where} has no field {column or name!r}, but {', '.join(record)}: {_ADVICE}")


def _text(record: dict[str, Any], column: str, where: str) -> str:
    try:
        text = _field(record, column, where)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    if not isinstance(text, str):
        value = json.dumps(text)[:40]
        raise ValueError(f"{where}: field {column!r} is {value}, not a string: remove that line, or {_ADVICE}")
    return text


class Tables(RecordFile):
    """A file with a schema, in parts: those of Parquet are row groups, those of Arrow record batches."""

    part: str  # what messages call a part
    why_no_pipe: str  # why a named pipe cannot be read, for messages

    @abstractmethod
    def open(self, stream: Any) -> tuple[pa.Schema, Any]:
        """Read the schema; returns it, and the file for `parts`."""

    @abstractmethod
    def parts(self, file: Any, names: list[str]) -> Iterator[Iterable[pa.RecordBatch]]:
        """Read the parts in order, each as batches with at least the columns `names`."""

    def records(self, place: Place, texts: Sequence[str], others: Sequence[str] = ()) -> Iterator[Record]:
        """Read the columns of each row, part by part."""
        if place.pipe:
            raise ValueError(f"{place} is a named pipe, but {self.why_no_pipe}: store it as a file")
        where = str(place)
        try:
            with place.open() as stream:
                schema, file = self.open(stream)
                paths = [_path(schema, column, place, column in texts) for column in (*texts, *others)]
                parts = self.parts(file, list(dict.fromkeys(path[0] for path in paths)))
                for number in count():
                    where = f"{place}, {self.part} {number}"
                    if (part := next(parts, None)) is None:
                        break
                    for row, values in enumerate(_rows(part, paths), 1):
                        where = f"{place}, {self.part} {number}, row {row}"
                        row_values = [_value(value) for value in values]
                        for column, text in zip(texts, row_values, strict=False):
                            if text is None:
                                raise ValueError(f"{where}: column {column!r} is null: write the file without that row")
                        yield row_values[: len(texts)], row_values[len(texts) :]
        except UnicodeDecodeError as error:
            names = ", ".join(map(repr, texts))
            raise ValueError(f"{where}: column {names} is not UTF-8 ({error}): write that row again") from None
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None or of_network(place, error):
                raise
            raise ValueError(f"{where} cannot be read ({error}): it is truncated or damaged, fetch it again") from None
        check_unchanged(place)


class Parquet(Tables):
    """A record a row, row group by row group."""

    file_names = (r"\.parquet", ".parquet")
    part, why_no_pipe = "row group", "a Parquet file's index is at its end"

    def open(self, stream: Any) -> tuple[pa.Schema, Any]:
        """The schema, and the file."""
        # read through a buffer: the whole row group need not fit in memory
        file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
        return file.schema_arrow, file

    def parts(self, file: Any, names: list[str]) -> Iterator[Iterable[pa.RecordBatch]]:
        """The row groups, a few rows at once."""
        return (
            file.iter_batches(_BATCH_ROWS, [group], names, use_threads=False) for group in range(file.num_row_groups)
        )


class Arrow(Tables):
    """A record a row, of an Arrow stream such as Hugging Face's `save_to_disk` writes, or of an Arrow file."""

    file_names = (r"\.arrow", ".arrow")
    part, why_no_pipe = "record batch", "an Arrow file is read from its end"

    def open(self, stream: Any) -> tuple[pa.Schema, Any]:
        """The schema, and the reader of a stream or file. Raises ArrowInvalid for one without its end."""
        is_file = stream.read(len(_FILE_START)) == _FILE_START
        if not is_file:
            stream.seek(max(stream.seek(0, 2) - len(_STREAM_END), 0))
            if stream.read(len(_STREAM_END)) != _STREAM_END:  # Arrow accepts a stream that is cut off after a batch
                raise pa.ArrowInvalid("neither an Arrow file nor the end of an Arrow stream")
        stream.seek(0)
        reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        return reader.schema, reader

    def parts(self, file: Any, names: list[str]) -> Iterator[Iterable[pa.RecordBatch]]:
        """The record batches, each as it is stored."""
        if isinstance(file, pa.RecordBatchFileReader):
            return ([file.get_batch(number)] for number in range(file.num_record_batches))
        return ([batch] for batch in file)


def _path(schema: pa.Schema, column: str, place: Place, is_text: bool) -> tuple[str, ...]:
    """Names that lead to a column, from the outermost to the column itself."""
    names, inside, rest = tuple[str, ...](), list(schema), column
    while True:
        fields = {field.name: field.type for field in inside}
        if twice := [name for name in (rest, rest.partition(".")[0]) if [f.name for f in inside].count(name) > 1]:
            raise ValueError(f"{place} has several columns {'.'.join((*names, twice[0]))!r}: rename all but one")
        if rest in fields:
            break
        first, dot, rest = rest.partition(".")
        if not dot or first not in fields or not pa.types.is_struct(fields[first]):
            raise ValueError(f"{place} has no column {column!r}, but {', '.join(schema.names)}: {_ADVICE}")
        names, inside = (*names, first), list(fields[first].fields)
    kind = fields[rest]
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_text and not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{place}: column {column!r} has type {kind}, not string: {_ADVICE}")
    return (*names, rest)


def _check_offsets(column: pa.Array) -> None:
    """Raise ArrowInvalid for an offset outside of the memory, before any value is read. Invalid UTF-8 passes: it is
    found later, when its row is known."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error) or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise


def _value(scalar: pa.Scalar) -> Any:
    """Convert to Python; 16- and 32-bit floats to the shortest decimal that they encode: 0.1, not 0.10000000149."""
    value = scalar.as_py()
    float_type = _SHORT_FLOATS.get(type(scalar))
    return value if float_type is None or value is None else float(str(float_type(value)))


def _rows(batches: Iterable[pa.RecordBatch], paths: Sequence[tuple[str, ...]]) -> Iterator[tuple[Any, ...]]:
    """Read each row's scalars in the columns that the paths lead to."""
    for batch in batches:
        for column in batch.columns:
            _check_offsets(column)
        columns = [
            pc.struct_field(batch.column(first), list(inside)) if inside else batch.column(first)
            for first, *inside in paths
        ]
        yield from zip(*columns, strict=True)
