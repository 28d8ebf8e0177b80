"""Training rows in plain numpy: special token ids, the tasks, layouts of items, and rows as arrays. An item is one text
or one translation pair, with its special tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# XLM-R's id layout: four special tokens, the SentencePiece pieces, and `<mask>` as the last id of the vocabulary.
BOS, PAD, EOS, UNK = 0, 1, 2, 3
PIECE_OFFSET = 1  # is added to a piece's SentencePiece id: before the pieces, XLM-R has one id more, <pad>

TASKS = ("mono", "para")  # monolingual text, translation pairs


@dataclass(frozen=True)
class Layout:
    """The special tokens of an item: `opening text </s>`, or for a pair (e, f) `opening e between f </s>`."""

    opening: int
    between: tuple[int, ...]

    @property
    def pair_specials(self) -> int:
        """The number of special tokens of a pair."""
        return 2 + len(self.between)

    def item(self, first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
        """The ids of an item, int32, from its one or two sides without special tokens."""
        sides = [first] if second is None else [first, self.between, second]
        return np.concatenate([[self.opening], *sides, [EOS]]).astype(np.int32)


# The layouts of `xlme prep mix --layout` and `model.layout`. In the layout xlm, positions restart on the second side.
LAYOUTS = {"xlme": Layout(BOS, (EOS,)), "xlm": Layout(EOS, (EOS, EOS))}


def batches_by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield the indices of items with these `lengths` in batches of `size`. Items of similar lengths are in one batch,
    which needs little padding then; the shortest come first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    yield from (order[start : start + size] for start in range(0, len(order), size))


class Rows(NamedTuple):
    """Training rows as arrays, in reading order."""

    tokens: np.ndarray  # int32 [B, T]
    item_counts: np.ndarray  # int64 [B]: the number of items in each row
    lengths: np.ndarray  # int64: the number of tokens of each item, row after row
    languages: np.ndarray  # int64: the language index of each side of each item, row after row

    def texts(self) -> list[np.ndarray]:
        """The ids of every text, row after row, without special tokens. A text is not empty; a pair is two texts."""
        places = np.flatnonzero(self.tokens >= UNK)  # smaller ids are of `<s>`, `<pad>` and `</s>`, which end texts
        return np.split(self.tokens.ravel()[places], np.flatnonzero(np.diff(places) > 1) + 1)
