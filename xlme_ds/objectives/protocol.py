"""What the rest asks of an objective: engines and the training loop of any, the other parts of those of
pre-training."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from ..config import ModelConfig, ObjectiveConfig
from ..data.batch import Batch
from ..models.encoder import Part
from ..models.text_encoder import Which
from ..operations import Work


class Objective(Protocol):
    """Tensors in, sums and counts out: a mean is a sum over the counts of the whole global batch."""

    terms: tuple[str, ...]
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


class Pretraining(Objective, Protocol):
    """An objective of pre-training: a file of this folder, one line in `OBJECTIVES` and one in
    `config.ObjectiveConfig.name`.

    Checkpoints, plan, start, export, evaluation and report know of it only what stands here. The first of its terms is
    the −log p (nats) of tokens of monolingual text that the model predicts.
    """

    mask_fraction: float
    """Of the ordinary tokens of an item, those that are predicted."""
    encoders: Mapping[Which, str]
    """What its model holds, by the prefix of the parameters (a dot follows), with the prefix of the head that is
    trained on it; the encoder that is cut into stages, evaluated, fine-tuned and exported stands first. A token
    embedding is `embedding_n`."""

    def __init__(self, cfg: ObjectiveConfig): ...

    def build(self, cfg: ModelConfig, part: Part | None = None) -> nn.Module:
        """The model, or the form of one `part` of it that a pipeline runs (`models/pipeline.py`)."""

    def work(self, cfg: ModelConfig, row_tokens: int) -> Work:
        """Operations of a forward pass on full rows of `row_tokens` tokens, a token."""

    def shown(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """For the page: the tokens [B, T] with what the model put in the masked places, and the probability [B, T] that
        each was replaced; None from a model that judges none."""
