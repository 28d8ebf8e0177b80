"""Prepares monolingual sentences for translation (XLM; Conneau and Lample, 2019): makes a noised copy of each sentence
for denoising auto-encoding, and draws the language into which back-translation translates the sentence.

Copy and language depend only on the seed, the row and the row's number. Their random numbers are independent of all
other random numbers. B rows, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba.types import int32, int64, uint64, void

from ..config import weight_at
from ..data.batch import Batch
from ..data.collate import collate
from ..data.compiled import compiled, readonly
from ..data.masking import Array, TaskRows, Word, philox
from ..data.rows import EOS, PAD, TASKS

# The noise of XLM, by its names. A token moves by fewer positions than WORD_SHUFFLE. A share WORD_DROPOUT of a
# sentence's tokens is dropped, and a share WORD_BLANK of the others is masked.
WORD_SHUFFLE = 3
WORD_DROPOUT, WORD_BLANK = 0.1, 0.1
# Stands in place of a task's index in Philox's counter. No task has this index, so no other draw has the same counter.
_TASK = np.uint64(len(TASKS))
_TO_UNIT = 2.0**-32  # factor from 32 random bits to [0, 1)
_LOW_MASK, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True)
class SentenceInputs:
    """Makes batches (`Collate`), which have noised copies if the weight of denoising is not 0 in the step, and target
    languages if the weight of back-translation is not 0 (`config.weight_at`)."""

    denoising: tuple[str, ...]
    back_translation: tuple[str, ...]
    languages: tuple[int, ...]  # indices of the languages of the rows
    mask: int  # id of `<mask>`

    def __call__(self, task_rows: TaskRows, seed: int, mask_fraction: float, step: int) -> Batch:
        """The batch that `collate` makes, with `noised_BT` and `target_languages_BT` added, int64 [B, T], each only if
        the step needs it."""
        batch = collate(task_rows, seed, mask_fraction)
        noised_BT, target_languages_BT = np.full((2, *batch.tokens_BT.shape), PAD, dtype=np.int64)
        first = 0  # index in the batch of the task's first row
        for task, rows, row_numbers in task_rows:
            if task == TASKS.index("mono"):
                end, key = first + len(rows.tokens), np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
                of_task = noised_BT[first:end], target_languages_BT[first:end]
                _noise(*rows, row_numbers, key, self.mask, np.array(self.languages), *of_task)
            first += len(rows.tokens)
        if weight_at(self.denoising, step):
            batch = batch.with_added(noised_BT=torch.from_numpy(noised_BT))
        if weight_at(self.back_translation, step):
            batch = batch.with_added(target_languages_BT=torch.from_numpy(target_languages_BT))
        return batch


@compiled(
    void(
        *(
            readonly(int32, 2),
            readonly(int64),
            readonly(int64),
            readonly(int64),
            readonly(int64),
            uint64,
            int64,
            int64[::1],
        ),
        *(int64[:, ::1], int64[:, ::1]),
    )
)
def _noise(
    tokens_BT: Array,
    item_counts_B: Array,
    lengths: Array,
    languages: Array,
    numbers_B: Array,
    seed: Word,
    mask: int,
    language_indices: Array,
    noised_BT: Array,
    target_languages_BT: Array,
) -> None:
    """Fill `noised_BT` and `target_languages_BT` in the columns of each item. An item is one sentence.

    `noised_BT` gets a noised copy; the columns between its end and the end of the item keep `<pad>`.
    `target_languages_BT` gets the language to translate the item into, drawn uniformly from `language_indices` without
    the item's own language.

    The tokens of a sentence are sorted by i + u, where i is the position and u is uniform in [0, WORD_SHUFFLE). Then
    tokens are dropped with probability WORD_DROPOUT, and each other one becomes `<mask>` with probability WORD_BLANK.
    At least one token is not dropped.
    """
    width = tokens_BT.shape[1]
    keys_T, drops_T, blanks_T = np.empty(width), np.empty(width), np.empty(width)
    item = 0
    for row in range(len(tokens_BT)):
        number, start = np.uint64(numbers_B[row]), 0
        for _ in range(item_counts_B[row]):
            stop = start + lengths[item]
            own_index = 0
            while language_indices[own_index] != languages[item] and own_index < len(language_indices) - 1:
                own_index += 1
            draw = philox(np.uint64(start), _TASK, number & _LOW_MASK, number >> _WORD_BITS, seed)[3]
            others = np.uint64(max(len(language_indices) - 1, 1))
            target_index = (own_index + 1 + int(draw * others >> _WORD_BITS)) % len(language_indices)
            target_languages_BT[row, start:stop] = language_indices[target_index]
            for column in range(start + 1, stop - 1):
                move, drop, blank, _ = philox(np.uint64(column), _TASK, number & _LOW_MASK, number >> _WORD_BITS, seed)
                keys_T[column] = column + WORD_SHUFFLE * (move * _TO_UNIT)
                drops_T[column], blanks_T[column] = drop * _TO_UNIT, blank * _TO_UNIT
            threshold = min(WORD_DROPOUT, drops_T[start + 1 : stop - 1].max())  # the token with the largest draw stays
            noised_BT[row, start] = tokens_BT[row, start]
            write_column = start + 1
            for index in np.argsort(keys_T[start + 1 : stop - 1]):
                column = start + 1 + index
                if drops_T[column] >= threshold:
                    noised_BT[row, write_column] = mask if blanks_T[column] < WORD_BLANK else tokens_BT[row, column]
                    write_column += 1
            noised_BT[row, write_column] = EOS
            start = stop
            item += 1
