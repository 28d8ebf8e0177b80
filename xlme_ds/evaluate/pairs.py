"""Translation pairs out of packed rows: the held-out data folder is its own retrieval test."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..data.schema import EOS
from ..data.shards import RowStore


class Pair(NamedTuple):
    """One item of a parallel row: both sides' ids without special tokens, and their language codes."""

    first: np.ndarray
    second: np.ndarray
    first_language: str
    second_language: str


def pairs(store: RowStore, limit: int | None = None) -> Iterator[Pair]:
    """The pairs of the first `limit` rows of a store of the task para (all rows by default)."""
    codes = store.manifest.languages
    for start in range(0, min(store.rows, limit or store.rows), 256):
        rows = store.read(np.arange(start, min(start + 256, store.rows, limit or store.rows)))
        item = 0
        lengths = iter(rows.lengths)
        for tokens, items in zip(rows.tokens, rows.items, strict=True):
            at = 0
            for _ in range(items):
                length = int(next(lengths))
                ids = tokens[at : at + length]
                middle = int(np.flatnonzero(ids == EOS)[0])
                first, second = rows.languages[2 * item : 2 * item + 2]
                yield Pair(ids[1:middle], ids[middle + 1 : -1], codes[first], codes[second])
                at += length
                item += 1
