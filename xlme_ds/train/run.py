"""A whole training run: data, engine, resume, loop, records."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.checkpoints import PROBE_TOLERANCE, Checkpoints, matching
from ..checkpoint.state_files import read_state
from ..cli import number
from ..config import DataConfig, RunConfig, TrainConfig, Training
from ..counting import count_parameters, flops_per_step
from ..data.loader import Loader, unigram_by_language
from ..data.schema import TASKS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..engine.build import build_engine, open_data, require_engine_file, resolve_precision
from ..engine.engine import Engine
from ..engine.ranks import SharedError, broadcast, data_parallel, gather, on_all_ranks, on_gpu, process_group
from ..first_weights import named, starting_weights
from ..folders import at_step, checkpoints_of, saved_step
from ..io.errors import refuse
from ..io.files import to_disk
from ..models.init import InitialValues
from ..objectives import described, has_decoder, objective_of
from ..objectives.protocol import BatchSource
from ..recipes import RECIPES
from ..trained import MODEL_FOLDER, pinned, whole_checkpoint, write_vocabulary
from ..validate import validate
from .loop import Callback, Dimensions, Evaluate, Guard, Profile, Record, Save, Show, fit
from .records import Console, StepLines, Tracker, audit_reads, product_rate
from .run_folder import RunFolder, first_step, flatten, missing_steps, settled
from .stop import StopRequest, Watchdog


def heldout_data(config: RunConfig, folder: Path) -> DataConfig:
    """The rows of an evaluation: up to `train.eval_rows` from the start of each task."""
    asked = (config.data.mono_rows, config.data.para_rows)
    mono, para = (
        min(RowStore(folder / name).rows, config.train.eval_rows) if rows else 0
        for name, rows in zip(TASKS, asked, strict=True)
    )
    return DataConfig(mono, para, config.data.micro_batch)


class RunFacts(NamedTuple):
    """What a run has besides its settings.

    `flops`: of a step, by the standard count; `vocabulary_sha256`: of what the ids were made with; `evaluation`: from
    what an engine adds up over held-out rows, the numbers of the whole and those of every language; `objective`: what
    is trained for, in words (`objectives.described`), None in fine-tuning;
    `folders`: of pre-training, its data and its held-out data if it has any.
    """

    flops: float
    parameters: dict[str, int]
    vocabulary_sha256: str
    evaluation: Callable[..., tuple[dict[str, float], dict[str, Any]]] | None = None
    objective: Mapping[str, Any] | None = None
    folders: tuple[Path, ...] = ()


def train(
    engine: Engine,
    config: Training,
    folder: RunFolder,
    loader: BatchSource,
    heldout: BatchSource | None,
    work: RunFacts,
    stop: StopRequest,
    watchdog: Watchdog,
    profiled: int = 0,
) -> bool:
    """Train to the end or until stopped; True when the run is finished. Resumes from the newest whole checkpoint.

    Raises SharedError when the run cannot go on.
    """
    watchdog.beat("resuming from a checkpoint")
    settings, root, out = config.train, engine.rank == 0, folder.path
    buffer_bytes = int(settings.save_buffer_gib * 2**30)
    checkpoints = Checkpoints(out, settings.keep_last, settings.keep_every, buffer_bytes)
    read = partial(_read_until, loader, heldout)
    start, saved = _resume(engine, config, folder, checkpoints, read)
    state: dict[str, Any] = {"run": saved.get("run"), "settings": settled(config)}
    known = folder, config, loader, heldout, work, engine.world, saved.get("run")
    on_all_ranks(lambda: _begin(*known) if root else None)
    logged = on_all_ranks(lambda: folder.steps_logged() if root else 0)
    if start >= settings.steps:
        # It may have been made shorter after it had done more.
        on_all_ranks(lambda: folder.drop_records(start) if logged > start else None)
        if root:
            print(f"{out}: all {start} steps are done")
        return True
    if root:
        print("\n".join(opening(config, out, start, loader, engine.world, work)), flush=True)
    peak = engine.world * product_rate(engine.device, config.engine.precision)  # on all ranks at the same time
    audited = None
    if settings.audit and isinstance(loader, Loader):  # other sources refuse the setting
        audited = audit_reads(out, loader, start, engine.rank, engine.world)
    if logged > start:
        again = min(logged, settings.steps)
        print(
            f"{out}: what came after step {start}, up to step {again}, is done again: the newest checkpoint is of then"
        )
    facts = engine, config, out, start, saved, loader, work, peak, profiled
    guard, callbacks, shown = on_all_ranks(lambda: _callbacks(*facts))
    logs = [log for each in (guard, *callbacks) for log in each.logs]
    _tell_missing(logs, config, start, saved)

    def to_save(done: int) -> dict[str, Any]:
        if audited is not None and audited.exists():
            to_disk(audited)
        return {**state, **read(done), "guard": guard.state, "records": {log.path.stem: log.sync() for log in logs}}

    callbacks.append(Save(checkpoints, engine, settings.save_every, to_save, start))
    if root and work.folders:
        callbacks.append(Show(out, settings, checkpoints))  # last: after the checkpoint that it is to show
    done = fit(engine, config, guard, callbacks, start, stop, watchdog)
    for each in shown:
        each.close()
    if guard.fault is not None:
        raise SharedError(f"{out}: {guard.fault}")
    if root and done < settings.steps:
        print(f"{out}: stopped after step {done} of {settings.steps} and saved; the same command goes on from there")
    return done >= settings.steps


def opening(config: Training, out: Path, start: int, loader: BatchSource, world: int, work: RunFacts) -> list[str]:
    """What is run, in a few lines."""
    data, engine = config.data, config.engine
    rows = " + ".join(f"{count:,}" for count in (data.mono_rows, data.para_rows) if count)
    tokens = int(sum(data.mean_rows)) * loader.row_tokens
    kind = f"{engine.kind} {engine.deepspeed}" if engine.kind != "plain" else engine.kind
    parts = {name: count for name, count in work.parameters.items() if name != "trained_total"}
    counted = ", ".join(f"{name} {number(count)}" for name, count in parts.items())
    lines = [
        f"{out}: {'resuming after' if start else 'starting at'} step {start} of {config.train.steps}, {world} "
        f"{'process' if world == 1 else 'processes'}, {kind}, {engine.precision}",
        f"  model: {number(work.parameters.get('trained_total', sum(parts.values())))} parameters ({counted})",
        f"  a step: {rows} rows of {loader.row_tokens} tokens, {tokens:,} in all; a process takes "
        f"{loader.plan.accumulation} × {loader.plan.micro_rows} rows",
    ]
    objective = work.objective or {"terms": (), "description": ""}
    if objective["description"]:
        lines.append(f"  objective: {objective['description']}")
    words = {name: objective["quantities"][name] for name in objective["terms"]}
    for (title, unit), names in groupby(words, lambda name: (words[name]["title"], words[name]["unit"])):
        lines.append(f"  {', '.join(names)}: {title} ({unit})")
    other = _unusual(config)
    if isinstance(loader, Loader) and len(loader.phases) > 1:
        stretches = (f"from step {phase.first} {folder}, {100 * phase.mask_fraction:g}% predicted"
                 for phase, folder in zip(loader.phases, loader.folders, strict=True))  # fmt: skip
        lines.append(f"  phases: {'; '.join(stretches)}")
    lines += [f"  not as the recipe: {', '.join(other)}"] * bool(other)
    if world == 1 and on_gpu() and (visible := torch.cuda.device_count()) > 1:
        lines.append(f"  one of {visible} GPUs is used: `deepspeed --num_gpus {visible} --module …` uses them all")
    return lines


def _unusual(config: Training) -> list[str]:
    """The settings in which a run differs from the recipe of its name, each with its value."""
    if config.name not in RECIPES:
        return []
    recipe = RECIPES[config.name]
    now, usual = flatten(asdict(config)), flatten(asdict(recipe))
    chosen = {"engine.precision"} | ({"engine.deepspeed"} if recipe.engine.deepspeed == "auto" else set())
    return [f"{key} {now[key]}" for key in now if now[key] != usual.get(key) and key not in chosen]


def _begin(
    folder: RunFolder,
    config: Training,
    loader: BatchSource,
    heldout: BatchSource | None,
    work: RunFacts,
    world: int,
    identity: str | None,
) -> None:
    """Write down what the run is; of pre-training also its vocabulary, with which its checkpoints are models."""
    data: dict[str, Any] = {"fingerprints": loader.fingerprints, "vocabulary_sha256": work.vocabulary_sha256}
    if isinstance(loader, Loader):
        data["encoded"] = loader.encoded
    if isinstance(loader, Loader) and len(loader.phases) > 1:
        data |= {"fingerprints": loader.fingerprints_until(0), "phases": loader.fingerprints}
        data["phase_folders"] = [_seen(each, folder.path) for each in loader.folders]
    if heldout is not None:
        data["heldout_fingerprints"] = heldout.fingerprints
    data |= _places(work.folders, folder.path)
    folder.begin(config, data, world, work.parameters, identity, work.objective)
    for data_folder in work.folders[:1]:
        write_vocabulary(folder.path / MODEL_FOLDER, Vocabulary(data_folder / "vocab").path)


def _places(folders: Sequence[Path], run: Path) -> dict[str, str]:
    """The folders as seen from the run's, which may be moved with them."""
    return dict(zip(("folder", "heldout"), (_seen(folder, run) for folder in folders), strict=False))


