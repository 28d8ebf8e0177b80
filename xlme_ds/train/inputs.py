"""Opens the inputs of a pre-training run (data, held-out data, first weights) and derives the run's `RunInfo`."""

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
    """Facts about a run that its settings do not give."""

    flops: float  # floating-point operations of one step, as `flops_per_step` counts them
    parameters: dict[str, int]  # parameter count of each network
    vocabulary_sha256: str  # SHA-256 of the vocabulary with which the data were encoded
    # Turns the sums of an evaluation into (metrics over all languages, metrics by language). None: no held-out data.
    evaluation: Callable[..., tuple[dict[str, float], dict[str, Any]]] | None = None
    objective: Mapping[str, Any] | None = None  # `objectives.describe`; None in fine-tuning
    folders: tuple[Path, ...] = ()  # in pre-training: the data, then the held-out data if there is any


class RunInputs(NamedTuple):
    """The opened inputs of a pre-training run."""

    loader: Loader
    heldout: Loader | None
    initial: InitialValues | None  # first values of parameters; None: all are random


def heldout_data(config: RunConfig, folder: Path, row_tokens: int) -> DataConfig:
    """The DataConfig of an evaluation on the first `train.eval_rows` rows of each task in `folder`.

    A micro-batch has at least one row, and otherwise no more tokens than a micro-batch in training, where a row has
    `row_tokens` tokens.
    """
    rows_per_step = (config.data.mono_rows, config.data.para_rows)
    stores = [RowStore(folder / name) if rows else None for name, rows in zip(TASKS, rows_per_step, strict=True)]
    mono, para = (min(store.rows, config.train.eval_rows) if store else 0 for store in stores)
    longest = max(store.row_tokens for store in stores if store)
    micro_batch = max(1, config.data.micro_batch * row_tokens // longest)
    return DataConfig(mono_rows=mono, para_rows=para, micro_batch=micro_batch)


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
    validate(config, world)  # once more, because `engine.precision auto` has been replaced since the first check
    require_engine_file(config.engine)
    if not data:
        raise ValueError("no data folder is named: name one that `xlme prep mix` wrote")
    out = folder.path.resolve()
    for data_folder in data if heldout is None else (*data, heldout):
        read_from = data_folder.resolve()
        if out == read_from or any(out.is_relative_to(read_from / name) for name in (*TASKS, "vocab")):
            place = "is" if out == read_from else "is in"
            raise ValueError(f"{folder.path} {place} the data folder {data_folder}: choose another output folder")
        if data_folder is heldout and read_from in [other.resolve() for other in data]:
            raise ValueError(f"{heldout} is both the data and the held-out data: encode some with --split heldout")
    folder.claim(config)
    start = config.start
    may_be_random = start.take == "all" or objective_of(config.objective).may_start_random
    if not (may_be_random or start.folder or checkpoints_of(folder.path)):
        raise ValueError(
            f"start.take {start.take} takes the weights of another model, and start.folder names none: add "
            "--start.folder with a run or an export, or --start.take all, for random weights"
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
    """Information on a pre-training run. `root`: this is rank 0, which alone computes the unigram model's losses."""
    info = RunInfo(
        flops_per_step(config, loader.row_tokens, loader.row_lengths),
        count_parameters(config),
        loader.vocabulary_sha256,
        objective=describe(config.objective, (config.data.mono_rows, config.data.para_rows)),
        folders=folders,
    )
    if heldout is None:
        return info
    objective = objective_of(config.objective)
    codes = {TASKS[index]: store.languages for index, store in heldout.stores.items()}
    unigram = {}  # task -> (the unigram model's loss sums, token counts), both by language
    for index, store in heldout.stores.items() if root else ():
        unigram[TASKS[index]] = unigram_by_language(
            loader.shares(index, config.train.steps), store, index, heldout.plan.rows[index]
        )
    baselines = {f"unigram_nll_{task}": float(sums.sum() / counts.sum()) for task, (sums, counts) in unigram.items()}
    unigram_means = {task: _means(codes[task], sums, counts)[0] for task, (sums, counts) in unigram.items()}

    def evaluation(step: int, by_language: Tensor, **totals: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Returns (metrics over all languages, metrics by language), with the loss weights of step `step`.

        `by_language`: [2, terms, languages], the loss sums and the token counts; `totals`: the arguments of
        `Objective.summarise`.
        """
        means, token_counts = {}, {}
        for term, sums, counts in zip(objective.terms, *by_language.numpy(), strict=True):
            if counts.any():
                means[term], token_counts[term] = _means(codes[objective.quantities[term].task], sums, counts)
        overall = objective.at(step).summarise(**totals) | baselines
        return overall, {"terms": means, "tokens": token_counts, "unigram": unigram_means}

    return info._replace(evaluation=evaluation)


def _means(codes: Sequence[str], sums: np.ndarray, counts: np.ndarray) -> tuple[dict[str, float], dict[str, int]]:
    """Returns (means, counts), both by language code. Languages without tokens are left out. So are languages whose sum
    is not finite, because JSON has neither infinities nor NaN."""
    present = [index for index in range(len(codes)) if counts[index] and math.isfinite(sums[index])]
    means = {codes[index]: float(sums[index] / counts[index]) for index in present}
    return means, {codes[index]: int(counts[index]) for index in present}
