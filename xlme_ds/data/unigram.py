"""The losses of a unigram model, which knows only the frequencies of tokens: a baseline for masked-token losses."""

from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np
from torch import Tensor

from .batch import Batch
from .collate import collate
from .rows import UNK
from .shards import RowStore


def unigram_nll_by_id(train: RowStore | Mapping[RowStore, float], train_rows: int = 65_536) -> np.ndarray:
    """−log p (nats) of every id in a unigram model, float64 [V].

    p is proportional to 1 plus the count of the id in the first `train_rows` rows; only ordinary tokens are counted.
    `train` may be several stores with their shares of a run. Then the count is Σ share · count · N / n over the stores:
    n is the number of positions in the rows that a store gives, N the largest n.
    """
    shares = {train: 1.0} if isinstance(train, RowStore) else train
    most_positions = max(min(train_rows, store.rows) * store.row_tokens for store in shares)
    counts = np.ones(next(iter(shares)).manifest.vocabulary_size)
    for store, share in shares.items():
        rows = min(train_rows, store.rows)
        for start in range(0, rows, 1024):
            tokens = store.read(np.arange(start, min(start + 1024, rows))).tokens
            occurrences = np.bincount(tokens[tokens > UNK], minlength=len(counts))
            counts += share * most_positions / (rows * store.row_tokens) * occurrences
    return -np.log(counts / counts.sum())


def unigram_nll_by_language(
    train: RowStore | Mapping[RowStore, float],
    heldout: RowStore,
    task: int,
    rows: int,
    predicted_positions: Callable[[Batch], Tensor] = attrgetter("masked_M"),
) -> np.ndarray:
    """Returns float64 [2, languages]: the sum and the number of a unigram model's losses in each language. A language's
    mean loss is a baseline for its masked-token loss.

    The losses are the −log p, in nats, that `unigram_nll_by_id(train)` gives the ordinary tokens of the first `rows`
    held-out rows of a task: all that an objective with these `predicted_positions` may predict.
    """
    row_numbers = np.arange(min(rows, heldout.rows))
    batch = collate([(task, heldout.read(row_numbers), row_numbers)], seed=0, mask_fraction=1.0)
    predicted = predicted_positions(batch).numpy()
    tokens, languages = (values_BT.numpy().ravel()[predicted] for values_BT in (batch.tokens_BT, batch.languages_BT))
    tokens, languages = tokens[tokens > UNK], languages[tokens > UNK]
    language_count = len(heldout.languages)
    sums = np.bincount(languages, unigram_nll_by_id(train)[tokens], language_count)
    return np.stack([sums, np.bincount(languages, minlength=language_count)])
