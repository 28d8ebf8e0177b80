"""The rows that each step reads. They depend on the step's index alone, not on ranks, micro-batches or restarts.

Step s of a run reads rows [s·B, (s+1)·B) of each task, where B is the task's number of rows in a step. If tasks
alternate, step s reads rows [k·B, (k+1)·B) of one task, with k = s/2 rounded down. Row numbers never end: row n is
record n mod N of the N records of the data. So in a second pass over the data every record has a new row number, and
with it new masks. A run that changes its data has phases: row numbers continue from one phase to the next, and N is the
number of records in the phase's data. All steps have the same number of tokens: if rows become c times as long, B is
divided by c.
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
    """Consecutive steps that read one folder."""

    first_step: int
    mask_fraction: float  # share of the tokens that are predicted
    rotary_base: float | None  # replaces `model.rotary_base` in this phase, unless it is None


def phases(data: DataConfig, mask_fraction: float) -> list[Phase]:
    """The phases of a run. All have `mask_fraction`, unless `data` sets a fraction for each phase.

    Raises ValueError if the number of mask fractions or rotary bases does not fit the number of phases.
    """
    starts = [0, *accumulate(data.phase_steps)]
    fractions = data.phase_mask_fractions or (mask_fraction,) * len(starts)
    if len(fractions) != len(starts):
        raise ValueError(
            f"data.phase_mask_fractions has {len(fractions)} numbers, but data.phase_steps is for {len(starts)} "
            "folders: give one number per folder"
        )
    bases = data.phase_rotary_bases or (None,) * len(data.phase_steps)
    if len(bases) != len(data.phase_steps):
        raise ValueError(
            f"data.phase_rotary_bases has {len(bases)} numbers, but data.phase_steps has {len(data.phase_steps)}: give "
            "one number per folder, except for the last folder, which has model.rotary_base"
        )
    return [Phase(*phase) for phase in zip(starts, fractions, (*bases, None), strict=True)]


def phase_shares(run_phases: Sequence[Phase], steps: int) -> list[float]:
    """Each phase's share of a run's `steps`, and so of its tokens."""
    borders = [*(phase.first_step for phase in run_phases), steps]
    return [(end - start) / steps for start, end in pairwise(borders)]


def phase_index(run_phases: Sequence[Phase], step: int) -> int:
    """The index of a step's phase."""
    return bisect_right(run_phases, step, key=lambda phase: phase.first_step) - 1


@dataclass(frozen=True)
class StepPlan:
    """The split of a step's rows into micro-batches over `world` ranks, in one phase of a run."""

    rows_per_step: tuple[int, ...]  # number of rows of each task in a step
    rows_per_micro_batch: tuple[int, ...]  # number of rows of each task in a micro-batch
    accumulation: int  # number of micro-batches of a rank in a step
    world: int
    alternate: bool = False  # whether even steps read only monolingual rows, and odd steps only pairs
    first_step: int = 0  # the phase's first step
    rows_before_phase: tuple[int, ...] = (0,) * len(TASKS)  # number of rows of each task that earlier phases read

    @property
    def micro_batch_size(self) -> int:
        """The number of rows of a micro-batch."""
        return max(self.rows_per_micro_batch) if self.alternate else sum(self.rows_per_micro_batch)

    def step_rows(self, step: int, task: int) -> range:
        """Row numbers of one task in a step; empty if the step does not read the task."""
        if self.alternate and step % len(TASKS) != task:
            return range(0)
        first = self.rows_before(step, task)
        return range(first, first + self.rows_per_step[task])

    def rows_before(self, step: int, task: int) -> int:
        """The number of rows of a task that all steps before `step` read."""
        steps = range(self.first_step, step)
        if self.alternate:
            steps = steps[(task - self.first_step) % len(TASKS) :: len(TASKS)]
        return self.rows_before_phase[task] + len(steps) * self.rows_per_step[task]

    def row_numbers(self, step: int, rank: int, micro_batch: int, task: int) -> np.ndarray:
        """The row numbers of one task in one micro-batch of one rank, int64."""
        start = (micro_batch * self.world + rank) * self.rows_per_micro_batch[task]
        rows = self.step_rows(step, task)[start : start + self.rows_per_micro_batch[task]]
        return np.arange(rows.start, rows.stop)


def plan_step(data: DataConfig, world: int) -> StepPlan:
    """The plan of a run's first phase. The ratio of the tasks' rows is the same in every micro-batch as in the step.

    Raises ValueError if the rows cannot be divided equally among ranks and micro-batches.
    """
    rows = (data.mono_rows, data.para_rows)
    accumulation = -(-max(rows) // (data.micro_batch * world))
    micro_batches = accumulation * world
    for task, count in zip(TASKS, rows, strict=True):
        if count % micro_batches:
            most, divisible = max(rows), -(-count // micro_batches) * micro_batches
            needed_by = "" if count == most else f", which data.{TASKS[rows.index(most)]}_rows {most} needs"
            if count % world:
                raise ValueError(
                    f"data.{task}_rows {count} cannot be divided among {world} processes: choose {divisible} rows, "
                    "or another number of processes"
                )
            raise ValueError(
                f"data.{task}_rows {count} does not divide into {world} process{'es' * (world > 1)} × {accumulation} "
                f"micro-batches of at most data.micro_batch {data.micro_batch} rows{needed_by}: choose {divisible} "
                "rows, or another data.micro_batch"
            )
    return StepPlan(rows, tuple(count // micro_batches for count in rows), accumulation, world, data.alternate)


def phase_plans(run_phases: Sequence[Phase], plan: StepPlan, row_lengths: Sequence[int]) -> list[StepPlan]:
    """The plan of each phase. `plan`: the plan of the first phase. `row_lengths`: the number of tokens of a row in each
    phase. Raises ValueError if a step or micro-batch of a later phase would not have a whole number of rows."""
    plans = [plan]
    for phase, (previous_length, length) in zip(run_phases[1:], pairwise(row_lengths), strict=True):
        previous, first_step, ratio = plans[-1], phase.first_step, Fraction(length, previous_length)
        rows, micro = (
            tuple(count / ratio for count in counts)
            for counts in (previous.rows_per_step, previous.rows_per_micro_batch)
        )
        if any(count.denominator != 1 for count in (*rows, *micro)):
            raise ValueError(
                f"data.phase_steps: from step {first_step} on rows are {ratio} times as long, so that a step would "
                f"have {' + '.join(map(str, rows))} rows and a micro-batch {' + '.join(map(str, micro))}: choose "
                "data.mono_rows, data.para_rows and data.micro_batch that give whole numbers"
            )
        plans.append(
            replace(
                previous,
                rows_per_step=tuple(map(int, rows)),
                rows_per_micro_batch=tuple(map(int, micro)),
                first_step=first_step,
                rows_before_phase=tuple(previous.rows_before(first_step, task) for task in range(len(rows))),
            )
        )
    return plans
