"""Plain torch on one process, in float32: the reference that every other engine is compared with."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..data.loader import Loader
from ..objectives.electra import ElectraObjective
from .data_parallel import DataParallelEngine
from .optimizer import build_optimizer

_STATE = "plain.pt"


class PlainEngine(DataParallelEngine):
    """See `Engine`."""

    def __init__(
        self,
        module: nn.Module,
        objective: ElectraObjective,
        loader: Loader,
        heldout: Loader | None,
        device: torch.device,
        optimizer: OptimizerConfig,
    ):
        super().__init__(module.to(device), objective, loader, heldout, device)
        self.clip = optimizer.clip
        self.optimizer = build_optimizer(module, optimizer)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _update(self, learning_rate: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _reduce(self, values: Tensor) -> Tensor:
        return values

    def barrier(self) -> None:
        """See `Engine`."""

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        torch.save({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / _STATE)

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        if not (folder / _STATE).exists():
            raise ValueError(f"{folder} was not saved by engine.kind plain: resume with the engine that saved it")
        state = torch.load(folder / _STATE, weights_only=True, map_location=self.device)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def full_state(self) -> dict[str, Tensor]:
        """See `Engine`."""
        return {name: value.detach().float().cpu().clone() for name, value in self.module.named_parameters()}
