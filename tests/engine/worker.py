"""One rank of the parity test: trains every given case and writes its curve, gradients and weights. Run by
test_parity.py."""

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from xlme_ds.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from xlme_ds.data.loader import HeldOutLoader, Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine, StepStats
from xlme_ds.engine.ranks import data_parallel_rank_and_size, start_process_group
from xlme_ds.objectives import objective_of
from xlme_ds.train.loop import BadStepGuard, Callback, Record, fit
from xlme_ds.train.records import MetricsLog
from xlme_ds.train.stop import StopRequest, Watchdog
from xlme_ds.translate import model as translation_model
from xlme_ds.validate import validate

STEPS = 4  # of a case that does not name its own
HELDOUT = DataConfig(13, 9, micro_batch=4)  # they divide neither among ranks nor into micro-batches
SIZES = dict(
    vocabulary=200,
    width=32,
    heads=4,
    feed_forward=64,
    generator_layers=1,
    discriminator_layers=3,
    max_positions=32,
    head_chunk=16,
)


def tiny(
    engine: dict[str, object],
    micro_batch: int,
    para_rows: int = 8,
    objective: Any = "electra",
    pseudo_fractions: Sequence[float] = (),
    alternate: bool = False,
    language_embeddings: Sequence[str] = (),
    steps: int = 20,
    generator_temperature: float = 1.0,
    generator_keep_fraction: float = 0.0,
    random_fakes: Sequence[str] = (),
    discriminator_rate: float = 1.0,
    weight_decay: float = 0.01,
    z_loss: float = 0.0,
    denoising: Sequence[str] = (),
    back_translation: Sequence[str] = (),
    phase_steps: Sequence[int] = (),
    phase_rotary_bases: Sequence[float] = (),
    **model: object,
) -> RunConfig:
    """A model small enough to train in a second, with every part of a large one."""
    run = RunConfig(
        name="tiny",
        model=ModelConfig(language_embeddings=tuple(language_embeddings), **(SIZES | model)),
        objective=ObjectiveConfig(
            objective,
            mask_fraction=1.0 if objective in ("clm", "mt") else 0.15,
            pseudo_fractions=tuple(pseudo_fractions),
            generator_temperature=generator_temperature,
            generator_keep_fraction=generator_keep_fraction,
            random_fakes=tuple(random_fakes),
            z_loss=z_loss,
            denoising=tuple(denoising),
            back_translation=tuple(back_translation),
        ),
        data=DataConfig(
            0 if objective == "mt" and not denoising else 8,
            para_rows,
            micro_batch,
            alternate,
            phase_steps=tuple(phase_steps),
            phase_rotary_bases=tuple(phase_rotary_bases),
        ),
        engine=EngineConfig(**{"precision": "fp32"} | engine),
        train=TrainConfig(steps=steps, log_every=1),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            warmup_steps=min(5, steps // 2),
            weight_decay=weight_decay,
            discriminator_rate=discriminator_rate,
        ),
    )
    return validate(run)


def gradients(engine: Engine, beta1: float) -> dict[str, torch.Tensor]:
    """The clipped gradients of the only step so far, of this rank's parameters: Adam's first moment is their (1 −
    β1)-fold."""
    if not hasattr(engine, "engine"):
        states = engine.optimizer.state
        return {name: states[p]["exp_avg"] / (1 - beta1) for name, p in engine.module.named_parameters()}
    from deepspeed.utils import safe_get_full_optimizer_state

    optimizer = engine.engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # ZeRO 1 and 2 link the states after the first group's step, when those of the second do not exist yet (0.19.8).
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: safe_get_full_optimizer_state(p, "exp_avg").float() / (1 - beta1) for name, p in engine.named_parameters()
    }


def likely_specials(name: str) -> torch.Tensor | None:
    """First values by which special tokens are the likeliest ones: BTMLM, which must not write them, writes others in
    their place."""
    bias = torch.zeros(SIZES["vocabulary"])
    bias[[0, 1, 2, 3, -1]] = 1.0
    return bias if name == "masked_head.bias" else None


class FirstStep(Callback):
    """What is looked at after the first step: the gradients of this rank's parameters, and an evaluation."""

    def __init__(self, engine: Engine, config: RunConfig, path: Path):
        self.engine, self.objective, self.path = engine, config.objective, path
        self.beta1 = config.optimizer.beta1
        self.heldout: dict[str, torch.Tensor] = {}

    def after_step(self, done: int, stats: StepStats) -> None:
        if done == 1:
            found = gradients(self.engine, self.beta1).items()
            save_file({name: value.contiguous() for name, value in found}, self.path)
            self.heldout = self.engine.eval_batch()
            if objective_of(self.objective).reads_whole_rows:
                self.heldout["dimensions"] = torch.tensor(self.engine.effective_ranks(3))


def run(config: RunConfig, data: Path, rank: int, world: int, prefix: Path) -> dict[str, object]:
    """Train one case; rank by rank the gradients of step 1, on the root the weights in the end."""
    share = data_parallel_rank_and_size(config.engine, rank, world)
    heldout, objective = HELDOUT if config.data.para_rows else replace(HELDOUT, para_rows=0), config.objective
    heldout = heldout if config.data.mono_rows else replace(heldout, mono_rows=0)
    if config.engine.pipeline_schedule == "dualpipev":
        # More micro-batches than in training, and at the end fewer than the schedule needs.
        heldout = replace(heldout, micro_batch=2)
    read = config.seed, objective.mask_fraction, *share, config.model.language_embeddings, objective_of(objective)
    folders = [data, data.with_name("longer")][: 1 + len(config.data.phase_steps)]
    loaders = [Loader(folders, config.data, *read), HeldOutLoader(data, heldout, *read)]
    engine = build_engine(config, *loaders, likely_specials if objective.name == "btmlm" else None)
    first = FirstStep(engine, config, Path(f"{prefix}.gradients{rank}.safetensors"))
    folder = Path(f"{prefix}.run{rank}")
    folder.mkdir()
    log = MetricsLog(folder, "metrics", 0)
    record = Record(log, config, 0, engine, lambda done: done, lambda step: 0.0, 1.0, lambda values: None, lambda: 0)
    guard = BadStepGuard(config.train, {}, loaders[0].describe_rows, None)
    fit(engine, config, guard, [first, record], 0, StopRequest(), Watchdog(0, rank))
    weights = engine.full_state()
    if rank == 0:
        save_file(weights, f"{prefix}.weights.safetensors")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = {
        name: [line[key] for line in lines] for name, key in (("loss", "loss"), ("norm", "grad_norm"), ("rate", "lr"))
    }
    return curve | {"heldout": {key: value.flatten().tolist() for key, value in first.heldout.items()}}


def main(cases: Path, data: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    # Graphs of torch.compile run as they are: test_compile.py compares the code made of them, which takes a minute.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    # an untrained model writes as much as it may
    translation_model.max_translation_tokens = lambda source_tokens: source_tokens // 4
    for name, case in json.loads(cases.read_text()).items():
        config = tiny(**{"steps": STEPS} | case)
        rank, world = start_process_group(config.engine)
        gc.freeze()  # DeepSpeed collects garbage six times while it builds an engine
        curve = run(config, data, rank, world, out / name)
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(curve))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
