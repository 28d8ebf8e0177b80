"""Batches of a step for one rank, from a data folder. A loader has no position: the step's number gives the rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ..config import DataConfig, weight_at
from ..io.errors import refuse
from .batch import Batch
from .collate import collate
from .corrupt import Parts
from .order import StepPlan, phase_of, phase_shares, phases, plan_step
from .pseudo_parallel import PseudoSides
from .rows import TASKS, UNK
from .sentences import Sentences, languages_of_text
from .shards import RowStore, unigram_costs


class Loader:
    """Reads `folders` (one subfolder a task) for one of `world` ranks: each for the steps of its phase, if there are
    several. Row numbers go on from phase to phase.

    `languages` as in `RowStore`; `pseudo_fractions` as in `PseudoSides`: without them no places are opened;
    `denoising` and `back_translation` as in `Sentences`; `random_fakes` as in `ObjectiveConfig`. Raises ValueError for
    folders that do not fit each other or the phases.
    """

    def __init__(
        self,
        folders: Path | Sequence[Path],
        data: DataConfig,
        seed: int,
        mask_fraction: float,
        rank: int = 0,
        world: int = 1,
        languages: Sequence[str] = (),
        pseudo_fractions: tuple[float, ...] = (),
        denoising: tuple[str, ...] = (),
        back_translation: tuple[str, ...] = (),
        random_fakes: tuple[str, ...] = (),
    ):
        self.plan = self._planned(data, world)
        self.rank, self.seed = rank, seed
        self.random_fakes = random_fakes
        self.folders = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
        self.phases = phases(data, mask_fraction)
        asked, given = len(self.phases), len(self.folders)
        words = f"data.phase_steps {' '.join(map(str, data.phase_steps))} are of {asked} folders, --data names {given}"
        refuse([(asked == given, f"{words}: it needs one folder more than data.phase_steps has numbers")])
        opened = {
            folder: {
                task: RowStore(folder / name, languages, scattered=world > 1)
                for task, name in enumerate(TASKS)
                if self.plan.rows[task] > 0
            }
            for folder in dict.fromkeys(self.folders)
        }
        self._stores = [opened[folder] for folder in self.folders]  # of each phase
        self.stores = self._stores[0]
        first = next(iter(self.stores.values()))
        self.row_tokens = first.row_tokens
        self.vocabulary_sha256 = first.manifest.vocabulary_sha256
        self.vocabulary_size = first.manifest.vocabulary_size
        self.layout = first.manifest.layout
        for store in (store for stores in opened.values() for store in stores.values()):
            both, of = f"{store.folder} and {first.folder}", store.manifest
            vocabulary = of.vocabulary_sha256, of.vocabulary_size
            refuse(
                [
                    (
                        vocabulary == (self.vocabulary_sha256, self.vocabulary_size),
                        f"{both} were encoded with different vocabularies: prepare them together",
                    ),
                    (
                        (store.row_tokens, of.layout) == (self.row_tokens, self.layout),
                        f"{both} have rows of different lengths or layouts: mix them together",
                    ),
                ]
            )
        translated = denoising or back_translation
        self._made: list[tuple[Callable[[Parts, int, float], Batch], Sentences | None]] = []  # of each phase
        for store in (next(iter(stores.values())) for stores in self._stores):
            known = languages_of_text(store)
            sides = PseudoSides(pseudo_fractions, known).collate if pseudo_fractions else collate
            of_sentences = (
                Sentences(denoising, back_translation, known, self.vocabulary_size - 1) if translated else None
            )
            self._made.append((sides, of_sentences))
        # Whether monolingual rows must be those of `mix --sentences`; None: either will do.
        self.reads_sentences = True if translated else False if pseudo_fractions else None
        # Called after every step is read, with its number and its rows by micro-batch.
        self.watch: Callable[[int, list[Parts]], None] | None = None

    def _planned(self, data: DataConfig, world: int) -> StepPlan:
        return plan_step(data, world)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each task's data, of each phase."""
        return self.fingerprints_until(None)

    def fingerprints_until(self, steps: int | None) -> dict[str, str]:
        """The same of the phases that begin within so many steps."""
        return {
            f"{TASKS[task]} from step {phase.first}" if phase.first else TASKS[task]: store.manifest.fingerprint()
            for phase, stores in zip(self.phases, self._stores, strict=True)
            if steps is None or phase.first < max(steps, 1)
            for task, store in stores.items()
        }

    @property
    def encoded(self) -> list[str]:
        """Fingerprints of the encoded text that its rows were mixed from, of all tasks and phases."""
        settings = (store.manifest.settings for stores in self._stores for store in stores.values())
        return sorted({of["encoded"] for of in settings if "encoded" in of})

    def batch(self, step: int, micro_batch: int) -> Batch:
        """Micro-batch `micro_batch` (of `plan.accumulation`) of this rank in step `step`."""
        return self._collated(step, self._read(step, micro_batch))

    def _collated(self, step: int, parts: Parts) -> Batch:
        phase = phase_of(self.phases, step)
        collated, sentences = self._made[phase]
        batch = collated(parts, self.seed, self.phases[phase].mask_fraction)
        if self.random_fakes:
            batch = batch._replace(random_1=torch.tensor([weight_at(self.random_fakes, step)]))
        return batch if sentences is None else sentences.added(batch, parts, self.seed, step)

    def stores_at(self, step: int) -> dict[int, RowStore]:
        """What a step reads, by task."""
        return self._stores[phase_of(self.phases, step)]

    def shares(self, task: int, steps: int) -> dict[RowStore, float]:
        """What so many steps read of a task, and of how many of its rows each is."""
        found = dict.fromkeys((stores[task] for stores in self._stores), 0.0)
        for stores, share in zip(self._stores, phase_shares(self.phases, steps), strict=True):
            found[stores[task]] += share
        return found

    def _read(self, step: int, micro_batch: int) -> Parts:
        found = [
            (task, store, self.plan.numbers(step, self.rank, micro_batch, task))
            for task, store in self.stores_at(step).items()
        ]
        found = [(task, store, numbers) for task, store, numbers in found if len(numbers)]
        return [(task, store.read(numbers % store.rows), numbers) for task, store, numbers in found]

    def rows_of(self, step: int, micro_batch: int | None = None) -> str:
        """The rows of a micro-batch of this rank, or of the whole step, in words: `mono 328-335, para 164-167`."""
        words = []
        for task in self.stores:
            numbers = (
                self.plan.step_rows(step, task)
                if micro_batch is None
                else self.plan.numbers(step, self.rank, micro_batch, task)
            )
            if len(numbers):
                words.append(f"{TASKS[task]} {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else ""))
        return ", ".join(words)

    def probe(self) -> Batch:
        """The first row of every task, corrupted as in step 0: the same batch on all ranks, whatever their number."""
        return self._probe

    def first_rows(self, count: int) -> Batch:
        """The first `count` rows of every task, or all if there are fewer, corrupted as in step 0: the same on all
        ranks."""
        numbers = [(task, store, np.arange(min(count, store.rows))) for task, store in self.stores.items()]
        return self._collated(0, [(task, store.read(these), these) for task, store, these in numbers])

    @cached_property
    def _probe(self) -> Batch:
        batch = self.first_rows(1)
        # A translation may differ where two tokens are about equally likely, so the probe has none if it has more.
        steady = len(batch.noised_BT) > 0 or TASKS.index("para") in self.stores
        batch = batch._replace(into_BT=batch.into_BT[:0]) if steady else batch
        # So may what BTMLM writes, whose places hold one token instead.
        tokens = batch.tokens_BT.flatten().index_fill(0, batch.open_P, UNK + 1)
        return batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT), open_P=batch.open_P[:0])

    def step(self, step: int) -> list[Batch]:
        """All micro-batches of this rank in step `step`."""
        read = [self._read(step, micro) for micro in range(self.plan.accumulation)]
        for task, store in self.stores_at(step + 1).items():
            for micro in range(self.plan.accumulation):
                coming = self.plan.numbers(step + 1, self.rank, micro, task)
                if len(coming):
                    store.ahead(int(coming[0]) % store.rows, int(coming[-1]) % store.rows)
        if self.watch is not None:
            self.watch(step, read)
        return [self._collated(step, parts) for parts in read]


