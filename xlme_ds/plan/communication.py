"""Bytes that one GPU sends in an optimizer step, as DeepSpeed 0.19.8 really sends them.

An all-reduce of n bytes over N ranks sends 2n(N−1)/N bytes a rank, a reduce-scatter or an all-gather n(N−1)/N (ring
algorithms; ZeRO paper, arXiv:1910.02054, section 7, in units of Ψ: 2 for ZeRO-1 and 2, 3 for ZeRO-3). A micro-batches:

| | gradients | weights |
|---|---|---|
| ZeRO-1 | all-reduce, once a step | all-gather, once a step |
| ZeRO-2 | all-reduce in every micro-batch (`use_multi_rank_bucket_allreduce`, its default) | all-gather, once a step |
| ZeRO-3 | reduce-scatter in every micro-batch | all-gather in every micro-batch, again for what was not kept until the
|        |                                      | backward pass (`stage3_max_live_parameters`) |

All in the type of the weights. A pipeline sends hidden states forward and their gradients back besides. A pass that
goes ahead sends them forward once more, and under ZeRO-3 gathers what is not kept until the pass behind it.
"""

from dataclasses import asdict, dataclass

from . import activations, states
from .layout import Layout


@dataclass(frozen=True)
class Communication:
    """Bytes sent by the busiest GPU in an optimizer step. `gradients` and `weights` go to the replicas of its stage."""

    gradients: float
    weights: float
    stages: float
    overlapped: bool
    """Whether the engine sends while it computes; ZeRO-1 and 2 gather the new weights behind the update all the
    same."""

    @property
    def total(self) -> float:
        """Bytes in all."""
        return self.gradients + self.weights + self.stages

    def as_dict(self) -> dict[str, float]:
        """For JSON, in bytes."""
        return asdict(self) | {"total": self.total}


def communication(of: Layout) -> Communication:
    """What the stage that sends most sends."""
    return max((_of_stage(of, stage) for stage in range(len(of.stages))), key=lambda found: found.total)


def _of_stage(of: Layout, stage: int) -> Communication:
    sizes = of.sizes(stage)
    once = of.element * sizes.total * (of.replicas - 1) / of.replicas
    if of.zero.stage == 3:
        generator, discriminator = states.reused(of, stage)
        # The tables belong to the root module, which has not left them when its backward pass begins.
        again = once * (1 - (sizes.tables + generator + discriminator) / sizes.total)
        kept = not of.work.layer_ahead or sizes.discriminator <= of.zero.reuse_distance
        ahead = 0.0 if kept else once * sizes.discriminator / sizes.total
        gradients, weights = of.accumulation * once, of.accumulation * (once + again + ahead)
    else:
        reductions = of.accumulation if of.zero.stage == 2 else 1
        gradients, weights = 2 * once * reductions, once
    sides = (stage > 0) + (stage < len(of.stages) - 1)
    forward_again = of.work.layer_ahead > 0 and stage < len(of.stages) - 1
    between = of.accumulation * (sides + forward_again) * activations.flow(of)
    if stage == 0:  # the new embedding to the last stage, which sent its gradient
        between += of.element * of.borrowed
    elif stage == len(of.stages) - 1:
        between += states.FLOAT * of.borrowed
    # BF16_Optimizer reduces behind the last backward pass, whatever overlap_comm says.
    return Communication(gradients, weights, between, of.zero.overlap and not states.uses_bf16_optimizer(of))
