"""DeepSpeed's BF16_Optimizer (0.19.8) with gradients in bf16, which is what the backward pass gives: for one
micro-batch a step.

DeepSpeed itself has them in float32, and would convert bf16 ones whole before the update. Here the update goes over
weights and gradients a piece at a time, and needs no copies beyond a piece.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import all_gather_dp_groups, get_global_norm_of_tensors
from torch import Tensor
from torch.optim.adamw import adamw

_PIECE = {"cpu": 2**18, "cuda": 2**26}  # what caches hold; what keeps launches few


def halve_gradients(optimizer: BF16_Optimizer) -> None:
    """Replace the gradients' buffers by bf16 ones, and the step by one that reads them; before the first backward
    pass."""
    for group, weights in enumerate(optimizer.bf16_groups_flat):
        optimizer.fp32_groups_gradients_flat[group] = optimizer.non_expert_gradients[group] = (
            None  # or both are there for a moment
        )
        optimizer.fp32_groups_actual_gradients_flat[group] = optimizer.fp32_groups_gradient_flat_partition[group] = None
        optimizer.fp32_groups_gradients[group].clear()
        flat = torch.zeros_like(weights)
        sizes = [parameter.numel() for parameter in optimizer.bf16_groups[group]]
        ours = optimizer.fp32_groups_flat_partition[group].numel()
        start = dist.get_rank(optimizer.real_dp_process_group[group]) * ours
        optimizer.fp32_groups_gradients_flat[group] = optimizer.non_expert_gradients[group] = flat
        optimizer.fp32_groups_gradients[group][:] = optimizer._split_flat_tensor(flat, sizes)
        optimizer.fp32_groups_actual_gradients_flat[group] = flat[: sum(sizes)]
        optimizer.fp32_groups_gradient_flat_partition[group] = flat[start : start + ours]
    optimizer.grad_acc_dtype = torch.bfloat16
    optimizer.optimizer.step = partial(_update, optimizer)
    optimizer.step = partial(_step, optimizer)


@torch.no_grad()
def _step(optimizer: BF16_Optimizer) -> None:
    """In place of `step`: the gradients are clipped when they are read."""
    gradients, _ = optimizer.get_grads_for_norm()
    pieces = [piece for gradient in gradients for piece in gradient.split(_PIECE[gradient.device.type])]
    norm = get_global_norm_of_tensors(pieces, norm_type=optimizer.norm_type, mpu=optimizer.mpu)
    optimizer.overflow = not 0 <= float(norm) < math.inf  # DeepSpeed turns what is not finite into -1
    optimizer._global_grad_norm = math.inf if optimizer.overflow else norm
    if optimizer.overflow:
        optimizer.clear_lp_grads()
    else:
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.clear_hp_grads()


def _update(optimizer: BF16_Optimizer) -> None:
    """In place of the step of torch's optimizer: AdamW on this rank's part, and the weights to compute with;
    collective."""
    excess = ((optimizer._global_grad_norm + 1e-6) / optimizer.clip_grad).clamp(min=1)
    for group, settings in enumerate(optimizer.optimizer.param_groups):
        master = optimizer.fp32_groups_flat_partition[group]
        state = optimizer.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), device=master.device)
            state |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        gradient = optimizer.fp32_groups_gradient_flat_partition[group]
        low = optimizer.bf16_partitioned_groups[group][dist.get_rank(optimizer.real_dp_process_group[group])]
        flat = master, gradient, state["exp_avg"], state["exp_avg_sq"], low
        for piece in zip(*(each.detach().split(_PIECE[master.device.type]) for each in flat), strict=True):
            _update_piece(piece, state["step"].clone(), excess, settings)
        state["step"] += 1
    all_gather_dp_groups(
        groups_flat=optimizer.bf16_groups_flat,
        partitioned_param_groups=optimizer.bf16_partitioned_groups,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )


def _update_piece(piece: Sequence[Tensor], step: Tensor, excess: Tensor, settings: dict[str, Any]) -> None:
    master, gradient, mean, square, low = piece
    beta1, beta2 = settings["betas"]
    adamw(
        [master], [gradient.float()], [mean], [square], [], [step], fused=True, grad_scale=excess, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=settings["lr"], weight_decay=settings["weight_decay"], eps=settings["eps"],
    )  # fmt: skip
    low.copy_(master)
