"""The inputs of a pre-training run, data, held-out data and first weights; and `RunInfo`, derived from them."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..checkpoint_names import checkpoints_of
from ..config import DataConfig, RunConfig
from ..counting import count_parameters, flops_per_step
from ..data.loader import Loader, unigram_by_language
from ..data.rows import TASKS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..engine.build import open_data, require_engine_file
from ..engine.ranks import data_parallel
from ..first_weights import source_folders, starting_weights
from ..models.init import InitialValues
from ..objectives import describe, objective_of
from ..trained.runs import pin_step
from ..validate import validate
from .run_folder import RunFolder


class RunInfo(NamedTuple):
    """Information on a run that is not in its settings.

    `flops`: operations of a step, by the standard count; `vocabulary_sha256`: checksum of the data's vocabulary;
    `evaluation`: makes metrics from the sums over held-out rows, in total and by language; `objective`: its record
    (`objectives.describe`), None in fine-tuning; `folders`: in pre-training, of the data and the held-out data.
    """

    flops: float
    parameters: dict[str, int]
    vocabulary_sha256: str
    evaluation: Callable[..., tuple[dict[str, float], dict[str, Any]]] | None = None
    objective: Mapping[str, Any] | None = None
    folders: tuple[Path, ...] = ()


class RunInputs(NamedTuple):
    """The opened inputs of a pre-training run."""

    loader: Loader
    heldout: Loader | None
    initial: InitialValues | None  # first values of parameters; None: all are random


def heldout_data(config: RunConfig, folder: Path, row_tokens: int) -> DataConfig:
    """The rows of an evaluation: of each task the first `train.eval_rows`, in micro-batches of as many tokens as those
    of training, whose rows have `row_tokens` tokens."""
    rows_per_step = (config.data.mono_rows, config.data.para_rows)
    stores = [RowStore(folder / name) if rows else None for name, rows in zip(TASKS, rows_per_step, strict=True)]
    mono, para = (min(store.rows, config.train.eval_rows) if store else 0 for store in stores)
    longest = max(store.row_tokens for store in stores if store)
    return DataConfig(mono, para, max(1, config.data.micro_batch * row_tokens // longest))


def read_inputs(
    config: RunConfig,
    data: Sequence[Path],
    heldout: Path | None,
    folder: RunFolder,
    sources: Sequence[Path],
    rank: int,
    world: int,
) -> RunInputs:
    """Claim the run's `folder`; open the data, the held-out data, and the `sources` of the first weights.

    Raises ValueError for inputs that do not fit the run.
    """
    validate(config, world)  # by now, a precision of `auto` is resolved
    require_engine_file(config.engine)
    out = folder.path.resolve()
    for place in (place.resolve() for place in (*data, *([] if heldout is None else [heldout]))):
        inside = out == place or any(out.is_relative_to(place / name) for name in (*TASKS, "vocab"))
        if inside:
            raise ValueError(f"{folder.path} is in the data of {place}: choose another --out")
    folder.claim(config)
    start, begun = config.start, checkpoints_of(folder.path)
    may_be_random = start.take == "all" or objective_of(config.objective).may_start_random
    if not (may_be_random or start.folder or begun):
        raise ValueError(
            f"start.take {start.take} is of a model that the run begins with, and start.folder names none: name "
            "it, or set start.take to all, for random weights"
        )
    replica, replicas = data_parallel(config.engine, rank, world)
    loader = open_data(config, data, replica, replicas)
    initial = starting_weights(config, Vocabulary(data[0] / "vocab"), sources) if sources else None
    if heldout is None:
        return RunInputs(loader, None, initial)
    rows = heldout_data(config, heldout, loader.row_tokens)
    return RunInputs(loader, open_data(config, heldout, replica, replicas, rows, like=loader), initial)


def starting_folders(config: RunConfig, out: Path) -> list[Path]:
    """The folders from which a run reads its first weights; none if it resumes."""
    return [] if checkpoints_of(out) else [pin_step(folder) for folder in source_folders(config)]


def pretraining_info(
    config: RunConfig, loader: Loader, heldout: Loader | None, root: bool, folders: tuple[Path, ...] = ()
) -> RunInfo:
    """Information on a pre-training run; only the `root` computes the unigram model's losses."""
    info = RunInfo(
        flops_per_step(config, loader.row_tokens, loader.row_lengths),
        count_parameters(config),
        loader.vocabulary_sha256,
        objective=describe(config.objective, (config.data.mono_rows, config.data.para_rows)),
        folders=folders,
    )
    if heldout is None:
        return info
    objective, unigram = objective_of(config.objective), {}
    codes = {TASKS[task]: store.languages for task, store in heldout.stores.items()}
    for task, store in heldout.stores.items() if root else ():
        unigram[TASKS[task]] = unigram_by_language(
            loader.shares(task, config.train.steps), store, task, heldout.plan.rows[task]
        )
    constants = {f"unigram_nll_{task}": float(sums.sum() / counts.sum()) for task, (sums, counts) in unigram.items()}
    baselines = {task: _means(codes[task], *sums_and_counts)[0] for task, sums_and_counts in unigram.items()}

    def evaluation(step: int, by_language: Tensor, **totals: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        by_term = {
            term: _means(codes[objective.quantities[term].task], sums, counts)
            for term, sums, counts in zip(objective.terms, *by_language.numpy(), strict=True)
            if counts.any()
        }
        means, numbers = ({term: sums_and_counts[n] for term, sums_and_counts in by_term.items()} for n in (0, 1))
        overall = objective.at(step).summarise(**totals) | constants
        return overall, {"terms": means, "tokens": numbers, "unigram": baselines}

    return info._replace(evaluation=evaluation)


def _means(codes: Sequence[str], sums: np.ndarray, counts: np.ndarray) -> tuple[dict[str, float], dict[str, int]]:
    """Means and counts by language code, where there are tokens and the sum is finite: JSON holds no other numbers."""
    present = [n for n in range(len(codes)) if counts[n] and math.isfinite(sums[n])]
    return {codes[n]: float(sums[n] / counts[n]) for n in present}, {codes[n]: int(counts[n]) for n in present}
