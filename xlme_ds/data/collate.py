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
    positions, segments = item_layout(rows)
    sides, languages, positions = side_layout(rows, positions, segments, tasks)
    masked, uniforms = corrupt(rows.tokens, segments, numbers, seed, tasks, mask_fraction)
    layout = rows.tokens.astype(np.int64), positions, segments, sides, languages
    randomness = row_keys(numbers, seed, tasks), masked, uniforms
    return Batch(*(torch.from_numpy(array) for array in (*layout, tasks, *randomness)))


def item_layout(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of packed rows, both int64 [B, T] (see Batch)."""
    batch, width = rows.tokens.shape
    last = np.cumsum(rows.items)  # behind each row's items
    row_of_item = np.repeat(np.arange(batch), rows.items)
    used = np.diff(np.concatenate([[0], np.cumsum(rows.lengths)])[np.concatenate([[0], last])])
    # A stretch is an item or, behind each row's items, its padding, of any length: number 0.
    lengths = np.insert(rows.lengths, last, width - used)
    numbers = np.insert(np.arange(1, len(rows.lengths) + 1) - (last - rows.items)[row_of_item], last, 0)
    segments = np.repeat(numbers, lengths)
    positions = np.arange(batch * width) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    padding = segments == 0
    positions[padding] = 0
    assert (rows.tokens.ravel()[padding] == PAD).all()
    return positions.reshape(batch, width), segments.reshape(batch, width)


def side_layout(
    rows: Rows, positions: np.ndarray, segments: np.ndarray, tasks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sides, languages and positions of the tokens, int64 [B, T] (see Batch), from their items and each row's task.

    The first side of a pair ends with the first `</s>` behind the item's first token. Where that one is a `</s>` too the rows are
    laid out as XLM's, and positions restart. Raises ValueError for a pair without a second side, and where there are not as many
    languages as sides.
    """
    shape, padding = positions.shape, segments.ravel() == 0
    starts = np.flatnonzero((positions.ravel() == 0) & ~padding)
    pairs = starts[tasks[starts // shape[1]] == TASKS.index("para")]
    ends = np.append(np.flatnonzero(rows.tokens.ravel() == EOS), padding.size)
    second = ends[np.searchsorted(ends, pairs, side="right")] + 1
    inside = positions.ravel()[np.minimum(second, padding.size - 1)] == second - pairs
    if not inside.all() or len(starts) + len(second) != len(rows.languages):
        raise ValueError("a row has a pair without two sides, or a side without a language: mix the data again")
    begins = np.zeros(padding.size, dtype=np.int64)
    begins[starts] = begins[second] = 1
    number = np.cumsum(begins) - 1
    side_of = np.zeros(len(rows.languages), dtype=np.int64)
    side_of[number[second]] = 1
    sides, languages = side_of[number], rows.languages[number]
    sides[padding] = languages[padding] = 0
    if len(pairs) and rows.tokens.ravel()[pairs[0]] == LAYOUTS["xlm"].opening:
        before = np.zeros(len(rows.languages), dtype=np.int64)
        before[number[second]] = second - pairs
        positions = positions - before[number].reshape(shape) * (segments > 0)
    return sides.reshape(shape), languages.reshape(shape), positions
