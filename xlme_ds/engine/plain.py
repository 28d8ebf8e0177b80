"""Plain torch on one process, in float32: the reference that every other engine is compared with."""

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..data.source import BatchSource
from ..objectives.protocol import Objective
from .engine import Engine
from .optimizer import applied_rate, build_optimizer, set_learning_rate
from .state import Bucket, Piece


class PlainEngine(Engine):
    """See `Engine`."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: BatchSource | None,
        device: torch.device,
        optimizer: OptimizerConfig,
    ):
        super().__init__(module.to(device), objective, loader, heldout, device)
        self.clip = optimizer.clip
        self.optimizer = build_optimizer(module, optimizer)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _update(self, learning_rate: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip))
        set_learning_rate(self.optimizer, learning_rate)
        self._applied = self._accepts(norm)
        if self._applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _rate(self) -> float:
        return applied_rate(self.optimizer)

    def _reduce(self, values: Tensor) -> Tensor:
        return values

    def _buckets(self) -> list[Bucket]:
        return [
            Bucket([Piece(name, 0, parameter.numel(), 0)], self.optimizer, parameter)
            for name, parameter in self.module.named_parameters()
        ]

    def _publish(self) -> None:
        """The master weights are the weights."""

    def full_state(self) -> dict[str, Tensor]:
        """See `Engine`."""
        return {name: value.detach().float().cpu().clone() for name, value in self.module.named_parameters()}
