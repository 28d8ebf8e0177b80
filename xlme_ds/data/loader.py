"""Reads the micro-batches of one rank in each step from data folders. The step number alone determines a step's
rows."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import DataConfig
from .batch import Batch
from .collate import BatchMaker, Collate, Purpose, collate
from .masking import TaskRows
from .order import Phase, StepPlan, phase_index, phase_plans, phase_shares, phases, plan_step
from .rows import TASKS
from .shards import RowStore


def fingerprint_name(task: str, phase: Phase) -> str:
    """The name of the fingerprint of a task's data in a phase: `mono`, or `mono from step 1000`."""
    return task + (f" from step {phase.first_step}" if phase.first_step else "")


class Loader:
    """Reads the rows of one of `world` ranks. `folders` has one folder per phase (see `order.py`), with a subfolder for
    each task.

    `plan`, `stores` and `row_tokens` belong to the first phase. `languages`: see `RowStore`. `maker` makes the batches,
    by default with `collate`. Raises ValueError for folders that do not fit each other or the phases.
    """

    purpose: Purpose = "train"
    _make_plan = staticmethod(plan_step)

    def __init__(
        self,
        folders: Path | Sequence[Path],
        data: DataConfig,
        seed: int,
        mask_fraction: float,
        rank: int = 0,
        world: int = 1,
        languages: Sequence[str] = (),
        maker: BatchMaker | None = None,
    ):
        self.plan = self._make_plan(data, world)
        self.rank, self.seed = rank, seed
        self.folders = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
        self.phases = phases(data, mask_fraction)
        self._stores = self._open(data, languages)  # one dict per phase
        self.stores = self._stores[0]
        reference = next(iter(self.stores.values()))  # every store must have this one's vocabulary and layout
        self.vocabulary_sha256 = reference.manifest.vocabulary_sha256
        self.vocabulary_size = reference.manifest.vocabulary_size
        self.layout = reference.manifest.layout
        self.row_lengths = [_row_tokens(reference, list(stores.values())) for stores in self._stores]  # one per phase
        self.row_tokens = self.row_lengths[0]
        self._plans = phase_plans(self.phases, self.plan, self.row_lengths)
        self._collates: list[Collate] = [collate] * len(self._stores)  # one function per phase
        if maker is not None:
            self._collates = [maker.collate_for(next(iter(stores.values())), self.purpose) for stores in self._stores]
        # Called after the rows of a step are read, with the step and the rows of each micro-batch.
        self.on_read: Callable[[int, list[TaskRows]], None] | None = None

    def _open(self, data: DataConfig, languages: Sequence[str]) -> list[dict[int, RowStore]]:
        """The stores of each phase, by task. A folder that several phases name is opened once."""
        phase_count, folder_count = len(self.phases), len(self.folders)
        if phase_count != folder_count:
            raise ValueError(
                f"data.phase_steps must have {folder_count - 1} number{'s' * (folder_count != 2)} for {folder_count} "
                f"folder{'s' * (folder_count > 1)}, not {phase_count - 1}: give the number of steps of each folder "
                f"except the last, or name {phase_count} folder{'s' * (phase_count > 1)}"
            )
        for folder in self.folders:
            has_task = [(folder / name / "manifest.json").exists() for name in TASKS]
            for task, content in enumerate(("monolingual text", "pairs")):
                # If the folder has neither task, `RowStore` raises the error.
                if self.plan.rows_per_step[task] and any(has_task) and not has_task[task]:
                    name = TASKS[task]
                    raise ValueError(
                        f"{folder} has no {content}: set data.{name}_rows to 0 (`--data.{name}-rows 0`), or name a "
                        f"folder with {content}"
                    )
        opened = {
            folder: {
                task: RowStore(folder / name, languages, scattered=self.plan.world > 1)
                for task, name in enumerate(TASKS)
                if self.plan.rows_per_step[task] > 0
            }
            for folder in dict.fromkeys(self.folders)
        }
        return [opened[folder] for folder in self.folders]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each task's data in each phase, by `fingerprint_name`."""
        return self.fingerprints_until(None)

    def fingerprints_until(self, steps: int | None) -> dict[str, str]:
        """`fingerprints` of the first phase and of each later phase that begins in the first `steps` steps; of all
        phases if `steps` is None."""
        fingerprints = {}
        for phase, stores in zip(self.phases, self._stores, strict=True):
            if steps is None or phase.first_step < max(steps, 1):
                for task, store in stores.items():
                    fingerprints[fingerprint_name(TASKS[task], phase)] = store.manifest.fingerprint()
        return fingerprints

    @property
    def encoded_fingerprints(self) -> list[str]:
        """Fingerprints of the outputs of `xlme prep encode` from which the rows of all tasks and phases were mixed."""
        mix_settings = (store.manifest.settings for stores in self._stores for store in stores.values())
        return sorted({settings["encoded"] for settings in mix_settings if "encoded" in settings})

    def _batch(self, step: int, task_rows: TaskRows) -> Batch:
        """The batch of these rows, masked as in the phase of `step`."""
        phase = phase_index(self.phases, step)
        return self._collates[phase](task_rows, self.seed, self.phases[phase].mask_fraction, step)

    def stores_at(self, step: int) -> dict[int, RowStore]:
        """The stores that a step reads, by task."""
        return self._stores[phase_index(self.phases, step)]

    def plan_at(self, step: int) -> StepPlan:
        """The plan by which a step's rows are split over ranks and micro-batches."""
        return self._plans[phase_index(self.phases, step)]

    def shares(self, task: int, steps: int) -> dict[RowStore, float]:
        """Each store from which the first `steps` steps read a task, with the store's share of these steps."""
        shares = dict.fromkeys((stores[task] for stores in self._stores), 0.0)
        for stores, share in zip(self._stores, phase_shares(self.phases, steps), strict=True):
            shares[stores[task]] += share
        return shares

    def _read(self, step: int, micro_batch: int) -> TaskRows:
        """The rows of one of this rank's micro-batches; tasks without rows are left out."""
        return [
            (task, store.read(row_numbers % store.rows), row_numbers)
            for task, store in self.stores_at(step).items()
            if len(row_numbers := self.plan_at(step).row_numbers(step, self.rank, micro_batch, task))
        ]

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """A text such as `mono 328-335, para 164-167`: the rows of a micro-batch of this rank, or of the whole step if
        `micro_batch` is None. In every pass over the data rows are counted from 0, as in `xlme prep show`."""
        plan, ranges = self.plan_at(step), []
        for task, store in self.stores_at(step).items():
            row_numbers = (
                plan.step_rows(step, task)
                if micro_batch is None
                else plan.row_numbers(step, self.rank, micro_batch, task)
            )
            passes = np.array(row_numbers) // store.rows  # for each row, the index of its pass over the data
            borders = [0, *(np.flatnonzero(np.diff(passes)) + 1), len(row_numbers)]
            for start, end in pairwise(borders):
                if start < end:
                    first, last = (int(row_numbers[index]) % store.rows for index in (start, end - 1))
                    ranges.append(f"{TASKS[task]} {first}{f'-{last}' if last > first else ''}")
        return ", ".join(ranges)

    def probe(self) -> Batch:
        """A batch of the first row of every task, masked as in step 0. It is equal on all ranks and for any world
        size."""
        return self._probe

    @cached_property
    def _probe(self) -> Batch:
        return self.first_rows(1)

    def first_rows(self, count: int) -> Batch:
        """A batch of the first `count` rows of every task, or of all rows if the task has fewer, masked as in step 0.
        It is equal on all ranks."""
        task_rows = []
        for task, store in self.stores.items():
            row_numbers = np.arange(min(count, store.rows))
            task_rows.append((task, store.read(row_numbers), row_numbers))
        return self._batch(0, task_rows)

    def micro_batches(self, step: int) -> list[Batch]:
        """All micro-batches of this rank in step `step`; the rows of the next step are prefetched."""
        micro_batches = range(self.plan.accumulation)  # their number is the same in all phases
        rows_by_micro_batch = [self._read(step, micro_batch) for micro_batch in micro_batches]
        next_plan = self.plan_at(step + 1)
        for task, store in self.stores_at(step + 1).items():
            for micro_batch in micro_batches:
                next_rows = next_plan.row_numbers(step + 1, self.rank, micro_batch, task)
                if len(next_rows):
                    store.prefetch(int(next_rows[0]) % store.rows, int(next_rows[-1]) % store.rows)
        if self.on_read is not None:
            self.on_read(step, rows_by_micro_batch)
        return [self._batch(step, task_rows) for task_rows in rows_by_micro_batch]


