"""A training row in plain numpy: special token ids, the tasks, layouts of items, and rows as arrays."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# XLM-R's id layout: four specials, the SentencePiece pieces, and `<mask>` as the last id of the vocabulary.
BOS, PAD, EOS, UNK = 0, 1, 2, 3
PIECE_OFFSET = 1  # SentencePiece's own ids start <unk>, <s>, </s>; fairseq's and so XLM-R's put <pad> in between

TASKS = ("mono", "para")


@dataclass(frozen=True)
class Layout:
    """The special tokens of an item: `opening text </s>`, or for a pair (e, f) `opening e between f </s>`."""

    opening: int
    between: tuple[int, ...]  # between the two sides of a pair

    @property
    def pair_specials(self) -> int:
        """Special tokens of a pair."""
        return 2 + len(self.between)

    def item(self, first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
        """The ids of an item of one side or two, given without special tokens."""
        sides = [first] if second is None else [first, self.between, second]
        return np.concatenate([[self.opening], *sides, [EOS]]).astype(np.int32)


# By their names in `xlme prep mix --layout` and `model.layout`; under xlm positions restart on the second side.
LAYOUTS = {"xlme": Layout(BOS, (EOS,)), "xlm": Layout(EOS, (EOS, EOS))}


class Rows(NamedTuple):
    """Training rows as arrays, in reading order.

    `tokens` int32 [B, T]; `items` int64 [B]: items of each row; `lengths` int64: tokens of all items, row after row;
    `languages` int64: language indices of all sides, row after row.
    """

    tokens: np.ndarray
    items: np.ndarray
    lengths: np.ndarray
    languages: np.ndarray
