"""The initialisation of every model that is trained. (Exports initialise new heads in export/remote/.)

| parameters | initial value |
|---|---|
| linear weights, embeddings, positions, languages, relative tables, gate vectors | normal, std `model.init_std` |
| biases, the GDES difference | 0 |
| LayerNorm weights, gate scales w | 1 |

Every parameter has its own random generator, seeded by `seed` and the parameter's name, so the values do not depend on
the order of construction, the engine, or the number of processes.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

# A function from a parameter's name to its initial value, float32, or to None for the value in the table above.
InitialValues = Callable[[str], torch.Tensor | None]
# A function from a parameter to a context. Inside the context the whole parameter is present, on every rank or on one.
# At the context's end each rank stores its part of the parameter.
GatherParameter = Callable[[nn.Parameter], AbstractContextManager[object]]


def has_weight_decay(parameter_dim: int) -> bool:
    """Whether a parameter of `parameter_dim` dimensions gets weight decay. Biases, norms and other vectors get none."""
    return parameter_dim >= 2


def initialise(
    model: nn.Module,
    seed: int,
    std: float,
    gather_parameter: GatherParameter | None = None,
    initial_values: InitialValues | None = None,
) -> None:
    """Fill every parameter in place, from `initial_values` or with the value in the table above.

    Each parameter is filled inside `gather_parameter(parameter)`, for engines that partition parameters.
    """
    for name, parameter in model.named_parameters():
        with nullcontext() if gather_parameter is None else gather_parameter(parameter), torch.no_grad():
            if parameter.numel() == 0:  # the parameter is partitioned, and another rank fills it
                continue
            leaf = name.rsplit(".", 1)[-1]  # the name inside its module
            initial_value = None if initial_values is None else initial_values(name)
            if initial_value is not None:
                parameter.copy_(initial_value)
            elif leaf == "bias" or leaf.startswith("difference_"):
                parameter.zero_()
            elif leaf == "scale" or (leaf == "weight" and parameter.dim() == 1):
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                random_values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
                parameter.copy_(random_values)
