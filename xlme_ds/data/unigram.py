"""The baseline of the masked-token loss: what a model knows that has only counted tokens."""

import numpy as np

from .schema import UNK
from .shards import RowStore


def unigram_costs(train: RowStore, train_rows: int = 65_536) -> np.ndarray:
    """−log p (nats) of every id, float64 [V], counted (add one) on the ordinary tokens of the first `train_rows`
    rows."""
    counts = np.ones(train.manifest.vocabulary_size)
    for start in range(0, min(train_rows, train.rows), 1024):
        tokens = train.read(np.arange(start, min(start + 1024, train_rows, train.rows))).tokens
        counts += np.bincount(tokens[tokens > UNK], minlength=len(counts))
    return -np.log(counts / counts.sum())


def unigram_nll(train: RowStore, heldout: RowStore, heldout_rows: int) -> float:
    """Mean −log p (nats) of the ordinary tokens of the first `heldout_rows` rows by `unigram_costs`."""
    tokens = heldout.read(np.arange(min(heldout_rows, heldout.rows))).tokens
    return float(unigram_costs(train)[tokens[tokens > UNK]].mean())
