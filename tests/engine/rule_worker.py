"""One rank of test_optimizer_rule.py: 6 steps under every engine with another update rule in engine/optimizer.py."""

import functools
import gc
import json
import os
import sys
from pathlib import Path

import torch

from tests.engine.worker import tiny
from xlme_ds.data.loader import Loader
from xlme_ds.engine import optimizer
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.ranks import SharedError, data_parallel_rank_and_size, start_process_group

STEPS = 6


def radam(groups: object, fused: bool, **settings: object) -> torch.optim.Optimizer:
    """Starts without Adam's second moment: far from AdamW in the first steps."""
    return torch.optim.RAdam(groups, decoupled_weight_decay=True, **settings)


def adafactor(groups: object, fused: bool, lr: float, **settings: object) -> torch.optim.Optimizer:
    """Keeps a row and a column in place of a second moment."""
    return torch.optim.Adafactor(groups, lr=lr)


def main(cases: Path, data: Path, out: Path) -> None:
    found: dict[str, object] = {}
    adamw = optimizer.AdamW
    for name, (rule, engine) in json.loads(cases.read_text()).items():
        rules = {"AdamW": adamw, "RAdam": radam, "amsgrad": functools.partial(adamw, amsgrad=True)}
        optimizer.AdamW = (rules | {"Adafactor": adafactor})[rule]  # type: ignore[assignment,misc]
        config = tiny(engine, micro_batch=2 if engine.get("kind") == "pipeline" else 4)
        rank, world = start_process_group(config.engine)
        gc.freeze()  # DeepSpeed collects garbage six times while it builds an engine
        loader = Loader(data, config.data, config.seed, 0.15, *data_parallel_rank_and_size(config.engine, rank, world))
        try:
            built = build_engine(config, loader, None)
        except SharedError as error:
            found[name] = str(error)
            continue
        found[name] = [built.train_batch(step, 2e-3, True).metrics["loss"] for step in range(STEPS)]
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
