"""What the training loop sees of an engine, whichever it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepStats:
    """Result of one optimizer step, the same on every rank.

    `metrics`: the objective's means over the global batch, empty unless they were asked for; `gradient_norm`: global,
    before clipping; `skipped`: steps since the start of the process that the engine left out because of an overflow.
    """

    metrics: dict[str, float]
    gradient_norm: float
    skipped: int


class Engine(Protocol):
    """A model with its optimizer under some parallelism. Every method is collective: all ranks call it alike."""

    rank: int
    world: int

    def train_batch(self, step: int, learning_rate: float, detailed: bool) -> StepStats:
        """Take optimizer step `step` (from 0) on its rows; `detailed` asks for the metrics."""

    def eval_batch(self, step: int) -> dict[str, torch.Tensor]:
        """Additive sums, counts and statistics (float64, on the CPU) of step `step` of the held-out rows."""

    def save(self, folder: Path) -> None:
        """Write all that `load` needs into the existing `folder`."""

    def load(self, folder: Path) -> None:
        """Take the state that `save` wrote, with the same engine and world size. Raises ValueError otherwise."""

    def full_state(self) -> dict[str, torch.Tensor]:
        """The whole model in float32 on the CPU of rank 0, by parameter name; empty on the other ranks."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""
