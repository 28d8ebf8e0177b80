"""AdamW with decoupled weight decay on matrices only (XLM-E, Table 10). The learning rate is set before every step; the
rate of a parameter group is the step's rate times the group's `scale`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..config import OptimizerConfig
from ..models.init import has_weight_decay
from ..objectives.protocol import Objective
from .ranks import SharedError


def build_optimizer(module: nn.Module, cfg: OptimizerConfig, objective: Objective | None = None) -> Optimizer:
    """The optimizer that every engine uses; `objective` may scale the learning rates of some parameters. Only this
    function chooses the update rule. The rule must be an optimizer of torch, and elementwise, because engines update
    pieces of parameters.

    Raises SharedError for a rule with a state that checkpoints cannot hold.
    """
    rule = partial(AdamW, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), eps=cfg.epsilon, fused=True)
    kinds = _probe_state_kinds(rule)
    names, all_parameters = zip(*module.named_parameters(), strict=True)
    scales = [1.0] * len(names) if objective is None else objective.learning_rate_scales(names, cfg)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for parameter, scale in zip(all_parameters, scales, strict=True):
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter's own tensor
        groups.setdefault((scale, has_weight_decay(len(shape))), []).append(parameter)
    return rule(
        [
            {"params": parameters, "weight_decay": cfg.weight_decay if decays else 0.0, "scale": scale, "kinds": kinds}
            for (scale, decays), parameters in groups.items()
        ]
    )


def _probe_state_kinds(rule: Callable[..., Optimizer]) -> tuple[str, ...]:
    """Names of the tensors that the rule keeps for each parameter, without `step`, found by one step on a small matrix.
    `initial_state` assumes that these tensors start as zeros.

    Raises SharedError for a rule whose state is anything but `step` and tensors of the parameter's shape, because
    checkpoints hold nothing else.
    """
    matrix = nn.Parameter(torch.zeros(2, 3))
    matrix.grad = torch.zeros(2, 3)
    optimizer = rule([matrix])
    optimizer.step()
    state = optimizer.state[matrix]
    names = [name for name in state if name != "step"]
    if "step" not in state or any(getattr(state[name], "shape", None) != matrix.shape for name in names):
        raise SharedError(
            f"{type(optimizer).__name__} keeps {', '.join(state)} of every parameter, but a checkpoint holds only the "
            "step and tensors of the parameter's shape: choose another rule in engine/optimizer.py"
        )
    return tuple(names)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of the next step; `optimizer` is torch's, or DeepSpeed's wrapper of it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["scale"]
