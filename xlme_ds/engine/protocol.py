"""What the training loop sees of an engine, whichever it is."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from .statefile import StateReader, StateWriter


@dataclass(frozen=True)
class StepStats:
    """Result of one optimizer step, the same on every rank.

    `metrics`: the objective's means over the global batch, empty unless they were asked for; `gradient_norm`: global,
    before clipping; `learning_rate`: the one that the optimizer had; `applied`: whether it changed anything - a step
    whose loss or gradient is not finite, or whose norm exceeds the limit, leaves weights, moments and Adam's step as
    they were; `suspects`: of a step that was left out, the rows whose own loss was not finite, a sentence part for each
    such micro-batch of any rank.
    """

    metrics: dict[str, float]
    gradient_norm: float
    learning_rate: float
    applied: bool = True
    suspects: tuple[str, ...] = ()


class Engine(Protocol):
    """A model with its optimizer under some parallelism. Every method is collective: all ranks call it alike."""

    rank: int
    world: int

    def train_batch(self, step: int, learning_rate: float, detailed: bool, norm_limit: float = math.inf) -> StepStats:
        """Take optimizer step `step` (from 0) on its rows, unless its gradient norm exceeds `norm_limit`.

        `detailed` asks for the metrics. Raises SharedError when any rank cannot read its rows.
        """

    def eval_batch(self, step: int) -> dict[str, torch.Tensor]:
        """Additive sums, counts and statistics (float64, on the CPU) of step `step` of the held-out rows."""

    def probe_loss(self) -> float:
        """Loss of the probe batch with the weights as they are: the same under any engine and number of ranks."""

    def save(self, writer: StateWriter) -> None:
        """Hand this rank's part of weights and optimizer state to `writer`; they may change once this returns."""

    def load(self, reader: StateReader) -> None:
        """Take weights and optimizer state, from whatever engine. Raises SharedError when they are another model's."""

    def full_state(self) -> dict[str, torch.Tensor]:
        """The whole model in float32 on the CPU of rank 0, by parameter name; empty on the other ranks."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
