"""A whole training run on a ready engine: resume, loop, records."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..checkpoint.checkpoints import PROBE_TOLERANCE, Checkpoints, read_state
from ..config import DataConfig, RunConfig, Training
from ..counting import count_parameters, flops_per_step
from ..data.loader import Loader
from ..data.schema import TASKS
from ..data.shards import RowStore, unigram_nll
from ..engine.build import resolve_precision
from ..engine.engine import Engine
from ..engine.ranks import SharedError, broadcast, on_all_ranks
from ..folders import to_disk
from ..objectives import described, objective_of
from ..objectives.protocol import BatchSource
from .loop import Callback, Evaluate, Guard, Record, Save, fit
from .records import Console, StepLines, audit_reads
from .run_folder import RunFolder, missing_steps, settled
from .stop import StopRequest, Watchdog


def heldout_data(config: RunConfig, folder: Path, world: int) -> DataConfig:
    """The rows of an evaluation: up to `train.eval_rows` from the start of each task, as many as divide among the
    ranks.

    Raises ValueError for a folder with fewer rows than processes.
    """
    asked = (config.data.mono_rows, config.data.para_rows)
    available = [
        min(RowStore(folder / name).rows, config.train.eval_rows) if rows else 0
        for name, rows in zip(TASKS, asked, strict=True)
    ]
    pieces = world * max(math.ceil(max(available) // world / config.data.micro_batch), 1)
    mono, para = (rows // pieces * pieces for rows in available)
    for name, rows, kept in zip(TASKS, asked, (mono, para), strict=True):
        if rows and not kept:
            raise ValueError(
                f"{folder / name} has too few rows for {pieces} micro-batches: mix more held-out rows, raise "
                "data.micro_batch, or use fewer processes"
            )
    return DataConfig(mono, para, micro_batch=max(mono, para) // pieces)


class RunFacts(NamedTuple):
    """What a run has besides its settings."""

    flops: float
    """Of a step, by the standard count."""
    parameters: dict[str, int]
    vocabulary_sha256: str
    """Of what the ids were made with."""
    evaluation: Callable[..., dict[str, float]] | None = None
    """Means from the sums, counts and statistics of held-out rows."""
    constants: Mapping[str, float] = MappingProxyType({})
    """Written with every evaluation."""
    objective: Mapping[str, Any] = MappingProxyType({})
    """What is trained for, in words (`objectives.described`); empty in fine-tuning."""


def train(
    engine: Engine,
    config: Training,
    folder: RunFolder,
    loader: BatchSource,
    heldout: BatchSource | None,
    work: RunFacts,
    stop: StopRequest | None = None,
    watchdog: Watchdog | None = None,
) -> bool:
    """Train to the end or until stopped; True when the run is finished. Resumes from the newest whole checkpoint.

    `stop` and `watchdog` are given where they were made earlier. Raises SharedError when the run cannot go on.
    """
    stop = stop or StopRequest()
    watchdog = watchdog or Watchdog(config.train.watchdog_minutes, engine.rank)
    watchdog.beat("resuming from a checkpoint")
    try:
        return _train(engine, config, folder, loader, heldout, work, stop, watchdog)
    finally:
        watchdog.close()


def _train(
    engine: Engine,
    config: Training,
    folder: RunFolder,
    loader: BatchSource,
    heldout: BatchSource | None,
    work: RunFacts,
    stop: StopRequest,
    watchdog: Watchdog,
) -> bool:
    root, out = engine.rank == 0, folder.path
    buffer_bytes = int(config.train.save_buffer_gib * 2**30)
    checkpoints = Checkpoints(out, config.train.keep_last, config.train.keep_every, buffer_bytes)
    state = {
        "fingerprints": loader.fingerprints,
        "heldout": None if heldout is None else heldout.fingerprints,
    }
    start, saved = _resume(engine, config, folder, checkpoints, state)
    state |= {"run": saved.get("run"), "settings": settled(config)}
    data = {"fingerprints": loader.fingerprints, "vocabulary_sha256": work.vocabulary_sha256}
    on_all_ranks(lambda: folder.begin(config, data, engine.world, work.parameters, saved.get("run"), work.objective))
    on_all_ranks(lambda: checkpoints.begin() if root else None)
    if start >= config.train.steps:
        if root:
            print(f"{out}: all {start} steps are done")
        return True
    if root:
        print(
            f"{out}: {'resuming after' if start else 'starting at'} step {start} of {config.train.steps}, "
            f"{engine.world} processes",
            flush=True,
        )

    audited = None
    if config.train.audit and isinstance(loader, Loader):  # other sources refuse the setting
        audited = audit_reads(out, loader, start, engine.rank, engine.world)
    plain_every = max(config.train.steps // 20, 1)
    console = Console(config.train.steps, start, plain_every, work.objective) if root else None
    faults = on_all_ranks(lambda: StepLines(out, "faults", start) if root else None)
    guard = Guard(config.train, saved.get("guard", {}), loader.rows_of, faults)
    callbacks = on_all_ranks(lambda: _records(engine, config, out, start, loader, work, console, guard))
    logs = [each.log for each in (guard, *callbacks) if each.log is not None]
    if root:
        _tell_missing(logs, config, start, saved)

    def to_save() -> dict[str, Any]:
        if audited is not None and audited.exists():
            to_disk(audited)
        return {**state, "guard": guard.state, "records": {log.path.stem: log.sync() for log in logs}}

    callbacks.append(Save(checkpoints, engine, config.train.save_every, to_save, start))
    done = fit(engine, config, guard, callbacks, start, stop, watchdog)
    if console is not None:
        console.close()
    if guard.fault is not None:
        raise SharedError(f"{out}: {guard.fault}")
    if root and done < config.train.steps:
        print(
            f"{out}: stopped after step {done} of {config.train.steps} and saved; the same command goes on from there"
        )
    return done >= config.train.steps


def _tell_missing(logs: Sequence[StepLines], config: Training, start: int, saved: Mapping[str, Any]) -> None:
    """Say which records have fewer lines than when the checkpoint was saved."""
    every = {"metrics": config.train.log_every, "heldout": config.train.eval_every}
    for log in logs:
        name, there = log.path.stem, saved.get("records", {})
        if len(log.steps) < there.get(name, 0):
            steps = missing_steps(log.steps, every[name], start) if every.get(name) else ""
            print(
                f"{log.path} has {len(log.steps)} of the {there[name]} lines that it had at step {start}"
                + (f", and no record of step {steps}" if steps else ""),
                flush=True,
            )


def _records(
    engine: Engine,
    config: Training,
    out: Path,
    start: int,
    loader: BatchSource,
    work: RunFacts,
    console: Console | None,
    guard: Guard,
) -> list[Callback]:
    """What writes down how the run goes; `console` is the root's. Raises OSError when that cannot be."""
    callbacks: list[Callback] = []
    if console is not None:
        shown = console.step, lambda: guard.skipped
        callbacks.append(Record(out, config, start, loader.row_tokens, work.flops, *shown))
    if work.evaluation is not None:
        every, steps = config.train.eval_every, config.train.steps
        show = console.evaluation if console is not None else None
        callbacks.append(Evaluate(out, engine, work.evaluation, every, steps, start, work.constants, show))
    return callbacks


