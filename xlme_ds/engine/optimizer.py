"""AdamW with decoupled weight decay on matrices only (XLM-E, Table 10); the learning rate is set at every step."""

import torch
from torch import nn

from ..config import OptimizerConfig
from ..models.init import has_weight_decay


def build_optimizer(module: nn.Module, cfg: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of every engine, so that their curves agree."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor in its place
        groups[has_weight_decay(name, len(shape))].append(parameter)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": cfg.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
        lr=cfg.learning_rate,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.epsilon,
        fused=True,
    )
