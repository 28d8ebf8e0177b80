"""Masked language modelling on monolingual rows (MLM), as in XLM-R, and on translation pairs (TLM), as in XLM.

L = L_MLM + L_TLM, each a mean over the masked positions of its task; `objective.z_loss` adds to the gradient alone. B
rows, T tokens, M masked positions. Tasks are in the order of data.rows.TASKS.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EncoderName, ModelConfig, ObjectiveConfig, RunConfig
from ..data.batch import Batch, sum_by_language, sum_by_task
from ..models.attention import item_mask
from ..models.pipeline import Flops, LanguageModelStage, PipelinePart, encoder_flops, masked_head_flops
from ..models.text_encoder import LanguageModel, LanguageModelOutput, Masking
from .protocol import Pretraining, Quantity, require_masks


class MaskedLanguageModelling(Pretraining):
    """One encoder with a masked-token head (see `Pretraining`). Objectives that mask differently inherit from it."""

    description = "masked language modelling of one encoder, on {rows}"
    terms: tuple[str, ...] = ("mlm", "tlm")
    quantities: Mapping[str, Quantity] = {
        "mlm": Quantity("Masked-token loss", "nats a token", "mono", unigram=True),
        "tlm": Quantity("Masked-token loss", "nats a token", "para", unigram=True),
        "accuracy": Quantity("Accuracy on masked tokens"),
    }
    encoders: Mapping[EncoderName, str] = {"encoder": "masked_head."}
    used_settings: tuple[str, ...] = ("objective.random_fraction", "objective.keep_fraction", "objective.z_loss")
    # The names of the terms' accuracies: the share of masked positions whose likeliest token is the original.
    accuracies: tuple[str, ...] = ("accuracy_mono", "accuracy_para")
    masking_class: type[Masking] = Masking
    model_classes: tuple[type[LanguageModel], type[LanguageModelStage]] = (LanguageModel, LanguageModelStage)
    predicts_all = False  # whether every token is predicted; if so, `mask_fraction` must be 1

    def __init__(self, cfg: ObjectiveConfig):
        self.mask_fraction, self.z_loss = cfg.mask_fraction, cfg.z_loss
        self.masking = self.masking_class(cfg.random_fraction, cfg.keep_fraction)
        self.weights = torch.ones(len(self.terms), dtype=torch.float64)
        self.statistics_shape: tuple[int, ...] = (len(self.terms),)

    def check(self, run: RunConfig) -> None:
        """Raise ValueError also for a `mask_fraction` that the objective cannot use, and for attention kernels or an
        encoder body that do not support its attention mask."""
        super().check(run)
        name, fraction = run.objective.name, run.objective.mask_fraction
        if self.predicts_all and fraction != 1.0:
            raise ValueError(
                f"objective.mask_fraction is {fraction}, and objective.name {name} predicts every token: set it to 1"
            )
        if not self.predicts_all:
            require_masks(run)
        if self.masking.attention_mask is item_mask:
            return
        for setting, value, remedy in (("kernels", "triton", "auto"), ("body", "modern", "xlme")):
            if getattr(run.model, setting) == value:
                raise ValueError(
                    f"model.{setting} {value} lets a position see its whole item, and objective.name {name} does not: "
                    f"set it to {remedy}"
                )

    def build(self, cfg: ModelConfig, part: PipelinePart | None = None) -> LanguageModel:
        """The pre-training model, or the stage that runs one `part` of it in a pipeline."""
        model, stage = self.model_classes
        arguments = cfg, self.masking, self.z_loss
        return model(*arguments) if part is None else stage(*arguments, part=part)

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Operations per token of the encoder and of the softmax, which runs in a pipeline's last part."""
        return Flops(
            layers=cfg.discriminator_layers,
            one_layer=encoder_flops(cfg, cfg.discriminator_layers, row_tokens) / cfg.discriminator_layers,
            softmax_last=masked_head_flops(cfg, self.mask_fraction),
        )

    def term_of_masked(self, batch: Batch) -> Tensor:
        """The index of each masked position's term, int64 [M]."""
        return batch.task_of_masked()

    def _term_sums(self, values_M: Tensor, batch: Batch) -> Tensor:
        return sum_by_task(values_M, self.term_of_masked(batch), len(self.terms))

    def counts(self, batch: Batch) -> Tensor:
        """The number of masked positions of each term, float64 [terms]."""
        return self._term_sums(torch.ones_like(batch.masked_M), batch).double()

    def sums(self, output: LanguageModelOutput, batch: Batch) -> Tensor:
        """The summed loss of each term, float32 [terms]. The sums carry the gradient."""
        return self._term_sums(output.nll_M, batch)

    def statistics(self, output: LanguageModelOutput, batch: Batch) -> Tensor:
        """The number of masked positions of each term whose most likely token is the original, float64 [terms]."""
        right_M = output.predicted_M == batch.tokens_BT.flatten()[batch.masked_M]
        return self._term_sums(right_M, batch).double()

    def by_language(self, output: LanguageModelOutput, batch: Batch, languages: int) -> Tensor:
        """`sums` (index 0) and `counts` (index 1) of each language's tokens, float64 [2, terms, languages]."""
        language_M = batch.languages_BT.flatten()[batch.masked_M]
        counted_M, term_M = torch.ones_like(output.nll_M), self.term_of_masked(batch)
        return sum_by_language(output.nll_M, counted_M, term_M, language_M, len(self.terms), languages)

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The losses and accuracies by name, from the sums, counts and statistics of a global batch. A term without
        masked positions has neither."""
        means = sums.double() / counts.clamp(min=1)
        metrics = {"loss": float((self.weights * means).sum())}
        for n, (term, accuracy) in enumerate(zip(self.terms, self.accuracies, strict=True)):
            if counts[n]:
                metrics |= {term: float(means[n]), accuracy: float(statistics[n] / counts[n])}
        return metrics

    @staticmethod
    def tokens_and_probabilities(output: LanguageModelOutput, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns (tokens [B, T], None). At masked positions the tokens are the most likely ones. There are no
        probabilities, because the model judges no replacements."""
        filled = batch.tokens_BT.flatten().index_copy(0, batch.masked_M, output.predicted_M)
        return filled.view_as(batch.tokens_BT), None
