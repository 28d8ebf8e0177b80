"""The gradients of DeepSpeed's BF16_Optimizer (0.19.8) in fewer passes over memory, and without further buffers.

They add up in one flat buffer a group, of float32, or of bf16 where a step has one micro-batch. DeepSpeed itself
converts each into a new buffer before it is added; it then joins the flat ones in another, converts that to the type
that is sent, and back, and copies it home, on one process too. Where a new buffer takes its pages one by one, a pass
over the gradients of Base costs as much as several of its layers. The largest gradient, the vocabulary softmax's of its
table, is written there tile by tile and is never a tensor of its own. What each part saves is in docs/lab_log.md.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors
from torch import Tensor, nn

from .engine import first_state

_AT_ONCE = 2**18
_PIECE = {"cpu": 2**19, "cuda": 2**26}  # what caches hold; what keeps launches few


def spare_passes(engine: Any, halved: bool = False) -> None:
    """Have a DeepSpeed engine add and reduce gradients in their buffers, if its optimizer is a BF16_Optimizer.

    `halved`: the buffers are bf16, which is what the backward pass gives.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        if halved:
            _halve(optimizer)
        optimizer._update_hp_grad = partial(_add, optimizer)
        optimizer.clear_hp_grads = partial(_forget, optimizer)
        engine.allreduce_and_copy = partial(_reduce, engine)
        for group, parameters in enumerate(optimizer.bf16_groups):
            for index, parameter in enumerate(parameters):
                parameter.open_gradient = partial(_open, optimizer, parameter, group, index)


def _halve(optimizer: BF16_Optimizer) -> None:
    """Replace the gradients' buffers by bf16 ones, before the first backward pass."""
    for group, weights in enumerate(optimizer.bf16_groups_flat):
        # Nothing may hold the old buffer when the new one is made.
        optimizer.fp32_groups_gradients_flat[group] = optimizer.non_expert_gradients[group] = None
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
    optimizer.optimizer.step = partial(_update, optimizer, optimizer.optimizer.step)
    optimizer.step = partial(_step, optimizer)


@torch.no_grad()
def _step(optimizer: BF16_Optimizer) -> None:
    """In place of `step`, which would clip in bf16 and convert all gradients at once."""
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


def _update(optimizer: BF16_Optimizer, take_step: Callable[[], object]) -> None:
    """In place of the step of torch's optimizer, which it takes on one piece of this rank's part after the other;
    collective."""
    excess = ((optimizer._global_grad_norm + 1e-6) / optimizer.clip_grad).clamp(min=1)
    groups, states = optimizer.optimizer.param_groups, optimizer.optimizer.state
    whole = [group.pop("params") for group in groups]
    for number, group in enumerate(groups):
        master = optimizer.fp32_groups_flat_partition[number]
        states[master] = states[master] or first_state(master)
        flat = master.detach(), optimizer.fp32_groups_gradient_flat_partition[number], *states[master].values()
        for each in groups:
            each["params"] = []
        for piece, gradient, *state in zip(*(_pieces(tensor, master) for tensor in flat), strict=True):
            piece.grad = gradient.float().div_(excess)
            group["params"] = [piece]
            states[piece] = dict(zip(states[master], state, strict=True))
            take_step()
            piece.grad = None
            del states[piece]
        states[master]["step"].copy_(state[list(states[master]).index("step")])
    for group, parameters in zip(groups, whole, strict=True):
        group["params"] = parameters
    optimizer.update_lp_params()


def _pieces(tensor: Tensor, master: Tensor) -> list[Tensor]:
    """Views of a flat tensor, as many as of `master`; of a number that many copies."""
    size = _PIECE[master.device.type]
    if tensor.dim():
        return list(tensor.split(size))
    return [tensor.clone() for _ in range(0, master.numel(), size)]


def _open(
    optimizer: BF16_Optimizer, parameter: nn.Parameter, group: int, index: int
) -> Callable[[slice, Tensor], object]:
    """Adds a gradient of some rows to the step's; see `models.masked_head`. To be called for all rows, once each."""
    total = optimizer.fp32_groups_gradients[group][index].view_as(parameter)
    arrived = optimizer.fp32_groups_has_gradients[group]
    first, arrived[index] = not arrived[index], True
    parameter._hp_grad = total  # type: ignore[attr-defined]
    return lambda rows, part: total[rows].copy_(part) if first else _accumulate(total[rows], part)


@torch.no_grad()
def _add(optimizer: BF16_Optimizer, parameter: nn.Parameter, group: int, index: int, clear_lp_grads: bool) -> None:
    """In place of `_update_hp_grad`: the step's first gradient of a parameter overwrites what the last step left."""
    if parameter.grad is None:
        return
    arrived = optimizer.fp32_groups_has_gradients[group]
    total = optimizer.fp32_groups_gradients[group][index].view_as(parameter)
    if arrived[index]:
        _accumulate(total, parameter.grad)
    elif parameter.grad.is_sparse:  # of a lookup, in a pass of its own
        _accumulate(total.zero_(), parameter.grad)
    else:
        total.copy_(parameter.grad)
    parameter._hp_grad = total  # type: ignore[attr-defined]
    arrived[index] = True
    if clear_lp_grads:
        parameter.grad.zero_()


def _accumulate(total: Tensor, part: Tensor) -> None:
    """Add a gradient of any type, sparse or dense; of bf16 to float32 the CPU would first convert all of it."""
    if part.is_sparse:  # the rows of a frequent token add up in float32, whatever `total` is
        rows = torch.sparse_coo_tensor(
            part._indices(), part._values().float(), part.shape, check_invariants=False
        ).coalesce()
        total.index_add_(0, rows.indices()[0], rows.values().to(total.dtype))
        return
    if total.is_cuda or total.dtype == part.dtype:
        total.add_(part)
        return
    for sums, numbers in zip(total.view(-1).split(_AT_ONCE), part.reshape(-1).split(_AT_ONCE), strict=True):
        sums.add_(numbers)


def _forget(optimizer: BF16_Optimizer) -> None:
    """In place of `clear_hp_grads`, without filling them with zeros."""
    optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in optimizer.fp32_groups_gradients]


def _reduce(engine: Any, gradients: Sequence[Tensor], group: dist.ProcessGroup, replicas: float | None = None) -> None:
    """In place of `allreduce_and_copy`: the average over `group` of flat gradients, one after the other."""
    optimizer = engine.optimizer
    for totals, arrived in zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True):
        for total, has in zip(totals, arrived, strict=True):
            if not has:  # of the step before
                total.zero_()
        arrived[:] = [True] * len(arrived)  # once a step, though large models are reduced in several calls
    if dist.get_world_size(group) > 1:
        for flat in gradients:
            engine.allreduce_bucket(
                [flat], group, replicas
            )  # alone it is not joined, and what is sent comes back into it
