"""One rank of test_sums.py: the gradients of its backward passes, and what the optimizer is given of their sum."""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from tests.engine.worker import tiny
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.ranks import data_parallel_rank_and_size, start_process_group


class Own:
    """Float64 sums of what reaches this rank's parameters, by their names."""

    def __init__(self, engine: Any):
        self.sums: dict[str, Tensor] = {}
        found = list(engine.named_parameters())
        tied = getattr(engine, "_tied_embedding", None)
        if tied is not None and not tied.owns:  # the last stage's copy of the first one's table
            found += [(f"embedding_{n}", block) for n, block in enumerate(tied.blocks)]
        for name, parameter in found:
            self.sums[name] = torch.zeros(getattr(parameter, "ds_shape", parameter.shape), dtype=torch.float64)
            parameter.register_hook(self._adding(self.sums[name]))
            if hasattr(parameter, "gradient_adder"):  # what autograd does not see
                parameter.gradient_adder = self._opened(self.sums[name], parameter.gradient_adder)

    @staticmethod
    def _adding(total: Tensor) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            total.add_(gradient.to_dense().double())

        return add

    @staticmethod
    def _opened(total: Tensor, gradient_adder: Callable[[], Any]) -> Callable[[], Any]:
        def opened() -> Callable[[slice, Tensor], None]:
            add = gradient_adder()

            def both(rows: slice, part: Tensor) -> None:
                total[rows] += part.double()
                add(rows, part)

            return both

        return opened


def watch(engine: Any) -> list[tuple[str, int, Tensor]]:
    """Pieces of the gradients that torch's optimizer will be given: name, first element, values."""
    shards, found = engine._state_shards(), []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for given in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            for shard in shards:
                first = (given.data_ptr() - shard.master.data_ptr()) // 4
                for piece in shard.pieces if 0 <= first < shard.master.numel() else ():
                    begin, end = max(piece.offset, first), min(piece.offset + piece.numel, first + given.numel())
                    if begin < end:
                        values = given.grad.view(-1)[begin - first : end - first].clone()
                        found.append((piece.name, piece.start + begin - piece.offset, values))

    engine.optimizer.optimizer.register_step_pre_hook(look)
    return found


def step(engine: Any, out: Path) -> None:
    own, given, ahead = Own(engine), watch(engine), []
    finish = engine.engine.buffered_allreduce_fallback

    def finished(**arguments: Any) -> None:
        ahead.append(finish.__self__.sent)
        finish(**arguments)

    if isinstance(engine.optimizer, BF16_Optimizer):
        engine.engine.buffered_allreduce_fallback = finished
    stats = engine.train_batch(0, 1e-3, False)
    assert stats.applied
    replicas = engine.engine.dp_world_size  # what DeepSpeed's average divides by
    found = {"own": own.sums, "given": given, "replicas": replicas, "norm": stats.gradient_norm}
    torch.save(found | {"ahead": sum(ahead)}, out)


def main(cases: Path, data: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    for name, case in json.loads(cases.read_text()).items():
        config = tiny(**case)
        config = replace(config, optimizer=replace(config.optimizer, clip=1e9))
        rank, world = start_process_group(config.engine)
        gc.freeze()  # DeepSpeed collects garbage six times while it builds an engine
        share = data_parallel_rank_and_size(config.engine, rank, world)
        loader = Loader(data, config.data, config.seed, config.objective.mask_fraction, *share)
        step(build_engine(config, loader, None), out / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