def _seen(folder: Path, run: Path) -> str:
    return os.path.relpath(folder.resolve(), run.resolve())


def _tell_missing(logs: Sequence[StepLines], config: Training, start: int, saved: Mapping[str, Any]) -> None:
    """Say which records have fewer lines than when the checkpoint was saved."""
    every = {"metrics": config.train.log_every, "heldout": config.train.eval_every}
    every["heldout_languages"] = every["heldout"]
    first = first_step(config) if isinstance(config, RunConfig) else 0
    for log in logs:
        name, there = log.path.stem, saved.get("records", {})
        if len(log.steps) < there.get(name, 0):
            steps = missing_steps(log.steps, every[name], start, first) if every.get(name) else ""
            print(
                f"{log.path} has {len(log.steps)} of the {there[name]} lines that it had at step {start}"
                + (f", and no record of step {steps}" if steps else ""),
                flush=True,
            )


def _callbacks(
    engine: Engine,
    config: Training,
    out: Path,
    start: int,
    saved: Mapping[str, Any],
    loader: BatchSource,
    work: RunFacts,
    peak: float,
    profiled: int,
) -> tuple[Guard, list[Callback], list[Console | Tracker]]:
    """The guard, what writes down how the run goes, and what is to be closed after it; the root has the console and
    the files. Raises OSError when these cannot be written."""
    root, settings = engine.rank == 0, config.train
    guard = Guard(settings, saved.get("guard", {}), loader.rows_of, StepLines(out, "faults", start) if root else None)
    callbacks: list[Callback] = []
    console, tracker = None, None
    if root:
        if settings.wandb:
            tracker = Tracker(settings.wandb, out, saved.get("run") or out.name, asdict(config))
        console = Console(settings.steps, start, (work.objective or {}).get("terms", ()))
        shown = console.step, lambda: guard.skipped
        callbacks.append(Record(out, config, start, engine, work.flops, peak, *shown, tracker))
    if work.evaluation is not None:
        callbacks.append(Evaluate(out, engine, settings, start, work.evaluation, console, tracker))
    if work.evaluation is not None and isinstance(config, RunConfig) and not has_decoder(config.objective):
        callbacks.append(Dimensions(out, engine, settings, start, first_step(config), console, tracker))
    if root and profiled:
        callbacks.append(Profile(out, profiled, engine.device))
    return guard, callbacks, [each for each in (console, tracker) if each is not None]


