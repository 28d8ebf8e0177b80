"""Parquet files with the text in one column of strings."""

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa
from pyarrow import parquet

from data_prep.corpus_files import Place
from data_prep.readers.jsonl import ADVICE, RecordReader
from data_prep.readers.reader import Input

_ROWS = 64  # read at once


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
                    values = chain.from_iterable(batch.column(0) for batch in batches)
                    for row, value in enumerate(values, 1):
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
        raise ValueError(f"{path} has no column {column!r}, but {', '.join(schema.names)}: {ADVICE}")
    kind = schema.field(index).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{path}: column {column!r} has type {kind}, not string: {ADVICE}")
