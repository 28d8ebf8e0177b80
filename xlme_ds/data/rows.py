"""What a training row is made of: special token ids, the tasks, and rows as arrays. Plain numpy, no Arrow."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

# XLM-R's id layout: four specials, the SentencePiece pieces, and `<mask>` as the last id of the vocabulary.
BOS, PAD, EOS, UNK = 0, 1, 2, 3

TASKS = ("mono", "para")


@dataclass(frozen=True)
class Layout:
    """The special tokens of an item, `opening text </s>` or `opening e between f </s>`."""

    opening: int
    between: tuple[int, ...]
    """Between the two sides of a pair."""

    @property
    def pair_specials(self) -> int:
        """Special tokens of a pair."""
        return 2 + len(self.between)

    def item(self, first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
        """The ids of an item of one side or two, given without special tokens."""
        sides = [first] if second is None else [first, self.between, second]
        return np.concatenate([[self.opening], *sides, [EOS]]).astype(np.int32)


LAYOUTS = {"xlme": Layout(BOS, (EOS,)), "xlm": Layout(EOS, (EOS, EOS))}
"""By the name that `data_prep mix --layout` and `model.layout` have for them; under xlm positions restart on the second side."""


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
