"""Counts of a run: floating-point operations by the standard count and by the paper's count, and parameters by
component.

In both counts a multiply-add is two operations, and only matrix products count. In the standard count a backward pass
costs two forward passes, the vocabulary softmax at the masked positions counts, and recomputation by activation
checkpointing does not count. Parameters are counted on the meta device, which takes no memory.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .config import ModelConfig, ObjectiveConfig, RunConfig
from .data.order import phase_shares, phases
from .models.pipeline import Flops, PipelinePart
from .objectives import objective_of


def flops_of(run: RunConfig, row_tokens: int) -> Flops:
    """Operations per token, forward and training, on full rows of `row_tokens` tokens. Phases may predict different
    fractions of the tokens, so the operations are means over the run's steps."""
    objective = run.objective
    if run.data.phase_mask_fractions:
        data_phases = phases(run.data, objective.mask_fraction)
        shares = phase_shares(data_phases, run.train.steps)
        mean = sum(phase.mask_fraction * share for phase, share in zip(data_phases, shares, strict=True))
        objective = replace(objective, mask_fraction=mean)
    return objective_of(objective).flops(run.model, row_tokens)


def flops_per_step(run: RunConfig, row_tokens: int) -> float:
    """Operations of one optimizer step, forward and backward, on full rows of `row_tokens` tokens."""
    return sum(run.data.mean_rows) * row_tokens * flops_of(run, row_tokens).training


def flops_by_phase(run: RunConfig, row_lengths: Sequence[int]) -> list[float]:
    """As `flops_per_step`, but of a step in each phase. `row_lengths`: the number of tokens of a row in each phase.
    Steps have the same number of tokens in all phases."""
    tokens = sum(run.data.mean_rows) * row_lengths[0]
    objectives = (
        objective_of(replace(run.objective, mask_fraction=phase.mask_fraction))
        for phase in phases(run.data, run.objective.mask_fraction)
    )
    return [
        tokens * objective.flops(run.model, length).training
        for objective, length in zip(objectives, row_lengths, strict=True)
    ]


def paper_forward_per_token(run: RunConfig, row_tokens: int) -> float:
    """Operations per token of a forward pass as XLM-E's Table 4 and ELECTRA count them: both encoders and the
    discriminator's head, without the softmax. Base has 252.84 MFLOP per token on rows of 512."""
    flops = flops_of(run, row_tokens)
    return flops.forward - flops.softmax


def paper_training_flops(run: RunConfig, row_tokens: int) -> dict[str, float]:
    """Operations of a run as XLM-E's Table 4 counts them: a backward pass costs one forward pass, 2^20 tokens are taken
    as 1.0e6, and only half of the tokens of pairs count. An additional pass without gradient adds the operations of its
    layers.

    In the result, `mono` counts monolingual text alone (published for Base: 6.3e19), `both` text and pairs (9.5e19).
    """
    flops = flops_of(run, row_tokens)
    per_token = 2.0 * paper_forward_per_token(run, row_tokens) + flops.layers * flops.first_pass_layer
    per_row = per_token * row_tokens * (1e6 / 2**20)
    mono, para = (per_row * rows * run.train.steps for rows in run.data.mean_rows)
    return {"mono": mono, "both": mono + para / 2}


@functools.cache
def parameter_sizes(objective: ObjectiveConfig, cfg: ModelConfig, part: PipelinePart | None = None) -> dict[str, int]:
    """Size of every parameter by its name, in the complete model that `objective` trains or in one `part`."""
    with torch.device("meta"):
        model = objective_of(objective).build(cfg, part)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def total_size(sizes: Mapping[str, int], *prefixes: str) -> int:
    """Size of all parameters whose names begin with one of `prefixes`; `sizes` has the size of a parameter by name."""
    return sum(size for name, size in sizes.items() if name.startswith(prefixes))


def count_parameters(run: RunConfig) -> dict[str, int]:
    """Parameters by component: `embedding`, every encoder with its head, and `trained_total`, every parameter once.

    The first encoder (XLM-E's discriminator, whose size the paper publishes) includes the token embedding, the second
    does not.
    """
    sizes = parameter_sizes(run.objective, run.model)
    # Under GDES the discriminator also reads the table `difference`, which only `trained_total` includes.
    counts = {"embedding": total_size(sizes, "embedding_")}
    for index, (encoder, head) in enumerate(objective_of(run.objective).encoders.items()):
        counts[encoder] = total_size(sizes, f"{encoder}.", head) + (counts["embedding"] if index == 0 else 0)
    return counts | {"trained_total": sum(sizes.values())}
