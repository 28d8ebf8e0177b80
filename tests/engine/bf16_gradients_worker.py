"""One rank of test_bf16_gradients.py: DeepSpeed's BF16_Optimizer as it comes, and with fewer passes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from tests.models.test_allocations import Allocations
from xlme_ds.config import EngineConfig
from xlme_ds.engine import bf16_gradients
from xlme_ds.engine.bf16_gradients import reduce_in_buffers
from xlme_ds.engine.ranks import start_process_group
from xlme_ds.models.encoder import lookup

STEPS = 6


class Sometimes(nn.Module):
    """Its second layer has a part in every other step, so that it often has no gradient; that of its table comes
    sparse where ours add it up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = sparse
        self.always, self.sometimes = nn.Linear(48, 48), nn.Linear(48, 1)
        self.table = nn.Parameter(torch.randn(8, 48, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, step: int) -> Tensor:
        """A loss that grows to spite the clipping, but for a step whose gradient is too small to be clipped."""
        places = (torch.arange(len(x)) + step) % len(self.table)
        hidden = self.always(x + lookup(places, [self.table], self.sparse)).tanh()
        return (self.sometimes(hidden) if step % 2 else hidden).float().pow(2).sum() * (1e-3 if step == 3 else 1.0)


def train(spare: bool, immediate: bool, micro_batches: int = 2, bf16_buffers: bool = False) -> dict[str, Any]:
    module = Sometimes(sparse=spare)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True, "immediate_grad_update": immediate},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
    }
    groups = [[p for p in module.parameters() if p.dim() == dim] for dim in (2, 1)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "kinds": ("exp_avg", "exp_avg_sq")} for group in groups], lr=1e-2, fused=True
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    if spare:
        reduce_in_buffers(engine, bf16_buffers)
    generator = torch.Generator().manual_seed(1 + engine.global_rank)
    numbers = sum(p.numel() for p in groups[0])
    norms, made = [], []
    for step in range(STEPS):
        with Allocations() as counted:
            for _ in range(micro_batches):
                engine.backward(engine(torch.randn(4, 48, generator=generator).bfloat16(), step))
                engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        made.append(sum(count for size, count in counted.sizes.items() if size >= numbers))
    weights = [value.view(torch.int16).flatten().tolist() for value in module.parameters()]
    masters = torch.cat([master.detach() for master in engine.optimizer.fp32_groups_flat_partition]).tolist()
    return {"norms": norms, "weights": weights, "masters": masters, "made": made}


def main(out: Path) -> None:
    bf16_gradients._PIECE_SIZES["cpu"] = 1024  # less than the parameters
    start_process_group(EngineConfig(kind="deepspeed", deepspeed="zero1"))
    results = {
        "as it comes": train(spare=False, immediate=False),
        "spared": train(spare=True, immediate=False),
        "spared, immediate": train(spare=True, immediate=True),
        "one micro-batch": train(spare=True, immediate=True, micro_batches=1),
        "halved": train(spare=True, immediate=True, micro_batches=1, bf16_buffers=True),
    }
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