def _read_until(loader: BatchSource, heldout: BatchSource | None, steps: int) -> dict[str, Any]:
    """What the data are that these steps read, and the held-out data."""
    ours = loader.fingerprints_until(steps) if isinstance(loader, Loader) else loader.fingerprints
    return {"fingerprints": ours, "heldout": None if heldout is None else heldout.fingerprints}


def rehearse_resume(config: RunConfig, loader: Loader, heldout: Loader | None, folder: RunFolder) -> None:
    """Raise ValueError for what would stop the run from going on from its newest checkpoint. The root's."""
    if checkpoints_of(folder.path):
        newest = whole_checkpoint(folder.path)
        saved = read_state(newest)
        folder.identity(config, newest, matching(saved, newest, _read_until(loader, heldout, saved["step"])))
    else:
        _require_records(config, folder, Checkpoints(folder.path, config.train.keep_last, config.train.keep_every))


def _require_records(config: Training, folder: RunFolder, checkpoints: Checkpoints, damaged: bool = False) -> None:
    """Raise ValueError where there was a checkpoint, and is none."""
    own = folder.steps_logged() - (first_step(config) if isinstance(config, RunConfig) else 0)
    words = f"{folder.path} has records but no usable checkpoint: restore one, or choose another --out"
    every = min(config.train.save_every, folder.last_started_with("save_every", math.inf))  # it may have been raised
    refuse([(not damaged and not checkpoints.lost(own, every), words)])


