"""Replaced token detection, multilingual (MRTD) and translation (TRTD), with the generator's MLM and TLM.

L = L_MLM + L_TLM + λ·L_MRTD + λ·L_TRTD (XLM-E section 3.2). Every function returns sums over a micro-batch. A mean
is a sum divided by the exact count of the global batch: it does not depend on how the batch was cut.

B rows, T tokens, M masked positions. Tasks are in the order of data.rows.TASKS: mono (MLM, MRTD), para (TLM, TRTD).
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig, weight_at
from ..data.batch import Batch, sum_by_language, sum_by_task
from ..data.collate import Collate, Purpose, RowBatches, collate
from ..data.corrupt import TaskRows
from ..data.rows import TASKS, UNK
from ..models.electra import Electra, ElectraOutput
from ..models.pipeline import ElectraStage, Flops, Part, encoder_forward, masked_head_forward
from ..models.text_encoder import EncoderName
from .protocol import Pretraining, Quantity, require_masks

if TYPE_CHECKING:
    from ..data.shards import RowStore

# Parameters that only the discriminator has.
_DISCRIMINATOR = re.compile(r"(?:^|\.)(?:discriminator|replaced_head|token_head|difference_\d+)(?:\.|$)")
_BINS = 512  # of the discriminator's logits, from −_LARGEST_LOGIT to _LARGEST_LOGIT, for the area under the ROC curve
_LARGEST_LOGIT = 16.0
_SCALARS = ("generator_correct", "masked", "replaced", "replaced_found", "original", "original_kept")


class ElectraObjective(RowBatches, Pretraining):
    """Generator and discriminator, trained together (see `Pretraining`)."""

    description = (
        "multilingual and translation replaced token detection: a generator fills masked tokens, a discriminator finds "
        "the replaced ones"
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
    reads: tuple[str, ...] = (
        *("objective.discriminator_weight", "objective.generator_temperature", "objective.generator_keep_fraction"),
        *("objective.random_fakes", "objective.z_loss"),
    )
    models: tuple[type[Electra], type[ElectraStage]] = (Electra, ElectraStage)
    statistics_shape: tuple[int, ...] = (len(TASKS), len(_SCALARS) + 2 * _BINS)

    def __init__(self, cfg: ObjectiveConfig):
        self.mask_fraction, self.random_fakes = cfg.mask_fraction, cfg.random_fakes
        self.generator_arguments = cfg.z_loss, cfg.generator_temperature, cfg.generator_keep_fraction
        self.weights = torch.tensor([1.0, 1.0, cfg.discriminator_weight, cfg.discriminator_weight], dtype=torch.float64)

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """`collate`; in training with `random_fakes`, a batch also has the step's share of random tokens,
        `random_1`."""
        if purpose != "train" or not self.random_fakes:
            return super().batches(rows, purpose)

        def with_share(parts: TaskRows, seed: int, mask_fraction: float, step: int) -> Batch:
            share_1 = torch.tensor([weight_at(self.random_fakes, step)])
            return collate(parts, seed, mask_fraction).with_added(random_1=share_1)

        return with_share

    def learning_rates(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """`optimizer.discriminator_rate` for parameters that only the discriminator has, 1 for the others."""
        return [cfg.discriminator_rate if _DISCRIMINATOR.search(name) else 1.0 for name in names]

    def probe(self, batch: Batch) -> Batch:
        """`batch` with uniforms of 0, so that the generator samples token 0: rounding could change any other sample."""
        return batch._replace(uniforms_M=batch.uniforms_M * 0)

    def check(self, run: RunConfig) -> None:
        """Raise ValueError also where no token or every token is masked, or a share of random tokens is above 1."""
        super().check(run)
        require_masks(run)
        fakes = run.objective.random_fakes
        most = max((weight_at(fakes, int(point.partition(":")[0])) for point in fakes), default=weight_at(fakes, 0))
        if most > 1:
            raise ValueError(
                f"objective.random_fakes {' '.join(fakes)} are shares of the samples, and one is {most:g}: lower it to "
                "1 at most"
            )

    def build(self, cfg: ModelConfig, part: Part | None = None) -> Electra:
        """The pre-training model, or its `part` that a pipeline's stage runs."""
        model, stage = self.models
        arguments = cfg, *self.generator_arguments
        return model(*arguments) if part is None else stage(*arguments, part=part)

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """The generator with its softmax is in the first part, the discriminator's head in the last."""
        return Flops(
            layers=cfg.discriminator_layers,
            layer=encoder_forward(cfg, 1, row_tokens),
            generator=encoder_forward(cfg, cfg.generator_layers, row_tokens),
            softmax_first=masked_head_forward(cfg, self.mask_fraction),
            head=2.0 * (cfg.width**2 + cfg.width),
        )

    @staticmethod
    def counts(batch: Batch) -> Tensor:
        """The counts of the four terms, float64 [4]: masked positions, and all non-padding tokens, of each task."""
        masked = sum_by_task(torch.ones_like(batch.masked_M), batch.task_of_masked())
        tokens = sum_by_task((batch.segments_BT > 0).sum(1), batch.task_B)
        return torch.cat([masked, tokens]).double()

    @staticmethod
    def costs(output: ElectraOutput, batch: Batch) -> Tensor:
        """The discriminator's loss at every position, float32 [B, T]."""
        replaced_BT = (output.corrupted_BT != batch.tokens_BT).float()
        return F.binary_cross_entropy_with_logits(output.replaced_logits_BT.float(), replaced_BT, reduction="none")

    @classmethod
    def sums(cls, output: ElectraOutput, batch: Batch) -> Tensor:
        """The four summed losses, float32 [4], in the order of `terms`; carries the gradient."""
        cost_BT = cls.costs(output, batch)
        generator = sum_by_task(output.nll_M, batch.task_of_masked())
        discriminator = sum_by_task((cost_BT * (batch.segments_BT > 0)).sum(1), batch.task_B)
        return torch.cat([generator, discriminator])

    def by_language(self, output: ElectraOutput, batch: Batch, languages: int) -> Tensor:
        """The four summed losses and their counts, float64 [2, 4, languages]."""
        language_N, cost_BT = batch.languages_BT.flatten(), self.costs(output, batch)
        values = torch.cat([output.nll_M, cost_BT.flatten()])
        counted = torch.cat([torch.ones_like(output.nll_M), (batch.segments_BT > 0).float().flatten()])
        task_N = batch.task_B.repeat_interleave(cost_BT.shape[1])
        terms = torch.cat([batch.task_of_masked(), len(TASKS) + task_N])
        language = torch.cat([language_N[batch.masked_M], language_N])
        return sum_by_language(values, counted, terms, language, 2 * len(TASKS), languages)

    @staticmethod
    def statistics(output: ElectraOutput, batch: Batch) -> Tensor:
        """Counts that the accuracies and the AUC are made of, float64 [2, S], additive; special tokens are left out."""
        # Masked sums, because the host would have to wait for the size of a selection.
        right_M = output.predicted_M == batch.tokens_BT.flatten()[batch.masked_M]
        replaced_BT, ordinary_BT = output.corrupted_BT != batch.tokens_BT, batch.tokens_BT > UNK
        logits_BT = output.replaced_logits_BT.float()
        right_BT = (logits_BT > 0) == replaced_BT
        bins_BT = (
            ((logits_BT.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT) + _LARGEST_LOGIT) / (2 * _LARGEST_LOGIT) * _BINS)
            .long()
            .clamp(0, _BINS - 1)
        )
        task_M = batch.task_of_masked()
        columns = [sum_by_task(right_M, task_M), sum_by_task(torch.ones_like(task_M), task_M)]
        place_BT, histograms = batch.task_B[:, None] * _BINS + bins_BT, []
        for kind_BT in (ordinary_BT & replaced_BT, ordinary_BT & ~replaced_BT):
            columns += [sum_by_task(counted_BT.sum(1), batch.task_B) for counted_BT in (kind_BT, kind_BT & right_BT)]
            histogram = torch.zeros(len(TASKS) * _BINS, dtype=torch.int64, device=place_BT.device)
            histogram.scatter_add_(0, place_BT.flatten(), kind_BT.flatten().long())
            histograms.append(histogram.view(len(TASKS), _BINS))
        return torch.cat([torch.stack(columns, dim=1), *histograms], dim=1).double()

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The metrics of a global batch from its added-up sums, counts and statistics; a task without rows is left
        out."""
        means = sums.double() / counts.clamp(min=1)
        metrics = {"loss": float((self.weights * means).sum())}
        for task, name in enumerate(TASKS):
            if counts[task] == 0:
                continue
            metrics |= dict(zip(self.terms[task :: len(TASKS)], means[task :: len(TASKS)].tolist(), strict=True))
            totals = dict(zip(_SCALARS, statistics[task, : len(_SCALARS)].tolist(), strict=True))
            replaced, original = statistics[task, len(_SCALARS) :].split(_BINS)
            metrics |= {
                f"generator_accuracy_{name}": totals["generator_correct"] / max(totals["masked"], 1),
                f"replaced_fraction_{name}": totals["replaced"] / max(totals["replaced"] + totals["original"], 1),
                f"accuracy_replaced_{name}": totals["replaced_found"] / max(totals["replaced"], 1),
                f"accuracy_original_{name}": totals["original_kept"] / max(totals["original"], 1),
            }
            if replaced.any() and original.any():
                metrics[f"auc_{name}"] = area_under_curve(replaced, original)
        return metrics

    @staticmethod
    def shown(output: ElectraOutput, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The generator's replacements, and the discriminator's verdict."""
        return output.corrupted_BT, torch.sigmoid(output.replaced_logits_BT.float())


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    """AUC of two histograms over ascending scores; ties inside a bin count half. Neither may be empty."""
    below = negative.cumsum(0) - negative
    return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))
