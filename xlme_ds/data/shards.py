"""Random access to the rows of a mixed data folder: memory-mapped, nothing copied before it is asked for."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from .rows import Rows
from .schema import Manifest, read_manifest, row_schema


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
        self._starts = np.cumsum([0] + [shard.rows for shard in self.manifest.shards])
        self._open: dict[int, list[pa.RecordBatch]] = {}

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
            pieces.append(_decode(batch.slice(int(run[0]) % size, len(run)), self.row_tokens))
        return pieces

    def _batches(self, shard: int) -> list[pa.RecordBatch]:
        if shard not in self._open:
            path = self.folder / self.manifest.shards[shard].name
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                if reader.schema != row_schema(self.row_tokens):
                    raise ValueError(f"its schema is {reader.schema}")
                batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
                if sum(batch.num_rows for batch in batches) != self.manifest.shards[shard].rows:
                    raise ValueError("its row count is not the manifest's")
            except (OSError, ValueError, pa.ArrowInvalid) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): check the folder with `python -m data_prep verify`"
                ) from None
            if len(self._open) >= 4:  # a reader moves front to back: older shards are done with
                self._open.pop(next(iter(self._open)))
            self._open[shard] = batches
        return self._open[shard]


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
