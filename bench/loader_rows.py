"""The rows that `bench.loader` reads: real text through data preparation where there is some, else synthetic ones."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.gpu_rows import synthetic_rows
from bench.tokenize_text import SHARED, trained
from data_prep.encode import EncodeConfig
from data_prep.encode import run as encode
from data_prep.mix import MixConfig
from data_prep.mix import run as mix
from data_prep.store import write_arrow
from xlme_ds.data.schema import TASKS, Manifest, Rows, read_manifest, row_schema, write_manifest
from xlme_ds.data.shards import RowStore

ROW_TOKENS = 512
SHARD_ROWS = 65_536  # data_prep's default
_SYNTHETIC_VOCABULARY = 250_002
_LANGUAGES = ("de", "fr", "hi")
_DISTINCT = 2048


class Text:
    """Makes mixed folders of any number of rows, of real text where the shared corpus is there, unless `synthetic`."""

    def __init__(self, scratch: Path, synthetic: bool = False):
        self.scratch = scratch
        self.real = SHARED.is_dir() and not synthetic
        if self.real:
            mono, para = scratch / "mono", scratch / "para"
            for folder in (mono, para):
                folder.mkdir()
            for code in _LANGUAGES:
                (mono / f"{code}.txt.xz").symlink_to(SHARED / "mono" / f"{code}.txt.xz")
                (para / f"en-{code}.txt.zip").symlink_to(SHARED / "para" / f"en-{code}.txt.zip")
            trained(mono, scratch / "vocab", 8000, 15_000)
            encode(EncodeConfig(vocab=scratch / "vocab", out=scratch / "encoded", mono=mono, para=para))

    def write(self, name: str, rows: int, shard_rows: int = SHARD_ROWS) -> Path:
        """A mixed folder with `rows` rows of each task."""
        folder = self.scratch / name
        if self.real:
            encoded, vocab = self.scratch / "encoded", self.scratch / "vocab"
            mix(MixConfig(encoded, vocab, folder, rows, rows, ROW_TOKENS, rows_per_shard=shard_rows))
        else:
            for task, part in enumerate(TASKS):
                _write_synthetic(folder / part, rows, shard_rows, pairs=task == 1)
        return folder


def _write_synthetic(folder: Path, rows: int, shard_rows: int, pairs: bool) -> None:
    """The same few rows again and again."""
    made = synthetic_rows(np.random.default_rng(pairs), min(rows, _DISTINCT), ROW_TOKENS, _SYNTHETIC_VOCABULARY, pairs)
    batch, shards = _record_batch(made), []
    for first in range(0, rows, shard_rows):
        count = min(shard_rows, rows - first)
        batches = [batch.slice(0, min(_DISTINCT, count - start)) for start in range(0, count, _DISTINCT)]
        path = folder / f"{first // shard_rows:05d}.arrow"
        shards.append(write_arrow(path, row_schema(ROW_TOKENS), batches, folder))
    settings = {"row_tokens": ROW_TOKENS, "rows": rows}
    manifest = Manifest("mix", settings, _SYNTHETIC_VOCABULARY, "0" * 64, ("xx",), tuple(shards), {"by_language": {}})
    write_manifest(folder, manifest)


def _record_batch(rows: Rows) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate([[0], np.cumsum(rows.items)]).astype(np.int32))
    lengths = pa.ListArray.from_arrays(offsets, pa.array(rows.lengths.astype(np.int16)))
    sides = pa.array(offsets.to_numpy() * (len(rows.languages) // len(rows.lengths)))
    languages = pa.ListArray.from_arrays(sides, pa.array(rows.languages.astype(np.int16)))
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.tokens.ravel()), ROW_TOKENS)
    return pa.record_batch([tokens, lengths, languages], schema=row_schema(ROW_TOKENS))


def in_training_order(folder: Path, rows: int, a_task: int) -> np.ndarray:
    """Tokens int32 [2 · rows, T] as the peers store them: batch after batch, `a_task` rows of each task in each."""
    parts = [RowStore(folder / task).read(np.arange(rows)).tokens.reshape(-1, a_task, ROW_TOKENS) for task in TASKS]
    return np.concatenate(parts, axis=1).reshape(-1, ROW_TOKENS)


def linked(source: Path, folder: Path, gigabytes: float) -> Path:
    """A mixed folder of that size whose shards are all the first one of `source` under further names."""
    for task in TASKS:
        manifest = read_manifest(source / task)
        shard = manifest.shards[0]
        count = max(1, round(gigabytes * 1e9 / len(TASKS) / shard.bytes))
        names = [f"{number:05d}.arrow" for number in range(count)]
        (folder / task).mkdir(parents=True)
        for name in names:
            os.link(source / task / shard.name, folder / task / name)
        settings = manifest.settings | {"rows": count * shard.rows}
        shards = tuple(replace(shard, name=name) for name in names)
        write_manifest(folder / task, replace(manifest, settings=settings, shards=shards))
    return folder


def forget_pages(folder: Path) -> None:
    """Have the system drop what it caches of the shards: the next read comes from the disk."""
    for path in folder.glob("*/*.arrow"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
