"""What DeepSpeed 0.19.8 keeps of weights, gradients and optimizer from step to step, and in passing.

Ψ parameters of the stage, N replicas, e bytes an element (read off runtime/zero/ and runtime/bf16_optimizer.py):

| | weights | gradients | optimizer: float32 weights, two moments |
|---|---|---|---|
| ZeRO-1, bf16 (`BF16_Optimizer`) | eΨ | 4Ψ always, 2Ψ with one micro-batch a step | 12Ψ/N |
| ZeRO-1, fp32 | eΨ | 4Ψ/N after reduction; 4Ψ while micro-batches add up | 12Ψ/N |
| ZeRO-2 | eΨ | 4Ψ/N from the first reduction on | 12Ψ/N |
| ZeRO-3 | eΨ/N, and what is gathered | the same over N | 12Ψ/N |

The ZeRO paper (arXiv:1910.02054, section 3) counts gradients as 2Ψ: here several micro-batches add up in float32.
"""

import math

from .layout import Layout

FLOAT = 4
OPTIMIZER = 3 * FLOAT


def uses_bf16_optimizer(of: Layout) -> bool:
    """Whether DeepSpeed takes `BF16_Optimizer`, which reduces all gradients at once behind the backward pass."""
    return of.zero.stage == 1 and of.element == 2 and not of.zero.offload_optimizer


def weights(of: Layout, stage: int) -> float:
    """Weights that are always there."""
    size = of.sizes(stage).total * of.element
    if stage == len(of.stages) - 1:
        size += of.element * of.borrowed
    if of.zero.stage < 3:
        return size
    return 0.0 if of.zero.offload_parameters else size / of.replicas


def optimizer(of: Layout, stage: int) -> float:
    """Float32 weights and moments of this rank's part."""
    return 0.0 if of.zero.offload_optimizer else OPTIMIZER * of.sizes(stage).total / of.replicas


def standing_gradients(of: Layout, stage: int) -> float:
    """Gradients that are there all through a step's last micro-batch."""
    return _own_gradients(of, stage) + (FLOAT * of.borrowed if stage == len(of.stages) - 1 else 0)


def _own_gradients(of: Layout, stage: int) -> float:
    size = of.sizes(stage).total
    if uses_bf16_optimizer(of):
        return of.zero.gradient_bytes * size
    if of.zero.stage == 3:
        return 0.0 if of.zero.offload_optimizer else of.zero.gradient_bytes * size / of.replicas
    if of.accumulation == 1:
        return 0.0
    return FLOAT * size / (of.replicas if of.zero.stage == 2 else 1)


def arriving_gradients(of: Layout, stage: int, produced: int) -> float:
    """Gradients besides the standing ones when the backward pass has made those of `produced` parameters."""
    late = of.zero.stage == 1 and (len(of.stages) > 1 or not of.zero.overlap)
    if late and not uses_bf16_optimizer(of):  # each stays where autograd put it until all are reduced
        return of.element * produced if of.accumulation == 1 else 0.0
    return reduced_gradients(of, stage, produced)


def reduced_gradients(of: Layout, stage: int, produced: float = math.inf) -> float:
    """Gradients besides the standing ones once those of `produced` parameters are reduced."""
    sizes = of.sizes(stage)
    if uses_bf16_optimizer(of):
        return 0.0
    if of.zero.stage == 3 or (of.accumulation > 1 and of.zero.stage == 2 and of.element == 2):
        return 0.0
    if of.element == FLOAT:  # collected whole, also where only a part of the parameter is this rank's
        return FLOAT * min(sizes.total, sizes.total / of.replicas + min(sizes.largest, produced))
    return FLOAT * sizes.total / of.replicas


def gathered(of: Layout, stage: int, kept: int) -> float:
    """Weights that ZeRO-3 holds whole: the tables, which belong to the root module, and the `kept` ones."""
    if not gathers(of):
        return 0.0
    return of.element * (of.sizes(stage).tables + kept)


def gathers(of: Layout) -> bool:
    """Whether weights are copied together before they are used: alone, a rank uses its own where they stand."""
    return of.zero.stage == 3 and (of.replicas > 1 or of.zero.offload_parameters)


def reused(of: Layout, stage: int) -> tuple[int, int]:
    """Parameters of generator and discriminator that ZeRO-3 keeps for the backward pass.

    It keeps what it will soon need: going back over the last x parameters, and over the tables at the turn, the first
    is needed again after 2x. And prefetching keeps whatever it passes over because it is there, up to the live
    parameters that are allowed.
    """
    sizes = of.sizes(stage)
    prefetched = of.zero.live - sizes.tables if of.zero.prefetch_bucket else 0
    reach = max(0, prefetched, (of.zero.reuse_distance - sizes.tables) // 2)
    return max(0, min(sizes.generator, reach - sizes.discriminator)), min(sizes.discriminator, reach)


def buckets(of: Layout, stage: int, backward: bool) -> float:
    """Buffers that gradients are collected in before they are reduced, and that weights are gathered into."""
    if uses_bf16_optimizer(of):
        return 0.0
    bucket = of.zero.reduce_bucket * of.element
    if of.zero.stage == 3:
        ahead = min(of.zero.prefetch_bucket, of.sizes(stage).total) if gathers(of) else 0
        return bucket + of.element * ahead
    return (2 if of.zero.overlap else 1) * bucket if backward else 0.0


def reducing(of: Layout, stage: int, size: int) -> float:
    """Copies that reducing `size` elements takes."""
    if uses_bf16_optimizer(of):  # in the type that is sent
        return of.element * size if of.replicas > 1 else 0.0
    if of.zero.stage == 3:
        return size * (of.element + FLOAT / of.replicas)
    sizes = of.sizes(stage)
    part = min(size, sizes.largest, sizes.total // of.replicas)
    return of.element * size + (FLOAT * part if of.element == 2 else 0)


def updating(of: Layout, stage: int) -> float:
    """Copies that the optimizer step takes."""
    part = of.sizes(stage).total / of.replicas
    if of.zero.offload_optimizer or uses_bf16_optimizer(of):
        return 0.0
    if of.zero.stage == 3:
        return FLOAT * min(part, of.zero.sub_group)
    return FLOAT * part if of.element == FLOAT else 0.0
