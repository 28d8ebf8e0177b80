"""Rows to batches: positions and segments of the packed items, sides and languages, and the corruption. B rows, T tokens."""

import numpy as np
import torch

from .batch import Batch
from .corrupt import corrupt, row_keys
from .rows import EOS, LAYOUTS, PAD, TASKS, Rows, joined

Parts = list[tuple[int, Rows, np.ndarray]]
"""Of every task its index, rows, and their row numbers in the run's endless order."""


def collate(parts: Parts, seed: int, mask_fraction: float) -> Batch:
    """One batch of `parts`.

    The masked positions, uniforms and keys are a function of (seed, task, row number) and the row alone.
    """
    rows = joined([part for _, part, _ in parts])
    tasks = np.repeat([task for task, _, _ in parts], [len(part.tokens) for _, part, _ in parts])
    numbers = np.concatenate([numbers for _, _, numbers in parts])
    positions, segments, sides, languages = item_layout(rows, tasks)
    masked, uniforms = corrupt(rows.tokens, segments, numbers, seed, tasks, mask_fraction)
    text = rows.tokens.astype(np.int64), positions, segments, sides, languages
    randomness = row_keys(numbers, seed, tasks), masked, uniforms
    return Batch(*(torch.from_numpy(array) for array in (*text, tasks, *randomness)))


def item_layout(rows: Rows, tasks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, segments, sides and languages of the tokens, int64 [B, T] (see Batch), from their items and each row's task.

    The first side of a pair ends with the first `</s>` behind the item's first token. Where that one is a `</s>` too the rows are
    laid out as XLM's, and positions restart. Raises ValueError for a pair without a second side, and where there are not as many
    languages as sides.
    """
    batch, width = rows.tokens.shape
    row = np.repeat(np.arange(batch), rows.items)  # of every item
    first_item = np.cumsum(rows.items) - rows.items
    ends = np.concatenate([[0], np.cumsum(rows.lengths)])
    used = ends[first_item + rows.items] - ends[first_item]
    starts = row * width + ends[:-1] - ends[first_item][row]
    # Its first side is as long as the item, but for pairs.
    pair = np.flatnonzero((tasks == TASKS.index("para"))[row])
    closing = np.append(np.flatnonzero(rows.tokens.ravel() == EOS), rows.tokens.size)
    first_side = closing[np.searchsorted(closing, starts[pair], side="right")] + 1 - starts[pair]
    if (first_side >= rows.lengths[pair]).any() or len(row) + len(pair) != len(rows.languages):
        raise ValueError("a row has a pair without two sides, or a side without a language: mix the data again")

    # A stretch is a side or, behind each row's, its padding, of any length. All values of a stretch are alike but the positions.
    sides = np.ones(len(row), dtype=np.int64)
    sides[pair] = 2
    stretch = np.cumsum(sides) - sides + row  # of every item's first side
    second = stretch[pair] + 1
    padding = np.cumsum(np.bincount(row, sides, batch).astype(np.int64)) + np.arange(batch)
    lengths, segment, side, language, origin = np.zeros((5, len(rows.languages) + batch), dtype=np.int64)
    lengths[stretch], lengths[second], lengths[padding] = rows.lengths, rows.lengths[pair] - first_side, width - used
    lengths[second - 1] = first_side
    segment[stretch] = np.arange(1, len(row) + 1) - first_item[row]
    segment[second], side[second] = segment[second - 1], 1
    language[segment > 0] = rows.languages
    origin[stretch] = starts
    restarts = len(pair) and rows.tokens.ravel()[starts[pair[0]]] == LAYOUTS["xlm"].opening
    origin[second] = starts[pair] + (first_side if restarts else 0)

    segments = np.repeat(segment, lengths)
    positions = np.arange(batch * width) - np.repeat(origin, lengths)
    positions[segments == 0] = 0
    assert (rows.tokens.ravel()[segments == 0] == PAD).all()
    arrays = positions, segments, np.repeat(side, lengths), np.repeat(language, lengths)
    return tuple(array.reshape(batch, width) for array in arrays)  # type: ignore[return-value]
