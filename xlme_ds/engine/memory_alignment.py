"""Alignment of parameters in DeepSpeed's flat buffers: each begins at a multiple of 128 bytes.

DeepSpeed lays the parameters of an optimizer group end to end, so a parameter of odd size (a gate's scale, a head's
single bias) shifts all later ones to addresses that are no multiples of 16 bytes. For such addresses cuBLAS and layer
norm choose kernels without vector loads: a step of Base took 1.2 times as long on an H200
(docs/results/performance.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

ALIGNMENT = 64  # elements: 128 bytes of bf16


@contextmanager
def aligned(module: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, zero_stage: int) -> Iterator[None]:
    """Context for `deepspeed.initialize`: adds fillers, parameters of zeros, to the optimizer's groups, so that each
    real parameter is aligned.

    Fillers get no gradient, and are removed from `module` afterwards. Under ZeRO 1 and 2 each of the `ranks` owns an
    equal part of a group, so the group's size is made a multiple of `ranks` · ALIGNMENT. ZeRO-3 on several ranks needs
    no fillers, because it gathers every parameter into memory of its own, which is aligned.
    """
    module.fillers = fillers = nn.ParameterList()
    for group in optimizer.param_groups if zero_stage < 3 or ranks == 1 else ():
        parameters, size = group["params"], 0
        group["params"] = placed = []
        for count, parameter in enumerate(parameters, start=1):
            placed.append(parameter)
            size += getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 empties the parameter's own tensor
            gap = -size % (ALIGNMENT * ranks if count == len(parameters) else ALIGNMENT)
            if gap:
                fillers.append(nn.Parameter(torch.zeros(gap, dtype=parameter.dtype, device=parameter.device)))
                placed.append(fillers[-1])
                size += gap
    try:
        yield
    finally:
        del module.fillers
