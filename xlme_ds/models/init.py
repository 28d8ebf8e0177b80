"""The whole initialisation scheme, in one place.

| parameters | initial value |
|---|---|
| linear weights, embeddings, positions, languages, relative tables, gate vectors | normal, std `model.init_std` |
| biases, the GDES difference | 0 |
| LayerNorm weights, gate scales w | 1 |

Every parameter is drawn from a generator of its own, seeded by (seed, its name): the values do not depend on the order
of construction, on the engine, or on the number of processes.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

Known = Callable[[str], torch.Tensor | None]  # the first value of a parameter by its name, float32; None: it is drawn
# Holds a parameter whole on every rank, and saves what was written into it.
Whole = Callable[[nn.Parameter], AbstractContextManager[object]]


def has_weight_decay(name: str, parameter_dim: int) -> bool:
    """Whether the optimizer decays this parameter: all but biases, norms and other vectors."""
    return parameter_dim >= 2


def initialise(
    model: nn.Module,
    seed: int,
    std: float,
    whole: Whole | None = None,
    known: Known | None = None,
) -> None:
    """Fill every parameter in place, with what `known` has for it or by the scheme above; raises nothing.

    `whole(parameter)` is entered around the filling of each one, for engines that hold parameters in parts.
    """
    for name, parameter in model.named_parameters():
        with nullcontext() if whole is None else whole(parameter), torch.no_grad():
            if parameter.numel() == 0:  # the other ranks of a partitioned parameter
                continue
            leaf = name.rsplit(".", 1)[-1]
            value = None if known is None else known(name)
            if value is not None:
                parameter.copy_(value)
            elif leaf == "bias" or leaf.startswith("difference_"):
                parameter.zero_()
            elif leaf == "scale" or (leaf == "weight" and parameter.dim() == 1):
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
                parameter.copy_(values)
