"""What a training row is made of: special token ids, the tasks, and rows as arrays. Plain numpy, no Arrow."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

# XLM-R's id layout: four specials, the SentencePiece pieces, and `<mask>` as the last id of the vocabulary.
BOS, PAD, EOS, UNK = 0, 1, 2, 3

TASKS = ("mono", "para")


@dataclass(frozen=True)
class Rows:
    """Rows in reading order.

    `tokens` int32 [B, T]; `items` int64 [B]: items of each row; `lengths` int64: tokens of all items, row after row;
    `languages` int64: language indices of all sides, row after row.
    """

    tokens: np.ndarray
    items: np.ndarray
    lengths: np.ndarray
    languages: np.ndarray


def joined(pieces: Sequence[Rows]) -> Rows:
    """The rows of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    return Rows(*(np.concatenate([getattr(piece, field.name) for piece in pieces]) for field in fields(Rows)))