class HeldOutLoader(Loader):
    """Reads the first `data.mono_rows` and `data.para_rows` rows, whatever the number of ranks and the micro-batch.

    Every rank has as many micro-batches of the same sizes, each of one task, as its engine's collectives need. What
    does not divide is read row by row; of the last of these some are the first row again, which does not count.
    """

    def _planned(self, data: DataConfig, world: int) -> StepPlan:
        return StepPlan((data.mono_rows, data.para_rows), (data.micro_batch,) * len(TASKS), 1, world)

    @cached_property
    def _pieces(self) -> list[tuple[int, np.ndarray, bool]]:
        """Of every micro-batch its task, row numbers, and whether it counts; those of one size follow one another."""
        found, world = [], self.plan.world
        for task, rows in enumerate(self.plan.rows):
            each, more = divmod(rows, world)
            mine, whole = np.arange(self.rank * each, (self.rank + 1) * each), each - each % self.plan.micro[task]
            borders = [*range(0, whole, self.plan.micro[task]), *range(whole, each + 1)]
            found += [(task, mine[first:end], True) for first, end in pairwise(borders)]
            last = self.rank < more
            found += [(task, np.array([world * each + self.rank if last else 0]), last)] * bool(more)
        return sorted(found, key=lambda piece: -len(piece[1]))

    @property
    def counted(self) -> list[bool]:
        """Whether each micro-batch of a step counts."""
        return [counts for *_, counts in self._pieces]

    def step(self, step: int) -> list[Batch]:
        """All micro-batches of this rank; every step reads the same rows."""
        read = ((task, self.stores[task].read(numbers), numbers) for task, numbers, _ in self._pieces)
        return [self._collated(step, [part]) for part in read]


def unigram_by_language(
    train: RowStore | Mapping[RowStore, float], heldout: RowStore, task: int, rows: int
) -> np.ndarray:
    """Baseline of the masked-token losses: summed −log p (nats) by `unigram_costs` of the ordinary tokens of the first
    `rows` held-out rows, and their number, by the token's language, float64 [2, languages]."""
    numbers = np.arange(min(rows, heldout.rows))
    batch = collate([(task, heldout.read(numbers), numbers)], seed=0, mask_fraction=0.5)
    tokens_BT, languages_BT = batch.tokens_BT.numpy(), batch.languages_BT.numpy()
    tokens, languages = tokens_BT[tokens_BT > UNK], languages_BT[tokens_BT > UNK]
    count = len(heldout.languages)
    costs = np.bincount(languages, unigram_costs(train)[tokens], count)
    return np.stack([costs, np.bincount(languages, minlength=count)])
