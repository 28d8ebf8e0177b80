"""One rank of the elastic test: goes through its links of every chain of layouts. Run by test_elastic.py."""

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.engine.worker import tiny
from xlme_ds.checkpoint.checkpoints import PROBE_TOLERANCE, Checkpoints
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine
from xlme_ds.engine.ranks import data_parallel_rank_and_size, start_process_group
from xlme_ds.objectives import objective_of

STEPS = 4  # of a link


def go_on(engine: Engine, chain: Path, tolerance: float, steps: int) -> list[float]:
    """Load the newest checkpoint of `chain`, save it again as `copies/`, take `steps` steps, in which no process waits
    for its device, and save."""
    (chain / "copies").mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(chain, keep_last=99, keep_every=0)
    newest, complaints = checkpoints.newest(engine.rank, engine.world)
    assert not complaints, complaints
    start = 0
    if newest is not None:
        start = checkpoints.load(engine, newest, {}, tolerance)
        copies = Checkpoints(chain / "copies", keep_last=99, keep_every=0, buffer_bytes=0)
        copies.save(engine, start, {})
        copies.wait(engine)
    waits: list[int] = []  # for the device, by DeepSpeed
    accelerator = get_accelerator()
    accelerator.synchronize = lambda device_index=None: waits.append(start)
    losses = [engine.train_batch(step, 1e-3, True).metrics["loss"] for step in range(start, start + steps)]
    assert not waits, f"{len(waits)} in {steps} steps"
    checkpoints.save(engine, start + steps, {})
    checkpoints.wait(engine)
    return losses


def main(links: Path, data: Path, out: Path) -> None:
    for chain, case, steps in json.loads(links.read_text()):
        config = tiny(**case)
        rank, world = start_process_group(config.engine)
        gc.freeze()  # DeepSpeed collects garbage six times while it builds an engine
        objective, share = config.objective, data_parallel_rank_and_size(config.engine, rank, world)
        read = config.seed, objective.mask_fraction, *share, config.model.language_embeddings
        loader = Loader(data, config.data, *read, objective_of(objective))
        engine = build_engine(config, loader, None)
        losses = go_on(engine, out / chain, PROBE_TOLERANCE[config.engine.precision], steps)
        if rank == 0:
            with open(out / chain / "losses.jsonl", "a") as file:
                file.writelines(f"{loss}\n" for loss in losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
