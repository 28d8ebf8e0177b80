"""Random access to the rows of a mixed data folder, none of which is used before its shard is found to be the one listed.

A shard is read whole into memory and compared with the manifest's SHA-256 when it is first needed, and rows are taken from that
memory: so no byte that changes on the disk, before or after, gets into a batch, and a file that is cut short cannot end the process
as it would under a memory map.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from .rows import PAD, Rows
from .schema import Manifest, read_manifest, row_schema

_OPEN = 2  # shards that are held


class RowStore:
    """One task of a mixed data folder, addressed by record number 0 … rows−1."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        if self.manifest.stage != "mix":
            raise ValueError(
                f"{folder} was written by the stage {self.manifest.stage}: name the folder that `data_prep mix` wrote"
            )
        self.row_tokens = int(self.manifest.settings["row_tokens"])
        self.rows = self.manifest.rows
        if self.rows < 1 or self.row_tokens < 1 or min(shard.rows for shard in self.manifest.shards) < 1:
            raise ValueError(f"{self.folder / 'manifest.json'} lists a shard without rows: mix the folder again")
        self._starts = np.cumsum([0] + [shard.rows for shard in self.manifest.shards])
        self._open: dict[int, list[pa.RecordBatch]] = {}
        self._coming: dict[int, Future[list[pa.RecordBatch]]] = {}
        self._reader = ThreadPoolExecutor(1, f"shards of {self.folder.name}")  # has no thread before it has work

    def read(self, records: np.ndarray) -> Rows:
        """The rows of `records` (int64), in the order given. Raises ValueError for a damaged shard."""
        shards = np.searchsorted(self._starts, records, side="right") - 1
        pieces = []
        cuts = np.flatnonzero(np.diff(shards)) + 1
        for group in np.split(np.arange(len(records)), cuts):
            if len(group):
                shard = int(shards[group[0]])
                pieces += self._from_shard(shard, records[group] - self._starts[shard])
        return Rows(
            *(
                np.concatenate([getattr(piece, name) for piece in pieces])
                for name in ("tokens", "items", "lengths", "languages")
            )
        )

    def _from_shard(self, shard: int, rows: np.ndarray) -> list[Rows]:
        """Consecutive rows are sliced, the others taken one by one."""
        batches = self._batches(shard)
        size = batches[0].num_rows  # all but the last of a shard are of one size
        jumps = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % size == 0)) + 1
        pieces = []
        for run in np.split(rows, jumps):
            batch = batches[int(run[0]) // size]
            piece = _decode(batch.slice(int(run[0]) % size, len(run)), self.row_tokens)
            if not self._possible(piece):
                raise ValueError(
                    f"{self._path(shard)} has ids or lengths that no row can have, near row {run[0]}: mix {self.folder} again"
                )
            pieces.append(piece)
        return pieces

    def _path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].name

    def _batches(self, shard: int) -> list[pa.RecordBatch]:
        if shard not in self._open:
            coming = self._coming.pop(shard, None)
            self._coming.clear()
            batches = self._read_whole(shard) if coming is None else coming.result()
            following = (shard + 1) % len(self.manifest.shards)
            if (
                shard - 1 in self._open and following not in self._open
            ):  # one goes front to back: the next is read meanwhile
                self._coming[following] = self._reader.submit(self._read_whole, following)
            if len(self._open) >= _OPEN:  # older shards are done with
                self._open.pop(next(iter(self._open)))
            self._open[shard] = batches
        return self._open[shard]

    def _read_whole(self, shard: int) -> list[pa.RecordBatch]:
        path, listed = self._path(shard), self.manifest.shards[shard]
        try:
            content = path.read_bytes()
            if len(content) != listed.bytes or hashlib.sha256(content).hexdigest() != listed.sha256:
                raise ValueError("it is not the file that the manifest lists, its bytes changed")
            reader = pa.ipc.open_file(pa.py_buffer(content))
            if reader.schema != row_schema(self.row_tokens):
                raise ValueError(f"its schema is {reader.schema}")
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate(full=True)
            if sum(batch.num_rows for batch in batches) != listed.rows:
                raise ValueError("its row count is not the manifest's")
            if len({batch.num_rows for batch in batches[:-1]}) > 1 or batches[-1].num_rows > batches[0].num_rows:
                raise ValueError("its record batches have different sizes")
        except (OSError, ValueError, pa.ArrowException) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"{path} cannot be read ({why}): check the folder with `python -m data_prep verify`, restore the file or mix again"
            ) from None
        return batches

    def _possible(self, rows: Rows) -> bool:
        """Whether a model can read them: data from elsewhere may hold anything under a right checksum."""
        if not (len(rows.items) == len(rows.tokens) and len(rows.lengths) == rows.items.sum()):
            return False
        ends = np.cumsum(rows.lengths)
        used = np.diff(np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(rows.items)])])
        padding = np.arange(self.row_tokens) >= used[:, None]
        return bool(
            ((rows.tokens >= 0) & (rows.tokens < self.manifest.vocabulary_size)).all()
            and (rows.lengths > 0).all()
            and (rows.items > 0).all()
            and (used <= self.row_tokens).all()
            and ((rows.tokens == PAD) == padding).all()
            and ((rows.languages >= 0) & (rows.languages < len(self.manifest.languages))).all()
        )


def _decode(batch: pa.RecordBatch, row_tokens: int) -> Rows:
    tokens, lengths, languages = batch.columns
    start = tokens.offset * row_tokens
    flat = tokens.values.to_numpy(zero_copy_only=True)[start : start + len(tokens) * row_tokens]
    return Rows(
        flat.reshape(-1, row_tokens),
        np.diff(lengths.offsets.to_numpy()).astype(np.int64),
        lengths.flatten().to_numpy().astype(np.int64),
        languages.flatten().to_numpy().astype(np.int64),
    )
