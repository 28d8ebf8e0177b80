"""How long documents and pairs are: histograms over bins half an octave wide, read from the shards' offsets alone."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.parallel import run_tasks
from xlme_ds.data.schema import Manifest

# Lower bounds in tokens: 1, 2, 4, 5, 8, 11, 16, 22, 32 … (an octave is a factor of two)
EDGES: tuple[int, ...] = tuple(sorted({int(2 ** (k / 2)) for k in range(45)}))


def length_histograms(folder: Path, manifest: Manifest, processes: int) -> dict[str, np.ndarray]:
    """Records in each bin, int64 [len(EDGES)], by language or pair; both sides of a pair count together.

    Raises ValueError for a shard that cannot be read.
    """
    names = [shard.name for shard in manifest.shards]
    sizes = [shard.bytes for shard in manifest.shards]
    counted = run_tasks(partial(_histogram, folder), names, sizes, processes, f"lengths {folder.name}")
    total = {name: np.zeros(len(EDGES), dtype=np.int64) for name in manifest.counts["by_language"]}
    for name, counts in zip(names, counted, strict=True):
        total[name.split("/")[0]] += counts
    return total


def median(histogram: np.ndarray) -> int:
    """Lower bound of the bin that holds the median; 0 of nothing."""
    cumulative = np.cumsum(histogram)
    return EDGES[int(np.searchsorted(cumulative, cumulative[-1] / 2))] if cumulative[-1] else 0


def _histogram(folder: Path, name: str) -> np.ndarray:
    counts = np.zeros(len(EDGES), dtype=np.int64)
    try:
        with pa.memory_map(str(folder / name)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                lengths = sum(np.diff(column.offsets.to_numpy()) for column in batch.columns)
                bins = np.searchsorted(EDGES, lengths, side="right") - 1
                counts += np.bincount(bins, minlength=len(EDGES))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{folder / name} cannot be read ({error}): check the folder with verify") from None
    return counts
