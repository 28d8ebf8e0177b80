"""The baseline of the masked-token loss: what a model knows that has only counted tokens."""

import numpy as np

from .schema import UNK
from .shards import RowStore


def unigram_nll(train: RowStore, heldout: RowStore, heldout_rows: int, train_rows: int = 65_536) -> float:
    """Mean −log p (nats) of the ordinary tokens of the first `heldout_rows` rows, p counted (add one) on training rows."""
    counts = np.ones(train.manifest.vocabulary_size)
    for start in range(0, min(train_rows, train.rows), 1024):
        tokens = train.read(np.arange(start, min(start + 1024, train_rows, train.rows))).tokens
        counts += np.bincount(tokens[tokens > UNK], minlength=len(counts))
    tokens = heldout.read(np.arange(min(heldout_rows, heldout.rows))).tokens
    return float(-np.log(counts / counts.sum())[tokens[tokens > UNK]].mean())
