"""Compares our loader with Hugging Face's `datasets` (the peer): rows per second, and the time to the first batch.

    xlme bench loader --data DIR [--quick] [--json]     # DIR: a folder that `xlme prep mix` wrote

A pass opens the data and reads it to the last row, in one process without workers, with one thread of torch and cached
files. The two loaders take turns. `bench/peers/loaders.py` says how the peer reads. The peer's rows lie on the disk in
reading order, which helps the peer. Our masks are exact (15% of each item, drawn without replacement) and repeatable
(they depend on the row's index alone). Our loader checks every shard's SHA-256 before it uses the shard; the peer
checks nothing.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from bench.measure import Figures, by_turns, show
from bench.peers.loaders import MASK_FRACTION, ROWS, Tensors, peer_batches, write_rows
from xlme_ds.cli import fail
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import TASKS
from xlme_ds.data.shards import RowStore
from xlme_ds.io.help import read_command

ROWS_PER_TASK = ROWS // 2  # rows of each task in a micro-batch, as in Base
OURS, PEER = "ours", "datasets"


@dataclass(frozen=True)
class LoaderSettings:
    """Arguments of the command."""

    data: Path  # folder that `xlme prep mix` wrote; its first rows are read
    rows: int = 16_384  # rows of each task in a pass
    rounds: int = 5  # rounds to measure; each figure is the median over the rounds
    quick: bool = False  # at most 2,048 rows of each task, three rounds
    json: bool = False  # print JSON


def our_batches(data: Path, rows: int, kind: str) -> Iterator[Tensors]:
    """Open the data, and yield the batches of one pass of our loader. If `kind` is "bare", the batches are read without
    the loader, and have only ids."""
    if kind == "bare":
        stores = [RowStore(data / task) for task in TASKS]
        for first in range(0, rows, ROWS_PER_TASK):
            parts = [store.read(np.arange(first, first + ROWS_PER_TASK)).tokens for store in stores]
            yield (torch.from_numpy(np.concatenate(parts).astype(np.int64)),)
        return
    loader = Loader(data, DataConfig(ROWS_PER_TASK, ROWS_PER_TASK, ROWS_PER_TASK), 1, MASK_FRACTION)
    for step in range(rows // ROWS_PER_TASK):
        (batch,) = loader.step(step)
        yield batch.tokens_BT, batch.masked_M, batch.positions_BT, batch.segments_BT


def in_training_order(data: Path, rows: int) -> np.ndarray:
    """Tokens int32 [2 · rows, T] as the peer stores them: batch after batch, each with 16 rows of each task."""
    parts = [RowStore(data / task).read(np.arange(rows)).tokens for task in TASKS]
    row_tokens = parts[0].shape[1]
    batches = np.concatenate([part.reshape(-1, ROWS_PER_TASK, row_tokens) for part in parts], axis=1)
    return batches.reshape(-1, row_tokens)


def race(data: Path, rows: int, rounds: int, scratch: Path) -> Figures:
    """Run the passes of our loader and of the peer in turns. A ratio is the median over the rounds of each round's
    ratio of ours to the peer's."""
    tokens = in_training_order(data, rows)
    checksum = int(tokens.sum(dtype="int64"))
    write_rows(scratch / PEER, tokens)
    batches = {OURS: partial(our_batches, data, rows), PEER: partial(peer_batches, scratch / PEER)}
    contenders = [(OURS, "lean"), (OURS, "bare"), (PEER, "lean"), (PEER, "bare"), (PEER, "customary")]
    passes = {(name, kind): partial(one_pass, name, batches[name], kind, checksum) for name, kind in contenders}
    turns = by_turns(passes, rounds)
    medians: Figures = {OURS: {}, PEER: {}}
    for (name, kind), figures in turns[0].items():
        medians[name][kind] = {
            figure: statistics.median(turn[name, kind][figure] for turn in turns) for figure in figures
        }

    def ratio(ours: str, peer: str, figure: str = "rows_per_s") -> float:
        return statistics.median(turn[OURS, ours][figure] / turn[PEER, peer][figure] for turn in turns)

    return {
        "ratio_vs_datasets": ratio("lean", "lean"),
        "ratio_vs_datasets_in_cpu_time": ratio("lean", "lean", "rows_per_cpu_s"),
        "ratio_vs_customary": ratio("lean", "customary"),
        "ratio_vs_bare": ratio("bare", "bare"),
        "contenders": medians,
        "rows": len(tokens),
    }


def one_pass(name: str, batches: Callable[[str], Iterator[Tensors]], kind: str, checksum: int) -> Figures:
    """Rows per second of wall time and per second of CPU time, milliseconds to the first batch, and masked tokens per
    row.

    Raises ValueError if the ids of all rows do not add up to `checksum`.
    """
    id_sum, rows, first_seconds, masked = 0, 0, 0.0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches(kind):
        first_seconds = first_seconds or time.perf_counter() - wall
        rows += len(batch[0])
        id_sum += int(batch[0].sum())
        masked += batch[1].numel() if len(batch) > 1 else 0
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if id_sum != checksum:
        raise ValueError(f"{name} read other rows: their ids add up to {id_sum}, not {checksum}")
    return {
        "rows_per_s": rows / wall, "rows_per_cpu_s": rows / cpu, "first_batch_ms": 1e3 * first_seconds,
        "masked_per_row": masked / rows,
    }  # fmt: skip


def main() -> None:
    """Measure, and print the figures as text or JSON."""
    settings = read_command(LoaderSettings, "xlme bench loader", None, __doc__)
    rows, rounds = (min(settings.rows, 2048), 3) if settings.quick else (settings.rows, settings.rounds)
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 2)
    try:
        if find_spec("datasets") is None or find_spec("transformers") is None:
            raise ValueError('datasets or transformers is missing: pip install -c constraints.txt -e ".[bench]"')
        with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
            figures = race(settings.data, rows, rounds, Path(scratch)) | {"load_before": load}
    except (ValueError, OSError) as error:
        fail("bench.loader", error)
    show(figures, settings.json)


if __name__ == "__main__":
    main()
