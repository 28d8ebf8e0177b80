"""Batches of a step for one rank, from a data folder. A loader has no position: the step's number gives the rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..config import DataConfig
from .batch import Batch
from .collate import BatchMaker, Purpose, RowBatches, collate
from .corrupt import TaskRows
from .order import StepPlan, phase_index, phase_plans, phase_shares, phases, plan_step
from .rows import TASKS, UNK
from .shards import RowStore, unigram_costs


class Loader:
    """Reads the rows of one of `world` ranks from `folders`, one for each phase, with a subfolder for each task.

    Row numbers continue from phase to phase; `plan`, `stores` and `row_tokens` are those of the first phase.
    `languages`: see `RowStore`. `maker`: makes batches in the objective's way, by default `RowBatches`. Raises
    ValueError for folders that do not fit each other or the phases.
    """

    purpose: Purpose = "train"

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
        self._stores = self._open(data, languages)  # of each phase
        self.stores = self._stores[0]
        first = next(iter(self.stores.values()))
        self.vocabulary_sha256 = first.manifest.vocabulary_sha256
        self.vocabulary_size = first.manifest.vocabulary_size
        self.layout = first.manifest.layout
        self.row_lengths = [_row_tokens(first, list(stores.values())) for stores in self._stores]  # of each phase
        self.row_tokens = self.row_lengths[0]
        self._plans = phase_plans(self.phases, self.plan, self.row_lengths)
        batch_maker = maker or RowBatches()
        self._collate = [batch_maker.batches(next(iter(stores.values())), self.purpose) for stores in self._stores]
        # Called after every step is read, with its number and its rows by micro-batch.
        self.on_read: Callable[[int, list[TaskRows]], None] | None = None

    def _make_plan(self, data: DataConfig, world: int) -> StepPlan:
        return plan_step(data, world)

    def _open(self, data: DataConfig, languages: Sequence[str]) -> list[dict[int, RowStore]]:
        """The rows of each phase by task; a folder that several phases name is opened once."""
        phase_count, folder_count = len(self.phases), len(self.folders)
        steps = " ".join(map(str, data.phase_steps))
        if phase_count != folder_count:
            raise ValueError(
                f"data.phase_steps {steps} are of {phase_count} folders, --data names {folder_count}: it needs one "
                "folder more than data.phase_steps has numbers"
            )
        for folder in self.folders:
            has_task = [(folder / name / "manifest.json").exists() for name in TASKS]
            for name, exists, other_exists, rows, content in zip(
                TASKS, has_task, has_task[::-1], self.plan.rows, ("monolingual text", "pairs"), strict=True
            ):
                if rows and other_exists and not exists:
                    raise ValueError(f"{folder} has no {content}: add --data.{name}-rows 0, or data that have some")
        opened = {
            folder: {
                task: RowStore(folder / name, languages, scattered=self.plan.world > 1)
                for task, name in enumerate(TASKS)
                if self.plan.rows[task] > 0
            }
            for folder in dict.fromkeys(self.folders)
        }
        return [opened[folder] for folder in self.folders]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each task's data in each phase."""
        return self.fingerprints_until(None)

    def fingerprints_until(self, steps: int | None) -> dict[str, str]:
        """`fingerprints` of the phases that begin within `steps` steps."""
        return {
            f"{TASKS[task]} from step {phase.first}" if phase.first else TASKS[task]: store.manifest.fingerprint()
            for phase, stores in zip(self.phases, self._stores, strict=True)
            if steps is None or phase.first < max(steps, 1)
            for task, store in stores.items()
        }

    @property
    def encoded(self) -> list[str]:
        """Fingerprints of the encoded text from which the rows of all tasks and phases were mixed."""
        mix_settings = (store.manifest.settings for stores in self._stores for store in stores.values())
        return sorted({settings["encoded"] for settings in mix_settings if "encoded" in settings})

    def _collated(self, step: int, parts: TaskRows) -> Batch:
        phase = phase_index(self.phases, step)
        return self._collate[phase](parts, self.seed, self.phases[phase].mask_fraction, step)

    def stores_at(self, step: int) -> dict[int, RowStore]:
        """The rows that a step reads, by task."""
        return self._stores[phase_index(self.phases, step)]

    def plan_at(self, step: int) -> StepPlan:
        """The plan by which a step's rows are split over ranks and micro-batches."""
        return self._plans[phase_index(self.phases, step)]

    def shares(self, task: int, steps: int) -> dict[RowStore, float]:
        """Each store from which the first `steps` steps read a task, with its share of the rows read."""
        shares = dict.fromkeys((stores[task] for stores in self._stores), 0.0)
        for stores, share in zip(self._stores, phase_shares(self.phases, steps), strict=True):
            shares[stores[task]] += share
        return shares

    def _read(self, step: int, micro_batch: int) -> TaskRows:
        return [
            (task, store.read(numbers % store.rows), numbers)
            for task, store in self.stores_at(step).items()
            if len(numbers := self.plan_at(step).numbers(step, self.rank, micro_batch, task))
        ]

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """The rows of a micro-batch of this rank, or of the whole step, in words: `mono 328-335, para 164-167`."""
        ranges = []
        for task in self.stores:
            numbers = (
                self.plan_at(step).step_rows(step, task)
                if micro_batch is None
                else self.plan_at(step).numbers(step, self.rank, micro_batch, task)
            )
            if len(numbers):
                ranges.append(f"{TASKS[task]} {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else ""))
        return ", ".join(ranges)

    def probe(self) -> Batch:
        """The first row of every task, corrupted as in step 0: equal on all ranks, whatever their number."""
        return self._probe

    @cached_property
    def _probe(self) -> Batch:
        return self.first_rows(1)

    def first_rows(self, count: int) -> Batch:
        """The first `count` rows of every task, or all if there are fewer, corrupted as in step 0: equal on all
        ranks."""
        numbers = [(task, store, np.arange(min(count, store.rows))) for task, store in self.stores.items()]
        return self._collated(0, [(task, store.read(these), these) for task, store, these in numbers])

    def step(self, step: int) -> list[Batch]:
        """All micro-batches of this rank in step `step`; the rows of the next step are prefetched."""
        read = [self._read(step, micro) for micro in range(self.plan.accumulation)]
        for task, store in self.stores_at(step + 1).items():
            for micro in range(self.plan.accumulation):
                coming = self.plan_at(step + 1).numbers(step + 1, self.rank, micro, task)
                if len(coming):
                    store.prefetch(int(coming[0]) % store.rows, int(coming[-1]) % store.rows)
        if self.on_read is not None:
            self.on_read(step, read)
        return [self._collated(step, parts) for parts in read]


class HeldOutLoader(Loader):
    """Reads the first `data.mono_rows` and `data.para_rows` rows, whatever the number of ranks and the micro-batch.

    All ranks have micro-batches of the same number and sizes, each of one task, as the engine's collectives need. Rows
    that do not fill a micro-batch are micro-batches of one row. If the rows do not divide among the ranks, a rank
    without a last row reads the task's first row again, which does not count.
    """

    purpose: Purpose = "evaluate"

    def _make_plan(self, data: DataConfig, world: int) -> StepPlan:
        return StepPlan((data.mono_rows, data.para_rows), (data.micro_batch,) * len(TASKS), 1, world)

    @cached_property
    def _pieces(self) -> list[tuple[int, np.ndarray, bool]]:
        """Task and row numbers of every micro-batch, and whether it counts; sorted by size."""
        pieces: list[tuple[int, np.ndarray, bool]] = []
        world = self.plan.world
        for task, rows in enumerate(self.plan.rows):
            per_rank, left_over = divmod(rows, world)
            own_rows = np.arange(self.rank * per_rank, (self.rank + 1) * per_rank)
            in_full = per_rank - per_rank % self.plan.micro[task]  # rows in full micro-batches
            borders = [*range(0, in_full, self.plan.micro[task]), *range(in_full, per_rank + 1)]
            pieces += [(task, own_rows[first:end], True) for first, end in pairwise(borders)]
            if left_over:
                counts = self.rank < left_over
                pieces.append((task, np.array([world * per_rank + self.rank if counts else 0]), counts))
        return sorted(pieces, key=lambda piece: -len(piece[1]))

    @property
    def counted(self) -> list[bool]:
        """Whether each micro-batch of a step counts."""
        return [counts for *_, counts in self._pieces]

    def step(self, step: int) -> list[Batch]:
        """All micro-batches of this rank; every step reads the same rows."""
        read = ((task, self.stores[task].read(numbers), numbers) for task, numbers, _ in self._pieces)
        return [self._collated(step, [part]) for part in read]


def _row_tokens(first: RowStore, stores: Sequence[RowStore]) -> int:
    """The tokens of a row of a phase. Raises ValueError if its tasks have rows of different lengths, or if one has
    another vocabulary or layout than `first`."""
    ours = first.manifest
    for store in stores:
        theirs, folders = store.manifest, f"{store.folder} and {first.folder}"
        if (theirs.vocabulary_sha256, theirs.vocabulary_size) != (ours.vocabulary_sha256, ours.vocabulary_size):
            raise ValueError(f"{folders} were encoded with different vocabularies: prepare them together")
        if theirs.layout != ours.layout:
            raise ValueError(f"{folders} have rows of different layouts: mix them together")
    reference, *others = stores
    for other in others:
        if other.row_tokens != reference.row_tokens:
            raise ValueError(f"{other.folder} and {reference.folder} have rows of different lengths: mix them together")
    return reference.row_tokens


def unigram_by_language(
    train: RowStore | Mapping[RowStore, float], heldout: RowStore, task: int, rows: int
) -> np.ndarray:
    """The loss of a unigram model, as a baseline of the masked-token losses; float64 [2, languages].

    By language, the summed −log p (nats, `unigram_costs` of `train`) of the ordinary tokens in the first `rows`
    held-out rows, and the number of these tokens.
    """
    numbers = np.arange(min(rows, heldout.rows))
    batch = collate([(task, heldout.read(numbers), numbers)], seed=0, mask_fraction=0.5)
    tokens_BT, languages_BT = batch.tokens_BT.numpy(), batch.languages_BT.numpy()
    tokens, languages = tokens_BT[tokens_BT > UNK], languages_BT[tokens_BT > UNK]
    count = len(heldout.languages)
    costs = np.bincount(languages, unigram_costs(train)[tokens], count)
    return np.stack([costs, np.bincount(languages, minlength=count)])
