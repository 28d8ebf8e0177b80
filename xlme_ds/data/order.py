"""The rows of a step: the order of the data as arithmetic, independent of ranks, micro-batches and restarts.

Step s of a run reads rows [s·B, (s+1)·B) of each task, where B is that task's rows a step. Where tasks alternate it
reads rows [k·B, (k+1)·B) of one of them, with k = s/2 rounded down. Row numbers never end: number n is record n mod N
of the data, so a second pass has new numbers, and with them new masks. A run whose data change has phases; row
numbers continue across their borders, and n is taken modulo the rows of the phase's data.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ..config import DataConfig
from .rows import TASKS


class Phase(NamedTuple):
    """Consecutive steps that read one folder: the first of them, and the share of tokens that are predicted."""

    first: int
    mask_fraction: float


def phases(data: DataConfig, mask_fraction: float) -> list[Phase]:
    """The phases of a run, whose share of predicted tokens is `mask_fraction` where `data` has no others.

    Raises ValueError for shares of another number of phases.
    """
    starts = [0, *accumulate(data.phase_steps)]
    fractions = data.phase_mask_fractions or (mask_fraction,) * len(starts)
    if len(fractions) != len(starts):
        raise ValueError(
            f"data.phase_mask_fractions has {len(fractions)} numbers, data.phase_steps are of {len(starts)} folders: "
            "it needs one for each"
        )
    return [Phase(*phase) for phase in zip(starts, fractions, strict=True)]


def phase_shares(of_run: Sequence[Phase], steps: int) -> list[float]:
    """The share of a run's steps, and so of its rows, that each phase has."""
    return [(end - first) / steps for first, end in pairwise([*(phase.first for phase in of_run), steps])]


def phase_of(of_run: Sequence[Phase], step: int) -> int:
    """The index of a step's phase."""
    return bisect_right(of_run, step, key=lambda phase: phase.first) - 1


@dataclass(frozen=True)
class StepPlan:
    """The cut of a step's rows into micro-batches over `world` ranks.

    `rows[t]`: task t's rows a step; `micro[t]`: its rows in one micro-batch; `accumulation`: micro-batches a rank runs.
    """

    rows: tuple[int, ...]
    micro: tuple[int, ...]
    accumulation: int
    world: int
    alternate: bool = False

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch."""
        return max(self.micro) if self.alternate else sum(self.micro)

    def step_rows(self, step: int, task: int) -> range:
        """Row numbers of one step; none for a task without rows, or when it is the other task's turn."""
        if self.alternate:
            step, turn = divmod(step, len(TASKS))
            if turn != task:
                return range(0)
        return range(step * self.rows[task], (step + 1) * self.rows[task])

    def numbers(self, step: int, rank: int, micro_batch: int, task: int) -> np.ndarray:
        """Row numbers, int64, of one micro-batch of one rank."""
        first = (micro_batch * self.world + rank) * self.micro[task]
        mine = self.step_rows(step, task)[first : first + self.micro[task]]
        return np.arange(mine.start, mine.stop)


def plan_step(data: DataConfig, world: int) -> StepPlan:
    """Cut the rows of a step; every micro-batch holds the tasks in the proportion of the step.

    Raises ValueError when the rows do not divide among the ranks.
    """
    rows = (data.mono_rows, data.para_rows)
    accumulation = -(-max(rows) // (data.micro_batch * world))
    pieces = accumulation * world
    for task, count in zip(TASKS, rows, strict=True):
        if count % pieces:
            raise ValueError(
                f"data.{task}_rows {count} does not divide into {world} processes × {accumulation} micro-batches of at "
                f"most data.micro_batch {data.micro_batch} rows: choose a multiple of {pieces} rows, or another "
                "data.micro_batch"
            )
    return StepPlan(rows, tuple(count // pieces for count in rows), accumulation, world, data.alternate)
