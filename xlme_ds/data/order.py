"""The rows that each step reads, computed from its number: independent of ranks, micro-batches and restarts.

Step s of a run reads rows [s·B, (s+1)·B) of each task, where B is the task's number of rows in a step. If tasks
alternate, it reads rows [k·B, (k+1)·B) of one of them, with k = s/2 rounded down. Row numbers never end: row n is
record n mod N of the N records of the data, so a second pass has new numbers, and with them new masks. A run that
changes its data has phases: row numbers continue from one to the next, and N is that of the phase's data. A step has
the same number of tokens in every phase: if rows are c times as long, B is c times smaller.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ..config import DataConfig
from .rows import TASKS


class Phase(NamedTuple):
    """Consecutive steps that read one folder: the first step, the share of tokens that are predicted, and the model's
    `rotary_base` (None: that of the settings)."""

    first: int
    mask_fraction: float
    rotary_base: float | None


def phases(data: DataConfig, mask_fraction: float) -> list[Phase]:
    """The phases of a run. `mask_fraction`: the share of tokens that a phase predicts, unless `data` has one for each.

    Raises ValueError if the number of shares or rotary bases does not fit the number of phases.
    """
    starts = [0, *accumulate(data.phase_steps)]
    fractions = data.phase_mask_fractions or (mask_fraction,) * len(starts)
    if len(fractions) != len(starts):
        raise ValueError(
            f"data.phase_mask_fractions has {len(fractions)} numbers, data.phase_steps are of {len(starts)} folders: "
            "it needs one for each"
        )
    bases = data.phase_rotary_bases or (None,) * len(data.phase_steps)
    if len(bases) != len(data.phase_steps):
        raise ValueError(
            f"data.phase_rotary_bases has {len(bases)} numbers, data.phase_steps {len(data.phase_steps)}: it needs one "
            "for each, and the last folder is read with model.rotary_base"
        )
    return [Phase(*phase) for phase in zip(starts, fractions, (*bases, None), strict=True)]


def phase_shares(run_phases: Sequence[Phase], steps: int) -> list[float]:
    """Each phase's share of a run's `steps`, and so of its tokens."""
    return [(end - first) / steps for first, end in pairwise([*(phase.first for phase in run_phases), steps])]


def phase_index(run_phases: Sequence[Phase], step: int) -> int:
    """The index of a step's phase."""
    return bisect_right(run_phases, step, key=lambda phase: phase.first) - 1


@dataclass(frozen=True)
class StepPlan:
    """How a step's rows are split into micro-batches over `world` ranks.

    `rows[t]`: rows of task t in a step; `micro[t]`: rows of task t in a micro-batch; `accumulation`: micro-batches of a
    rank in a step. `first`: the step at which the plan's phase begins; `read[t]`: rows of task t that earlier phases
    read.
    """

    rows: tuple[int, ...]
    micro: tuple[int, ...]
    accumulation: int
    world: int
    alternate: bool = False
    first: int = 0
    read: tuple[int, ...] = (0,) * len(TASKS)

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch."""
        return max(self.micro) if self.alternate else sum(self.micro)

    def step_rows(self, step: int, task: int) -> range:
        """Row numbers of one task in a step; none if it has no rows, or if it is the other task's turn."""
        if self.alternate and step % len(TASKS) != task:
            return range(0)
        first = self._read_before(step, task)
        return range(first, first + self.rows[task])

    def _read_before(self, step: int, task: int) -> int:
        """Rows of a task that the steps before `step` read."""
        # Steps with rows of the task, before the phase and before `step`: where tasks alternate, every other step.
        earlier, all_before = (-(-(end - task) // len(TASKS)) if self.alternate else end for end in (self.first, step))
        return self.read[task] + (all_before - earlier) * self.rows[task]

    def followed_by(self, first: int, length_ratio: Fraction) -> "StepPlan":
        """The plan of the next phase, which begins at step `first` and whose rows are `length_ratio` times as long as
        this one's. Raises ValueError where its steps or micro-batches would not have whole rows."""
        rows, micro = ([count / length_ratio for count in counts] for counts in (self.rows, self.micro))
        if any(count.denominator != 1 for count in (*rows, *micro)):
            raise ValueError(
                f"data.phase_steps: from step {first} on rows are {length_ratio} times as long, so that a step would "
                f"have {' + '.join(map(str, rows))} rows and a micro-batch {' + '.join(map(str, micro))}: choose "
                "data.mono_rows, data.para_rows and data.micro_batch that give whole numbers"
            )
        read = tuple(self._read_before(first, task) for task in range(len(self.rows)))
        return replace(self, rows=tuple(map(int, rows)), micro=tuple(map(int, micro)), first=first, read=read)

    def numbers(self, step: int, rank: int, micro_batch: int, task: int) -> np.ndarray:
        """Row numbers, int64, of one micro-batch of one rank."""
        first = (micro_batch * self.world + rank) * self.micro[task]
        rows = self.step_rows(step, task)[first : first + self.micro[task]]
        return np.arange(rows.start, rows.stop)


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


def phase_plans(run_phases: Sequence[Phase], plan: StepPlan, row_lengths: Sequence[int]) -> list[StepPlan]:
    """The plan of each phase. `plan`: the first phase's; `row_lengths`: tokens of a row in each phase. Raises
    ValueError if a later phase would not have whole rows in a step or micro-batch."""
    plans = [plan]
    for phase, (before, tokens) in zip(run_phases[1:], pairwise(row_lengths), strict=True):
        plans.append(plans[-1].followed_by(phase.first, Fraction(tokens, before)))
    return plans