def _resume(
    engine: Engine, config: Training, folder: RunFolder, checkpoints: Checkpoints, state: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Load the newest whole checkpoint, which the root chooses; returns the steps done, 0 for a new run, and what was
    saved with it."""
    newest, complaints = checkpoints.newest(engine.rank, engine.world)
    if engine.rank == 0 and complaints:
        print("\n".join(complaints))
    saved = on_all_ranks(lambda: {} if newest is None else read_state(newest))
    run = broadcast(on_all_ranks(lambda: folder.identity(config, newest, saved)))
    if newest is not None:
        return checkpoints.load(engine, newest, state, PROBE_TOLERANCE[resolve_precision(config.engine)]), saved
    lost = broadcast(on_all_ranks(lambda: checkpoints.lost(folder.steps_logged(), config.train.save_every)))
    if lost or complaints:
        raise SharedError(f"{folder.path} has records but no usable checkpoint: restore one, or choose another --out")
    return 0, {"run": run}


def pretraining(config: RunConfig, loader: Loader, heldout: Loader | None, root: bool) -> RunFacts:
    """The facts of a pre-training run; `root` alone reads text for them."""
    known = flops_per_step(config, loader.row_tokens), count_parameters(config), loader.vocabulary_sha256
    words = described(config.objective)
    if heldout is None:
        return RunFacts(*known, objective=words)
    constants = {
        f"unigram_nll_{TASKS[task]}": unigram_nll(loader.stores[task], store, heldout.plan.rows[task])
        for task, store in heldout.stores.items()
        if root
    }
    return RunFacts(*known, objective_of(config.objective).summarise, constants, words)
