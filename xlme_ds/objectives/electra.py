"""Replaced token detection, multilingual (MRTD) and translation (TRTD), with the generator's MLM and TLM.

L = L_MLM + L_TLM + λ·L_MRTD + λ·L_TRTD (XLM-E section 3.2), where λ is `objective.discriminator_weight`. `sums` and
`counts` return numerators and denominators of the four means for a micro-batch. Both are added up over the global batch
before the division, so the loss does not depend on how the global batch is split into micro-batches.

B rows, T tokens, M masked positions, N = B · T, S statistics of a task. Tasks are in the order of data.rows.TASKS: mono
(MLM, MRTD), para (TLM, TRTD).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import EncoderName, ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig, point_steps, weight_at
from ..data.batch import Batch, sum_by_language, sum_by_task
from ..data.collate import Collate, Purpose, collate
from ..data.masking import TaskRows
from ..data.rows import TASKS, UNK
from ..data.shards import RowStore
from ..models.electra import Electra, ElectraOutput
from ..models.pipeline import ElectraStage, Flops, PipelinePart, encoder_flops, masked_head_flops
from .protocol import Pretraining, Quantity, require_masks

# Matches the names of the parameters that only the discriminator has.
_DISCRIMINATOR = re.compile(r"(?:^|\.)(?:discriminator|replaced_head|token_head|difference_\d+)(?:\.|$)")
# The AUC is computed from histograms of the discriminator's logits, with _BINS bins from −_LARGEST_LOGIT to
# _LARGEST_LOGIT.
_BINS = 512
_LARGEST_LOGIT = 16.0
# The statistics of a task are these counts of positions, then a histogram of the logits of replaced tokens, then one of
# the logits of original tokens. `generator_correct` counts the masked positions at which the generator predicted the
# original token; `replaced_correct` and `original_correct` count positions that the discriminator judged correctly.
_COUNTS = ("generator_correct", "masked", "replaced", "replaced_correct", "original", "original_correct")


class ElectraObjective(Pretraining):
    """Generator and discriminator, trained together (see `Pretraining`)."""

    description = (
        "replaced token detection on {rows}: a generator fills masked tokens, a discriminator finds the replaced ones"
    )
    terms: tuple[str, ...] = ("mlm", "tlm", "mrtd", "trtd")
    quantities: Mapping[str, Quantity] = {
        "mlm": Quantity("Masked-token loss", "nats a token", "mono", unigram=True),
        "tlm": Quantity("Masked-token loss", "nats a token", "para", unigram=True),
        "mrtd": Quantity("Discriminator: replaced-token loss", "nats a token", "mono"),
        "trtd": Quantity("Discriminator: replaced-token loss", "nats a token", "para"),
        "auc": Quantity("Discriminator: AUC, replaced against original tokens"),
        "accuracy_replaced": Quantity("Discriminator: accuracy on replaced tokens"),
        "accuracy_original": Quantity("Discriminator: accuracy on original tokens"),
        "generator_accuracy": Quantity("Generator: accuracy on masked tokens"),
        "replaced_fraction": Quantity("Tokens that the generator replaced", "fraction"),
    }
    encoders: Mapping[EncoderName, str] = {"discriminator": "replaced_head.", "generator": "masked_head."}
    used_settings: tuple[str, ...] = (
        *("objective.discriminator_weight", "objective.generator_temperature", "objective.generator_keep_fraction"),
        *("objective.random_fakes", "objective.z_loss"),
    )
    model_classes: tuple[type[Electra], type[ElectraStage]] = (Electra, ElectraStage)
    # One entry for each two terms (one for monolingual text, one for pairs): whether their means are over the masked
    # positions, or over all tokens except padding.
    means_over: tuple[Literal["masked", "tokens"], ...] = ("masked", "tokens")
    why_no_gdes: str = ""  # why the model cannot have `embedding_sharing` gdes; empty if it can
    statistics_shape: tuple[int, ...] = (len(TASKS), len(_COUNTS) + 2 * _BINS)

    def __init__(self, cfg: ObjectiveConfig):
        self.mask_fraction, self.random_fakes = cfg.mask_fraction, cfg.random_fakes
        self.generator_arguments = cfg.z_loss, cfg.generator_temperature, cfg.generator_keep_fraction
        weight_of = {"masked": 1.0, "tokens": cfg.discriminator_weight}
        weights = [weight_of[positions] for positions in self.means_over for _ in TASKS]
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def collate_for(self, rows: RowStore, purpose: Purpose) -> Collate:
        """Returns `collate` or, for training with `random_fakes`, a function that also adds `random_1`, float32 [1], to
        a batch: the fraction of the generator's samples that random tokens replace in this step."""
        if purpose != "train" or not self.random_fakes:
            return super().collate_for(rows, purpose)

        def collate_with_share(task_rows: TaskRows, seed: int, mask_fraction: float, step: int) -> Batch:
            share_1 = torch.tensor([weight_at(self.random_fakes, step)])
            return collate(task_rows, seed, mask_fraction).with_added(random_1=share_1)

        return collate_with_share

    def learning_rate_scales(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The factor of each parameter's learning rate. It is `optimizer.discriminator_rate` if only the discriminator
        has the parameter, else 1."""
        return [cfg.discriminator_rate if _DISCRIMINATOR.search(name) else 1.0 for name in names]

    def as_probe(self, batch: Batch) -> Batch:
        """`batch` with all uniform random numbers set to 0. Then every sample is token 0 or, in a step with random
        fakes, the first ordinary token. With other numbers, rounding could change the samples."""
        return batch._replace(uniforms_M=batch.uniforms_M * 0)

    def check(self, run: RunConfig) -> None:
        """Raise ValueError also if no token or every token is masked, if a share of random tokens is above 1, or if the
        model cannot have its `embedding_sharing`."""
        super().check(run)
        require_masks(run)
        if self.why_no_gdes and run.model.embedding_sharing != "tied":
            raise ValueError(f"objective.name {run.objective.name} {self.why_no_gdes}: set it to tied")
        fakes = run.objective.random_fakes
        # `weight_at` comes first, because its error explains malformed points.
        largest_share = max(weight_at(fakes, 0), *(weight_at(fakes, step) for step in point_steps(fakes)))
        if largest_share > 1:
            raise ValueError(
                f"objective.random_fakes {' '.join(fakes)} are shares of the samples, and one is {largest_share:g}: "
                "lower it to 1 at most"
            )

    def build(self, cfg: ModelConfig, part: PipelinePart | None = None) -> Electra:
        """The pre-training model, or the stage that runs one `part` of it in a pipeline."""
        model, stage = self.model_classes
        arguments = cfg, *self.generator_arguments
        return model(*arguments) if part is None else stage(*arguments, part=part)

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Operations per token. The generator with its softmax is in a pipeline's first part, the discriminator's head
        in the last."""
        return Flops(
            layers=cfg.discriminator_layers,
            one_layer=encoder_flops(cfg, cfg.discriminator_layers, row_tokens) / cfg.discriminator_layers,
            generator=encoder_flops(cfg, cfg.generator_layers, row_tokens),
            softmax_first=masked_head_flops(cfg, self.mask_fraction),
            head=2.0 * (cfg.width**2 + cfg.width),
        )

    @classmethod
    def counts(cls, batch: Batch) -> Tensor:
        """The divisor of each term's sum, float64 [terms]: the number of positions that the term's mean is over."""
        counts = {
            "masked": sum_by_task(torch.ones_like(batch.masked_M), batch.task_of_masked()),
            "tokens": sum_by_task((batch.segments_BT > 0).sum(1), batch.task_B),
        }
        return torch.cat([counts[positions] for positions in cls.means_over]).double()

    @staticmethod
    def discriminator_loss(output: ElectraOutput, batch: Batch) -> Tensor:
        """The discriminator's loss at every position, padding included, float32 [B, T]."""
        replaced_BT = (output.corrupted_BT != batch.tokens_BT).float()
        return F.binary_cross_entropy_with_logits(output.replaced_logits_BT.float(), replaced_BT, reduction="none")

    @classmethod
    def losses(cls, output: ElectraOutput, batch: Batch) -> list[Tensor]:
        """For each entry of `means_over`, the loss at these positions, float32: [M] for the masked positions, or [B, T]
        with 0 at all other positions."""
        return [output.nll_M, cls.discriminator_loss(output, batch) * (batch.segments_BT > 0)]

    @classmethod
    def sums(cls, output: ElectraOutput, batch: Batch) -> Tensor:
        """The summed loss of each term, float32 [terms]. The sums carry the gradient."""
        sums = [
            sum_by_task(loss, batch.task_of_masked()) if loss.dim() == 1 else sum_by_task(loss.sum(1), batch.task_B)
            for loss in cls.losses(output, batch)
        ]
        return torch.cat(sums)

    def by_language(self, output: ElectraOutput, batch: Batch, languages: int) -> Tensor:
        """`sums` (index 0) and `counts` (index 1) of each language's tokens, float64 [2, terms, languages]."""
        counted_N, language_N = (batch.segments_BT > 0).float().flatten(), batch.languages_BT.flatten()
        task_N = batch.task_B.repeat_interleave(batch.tokens_BT.shape[1])
        sums = []
        for positions, loss in zip(self.means_over, self.losses(output, batch), strict=True):
            indices = batch.masked_M if positions == "masked" else torch.arange(len(task_N), device=task_N.device)
            values = loss if loss.dim() == 1 else loss.flatten()[indices]
            counted, task, language = counted_N[indices], task_N[indices], language_N[indices]
            sums.append(sum_by_language(values, counted, task, language, len(TASKS), languages))
        return torch.cat(sums, dim=1)

    @staticmethod
    def statistics(output: ElectraOutput, batch: Batch) -> Tensor:
        """The numbers from which the accuracies, the replaced fraction and the AUC are computed, float64 [2, S]. Each
        task has the `_COUNTS` and two histograms of logits. The histograms and the last four counts leave out special
        tokens."""
        correct_M = output.predicted_M == batch.tokens_BT.flatten()[batch.masked_M]
        replaced_BT = output.corrupted_BT != batch.tokens_BT
        ordinary_BT = batch.tokens_BT > UNK
        logits_BT = output.replaced_logits_BT.float()
        correct_BT = (logits_BT > 0) == replaced_BT
        scaled_BT = (logits_BT.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT) + _LARGEST_LOGIT) / (2 * _LARGEST_LOGIT)
        # Without the last clamp, the largest logit would get the bin _BINS, and a NaN an arbitrary bin.
        bins_BT = (scaled_BT * _BINS).long().clamp(0, _BINS - 1)
        histogram_index_BT = batch.task_B[:, None] * _BINS + bins_BT
        task_M = batch.task_of_masked()
        # The columns are in the order of `_COUNTS`.
        count_columns = [sum_by_task(correct_M, task_M), sum_by_task(torch.ones_like(task_M), task_M)]
        histograms = []
        # Positions are counted with masks: indexing on a GPU would make the host wait for the number of positions.
        for selected_BT in (ordinary_BT & replaced_BT, ordinary_BT & ~replaced_BT):
            count_columns.append(sum_by_task(selected_BT.sum(1), batch.task_B))
            count_columns.append(sum_by_task((selected_BT & correct_BT).sum(1), batch.task_B))
            histogram = torch.zeros(len(TASKS) * _BINS, dtype=torch.int64, device=bins_BT.device)
            histogram.scatter_add_(0, histogram_index_BT.flatten(), selected_BT.flatten().long())
            histograms.append(histogram.view(len(TASKS), _BINS))
        return torch.cat([torch.stack(count_columns, dim=1), *histograms], dim=1).double()

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The metrics by name, from the sums, counts and statistics of a global batch. A task without rows has no
        metrics."""
        means = sums.double() / counts.clamp(min=1)
        metrics = {"loss": float((self.weights * means).sum())}
        for task, name in enumerate(TASKS):
            if counts[task] == 0:
                continue
            terms_of_task = slice(task, None, len(TASKS))  # `terms` alternates between the tasks
            metrics |= dict(zip(self.terms[terms_of_task], means[terms_of_task].tolist(), strict=True))
            totals = dict(zip(_COUNTS, statistics[task, : len(_COUNTS)].tolist(), strict=True))
            replaced, original = statistics[task, len(_COUNTS) :].split(_BINS)
            if "generator_accuracy" in self.quantities:
                metrics[f"generator_accuracy_{name}"] = totals["generator_correct"] / max(totals["masked"], 1)
            metrics |= {
                f"replaced_fraction_{name}": totals["replaced"] / max(totals["replaced"] + totals["original"], 1),
                f"accuracy_replaced_{name}": totals["replaced_correct"] / max(totals["replaced"], 1),
                f"accuracy_original_{name}": totals["original_correct"] / max(totals["original"], 1),
            }
            if replaced.any() and original.any():
                metrics[f"auc_{name}"] = area_under_curve(replaced, original)
        return metrics

    @staticmethod
    def tokens_and_probabilities(output: ElectraOutput, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns (tokens after replacement, probability that each of them was replaced), both [B, T]."""
        return output.corrupted_BT, torch.sigmoid(output.replaced_logits_BT.float())


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    """The area under the ROC curve, from histograms of the positive and of the negative examples with the same bins of
    ascending scores. A tie (two scores in one bin) counts half. Neither histogram may be empty."""
    negatives_below = negative.cumsum(0) - negative  # for each bin, the number of negative examples in lower bins
    return float((positive * (negatives_below + negative / 2)).sum() / (positive.sum() * negative.sum()))
