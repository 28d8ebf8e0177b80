"""The start of a run: the lines that it prints, and the description that it writes before the first step."""

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
    kind = f"{engine.kind} {engine.deepspeed}" if engine.kind != "plain" else engine.kind
    sizes = {name: count for name, count in info.parameters.items() if name != "trained_total"}
    counted = ", ".join(f"{name} {number(count)}" for name, count in sizes.items())
    lines = [
        f"{out}: {'resuming after' if start else 'starting at'} step {start} of {config.train.steps}, {world} "
        f"{'process' if world == 1 else 'processes'}, {kind}, {engine.precision}",
        f"  model: {number(info.parameters.get('trained_total', sum(sizes.values())))} parameters ({counted})",
        f"  a step: {rows} rows of {loader.row_tokens} tokens, {tokens:,} in all; a process takes "
        f"{loader.plan.accumulation} × {loader.plan.micro_rows} rows",
    ]
    objective = info.objective or {"terms": (), "description": ""}
    if objective["description"]:
        lines.append(f"  objective: {objective['description']}")
    quantities = {name: objective["quantities"][name] for name in objective["terms"]}
    for (title, unit), names in groupby(quantities, lambda name: (quantities[name]["title"], quantities[name]["unit"])):
        lines.append(f"  {', '.join(names)}: {title} ({unit})")
    changed = _changed_from_recipe(config)
    if isinstance(loader, Loader) and len(loader.phases) > 1:
        lines.append(f"  phases: {'; '.join(_phases(loader))}")
    if changed:
        lines.append(f"  not as the recipe: {', '.join(changed)}")
    if world == 1 and on_gpu() and (visible := torch.cuda.device_count()) > 1:
        lines.append(f"  one of {visible} GPUs is used: `deepspeed --num_gpus {visible} --module …` uses them all")
    return lines


def _phases(loader: Loader) -> Iterator[str]:
    """Each phase in words."""
    for phase, folder, tokens in zip(loader.phases, loader.folders, loader.row_lengths, strict=True):
        rows = f", rows of {tokens} tokens" * (len(set(loader.row_lengths)) > 1)
        base = f", rotary base {phase.rotary_base:g}" if phase.rotary_base else ""
        yield f"from step {phase.first_step} {folder}, {100 * phase.mask_fraction:g}% predicted{rows}{base}"


def _changed_from_recipe(config: Training) -> list[str]:
    """Settings, with their values, in which a run differs from the recipe of its name."""
    if config.name not in RECIPES:
        return []
    recipe = RECIPES[config.name]
    now, of_recipe = flatten(asdict(config)), flatten(asdict(recipe))
    set_at_start = {"engine.precision"} | ({"engine.deepspeed"} if recipe.engine.deepspeed == "auto" else set())
    return [f"{key} {now[key]}" for key in now if now[key] != of_recipe.get(key) and key not in set_at_start]


def write_description(
    folder: RunFolder,
    config: Training,
    loader: BatchSource,
    heldout: BatchSource | None,
    info: RunInfo,
    world: int,
    identity: str,
) -> None:
    """Write config.json; in pre-training also the vocabulary, which checkpoints need to be used as models."""
    data: dict[str, Any] = {"fingerprints": loader.fingerprints, "vocabulary_sha256": info.vocabulary_sha256}
    if isinstance(loader, Loader):
        data["encoded"] = loader.encoded
    if isinstance(loader, Loader) and len(loader.phases) > 1:
        data |= {"fingerprints": loader.fingerprints_until(0), "phases": loader.fingerprints}
        data["phase_folders"] = [_relative_path(place, folder.path) for place in loader.folders]
    if heldout is not None:
        data["heldout_fingerprints"] = heldout.fingerprints
    for name, place in zip(("folder", "heldout"), info.folders, strict=False):
        data[name] = _relative_path(place, folder.path)
    folder.begin(config, data, world, info.parameters, identity, info.objective)
    for data_folder in info.folders[:1]:
        write_vocabulary(folder.path / MODEL_FOLDER, Vocabulary(data_folder / "vocab").path)


def _relative_path(folder: Path, run: Path) -> str:
    """The path of a folder relative to the run's, so that both can be moved together."""
    return os.path.relpath(folder.resolve(), run.resolve())


def report_missing(logs: Sequence[StepLines], config: Training, start: int, saved: Mapping[str, Any]) -> None:
    """Print which logs have fewer lines than when the checkpoint was saved, and the steps that they lack."""
    every = {"metrics": config.train.log_every, "heldout": config.train.eval_every}
    every["heldout_languages"] = every["heldout"]
    first = first_step(config) if isinstance(config, RunConfig) else 0
    for log in logs:
        name, lines = log.path.stem, saved.get("records", {}).get(log.path.stem, 0)
        if len(log.steps) < lines:
            steps = missing_steps(log.steps, every[name], start, first) if every.get(name) else ""
            print(
                f"{log.path} has {len(log.steps)} of the {lines} lines that it had at step {start}"
                + (f", and no record of step {steps}" if steps else ""),
                flush=True,
            )
