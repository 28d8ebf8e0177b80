"""The start of a run: the lines that it prints, and the `config.json` that it writes before the first step."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..cli import number
from ..config import RunConfig, Training
from ..data.loader import Loader
from ..data.rows import TASKS
from ..data.vocabulary import Vocabulary
from ..engine.ranks import on_gpu
from ..objectives.protocol import BatchSource
from ..recipes import RECIPES
from ..trained.runs import MODEL_FOLDER, write_vocabulary
from .inputs import RunInfo
from .records import StepLines
from .run_folder import RunFolder, first_step, flatten, missing_steps


def opening_lines(config: Training, out: Path, start: int, loader: BatchSource, world: int, info: RunInfo) -> list[str]:
    """The lines that a run prints at its start: its main settings and sizes."""
    data, engine = config.data, config.engine
    rows = " + ".join(f"{count:,}" for count in (data.mono_rows, data.para_rows) if count)
    tokens = int(sum(data.mean_rows)) * loader.row_tokens
    precision = engine.precision + ("" if on_gpu() else " on the CPU")
    engine_name = f"{engine.kind} {engine.deepspeed}" if engine.kind != "plain" else engine.kind
    network_sizes = {name: count for name, count in info.parameters.items() if name != "trained_total"}
    total = info.parameters.get("trained_total", sum(network_sizes.values()))
    counts = ", ".join(f"{name} {number(count)}" for name, count in network_sizes.items())
    lines = [
        f"{out}: {'resuming after' if start else 'starting at'} step {start} of {config.train.steps}, {world} "
        f"{'process' if world == 1 else 'processes'}, {engine_name}, {precision}",
        f"  model: {number(total)} parameters ({counts})",
        f"  a step: {rows} rows of {loader.row_tokens} tokens, {tokens:,} in all; a process takes "
        f"{loader.plan.accumulation} × {loader.plan.micro_rows} rows",
    ]
    objective = info.objective or {"terms": (), "description": ""}
    if objective["description"]:
        lines.append(f"  objective: {objective['description']}")
    quantities = {name: objective["quantities"][name] for name in objective["terms"]}
    for (title, unit), names in groupby(quantities, lambda name: (quantities[name]["title"], quantities[name]["unit"])):
        lines.append(f"  {', '.join(names)}: {title} ({unit})")
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
    """Yield a description of each phase."""
    lengths_differ = len(set(loader.row_lengths)) > 1
    for phase, folder, tokens in zip(loader.phases, loader.folders, loader.row_lengths, strict=True):
        rows = f", rows of {tokens} tokens" if lengths_differ else ""
        base = f", rotary base {phase.rotary_base:g}" if phase.rotary_base else ""
        yield f"from step {phase.first_step} {folder}, {100 * phase.mask_fraction:g}% predicted{rows}{base}"


def _changed_from_recipe(config: Training) -> list[str]:
    """Return `SETTING VALUE` for every setting that differs from the recipe called `config.name`, if there is one."""
    if config.name not in RECIPES:
        return []
    recipe = RECIPES[config.name]
    ours, theirs = flatten(asdict(config)), flatten(asdict(recipe))
    # Settings that the recipe leaves at `auto`, and that the run has replaced by a choice.
    replaced_autos = {"engine.precision"} | ({"engine.deepspeed"} if recipe.engine.deepspeed == "auto" else set())
    return [f"{key} {ours[key]}" for key in ours if ours[key] != theirs.get(key) and key not in replaced_autos]


def write_description(
    folder: RunFolder,
    config: Training,
    loader: BatchSource,
    heldout: BatchSource | None,
    info: RunInfo,
    world: int,
    identity: str,
) -> None:
    """Write config.json; in pre-training also the vocabulary, without which no checkpoint can be used as a model."""
    data: dict[str, Any] = {"fingerprints": loader.fingerprints, "vocabulary_sha256": info.vocabulary_sha256}
    if isinstance(loader, Loader):
        data["encoded"] = loader.encoded
        if len(loader.phases) > 1:
            data |= {"fingerprints": loader.fingerprints_until(0), "phases": loader.fingerprints}
            data["phase_folders"] = [_relative_path(phase_folder, folder.path) for phase_folder in loader.folders]
    if heldout is not None:
        data["heldout_fingerprints"] = heldout.fingerprints
    for name, data_folder in zip(("folder", "heldout"), info.folders, strict=False):
        data[name] = _relative_path(data_folder, folder.path)
    folder.begin(config, data, world, info.parameters, identity, info.objective)
    if info.folders:
        write_vocabulary(folder.path / MODEL_FOLDER, Vocabulary(info.folders[0] / "vocab").path)


def _relative_path(folder: Path, run: Path) -> str:
    """The path of `folder` relative to the run folder, so that both folders can be moved together."""
    return os.path.relpath(folder.resolve(), run.resolve())


def report_missing(logs: Sequence[StepLines], config: Training, start: int, saved: Mapping[str, Any]) -> None:
    """Print which logs have fewer lines than they had when the checkpoint of step `start` was saved, and which steps
    are missing in these logs. `saved`: the checkpoint's state."""
    intervals = {"metrics": config.train.log_every, "heldout": config.train.eval_every}
    intervals["heldout_languages"] = intervals["heldout"]
    first = first_step(config) if isinstance(config, RunConfig) else 0
    for log in logs:
        name = log.path.stem
        saved_lines = saved.get("records", {}).get(name, 0)
        if len(log.steps) < saved_lines:
            steps = missing_steps(log.steps, intervals[name], start, first) if intervals.get(name) else ""
            print(
                f"{log.path} has {len(log.steps)} of the {saved_lines} lines that it had at step {start}"
                + (f", and no record of step {steps}" if steps else ""),
                flush=True,
            )
