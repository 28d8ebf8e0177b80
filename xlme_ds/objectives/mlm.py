"""Masked language modelling on monolingual rows (MLM) and on translation pairs (TLM): XLM-R, and XLM-R + TLM.

L = L_MLM + L_TLM, each a mean over the masked positions of its task. M masked positions. Tasks are in the order of
data.rows.TASKS.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from ..config import ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from ..data.batch import Batch, sum_by_language, sum_by_task
from ..data.collate import RowBatches
from ..io.errors import Check
from ..models.attention import item_mask
from ..models.pipeline import LanguageModelStage, Part, Work, encoder_forward, masked_head_forward
from ..models.text_encoder import LanguageModel, LanguageModelOutput, Masking, Which
from .protocol import OF_GENERATORS, Quantity, adds_none, masks_some, not_read


class MaskedLanguageModelling(RowBatches):
    """One encoder with a masked head (see `Pretraining`); objectives with another masking inherit the rest."""

    description = "masked language modelling of one encoder, on text and on translation pairs"
    terms: tuple[str, ...] = ("mlm", "tlm")
    quantities: Mapping[str, Quantity] = {
        "mlm": Quantity("Masked-token loss", "nats a token", "mono", unigram=True),
        "tlm": Quantity("Masked-token loss", "nats a token", "para", unigram=True),
        "accuracy": Quantity("Accuracy on masked tokens"),
    }
    encoders: Mapping[Which, str] = {"encoder": "masked_head."}
    has_decoder = False
    reads_both_sides = True
    # Names of the share of masked positions whose most likely token is the original, by term.
    accuracies: tuple[str, ...] = ("accuracy_mono", "accuracy_para")
    masking_kind: type[Masking] = Masking

    def __init__(self, cfg: ObjectiveConfig):
        self.mask_fraction, self.z_loss = cfg.mask_fraction, cfg.z_loss
        self.masking = self.masking_kind(cfg.random_fraction, cfg.keep_fraction)
        self.weights = torch.ones(len(self.terms), dtype=torch.float64)
        self.statistics_shape: tuple[int, ...] = (len(self.terms),)

    def at(self, step: int) -> Self:
        """Itself: the weights are equal in all steps."""
        return self

    def learning_rates(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The rate of the step for all parameters."""
        return [1.0] * len(names)

    def probe(self, batch: Batch) -> Batch:
        """`batch` as it is."""
        return batch

    def checks(self, run: RunConfig) -> list[Check]:
        """A share of the tokens is masked, and the attention kernel can do this masking."""
        return [masks_some(run), adds_none(run), *not_read(run, *OF_GENERATORS), self.kernel_check(run)]

    def kernel_check(self, run: RunConfig) -> Check:
        """The Triton kernel lets every position see its whole item, which some maskings do not."""
        return (
            run.model.kernels != "triton" or self.masking.allowed is item_mask,
            f"model.kernels triton lets a position see its whole item, which is not so under objective.name "
            f"{run.objective.name}: set it to auto",
        )

    def build(self, cfg: ModelConfig, part: Part | None = None) -> LanguageModel:
        """The pre-training model, or its `part` that a pipeline's stage runs."""
        whole = cfg, self.masking, self.z_loss
        return LanguageModel(*whole) if part is None else LanguageModelStage(*whole, part=part)

    def work(self, cfg: ModelConfig, row_tokens: int) -> Work:
        """The softmax is in the last part."""
        return Work(
            layers=cfg.discriminator_layers,
            layer=encoder_forward(cfg, 1, row_tokens),
            softmax_last=masked_head_forward(cfg, self.mask_fraction),
        )

    def places(self, batch: Batch) -> Tensor:
        """The masked positions, [M]."""
        return batch.masked_M

    def term_of_masked(self, batch: Batch) -> Tensor:
        """Number of the term that every masked position counts for, [M]."""
        return batch.task_of_masked()

    def _by_term(self, values_M: Tensor, batch: Batch) -> Tensor:
        return sum_by_task(values_M, self.term_of_masked(batch), len(self.terms))

    def counts(self, batch: Batch) -> Tensor:
        """Masked positions of each term, float64 [terms]."""
        return self._by_term(torch.ones_like(batch.masked_M), batch).double()

    def sums(self, output: LanguageModelOutput, batch: Batch) -> Tensor:
        """The summed losses, float32 [terms]; carries the gradient."""
        return self._by_term(output.nll_M, batch)

    def statistics(self, output: LanguageModelOutput, batch: Batch) -> Tensor:
        """Masked positions whose most likely token is the original, float64 [terms]."""
        right_M = output.predicted_M == batch.tokens_BT.flatten()[batch.masked_M]
        return self._by_term(right_M, batch).double()

    def by_language(self, output: LanguageModelOutput, batch: Batch, languages: int) -> Tensor:
        """The summed losses and masked positions, float64 [2, terms, languages]."""
        language_M = batch.languages_BT.flatten()[batch.masked_M]
        counted_M, term_M = torch.ones_like(output.nll_M), self.term_of_masked(batch)
        return sum_by_language(output.nll_M, counted_M, term_M, language_M, len(self.terms), languages)

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """Loss and accuracy of a global batch; a term without positions is left out."""
        means = sums.double() / counts.clamp(min=1)
        metrics = {"loss": float((self.weights * means).sum())}
        for n, (term, accuracy) in enumerate(zip(self.terms, self.accuracies, strict=True)):
            if counts[n]:
                metrics |= {term: float(means[n]), accuracy: float(statistics[n] / counts[n])}
        return metrics

    @staticmethod
    def shown(output: LanguageModelOutput, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The predictions in the masked places."""
        filled = batch.tokens_BT.flatten().index_copy(0, batch.masked_M, output.predicted_M)
        return filled.view_as(batch.tokens_BT), None
