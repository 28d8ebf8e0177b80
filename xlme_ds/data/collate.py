"""Turns rows into batches: positions and segments of the packed items, sides, languages, and the corruption.

B rows, T tokens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from numba.types import boolean, int32, int64, void

from .batch import Batch
from .compiled import compiled, reads
from .corrupt import TOO_LONG, Array, TaskRows, corrupt, row_bits
from .rows import EOS, TASKS

if TYPE_CHECKING:  # this file runs where there is no pyarrow
    from .shards import RowStore

# train: as the step trains; evaluate: as training, but equal in every step; compare: only the tokens of the data, so
# that all models read the same; show: as `compare`, but each row is corrupted in one way only.
Purpose = Literal["train", "evaluate", "compare", "show"]
# Makes a batch; arguments: rows, seed, share of masked tokens, step.
Collate = Callable[[TaskRows, int, float, int], Batch]


class BatchMaker(Protocol):
    """The part of an objective that a loader needs: makes batches from rows."""

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """The function that makes batches from `rows`, and from the rows of the other task in the same folder."""


class RowBatches:
    """Makes batches without changing the rows."""

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """`collate`, in every step."""
        return lambda parts, seed, mask_fraction, step: collate(parts, seed, mask_fraction)

    def check_rows(self, rows: "RowStore", purpose: Purpose) -> None:
        """Accept all rows."""


_NO_COLUMN = 0xFFFFFFFF  # the column in the counter from which a row's key is drawn: no row is so long
_NO_SIDE = "a row has a pair without two sides, or a side without a language: mix the data again"


def collate(parts: TaskRows, seed: int, mask_fraction: float) -> Batch:
    """One batch of `parts`.

    The masked positions, uniforms and keys are a function of (seed, task, row number) and the row alone. Raises
    ValueError for an item that is longer than its row, for a pair without a second side, and for a side without a
    language.
    """
    batch, width = sum(len(rows.tokens) for _, rows, _ in parts), parts[0][1].tokens.shape[1]
    text_BT = np.empty((5, batch, width), dtype=np.int64)
    tasks_B, keys_B = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.int64)
    first = 0
    for task, rows, numbers in parts:
        last = first + len(rows.tokens)
        _lay_out(rows.tokens, rows.items, rows.lengths, rows.languages, task == TASKS.index("para"), text_BT, first)
        tasks_B[first:last] = task
        keys_B[first:last] = row_bits(numbers, seed, task, _NO_COLUMN).view(np.int64)
        first = last
    arrays = *text_BT, tasks_B, keys_B, *corrupt(parts, seed, mask_fraction)
    return Batch.of_tensors([torch.from_numpy(array) for array in arrays])


def languages_of_text(rows: "RowStore") -> tuple[int, ...]:
    """Indices into `rows.languages` of the languages that monolingual rows use; all indices if the manifest has no
    counts."""
    counts = rows.manifest.counts["by_language"] if rows.folder.name == "mono" else {}
    codes = [code for code in rows.manifest.languages if not counts or counts.get(code, {}).get("used")]
    return tuple(rows.languages.index(code) for code in codes)


@compiled(void(reads(int32, 2), reads(int64), reads(int64), reads(int64), boolean, int64[:, :, ::1], int64))
def _lay_out(
    tokens_BT: Array, items_B: Array, lengths: Array, languages: Array, pairs: bool, text_BT: Array, first: int
) -> None:
    """Write tokens, positions, segments, sides and languages to the five arrays of `text_BT` from row `first` on
    (see Batch).

    The first side of a pair ends with the first `</s>` after the item's first token. If the first token is itself a
    `</s>`, the rows have XLM's layout, and positions restart at the second side.
    """
    if len(languages) != len(lengths) * (1 + pairs):
        raise ValueError(_NO_SIDE)
    item = 0
    for row in range(len(tokens_BT)):
        tokens_T, at = tokens_BT[row], first + row
        text_BT[0, at] = tokens_T
        positions_T, segments_T, sides_T, languages_T = text_BT[1, at], text_BT[2, at], text_BT[3, at], text_BT[4, at]
        start = 0
        for number in range(1, items_B[row] + 1):
            stop = start + lengths[item]
            if not start < stop <= len(tokens_T):
                raise ValueError(TOO_LONG)
            second = stop
            if pairs:
                second = start + 1
                while second < stop and tokens_T[second] != EOS:
                    second += 1
                second += 1
                if second >= stop:
                    raise ValueError(_NO_SIDE)
            language, second_language = languages[item * (1 + pairs)], languages[item * (1 + pairs) + pairs]
            restart = second if tokens_T[start] == EOS else start
            for column in range(start, stop):
                after = column >= second
                positions_T[column] = column - (restart if after else start)
                segments_T[column] = number
                sides_T[column] = after
                languages_T[column] = second_language if after else language
            start = stop
            item += 1
        text_BT[1:, at, start:] = 0
