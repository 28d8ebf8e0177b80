"""AdamW with decoupled weight decay on matrices only (XLM-E, Table 10); the learning rate is set at every step, of all
parameters or of those of one network or layer by a factor of their own."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..checkpoint.state_files import MOMENTS
from ..config import OptimizerConfig
from ..models.init import has_weight_decay
from .ranks import SharedError

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
_DISCRIMINATOR = re.compile(r"(?:^|\.)(?:discriminator|replaced_head|token_head|difference_\d+)(?:\.|$)")
_BELOW = (
    "encoder.embedding_",
    *(f"encoder.encoder.{name}" for name in ("positions", "languages", "relative", "input_norm")),
)


def layer_scale(name: str, layers: int, decay: float) -> float:
    """Layer-wise learning rates of fine-tuning (ERNIE-M, Tables 11 and 12): 1 for the head and what follows the
    last layer, `decay` for the last of `layers`, and so on down to the embedding."""
    layer = _LAYER.search(name)
    if layer is not None:
        return decay ** (layers - int(layer[1]))
    return decay ** (layers + 1) if name.startswith(_BELOW) else 1.0


def build_optimizer(module: nn.Module, cfg: OptimizerConfig) -> Optimizer:
    """The optimizer of every engine. The update rule is chosen here alone; it is torch's, and elementwise.

    Raises SharedError for a rule whose state checkpoints do not hold.
    """
    rule = partial(AdamW, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), eps=cfg.epsilon, fused=True)
    _check_state(rule)
    layers = 1 + max(
        (int(found[1]) for name, _ in module.named_parameters() if (found := _LAYER.search(name))), default=-1
    )
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for name, parameter in module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor in its place
        scale = 1.0 if cfg.layer_decay == 1 else layer_scale(name, layers, cfg.layer_decay)
        scale *= cfg.discriminator_rate if _DISCRIMINATOR.search(name) else 1.0
        groups.setdefault((scale, has_weight_decay(name, len(shape))), []).append(parameter)
    return rule(
        [
            {"params": parameters, "weight_decay": cfg.weight_decay if decays else 0.0, "scale": scale}
            for (scale, decays), parameters in groups.items()
        ]
    )


def _check_state(rule: Callable[..., Optimizer]) -> None:
    number = nn.Parameter(torch.zeros(1))
    number.grad = torch.zeros(1)
    optimizer = rule([number])
    optimizer.step()
    kept = list(optimizer.state[number])
    if set(kept) != {"step", *MOMENTS}:
        raise SharedError(
            f"{type(optimizer).__name__} keeps {', '.join(kept)} of every parameter, a checkpoint holds step, "
            f"{' and '.join(MOMENTS)}: choose another rule in engine/optimizer.py, or extend "
            "checkpoint/state_files.py"
        )


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """For the next step of `optimizer`, or of DeepSpeed's wrapper of it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["scale"]
