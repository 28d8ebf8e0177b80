"""The start of a run: opens its inputs (data, held-out data, first weights), derives its `RunInfo`, describes it in
lines to print, and writes its `config.json`."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoint_names import checkpoints_of
from ..cli import format_number
from ..config import DataConfig, RunConfig, Training
from ..counting import count_parameters, flops_by_phase
from ..data.loader import Loader
from ..data.rows import TASKS
from ..data.shards import RowStore
from ..data.unigram import unigram_nll_by_language
from ..data.vocabulary import Vocabulary
from ..engine.build import require_engine_file
from ..engine.engine import Engine
from ..engine.ranks import data_parallel_rank_and_size, on_gpu
from ..first_weights import source_folders, starting_weights
from ..io.files import real_path
from ..models.init import InitialValues
from ..objectives import describe, objective_of
from ..objectives.protocol import BatchSource
from ..recipes import RECIPES
from ..trained.runs import MODEL_FOLDER, pin_step, write_vocabulary
from ..validate import validate
from .data import open_loader
from .run_folder import RunFolder, flatten


class RunInfo(NamedTuple):
    """Facts about a run, computed from its settings and its data."""

    flops: Sequence[float]  # floating-point operations of one step in each phase, as `flops_by_phase` counts them
    parameters: dict[str, int]  # parameter count of each network
    vocabulary_sha256: str  # SHA-256 of the vocabulary with which the data were encoded
    # Turns the sums of an evaluation into (metrics over all languages, metrics by language). None: no held-out data.
    summarise: Callable[..., tuple[dict[str, float], dict[str, Any]]] | None = None
    objective: Mapping[str, Any] | None = None  # result of `objectives.describe`; None in fine-tuning
    folders: tuple[Path, ...] = ()  # in pre-training: the first data folder, then the held-out folder if any


def heldout_data_config(config: RunConfig, folder: Path, row_tokens: int) -> DataConfig:
    """The DataConfig of an evaluation on the first `train.eval_rows` rows of each task in `folder`.

    A micro-batch has at least one row, and otherwise at most as many tokens as in training, where a row has
    `row_tokens`.
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
) -> tuple[Loader, Loader | None, InitialValues | None]:
    """Lock the run's `folder`, open the loaders of the data and the held-out data, and read the first weights from
    `sources`. Raises ValueError for inputs that do not fit the run.

    Returns (loader of the data, loader of the held-out data or None, first weights or None). Without first weights,
    parameters start at random or come from a checkpoint.
    """
    validate(config, world)  # once more, because `engine.precision auto` has been replaced since the first check
    require_engine_file(config.engine)
    if not data:
        raise ValueError("no data folder is named: name one that `xlme prep mix` wrote")
    out = real_path(folder.path)
    for data_folder in data if heldout is None else (*data, heldout):
        read_from = real_path(data_folder)
        if out == read_from or any(out.is_relative_to(read_from / name) for name in (*TASKS, "vocab")):
            place = "is" if out == read_from else "is in"
            raise ValueError(f"{folder.path} {place} the data folder {data_folder}: choose another output folder")
        if data_folder is heldout and read_from in [real_path(other) for other in data]:
            raise ValueError(f"{heldout} is both the data and the held-out data: encode some with --split heldout")
    folder.claim(config)
    start = config.start
    may_be_random = start.take == "all" or objective_of(config.objective).may_start_random
    if not (may_be_random or start.folder or checkpoints_of(folder.path)):
        raise ValueError(
            f"start.take {start.take} takes the weights of another model, and start.folder names none: add "
            "--start.folder with a run or an export, or --start.take all, for random weights"
        )
    replica, replicas = data_parallel_rank_and_size(config.engine, rank, world)
    loader, heldout_loader = open_loader(config, data, replica, replicas), None
    initial = starting_weights(config, Vocabulary(data[0] / "vocab"), sources) if sources else None
    if heldout is not None:
        heldout_data = heldout_data_config(config, heldout, loader.row_tokens)
        heldout_loader = open_loader(config, heldout, replica, replicas, heldout_data, training=loader)
    return loader, heldout_loader, initial


