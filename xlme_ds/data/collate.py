"""Rows to batches: positions and segments of the packed items, and the corruption."""

import numpy as np
import torch

from .batch import Batch
from .corrupt import corrupt
from .rows import PAD, Rows


def collate(parts: list[tuple[int, Rows, np.ndarray]], seed: int, mask_fraction: float) -> Batch:
    """One batch of `parts`, each (task index, rows, their row numbers in the run's endless order).

    The masked positions and uniforms are a function of (seed, task, row number) and the row alone.
    """
    tokens, positions, segments, tasks, masked, uniforms = [], [], [], [], [], []
    offset = 0
    for task, rows, numbers in parts:
        position, segment = item_layout(rows)
        where, uniform = corrupt(rows.tokens, segment, numbers, seed, task, mask_fraction)
        tokens.append(rows.tokens)
        positions.append(position)
        segments.append(segment)
        tasks.append(np.full(len(rows.tokens), task))
        masked.append(where + offset)
        uniforms.append(uniform)
        offset += rows.tokens.size
    return Batch(
        _joined(tokens), _joined(positions), _joined(segments), _joined(tasks), _joined(masked),
        torch.from_numpy(np.concatenate(uniforms)),
    )  # fmt: skip


def _joined(group: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(group).astype(np.int64))


def item_layout(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of packed rows, both int64 [B, T] (see Batch)."""
    batch, width = rows.tokens.shape
    ends = np.cumsum(rows.lengths)  # over all rows
    items_before = np.concatenate([[0], np.cumsum(rows.items)])
    row_of_item = np.repeat(np.arange(batch), rows.items)
    row_start = np.concatenate([[0], ends])[items_before[:-1]]
    starts = ends - rows.lengths - row_start[row_of_item] + row_of_item * width
    flat = np.repeat(starts, rows.lengths) + _ranges(rows.lengths)
    positions = np.zeros(batch * width, dtype=np.int64)
    segments = np.zeros(batch * width, dtype=np.int64)
    positions[flat] = _ranges(rows.lengths)
    segments[flat] = np.repeat(np.arange(len(row_of_item)) - items_before[row_of_item] + 1, rows.lengths)
    assert (rows.tokens.ravel()[segments == 0] == PAD).all()
    return positions.reshape(batch, width), segments.reshape(batch, width)


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """0..n−1 for every n, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
