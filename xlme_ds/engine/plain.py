"""Plain torch on one process, in float32: the reference that every other engine is compared with."""

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..objectives.protocol import BatchSource, Objective
from .engine import Engine
from .optimizer import build_optimizer
from .state import Bucket, Piece


class PlainEngine(Engine):
    """One process; torch's optimizer updates the model's own weights."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: BatchSource | None,
        device: torch.device,
        optimizer: OptimizerConfig,
    ):
        module = module.to(device)
        super().__init__(module, objective, loader, heldout, device, build_optimizer(module, optimizer))
        self.clip = optimizer.clip

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _update(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip))
        self._applied = self._accepts(norm)
        if self._applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _buckets(self) -> list[Bucket]:
        return [
            Bucket([Piece(name, 0, parameter.numel(), 0)], self.optimizer, parameter)
            for name, parameter in self.module.named_parameters()
        ]

    def _publish(self) -> None:
        """The master weights are the weights."""

    def full_state(self) -> dict[str, Tensor]:
        """The whole model in float32 on the CPU, by parameter name."""
        return {name: value.detach().float().cpu().clone() for name, value in self.module.named_parameters()}
