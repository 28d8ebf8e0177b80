"""A whole training run on a ready engine: resume, loop, records."""

import math
from pathlib import Path
from typing import Any

from ..config import DataConfig, RunConfig
from ..data.loader import Loader
from ..data.schema import TASKS
from ..data.shards import RowStore
from ..data.unigram import unigram_nll
from ..engine.build import resolve_precision
from ..engine.processes import SharedError, broadcast, together
from ..engine.protocol import Engine
from ..flops import flops_per_step
from ..objectives import OBJECTIVES
from .callbacks import Callback, Evaluate, Record, Save
from .checkpoint import PROBE_TOLERANCE, Checkpoints
from .console import Console
from .folder import RunFolder
from .loop import StopRequest, fit


def heldout_data(config: RunConfig, folder: Path, world: int) -> DataConfig:
    """The rows of an evaluation: up to `train.eval_rows` from the start of each task, as many as divide among the ranks.

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
                f"{folder / name} has too few rows for {pieces} micro-batches: mix more held-out rows, raise data.micro_batch, "
                "or use fewer processes"
            )
    return DataConfig(mono, para, micro_batch=max(mono, para) // pieces)


def train(engine: Engine, config: RunConfig, folder: RunFolder, loader: Loader, heldout: Loader | None) -> bool:
    """Train to the end or until stopped; True when the run is finished. Resumes from the newest whole checkpoint."""
    root, out = engine.rank == 0, folder.path
    buffer_bytes = int(config.train.save_buffer_gib * 2**30)
    checkpoints = Checkpoints(out, config.train.keep_last, config.train.keep_every, buffer_bytes)
    state = {
        "fingerprints": loader.fingerprints,
        "heldout": None if heldout is None else heldout.fingerprints,
    }
    start = _resume(engine, config, folder, checkpoints, state)
    together(lambda: folder.begin(config, loader.fingerprints, engine.world))
    if start >= config.train.steps:
        if root:
            print(f"{out}: all {start} steps are done")
        return True
    if root:
        print(
            f"{out}: {'resuming after' if start else 'starting at'} step {start} of {config.train.steps}, {engine.world} processes",
            flush=True,
        )

    stop = StopRequest()
    console = Console(config.train.steps, start, max(config.train.steps // 20, 1)) if root else None
    callbacks: list[Callback] = []
    if console is not None:
        flops = flops_per_step(config, loader.row_tokens)
        callbacks.append(Record(out, config, start, loader.row_tokens, flops, console.step))
    if heldout is not None:
        objective = OBJECTIVES[config.objective.name](config.objective)
        constants = together(lambda: _unigram(loader, heldout) if root else {})
        callbacks.append(
            Evaluate(
                out,
                engine,
                objective,
                config.train.eval_every,
                config.train.steps,
                start,
                constants,
                console.evaluation if console is not None else None,
            )
        )
    callbacks.append(Save(checkpoints, engine, config.train.save_every, state, start))
    done = fit(engine, config, callbacks, start, stop)
    stop.release()
    if console is not None:
        console.close()
        if done < config.train.steps:
            print(
                f"{out}: stopped after step {done} of {config.train.steps} and saved; the same command goes on from there"
            )
    return done >= config.train.steps


def _resume(
    engine: Engine, config: RunConfig, folder: RunFolder, checkpoints: Checkpoints, state: dict[str, Any]
) -> int:
    """Load the newest whole checkpoint, which the root chooses; returns the steps done, 0 for a new run."""
    newest, complaints = checkpoints.newest(engine.rank, engine.world)
    if engine.rank == 0 and complaints:
        print("\n".join(complaints))
    if newest is not None:
        return checkpoints.load(engine, newest, state, PROBE_TOLERANCE[resolve_precision(config.engine)])
    if complaints or broadcast(folder.steps_logged()) > config.train.save_every:
        raise SharedError(f"{folder.path} has records but no usable checkpoint: restore one, or choose another --out")
    return 0


def _unigram(loader: Loader, heldout: Loader) -> dict[str, float]:
    return {
        f"unigram_nll_{TASKS[task]}": unigram_nll(loader.stores[task], store, heldout.plan.rows[task])
        for task, store in heldout.stores.items()
    }
