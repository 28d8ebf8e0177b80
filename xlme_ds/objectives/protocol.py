"""What engines and the training loop need to know of an objective; `ElectraObjective` is the first of them."""

from typing import Any, Protocol

from torch import Tensor, nn

from ..config import ModelConfig


class Objective(Protocol):
    """Tensors in, sums and counts out: a mean is a sum over the counts of the whole global batch."""

    terms: tuple[str, ...]
    stage: Any
    """The model's form for pipelines; None: it has none."""
    statistics_shape: tuple[int, ...]
    weights: Tensor
    """float64, of each term in the loss."""

    def build(self, cfg: ModelConfig) -> nn.Module:
        """The model that this objective trains, uninitialised; it takes a batch."""

    def counts(self, batch: Any) -> Tensor:
        """What each term is a mean over, float64 [terms]."""

    def sums(self, output: Any, batch: Any) -> Tensor:
        """The summed losses of each term, float32 [terms]; carries the gradient."""

    def statistics(self, output: Any, batch: Any) -> Tensor:
        """Counts behind what is reported, float64, additive."""

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """What is reported of a global batch, `loss` among it, from added-up sums, counts and statistics."""