def starting_folders(config: RunConfig, out: Path) -> list[Path]:
    """The folders from which a run reads its first weights; none if it resumes."""
    return [] if checkpoints_of(out) else [pin_step(folder) for folder in source_folders(config)]


def pretraining_info(
    config: RunConfig, loader: Loader, heldout: Loader | None, root: bool, folders: tuple[Path, ...] = ()
) -> RunInfo:
    """The `RunInfo` of a pre-training run. `root`: whether this is rank 0; only rank 0 computes the unigram model's
    losses."""
    info = RunInfo(
        flops_by_phase(config, loader.row_lengths),
        count_parameters(config),
        loader.vocabulary_sha256,
        objective=describe(config.objective, (config.data.mono_rows, config.data.para_rows)),
        folders=folders,
    )
    if heldout is None:
        return info
    objective = objective_of(config.objective)
    codes = {TASKS[index]: store.languages for index, store in heldout.stores.items()}
    unigram = {}  # name of a task -> (the unigram model's loss sums, token counts), both by language
    for index, store in heldout.stores.items() if root else ():
        unigram[TASKS[index]] = unigram_nll_by_language(
            loader.shares(index, config.train.steps),
            store,
            index,
            heldout.plan.rows_per_step[index],
            objective.predicted_positions,
        )
    baselines = {f"unigram_nll_{task}": float(sums.sum() / counts.sum()) for task, (sums, counts) in unigram.items()}
    unigram_means = {task: _means(codes[task], sums, counts)[0] for task, (sums, counts) in unigram.items()}

    def summarise(step: int, by_language: Tensor, **totals: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Returns (metrics over all languages, metrics by language). The loss weights are those of step `step`.

        `by_language`: [2, terms, languages], the loss sums and the token counts; `totals`: the arguments of
        `Objective.summarise`.
        """
        means, token_counts = {}, {}
        for term, sums, counts in zip(objective.terms, *by_language.numpy(), strict=True):
            if counts.any():
                means[term], token_counts[term] = _means(codes[objective.quantities[term].task], sums, counts)
        overall = objective.at(step).summarise(**totals) | baselines
        return overall, {"terms": means, "tokens": token_counts, "unigram": unigram_means}

    return info._replace(summarise=summarise)


def _means(codes: Sequence[str], sums: np.ndarray, counts: np.ndarray) -> tuple[dict[str, float], dict[str, int]]:
    """Returns (means, counts), both by language code. Languages without tokens are left out. So are languages whose sum
    is not finite, because JSON has neither infinities nor NaN."""
    present = [index for index in range(len(codes)) if counts[index] and math.isfinite(sums[index])]
    means = {codes[index]: float(sums[index] / counts[index]) for index in present}
    return means, {codes[index]: int(counts[index]) for index in present}


def opening_lines(config: Training, out: Path, start: int, loader: BatchSource, world: int, info: RunInfo) -> list[str]:
    """The lines that a run prints at its start: its main settings and sizes."""
    data, engine = config.data, config.engine
    counts = [f"{count:,}" for count in (data.mono_rows, data.para_rows) if count]
    rows = (" or " if data.alternate else " + ").join(counts)
    tokens = int(sum(data.mean_rows)) * loader.row_tokens
    precision = engine.precision + ("" if on_gpu() else " on the CPU")
    engine_name = f"{engine.kind} {engine.deepspeed}" if engine.kind != "plain" else engine.kind
    network_sizes = {name: count for name, count in info.parameters.items() if name != "trained_total"}
    total = info.parameters.get("trained_total", sum(network_sizes.values()))
    sizes = ", ".join(f"{name} {format_number(count)}" for name, count in network_sizes.items())
    lines = [
        f"{out}: {'resuming after' if start else 'starting at'} step {start} of {config.train.steps}, {world} "
        f"{'process' if world == 1 else 'processes'}, {engine_name}, {precision}",
        f"  model: {format_number(total)} parameters ({sizes})",
        f"  a step: {rows} rows of {loader.row_tokens} tokens, {tokens:,} in all; a process takes "
        f"{loader.plan.accumulation} × {loader.plan.micro_batch_size} rows",
    ]
    if info.objective is not None:
        lines.append(f"  objective: {info.objective['description']}")
        terms = [(name, info.objective["quantities"][name]) for name in info.objective["terms"]]
        for (title, unit), group in groupby(terms, lambda term: (term[1]["title"], term[1]["unit"])):
            lines.append(f"  {', '.join(name for name, _ in group)}: {title} ({unit})")
    if isinstance(loader, Loader) and len(loader.phases) > 1:
        lines.append(f"  phases: {'; '.join(_phases(loader))}")
    elif isinstance(loader, Loader):
        passes = {task: config.train.steps * data.mean_rows[task] / store.rows for task, store in loader.stores.items()}
        repeated = [f"{TASKS[task]} rows {count:.3g} times" for task, count in passes.items() if count > 1]
        if repeated:
            lines.append(f"  the whole run reads {', '.join(repeated)}")
    if changed := _changed_from_recipe(config):
        lines.append(f"  not as the recipe: {', '.join(changed)}")
    if world == 1 and on_gpu() and (visible := torch.cuda.device_count()) > 1:
        lines.append(f"  one of {visible} GPUs is used: `xlme launch --gpus {visible} …` uses them all")
    return lines


def _phases(loader: Loader) -> Iterator[str]:
    for phase, folder, tokens in zip(loader.phases, loader.folders, loader.row_lengths, strict=True):
        rows = f", rows of {tokens} tokens" if len(set(loader.row_lengths)) > 1 else ""
        base = f", rotary base {phase.rotary_base:g}" if phase.rotary_base else ""
        yield f"from step {phase.first_step} {folder}, {100 * phase.mask_fraction:g}% predicted{rows}{base}"


def _changed_from_recipe(config: Training) -> list[str]:
    """Return `SETTING VALUE` for every setting that differs from the recipe `config.name`; nothing if there is no such
    recipe."""
    if config.name not in RECIPES:
        return []
    recipe = RECIPES[config.name]
    ours, theirs = flatten(asdict(config)), flatten(asdict(recipe))
    # A run replaces `auto` by a value in these settings. Then they differ, although the user has not changed them.
    replaced_autos = {"engine.precision"} | ({"engine.deepspeed"} if recipe.engine.deepspeed == "auto" else set())
    return [f"{key} {ours[key]}" for key in ours if ours[key] != theirs.get(key) and key not in replaced_autos]


def write_run_config(folder: RunFolder, config: Training, engine: Engine, info: RunInfo, identity: str) -> None:
    """Write config.json; in pre-training also the vocabulary, without which no checkpoint can be used as a model."""
    loader, heldout = engine.loader, engine.heldout
    data: dict[str, Any] = {"fingerprints": loader.fingerprints, "vocabulary_sha256": info.vocabulary_sha256}
    if isinstance(loader, Loader):
        data["encoded"] = loader.encoded_fingerprints
        if len(loader.phases) > 1:
            data |= {
                "fingerprints": loader.fingerprints_until(0),  # of the first phase
                "phases": loader.fingerprints,
                "phase_folders": [_relative_path(phase_folder, folder.path) for phase_folder in loader.folders],
            }
    if heldout is not None:
        data["heldout_fingerprints"] = heldout.fingerprints
    # Not strict: `info.folders` has no held-out folder if the run has none, and is empty in fine-tuning.
    for name, data_folder in zip(("folder", "heldout"), info.folders, strict=False):
        data[name] = _relative_path(data_folder, folder.path)
    folder.write_config(config, data, engine.world, info.parameters, identity, info.objective)
    if info.folders:
        write_vocabulary(folder.path / MODEL_FOLDER, Vocabulary(info.folders[0] / "vocab").path)


def _relative_path(folder: Path, run: Path) -> str:
    """The path of `folder` relative to the run folder, so that both folders can be moved together."""
    return os.path.relpath(real_path(folder), real_path(run))
