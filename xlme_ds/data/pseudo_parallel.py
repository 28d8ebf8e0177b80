"""Pseudo-parallel rows: open positions after the sentence of a monolingual row (ERNIE-M, section 3.1: BTMLM).

`<s> x </s>` becomes `<s> x </s> y </s>`. The positions y are open: until the model fills them, they hold `<pad>`, which
occurs nowhere else inside an item. If the row has no room for y, the end of x is removed. B rows, T tokens, P open
positions.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .batch import Batch
from .collate import collate
from .compiled import HALF, LOW
from .masking import TaskRows, row_bits
from .rows import EOS, PAD, TASKS, Rows


@dataclass(frozen=True)
class PseudoSides:
    """Opens a random number of positions after each sentence; the model fills them with text in a random language."""

    fractions: tuple[float, ...]  # open positions per token of x; one of these numbers is drawn for each row
    # Indices of languages; one of these is drawn for each y, but not the language of x, unless it is the only one.
    languages: tuple[int, ...]

    def collate(self, task_rows: TaskRows, seed: int, mask_fraction: float) -> Batch:
        """The batch of monolingual rows, of one item each, with open positions as the second side. Only tokens of x are
        masked.

        The batch has the added tensor `open_P`: the open positions, as ascending indices into the flattened tokens.
        """
        ((task, rows, row_numbers),) = task_rows
        assert task == TASKS.index("mono") and (rows.item_counts == 1).all()
        opened, languages_B = self.append(rows, row_numbers, seed)
        batch = collate([(task, opened, row_numbers)], seed, mask_fraction)
        in_item_BT = batch.segments_BT > 0
        open_BT = (batch.tokens_BT == PAD) & in_item_BT
        second_BT = open_BT.cummax(1).values & in_item_BT  # y and the `</s>` after it
        languages_BT = torch.where(second_BT, torch.from_numpy(languages_B)[:, None], batch.languages_BT)
        open_P = open_BT.flatten().nonzero().squeeze(1)  # on the CPU: on a GPU the host would wait for `nonzero`
        return batch._replace(sides_BT=second_BT.long(), languages_BT=languages_BT).with_added(open_P=open_P)

    def append(self, rows: Rows, row_numbers: np.ndarray, seed: int) -> tuple[Rows, np.ndarray]:
        """Returns (rows, languages): the rows with open positions, and the language of y in each row, int64 [B].

        The first n tokens of x are kept: all of them, but at most (T − 3) / (1 + fraction). After these tokens and a
        `</s>`, max(1, round(fraction · n)) positions are opened, or as many as the row has room for.
        Fraction and language are drawn from the random numbers of the row's first token, which depend on (seed, row
        number) alone. Masking does not use these numbers, because this token is never masked.
        """
        count, width = rows.tokens.shape
        bits = row_bits(row_numbers, seed, TASKS.index("mono"), column=0)
        fractions = np.array(self.fractions)[_draw_below(len(self.fractions), bits & LOW)]
        x_lengths = np.minimum(rows.lengths - 2, ((width - 3) / (1 + fractions)).astype(np.int64))
        y_lengths = np.clip(np.floor(fractions * x_lengths + 0.5).astype(np.int64), 1, width - 3 - x_lengths)
        lengths = x_lengths + y_lengths + 3  # 3 special tokens
        tokens = np.where(np.arange(width) <= x_lengths[:, None], rows.tokens, np.int32(PAD))
        tokens[np.arange(count), x_lengths + 1] = EOS
        tokens[np.arange(count), lengths - 1] = EOS
        languages = np.sort(self.languages)
        # With n languages, a shift by 1 to n − 1 leads to any other language. With a single one, the shift is 0.
        shift = _draw_below(max(len(languages) - 1, 1), bits >> HALF) + (len(languages) > 1)
        y_languages = languages[(np.searchsorted(languages, rows.languages) + shift) % len(languages)]
        return Rows(tokens, rows.item_counts, lengths, rows.languages), y_languages


def _draw_below(count: int, bits: np.ndarray) -> np.ndarray:
    """Integers from 0 to count − 1, int64, each from 32 random bits (uint64)."""
    return ((bits * np.uint64(count)) >> HALF).astype(np.int64)