def _resume(
    engine: Engine, config: Training, folder: RunFolder, checkpoints: Checkpoints, read: Callable[[int], dict[str, Any]]
) -> tuple[int, dict[str, Any]]:
    """Load the newest whole checkpoint, which the root chooses; returns the steps done, 0 for a new run, and what was
    saved with it."""
    newest, complaints = checkpoints.newest(engine.rank, engine.world)
    if engine.rank == 0 and complaints:
        print("\n".join(complaints))
    saved = on_all_ranks(lambda: {} if newest is None else read_state(newest))
    run = broadcast(on_all_ranks(lambda: folder.identity(config, newest, saved)))
    tolerance = PROBE_TOLERANCE[resolve_precision(config.engine)]
    if newest is not None:
        on_all_ranks(lambda: _tell_not_kept(config.train, folder, checkpoints) if engine.rank == 0 else None)
        return checkpoints.load(engine, newest, read(saved["step"]), tolerance), saved
    on_all_ranks(lambda: _begin_anew(config, folder, checkpoints, bool(complaints)) if engine.rank == 0 else None)
    if isinstance(config, RunConfig) and config.start.take == "state":
        return _branch(engine, config, checkpoints, read, tolerance), {"run": run}
    return 0, {"run": run}


def _tell_not_kept(config: TrainConfig, folder: RunFolder, checkpoints: Checkpoints) -> None:
    """Say which checkpoints the next save deletes that were kept for good before."""
    before, now = int(folder.last_started_with("keep_every", 0)), config.keep_every
    gone = [
        each.name
        for each in checkpoints.all()[: -config.keep_last]
        if before and saved_step(each) % before == 0 and not (now and saved_step(each) % now == 0)
    ]
    if gone:
        print(
            f"{folder.path}: train.keep_every was {before} and is {now}: the next save deletes {', '.join(gone)}, copy "
            "what you want to keep, or start the run again with the same",
            flush=True,
        )


def _begin_anew(config: Training, folder: RunFolder, checkpoints: Checkpoints, damaged: bool) -> None:
    """Put aside what a run recorded before its first checkpoint. Raises as `_require_records`."""
    _require_records(config, folder, checkpoints, damaged)
    if aside := folder.put_records_aside():
        print(f"{folder.path} has no checkpoint yet and begins anew: its records are kept as {', '.join(aside)}")


def _branch(
    engine: Engine, config: RunConfig, checkpoints: Checkpoints, read: Callable[[int], dict[str, Any]], tolerance: float
) -> int:
    """Load the state of the checkpoint that `start.folder` names; returns its number of steps."""
    parent = on_all_ranks(lambda: whole_checkpoint(*at_step(Path(config.start.folder))))
    saved = on_all_ranks(lambda: read_state(parent))
    same = {key: value for key, value in read(0).items() if saved.get(key) == value}
    # The probe's loss depends on its row, masks and weights: with others nothing says what it should be.
    ours, theirs = settled(config), saved.get("settings", {})
    probed = [key for key in ours if key == "seed" or key.startswith(("objective.", "data.phase_"))]
    comparable = "fingerprints" in same and all(ours[key] == theirs.get(key, ours[key]) for key in probed)
    start = checkpoints.load(engine, parent, same, tolerance if comparable else math.inf)
    if engine.rank == 0:
        print(f"{parent}: its state is taken, with the optimizer's", flush=True)
    return start


