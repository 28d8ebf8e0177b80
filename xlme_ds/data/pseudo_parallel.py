"""Pseudo-parallel rows: open places after the sentence of a monolingual row (ERNIE-M, section 3.1: BTMLM).

`<s> x </s>` becomes `<s> x </s> y </s>`. Until the model fills them, the places y hold `<pad>`, which occurs in no
other item. If the row has no room for y, the end of x is cut. B rows, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .batch import Batch
from .collate import collate
from .corrupt import TaskRows, row_bits
from .rows import EOS, PAD, TASKS, Rows

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class PseudoSides:
    """Opens places after each sentence; draws the number of places, and the language in which the model fills them."""

    fractions: tuple[float, ...]  # number of places per token of x; every item draws one of these
    languages: tuple[int, ...]  # those of the rows; every item draws one other than its own, uniformly

    def collate(self, parts: TaskRows, seed: int, mask_fraction: float) -> Batch:
        """`collate` for monolingual rows with open places: positions are masked in what remains of x, and y is the
        second side.

        The batch has the added tensor `open_P`: the open places, as ascending indices into the flattened tokens.
        """
        ((task, rows, numbers),) = parts
        assert task == TASKS.index("mono") and (rows.items == 1).all()
        opened, languages_B = self.append(rows, numbers, seed)
        batch = collate([(task, opened, numbers)], seed, mask_fraction)
        inside_BT = batch.segments_BT > 0
        open_BT = (batch.tokens_BT == PAD) & inside_BT
        second_BT = open_BT.cummax(1).values & inside_BT
        languages_BT = torch.where(second_BT, torch.from_numpy(languages_B)[:, None], batch.languages_BT)
        open_P = open_BT.flatten().nonzero().squeeze(1)  # on the CPU: on a GPU the host would wait for `nonzero`
        return batch._replace(sides_BT=second_BT.long(), languages_BT=languages_BT).with_added(open_P=open_P)

    def append(self, rows: Rows, numbers: np.ndarray, seed: int) -> tuple[Rows, np.ndarray]:
        """The rows with open places, and the language of each row's places, int64 [B].

        The first n tokens of x stay, as many as leave room, and max(1, round(fraction · n)) places follow. Both draws
        are a function of (seed, row number): they use the counter of the row's first token, which is never masked.
        """
        count, width = rows.tokens.shape
        bits = row_bits(numbers, seed, TASKS.index("mono"), column=0)
        fractions = np.array(self.fractions)[_below(len(self.fractions), bits & _LOW)]
        length_of_x = np.minimum(rows.lengths - 2, ((width - 3) / (1 + fractions)).astype(np.int64))
        places = np.clip(np.floor(fractions * length_of_x + 0.5).astype(np.int64), 1, width - 3 - length_of_x)
        lengths = length_of_x + places + 3
        tokens = np.where(np.arange(width) <= length_of_x[:, None], rows.tokens, np.int32(PAD))
        tokens[np.arange(count), length_of_x + 1] = tokens[np.arange(count), lengths - 1] = EOS
        languages = np.sort(self.languages)
        shift = _below(max(len(languages) - 1, 1), bits >> _HALF) + (len(languages) > 1)
        second = languages[(np.searchsorted(languages, rows.languages) + shift) % len(languages)]
        return Rows(tokens, rows.items, lengths, rows.languages), second


def _below(count: int, bits: np.ndarray) -> np.ndarray:
    """Random integers from 0 to count − 1, each from 32 random bits, int64."""
    return ((bits * np.uint64(count)) >> _HALF).astype(np.int64)