class _HeldOutRows(NamedTuple):
    """The rows of one micro-batch of held-out data."""

    task: int
    row_numbers: np.ndarray
    is_counted: bool  # whether the result includes this micro-batch


class HeldOutLoader(Loader):
    """Reads the same rows in every step, whatever the world size and the micro-batch: the first `data.mono_rows`
    monolingual rows and the first `data.para_rows` rows of pairs.

    The engine's collectives need the same number of micro-batches, with the same sizes, on all ranks. So each
    micro-batch has rows of one task only, and all ranks have the same number of micro-batches. A rank's rows that do
    not fill a micro-batch become micro-batches of one row each. If the rows of a task do not divide equally among the
    ranks, the first ranks read one row more. Each other rank then reads the task's row 0 in addition, in a micro-batch
    that does not count.
    """

    purpose: Purpose = "evaluate"

    @staticmethod
    def _make_plan(data: DataConfig, world: int) -> StepPlan:
        return StepPlan((data.mono_rows, data.para_rows), (data.micro_batch,) * len(TASKS), 1, world)

    @cached_property
    def _heldout_rows(self) -> list[_HeldOutRows]:
        """This rank's micro-batches, the largest first."""
        micro_batches = []
        world = self.plan.world
        for task, rows in enumerate(self.plan.rows_per_step):
            per_rank, left_over = divmod(rows, world)
            own_rows = np.arange(self.rank * per_rank, (self.rank + 1) * per_rank)
            size = self.plan.rows_per_micro_batch[task]
            rows_in_full = per_rank - per_rank % size  # rows in full micro-batches; then come single rows
            borders = [*range(0, rows_in_full, size), *range(rows_in_full, per_rank + 1)]
            micro_batches += [_HeldOutRows(task, own_rows[start:end], True) for start, end in pairwise(borders)]
            if left_over:
                is_counted = self.rank < left_over
                row_number = world * per_rank + self.rank if is_counted else 0
                micro_batches.append(_HeldOutRows(task, np.array([row_number]), is_counted))
        return sorted(micro_batches, key=lambda micro_batch: -len(micro_batch.row_numbers))

    @property
    def counted(self) -> list[bool]:
        """Whether the result includes each micro-batch of a step."""
        return [micro_batch.is_counted for micro_batch in self._heldout_rows]

    def micro_batches(self, step: int) -> list[Batch]:
        """All micro-batches of this rank; every step reads the same rows."""
        return [
            self._batch(step, [(task, self.stores[task].read(row_numbers), row_numbers)])
            for task, row_numbers, _ in self._heldout_rows
        ]


def _row_tokens(reference: RowStore, stores: Sequence[RowStore]) -> int:
    """The number of tokens of a row in a phase whose tasks have these `stores`. Raises ValueError if the stores have
    rows of different lengths, or another vocabulary or layout than `reference`."""
    expected, first = reference.manifest, stores[0]
    for store in stores:
        manifest, folders = store.manifest, f"{store.folder} and {reference.folder}"
        vocabulary = manifest.vocabulary_sha256, manifest.vocabulary_size
        if vocabulary != (expected.vocabulary_sha256, expected.vocabulary_size):
            raise ValueError(f"{folders} were encoded with different vocabularies: prepare them together")
        if manifest.layout != expected.layout:
            raise ValueError(f"{folders} have rows of different layouts: mix them together")
        if store.row_tokens != first.row_tokens:
            raise ValueError(f"{store.folder} and {first.folder} have rows of different lengths: mix them together")
    return first.row_tokens