def pretraining(config: RunConfig, loader: Loader, heldout: Loader | None, root: bool) -> RunFacts:
    """The facts of a pre-training run; `root` alone reads text for them."""
    known = flops_per_step(config, loader.row_tokens), count_parameters(config), loader.vocabulary_sha256
    words = described(config.objective)
    if heldout is None:
        return RunFacts(*known, objective=words)
    objective, unigram = objective_of(config.objective), {}
    codes = {TASKS[task]: store.languages for task, store in heldout.stores.items()}
    for task, store in heldout.stores.items() if root else ():
        unigram[TASKS[task]] = unigram_by_language(
            loader.shares(task, config.train.steps), store, task, heldout.plan.rows[task]
        )
    constants = {f"unigram_nll_{task}": float(sums.sum() / counts.sum()) for task, (sums, counts) in unigram.items()}
    baselines = {task: _means(codes[task], *both)[0] for task, both in unigram.items()}

    def evaluation(step: int, by_language: Tensor, **totals: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        found = {
            term: _means(codes[objective.quantities[term].task], sums, counts)
            for term, sums, counts in zip(objective.terms, *by_language.numpy(), strict=True)
            if counts.any()
        }
        means, numbers = ({term: both[n] for term, both in found.items()} for n in (0, 1))
        overall = objective.at(step).summarise(**totals) | constants
        return overall, {"terms": means, "tokens": numbers, "unigram": baselines}

    return RunFacts(*known, evaluation, words)


def _means(codes: Sequence[str], sums: np.ndarray, counts: np.ndarray) -> tuple[dict[str, float], dict[str, int]]:
    """Means and counts of the languages that have any, by code; those whose mean is not finite are left out, as JSON
    has no word for it."""
    of = [n for n in range(len(codes)) if counts[n] and math.isfinite(sums[n])]
    return {codes[n]: float(sums[n] / counts[n]) for n in of}, {codes[n]: int(counts[n]) for n in of}


def read_inputs(
    config: RunConfig,
    data: Sequence[Path],
    heldout: Path | None,
    folder: RunFolder,
    sources: Sequence[Path],
    rank: int,
    world: int,
) -> tuple[Loader, Loader | None, InitialValues | None]:
    """Claim the `folder`, and open the data, the held-out data, and the `sources` of the first weights. Raises
    ValueError for what does not fit."""
    validate(config, world)  # with the precision that `auto` has become
    require_engine_file(config.engine)
    out = folder.path.resolve()
    for place in (each.resolve() for each in (*data, *([] if heldout is None else [heldout]))):
        own = out == place or any(out.is_relative_to(place / name) for name in (*TASKS, "vocab"))
        refuse([(not own, f"{folder.path} is in the data of {place}: choose another --out")])
    folder.claim(config)
    start, begun = config.start, checkpoints_of(folder.path)
    refuse(
        [
            (
                start.take == "all" or bool(start.folder) or has_decoder(config.objective) or bool(begun),
                f"start.take {start.take} is of a model that the run begins with, and start.folder names none: name "
                "it, or set start.take to all, for random weights",
            )
        ]
    )
    share, shares = data_parallel(config.engine, rank, world)
    loader = open_data(config, data, share, shares)
    known = starting_weights(config, Vocabulary(data[0] / "vocab"), sources) if sources else None
    if heldout is None:
        return loader, None, known
    rows = heldout_data(config, heldout)
    return loader, open_data(config, heldout, share, shares, rows, like=loader), known


def started_from(config: RunConfig, out: Path) -> list[Path]:
    """What the first weights are read from, if anything: a run that resumes needs the folders that it started from no
    more."""
    folders = named(config.start)
    return [pinned(folder) for folder in folders] if folders and not checkpoints_of(out) else []


def pretrain(
    config: RunConfig,
    data: Sequence[Path],
    out: Path,
    heldout: Path | None,
    stop: StopRequest,
    report: Callable[[dict[str, Tensor]], Path],
    profiled: int = 0,
) -> None:
    """Train `config` on `data` into `out`, from its newest checkpoint if it has one; collective over the launched
    ranks. `report` writes what is shown of a finished run from its weights, and returns the page; `profiled`: steps
    whose time is broken down into the folder."""
    minutes, rank = config.train.watchdog_minutes, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    with (
        closing(Watchdog(minutes, rank, "waiting for the other processes")) as watchdog,
        process_group(config.engine, minutes) as (rank, world),
    ):
        watchdog.beat("reading the data and building the model")
        # A resumed run must not change its precision because the processor differs.
        config = replace(config, engine=replace(config.engine, precision=resolve_precision(config.engine)))
        folder = RunFolder(out, root=rank == 0)

        # The same checkpoint on every rank, of a run that goes on meanwhile.
        sources = broadcast(on_all_ranks(lambda: started_from(config, out) if rank == 0 else []))
        inputs = config, data, heldout, folder, sources, rank, world
        try:
            loader, unseen, known = on_all_ranks(lambda: read_inputs(*inputs))
        except SharedError:
            folder.close()
            raise
        if any(gather(stop.received is not None)):
            if rank == 0:
                print(f"{out}: told to stop before the first step; the same command starts again", flush=True)
            return
        engine = build_engine(config, loader, unseen, known)
        work = on_all_ranks(lambda: pretraining(config, loader, unseen, root=rank == 0))
        work = work._replace(folders=(data[0],) if heldout is None else (data[0], heldout))
        finished = train(engine, config, folder, loader, unseen, work, stop, watchdog, profiled)
        watchdog.close()
        state = engine.full_state() if finished else {}
    if finished and rank == 0:
        stop.at_once = True
        try:
            page = on_all_ranks(lambda: report(state))  # this process alone by now
        except SystemExit:
            print(f"{out}: told to stop while the report was written; the same command writes it", flush=True)
            raise
        on_all_ranks(lambda: folder.finish(config.train.steps))
        print(f"{out}: finished; open {page}", flush=True)
