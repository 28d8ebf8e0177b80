"""Makes synthetic packed rows in memory, like those that data preparation writes, so that no data folder is needed."""

import numpy as np

from xlme_ds.config import ObjectiveConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.collate import collate
from xlme_ds.data.order import Phase, plan_step
from xlme_ds.data.pseudo_parallel import PseudoSides
from xlme_ds.data.rows import BOS, EOS, PAD, UNK, Rows


def synthetic_rows(rng: np.random.Generator, count: int, row_tokens: int, vocabulary: int, pairs: bool) -> Rows:
    """Make `count` rows of ids that follow a Zipf-like law. One item fills a row; if `pairs`, a row has several pairs,
    and each side of a pair has between 1/16 and 1/6 of the row's tokens."""
    tokens = np.full((count, row_tokens), PAD, dtype=np.int32)
    items, lengths = np.zeros(count, dtype=np.int64), []
    for row in range(count):
        end = 0
        while True:
            sides = rng.integers(row_tokens // 16 + 1, row_tokens // 6, 2) if pairs else np.array([row_tokens - 2])
            size = int(sides.sum()) + 1 + len(sides)
            if end + size > row_tokens:
                break
            ids = UNK + 1 + ((vocabulary - UNK - 2) * rng.random(size) ** 3).astype(np.int32)
            ids[0], ids[np.cumsum(sides + 1)] = BOS, EOS
            tokens[row, end : end + size] = ids
            items[row] += 1
            lengths.append(size)
            end += size
    languages = np.zeros(len(lengths) * (2 if pairs else 1), dtype=np.int64)
    return Rows(tokens, items, np.array(lengths, dtype=np.int64), languages)


def synthetic_batch(
    rows: tuple[int, int], row_tokens: int, vocabulary: int, seed: int = 0, objective: ObjectiveConfig | None = None
) -> Batch:
    """Make a micro-batch with `rows[task]` rows of each task, masked as in training for `objective`. If this has
    pseudo-parallel sides, each row has a second side whose positions are open: the model fills them (`PseudoSides`)."""
    objective, rng = objective or ObjectiveConfig(), np.random.default_rng(seed)
    parts = [
        (task, synthetic_rows(rng, count, row_tokens, vocabulary, pairs=task == 1), np.arange(count))
        for task, count in enumerate(rows)
        if count
    ]
    pseudo = objective.pseudo_fractions
    make_batch = PseudoSides(pseudo, languages=(0,)).collate if pseudo else collate
    return make_batch(parts, seed, mask_fraction=objective.mask_fraction)


class SyntheticSource:
    """A `BatchSource` for one of the `world` processes of `run`. It returns the same micro-batches in every step."""

    phases = (Phase(0, 0.0, None),)

    def __init__(self, run: RunConfig, row_tokens: int, world: int = 1):
        self.plan, self.row_tokens = plan_step(run.data, world), row_tokens
        # A step of an alternating run has rows of one task only. Every step here has the rows of step 0: task 0.
        mono, para = self.plan.rows_per_micro_batch
        rows = mono, 0 if run.data.alternate else para
        self.batches = [
            synthetic_batch(rows, row_tokens, run.model.vocabulary, seed, run.objective)
            for seed in range(self.plan.accumulation)
        ]

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of any step."""
        return self.batches

    def probe(self) -> Batch:
        """The first micro-batch."""
        return self.batches[0]
