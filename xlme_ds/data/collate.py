"""Turns rows into batches (`Batch`): positions, segments, sides and languages of the packed items, and the masks.

B rows, T tokens.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch
from numba.types import boolean, int32, int64, void

from .batch import Batch
from .compiled import Array, compiled, readonly
from .masking import TOO_LONG, TaskRows, draw_masks, row_bits
from .rows import EOS, TASKS
from .shards import RowStore

# What a batch is for.
# train: it may depend on the step.
# evaluate: it is made as in training, but is the same in every step.
# compare: it has only tokens of the data, and no tokens that a model writes, so that all models read the same tokens.
# show: it is as in `compare`; if the objective corrupts text in several ways, only one of these is used.
Purpose = Literal["train", "evaluate", "compare", "show"]
# A function that makes a batch from rows, seed, share of masked tokens, and step.
Collate = Callable[[TaskRows, int, float, int], Batch]


class BatchMaker(Protocol):
    """The part of an objective that a loader needs."""

    def collate_for(self, rows: RowStore, purpose: Purpose) -> Collate:
        """The function that makes batches from `rows` and the rows of the other task, which are in the same folder."""


# `row_bits` draws a row's seed as if for a token in this column. No row is long enough to have a token there.
_SEED_COLUMN = 0xFFFFFFFF
_MISSING_SIDE = "a row has a pair without two sides, or a side without a language: mix the data again"


def collate(task_rows: TaskRows, seed: int, mask_fraction: float, step: int = 0) -> Batch:
    """One batch of the rows of all tasks, the same for any `step`.

    A row's masked positions, their uniforms and the row's seed (see `Batch`) depend only on the row itself, on (seed,
    task, row number) and on `mask_fraction`. Raises ValueError for an item that is empty or longer than its row, for a
    pair without a second side, and for a side without a language.
    """
    batch_rows, width = sum(len(rows.tokens) for _, rows, _ in task_rows), task_rows[0][1].tokens.shape[1]
    text_5BT = np.empty((5, batch_rows, width), dtype=np.int64)
    tasks_B, seeds_B = np.empty(batch_rows, dtype=np.int64), np.empty(batch_rows, dtype=np.int64)
    start = 0
    for task, rows, row_numbers in task_rows:
        stop = start + len(rows.tokens)
        _lay_out(
            rows.tokens, rows.item_counts, rows.lengths, rows.languages, task == TASKS.index("para"), text_5BT, start
        )
        tasks_B[start:stop] = task
        seeds_B[start:stop] = row_bits(row_numbers, seed, task, _SEED_COLUMN).view(np.int64)
        start = stop
    arrays = *text_5BT, tasks_B, seeds_B, *draw_masks(task_rows, seed, mask_fraction)
    return Batch.of_tensors([torch.from_numpy(array) for array in arrays])


def languages_of_text(rows: RowStore) -> tuple[int, ...]:
    """The languages in which `rows` have text, as indices into `rows.languages`."""
    return tuple(map(rows.languages.index, rows.languages_of_text()))


@compiled(void(readonly(int32, 2), readonly(int64), readonly(int64), readonly(int64), boolean, int64[:, :, ::1], int64))
def _lay_out(
    tokens_BT: Array,
    item_counts_B: Array,
    lengths: Array,
    languages: Array,
    pairs: bool,
    text_5BT: Array,
    first_row: int,
) -> None:
    """Write tokens, positions, segments, sides and languages (see `Batch`) to the five arrays of `text_5BT`, from row
    `first_row` on. `lengths` and `languages` are those of `Rows`; `pairs` is true if each item has two sides.

    The first side of a pair ends with the first `</s>` after the item's first token. If the first token is a `</s>`
    too, the rows have XLM's layout, and positions restart on the second side.
    """
    sides = 2 if pairs else 1
    if len(languages) != len(lengths) * sides:
        raise ValueError(_MISSING_SIDE)
    item = 0
    for row in range(len(tokens_BT)):
        tokens_T, batch_row = tokens_BT[row], first_row + row
        text_5BT[0, batch_row] = tokens_T
        positions_T, segments_T = text_5BT[1, batch_row], text_5BT[2, batch_row]
        sides_T, languages_T = text_5BT[3, batch_row], text_5BT[4, batch_row]
        start = 0
        for segment in range(1, item_counts_B[row] + 1):
            stop = start + lengths[item]
            if not start < stop <= len(tokens_T):
                raise ValueError(TOO_LONG)
            second_start = stop
            if pairs:
                second_start = start + 1
                while second_start < stop and tokens_T[second_start] != EOS:
                    second_start += 1
                second_start += 1
                if second_start >= stop:
                    raise ValueError(_MISSING_SIDE)
            # Without pairs an item has one language, and both variables hold it.
            language, second_language = languages[item * sides], languages[item * sides + sides - 1]
            # The column from which the positions of the second side are counted.
            second_zero = second_start if tokens_T[start] == EOS else start
            for column in range(start, stop):
                is_second = column >= second_start
                positions_T[column] = column - (second_zero if is_second else start)
                segments_T[column] = segment
                sides_T[column] = is_second
                languages_T[column] = second_language if is_second else language
            start = stop
            item += 1
        text_5BT[1:, batch_row, start:] = 0
