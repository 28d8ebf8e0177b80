"""One rank of the parity test: trains every given case and writes its loss curve. Run by test_parity.py."""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.processes import start_process_group

STEPS = 20


def tiny(kind: str, deepspeed: str, micro_batch: int, precision: str = "fp32", **model: object) -> RunConfig:
    """A model small enough to train in a second, with every part of a large one."""
    sizes = dict(
        vocabulary=200,
        width=32,
        heads=4,
        feed_forward=64,
        generator_layers=1,
        discriminator_layers=2,
        max_positions=32,
        head_chunk=16,
    )
    return RunConfig(
        name="tiny",
        model=ModelConfig(**(sizes | model)),
        data=DataConfig(8, 4, micro_batch),
        engine=EngineConfig(kind, deepspeed, precision),
        train=TrainConfig(steps=STEPS),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5),
    ).validate()


def main(cases: Path, data: Path, out: Path) -> None:
    curves = {}
    for name, case in json.loads(cases.read_text()).items():
        config = tiny(**case)
        rank, world = start_process_group(config.engine)
        engine = build_engine(config, Loader(data, config.data, config.seed, 0.15, rank, world), None)
        stats = [engine.train_batch(step, 1e-3, True) for step in range(STEPS)]
        if rank == 0:
            folder = out.with_suffix("")
            folder.mkdir(exist_ok=True)
        weights = engine.full_state()
        if rank == 0:
            save_file(weights, folder / f"{name}.safetensors")
        curves[name] = {
            "loss": [s.metrics["loss"] for s in stats],
            "norm": [s.gradient_norm for s in stats],
        }
    if rank == 0:
        out.write_text(json.dumps(curves))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
