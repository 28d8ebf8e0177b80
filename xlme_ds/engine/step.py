"""The loss of each micro-batch in a training step or an evaluation, and the sums that are gathered for the metrics."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..objectives.protocol import Objective, Pretraining


@dataclass
class StepContext:
    """The settings of a pass over micro-batches, and its results so far."""

    objective: Objective  # the objective as it is at the step, with its weights
    weights: Tensor  # float32 [terms], on the device: the factor of each term's sum in the loss
    norm_limit: float = math.inf  # a step with a larger gradient norm is not taken
    detailed: bool = True  # whether to gather the numbers that are reported
    languages: int = 0  # number of languages for which to gather separate sums; 0: none
    applied: bool | None = None  # whether the step was taken; None: not decided yet, or DeepSpeed itself skipped it
    # For each micro-batch the objective's `sums`, `counts` and `statistics`, and its `by_language` if there are
    # `languages`; float64, with the shapes that `Objective` and `Pretraining` describe.
    gathered: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[tuple[Tensor, Any]] = field(default_factory=list)  # in training: (loss, batch) by micro-batch

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Return the micro-batch's contribution to the step's loss, and gather its sums if `detailed`. If the loss is
        not finite, make loss and gradient NaN, so that all ranks see the fault in the gradient's norm."""
        sums = self.objective.sums(output, batch)
        if self.detailed:
            micro_batch_sums = {
                "sums": sums.detach().double(),
                "counts": self.objective.counts(batch),
                "statistics": self.objective.statistics(output, batch),
            }
            if self.languages:
                objective = cast(Pretraining, self.objective)
                micro_batch_sums["by_language"] = objective.by_language(output, batch, self.languages)
            self.gathered.append(micro_batch_sums)
        loss = (self.weights * sums).sum()
        if loss.requires_grad:  # not in an evaluation
            self.losses.append((loss.detach(), batch))
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
