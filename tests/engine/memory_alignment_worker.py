"""One rank of test_memory_alignment.py: how far from the grid parameters, gradients and master weights begin."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from tests.engine.worker import tiny
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.ranks import data_parallel_rank_and_size, start_process_group


def misses(tensor: Tensor, grid: int = 128) -> int:
    """Bytes from the last multiple of `grid` bytes of its buffer to the tensor's first number."""
    return (tensor.data_ptr() - tensor.untyped_storage().data_ptr()) % grid


def watch(engine: Any) -> dict[str, int]:
    """Filled in by a forward pass: what the model computes with."""
    found: dict[str, int] = {}
    names = {parameter: name for name, parameter in engine.named_parameters()}
    for module in engine.module.modules():

        def look(module: torch.nn.Module, *_: object) -> None:
            found.update({names[p]: misses(p) for p in module.parameters(recurse=False)})

        module.register_forward_hook(look)
    return found


def gradients(engine: Any) -> list[Tensor]:
    """The buffers that a backward pass adds to, where they are parts of a flat one."""
    known, optimizer = {parameter for _, parameter in engine.named_parameters()}, engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer):
        return []
    groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    return [total for group in groups for parameter, total in zip(*group, strict=True) if parameter in known]


def main(cases: Path, data: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    for name, case in json.loads(cases.read_text()).items():
        config = tiny(**case)
        rank, world = start_process_group(config.engine)
        read = config.seed, config.objective.mask_fraction, *data_parallel_rank_and_size(config.engine, rank, world)
        engine = build_engine(config, Loader(data, config.data, *read), None)
        computed = watch(engine)
        engine.train_batch(0, 1e-3, detailed=False)
        found: dict[str, object] = {"parameters": computed}
        found["gradients"] = [misses(each) for each in gradients(engine)]
        pieces = {f"{piece.name} from {piece.start}": (shard.master.view(-1)[piece.offset :], piece.offset)
                  for shard in engine._state_shards() for piece in shard.pieces}  # fmt: skip
        found["masters"] = {key: max(misses(master), offset % 32) for key, (master, offset) in pieces.items()}
        found["names"] = [name for name, _ in engine.named_parameters()]
        (out / f"{name}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
