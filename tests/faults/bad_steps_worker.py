"""One rank: under each engine, steps with a bad loss, a bad gradient or a spike; then the same run without those steps.

Run by test_bad_steps.py. Writes the state of both runs, and what the engine said of the bad steps.
"""

import gc
import json
import math
import sys
from pathlib import Path

import torch

from tests.engine.worker import tiny
from xlme_ds.checkpoint.state_files import StateWriter
from xlme_ds.config import RunConfig
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine, StepStats
from xlme_ds.engine.ranks import data_parallel_rank_and_size, start_process_group

# Step: what is wrong with it. The first of all is one, when Adam has no moments yet.
BAD = {0: "gradient", 3: "loss", 5: "gradient", 6: "spike"}
STEPS = 8


def take(engine: Engine, step: int, bad: str | None, here: bool) -> StepStats:
    """A step; the fault is `here`, in the second micro-batch."""
    calls = 0
    sums = engine.objective.sums

    def infinite(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return sums(*arguments) * (math.inf if calls == 2 else 1)

    handle = None
    if bad == "gradient" and here:
        parameter = next(p for name, p in engine.module.named_parameters() if "query" in name or "norm" in name)
        handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
    if bad == "loss" and here:
        engine.objective.sums = infinite
    stats = engine.train_batch(step, 1e-3, step % 2 == 0, 1e-6 if bad == "spike" else math.inf)
    engine.objective.sums = sums
    if handle is not None:
        handle.remove()
    return stats


def run(config: RunConfig, data: Path, rank: int, world: int, file: Path, disturbed: bool) -> list[list[object]]:
    loader = Loader(data, config.data, config.seed, 0.15, *data_parallel_rank_and_size(config.engine, rank, world))
    engine = build_engine(config, loader, None)
    # The last rank, but DualPipeV has the last part of the model on the first.
    here = rank == (0 if config.engine.pipeline_schedule == "dualpipev" else world - 1)
    said: list[list[object]] = []
    for step in range(STEPS):
        if disturbed or step not in BAD:
            stats = take(engine, step, BAD.get(step) if disturbed else None, here)
            said.append([stats.applied, math.isfinite(stats.gradient_norm), list(stats.suspects)])
    writer = StateWriter(file, 0)
    engine.save(writer)
    writer.result()
    return said


def main(cases: Path, data: Path, out: Path) -> None:
    for name, engine in json.loads(cases.read_text()).items():
        config = tiny(engine, micro_batch=2)
        rank, world = start_process_group(config.engine)
        gc.freeze()  # DeepSpeed collects garbage six times while it builds an engine
        for kind in ("disturbed", "alone"):
            prefix = out / f"{name} {kind} {rank}"
            said = run(config, data, rank, world, prefix.with_suffix(".state"), kind == "disturbed")
            prefix.with_suffix(".json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
