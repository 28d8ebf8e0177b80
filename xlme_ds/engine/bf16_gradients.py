"""The gradients of DeepSpeed's BF16_Optimizer (0.19.8) in fewer passes over memory, and without buffers besides.

They add up in one flat buffer a group, of float32 unless they are halved. As DeepSpeed comes, each is converted into a
new buffer before it is added; the flat ones are then joined in another, converted to the type that is sent, back, and
copied home, on one process too. Where a new buffer takes its pages one by one, a pass over the gradients of Base costs
as much as several of its layers. The largest gradient, the vocabulary softmax's of its table, is written there tile by
tile and never stands alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from .half_gradients import halve_gradients

_AT_ONCE = 2**18


def spare_passes(engine: Any, halved: bool = False) -> None:
    """Have a DeepSpeed engine add and reduce gradients where they stand, if its optimizer is a BF16_Optimizer;
    `halved`: in bf16."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        if halved:
            halve_gradients(optimizer)
        optimizer._update_hp_grad = partial(_add, optimizer)
        optimizer.clear_hp_grads = partial(_forget, optimizer)
        engine.allreduce_and_copy = partial(_reduce, engine)
        for group, parameters in enumerate(optimizer.bf16_groups):
            for index, parameter in enumerate(parameters):
                parameter.open_gradient = partial(_open, optimizer, parameter, group, index)


def _open(
    optimizer: BF16_Optimizer, parameter: nn.Parameter, group: int, index: int
) -> Callable[[slice, Tensor], object]:
    """Adds a gradient of some rows to the step's; see `models.heads`. To be called for all rows, once each."""
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
    """Adds bf16 to float32; the CPU would convert all of it first."""
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
