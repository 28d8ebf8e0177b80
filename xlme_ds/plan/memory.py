"""Peak memory of one GPU by kind: the fullest moment of a step.

From step to step DeepSpeed 0.19.8 holds, of Ψ parameters of the stage on N replicas, at e bytes an element
(as in runtime/zero/ and runtime/bf16_optimizer.py):

| | weights | gradients | optimizer: float32 weights, two moments |
|---|---|---|---|
| ZeRO-1, bf16 (`BF16_Optimizer`) | eΨ | 4Ψ always, 2Ψ with one micro-batch a step | 12Ψ/N |
| ZeRO-1, fp32 | eΨ | 4Ψ/N after reduction; 4Ψ while micro-batches add up | 12Ψ/N |
| ZeRO-2 | eΨ | 4Ψ/N from the first reduction on | 12Ψ/N |
| ZeRO-3 | eΨ/N, and what is gathered | the same over N | 12Ψ/N |

The ZeRO paper (arXiv:1910.02054, section 3) counts gradients as 2Ψ: here several micro-batches add up in float32. Sums
over the ranks are float32: ZeRO-1 with one micro-batch needs copies of two groups at a time and 4Ψ/N for the sums,
ZeRO-2 and 3 copies of the gradients that they reduce at once.
tests/plan/test_memory.py compares the peak with what the engines allocate.
"""

import math

from .activations import between_stages, generator, logits, saved_layer, working
from .activations import stage as saved_stage
from .layout import ParallelLayout

FLOAT = 4
OPTIMIZER = 3 * FLOAT
GIB = 2.0**30
Memory = dict[str, float]  # bytes by kind at one moment: weights, gradients, optimizer, activations, logits, buffers


def peak(layout: ParallelLayout) -> tuple[str, Memory]:
    """The fullest moment of the fullest stage: its name, and the bytes by kind."""
    moments = [
        (f"{name}, stage {stage}" if len(layout.stages) > 1 else name, memory)
        for stage in range(len(layout.stages))
        for name, memory in _moments(layout, stage).items()
    ]
    return max(moments, key=lambda pair: sum(pair[1].values()))


def _plus(memory: Memory, **kinds: float) -> Memory:
    """`memory` with more bytes of some kinds."""
    return memory | {kind: memory[kind] + size for kind, size in kinds.items()}


def _moments(layout: ParallelLayout, stage: int) -> dict[str, Memory]:
    """Bytes by kind at the moments that can be the fullest, for a step in the middle of a run."""
    sizes, part = layout.sizes(stage), layout.stages[stage]
    idle = Memory(
        weights=_weights(layout, stage),
        gradients=_kept_gradients(layout, stage),
        optimizer=0.0 if layout.offloads_optimizer else OPTIMIZER * sizes.total / layout.replicas,
        activations=0.0,
        logits=0.0,
        buffers=_buckets(layout, stage, backward=False),
    )
    filling = _buckets(layout, stage, backward=True) - _buckets(layout, stage, backward=False)
    busy = _plus(
        idle,
        activations=(layout.in_flight(stage) - 1) * saved_stage(layout, stage),
        buffers=layout.neighbours(stage) * layout.in_flight(stage) * between_stages(layout),
    )
    turn = _plus(
        busy,
        weights=_gathered(layout, stage, sum(reused_weights(layout, stage))),
        activations=saved_stage(layout, stage),
    )
    moments = {
        "start of the backward pass": _plus(
            turn, gradients=_waiting(layout, stage), activations=working(layout), buffers=filling
        ),
        "update": _plus(idle, gradients=_reduced_gradients(layout, stage), buffers=_updating(layout, stage)),
    }
    if layout.work.softmax_first and part.first:
        moments |= _around_the_first_softmax(layout, stage, busy, filling)
    if layout.work.softmax_last and part.last:
        table = _softmax_gradient(layout, stage) if sizes.embedding else layout.element * layout.borrowed
        moments |= {
            "vocabulary softmax, forward": _plus(turn, logits=logits(layout, backward=False, last=True)),
            "vocabulary softmax, backward": _plus(
                turn, gradients=table, logits=logits(layout, backward=True, last=True), buffers=filling
            ),
        }
    if layout.work.softmax_last and part.first:
        arrived = _arriving_gradients(layout, stage, sizes.discriminator)
        moments["embedding, backward"] = _plus(
            busy,
            weights=_gathered(layout, stage, 0),
            gradients=arrived + _joined_by_lookup(layout, stage),
            buffers=filling,
        )
    return moments | _reductions(layout, stage, idle, turn, filling)


def _around_the_first_softmax(layout: ParallelLayout, stage: int, busy: Memory, filling: float) -> dict[str, Memory]:
    sizes = layout.sizes(stage)
    start = _plus(busy, weights=_gathered(layout, stage, reused_weights(layout, stage)[0]))
    # With the tables tied, the gradient of the discriminator's lookup exists already; on a GPU it is a full table.
    lookup = layout.element * sizes.embedding if layout.fused and not sizes.difference else 0
    arrived = _arriving_gradients(layout, stage, sizes.discriminator + sizes.difference)
    back = _plus(start, gradients=arrived, buffers=filling)
    saved = generator(layout)
    return {
        "vocabulary softmax, forward": _plus(
            start, activations=saved, logits=logits(layout, backward=False, last=False)
        ),
        "vocabulary softmax, backward": _plus(
            back,
            gradients=_softmax_gradient(layout, stage) + lookup,
            activations=saved,
            logits=logits(layout, backward=True, last=False),
        ),
        "embedding, backward": _plus(back, gradients=_joined_by_lookup(layout, stage)),
    }


def _reductions(layout: ParallelLayout, stage: int, idle: Memory, turn: Memory, filling: float) -> dict[str, Memory]:
    """Moments of reductions: `turn` is the memory where the backward pass begins, `idle` that between steps."""
    sizes, layers = layout.sizes(stage), len(layout.stages[stage].layers)
    everything = _reduced_gradients(layout, stage)
    bucket = min(layout.zero["reduce_bucket_size"], sizes.total)
    # Layers that the backward pass has finished when it has filled the first bucket.
    done = min(layers, bucket * layers // max(1, sizes.discriminator))
    if uses_bf16_optimizer(layout):
        first = _plus(turn, activations=-done * saved_layer(layout), buffers=_copies(layout, bucket, bucket))
        return {
            "first reduction": first,
            "reduction": _plus(idle, gradients=everything, buffers=_reducing(layout, stage, sizes.total)),
        }
    arrived = _arriving_gradients(layout, stage, bucket) + _waiting(layout, stage)
    if layout.element == FLOAT:  # the waiting gradient is among those that are collected complete
        arrived = min(arrived, FLOAT * sizes.total)
    reduced = _plus(turn, gradients=arrived, activations=-done * saved_layer(layout), buffers=filling)
    # In fp32 under ZeRO 1 and 2 the largest gradient is among those that are collected complete.
    largest = layout.element * sizes.largest if layout.element == 2 or layout.zero["stage"] == 3 else 0
    return {
        "first reduction": _plus(reduced, buffers=_reducing(layout, stage, bucket)),
        "after the first reduction": _plus(reduced, activations=working(layout)),
        "reduction of the largest parameter": _plus(
            idle,
            weights=_gathered(layout, stage, 0),
            gradients=everything + largest,
            buffers=filling + _reducing(layout, stage, sizes.largest),
        ),
    }


def uses_bf16_optimizer(layout: ParallelLayout) -> bool:
    """Whether DeepSpeed takes `BF16_Optimizer`, whose flat buffers we sum over the ranks in place."""
    return layout.zero["stage"] == 1 and layout.element == 2 and not layout.offloads_optimizer


def _weights(layout: ParallelLayout, stage: int) -> float:
    size = layout.element * (layout.sizes(stage).total + (layout.borrowed if stage == len(layout.stages) - 1 else 0))
    if layout.zero["stage"] < 3:
        return size
    return size / layout.replicas if layout.engine.offload_parameters == "none" else 0.0


def _kept_gradients(layout: ParallelLayout, stage: int) -> float:
    """Gradients that exist during a step's complete last micro-batch."""
    size = layout.sizes(stage).total
    borrowed = FLOAT * layout.borrowed if stage == len(layout.stages) - 1 else 0
    if uses_bf16_optimizer(layout):
        return layout.gradient_bytes * size + borrowed
    if layout.zero["stage"] == 3:
        return borrowed + (0 if layout.offloads_optimizer else layout.gradient_bytes * size / layout.replicas)
    if layout.accumulation == 1:
        return borrowed
    return borrowed + FLOAT * size / (layout.replicas if layout.zero["stage"] == 2 else 1)


def _arriving_gradients(layout: ParallelLayout, stage: int, produced: int) -> float:
    """Gradients, besides those of `_kept_gradients`, once the backward pass has computed those of `produced`
    parameters."""
    late = layout.zero["stage"] == 1 and (len(layout.stages) > 1 or not layout.zero["overlap_comm"])
    if late and not uses_bf16_optimizer(layout):  # each stays where autograd put it until all are reduced
        return layout.element * produced if layout.accumulation == 1 else 0.0
    return _reduced_gradients(layout, stage, produced)


def _reduced_gradients(layout: ParallelLayout, stage: int, produced: float = math.inf) -> float:
    """Gradients, besides those of `_kept_gradients`, once those of `produced` parameters are reduced."""
    sizes = layout.sizes(stage)
    adding = layout.accumulation > 1 and layout.zero["stage"] == 2 and layout.element == 2
    if uses_bf16_optimizer(layout) or layout.zero["stage"] == 3 or adding:
        return 0.0
    if layout.element == FLOAT:  # collected complete, even if this rank owns only a part of the parameter
        return FLOAT * min(sizes.total, sizes.total / layout.replicas + min(sizes.largest, produced))
    return FLOAT * sizes.total / layout.replicas


def _waiting(layout: ParallelLayout, stage: int) -> float:
    """The softmax's gradient of an embedding before its lookup computes its own: autograd adds the two first."""
    return _softmax_gradient(layout, stage) if layout.work.softmax_last and len(layout.stages) == 1 else 0.0


def _softmax_gradient(layout: ParallelLayout, stage: int) -> float:
    """Bytes of the softmax's gradient of the stage's own embedding; BF16_Optimizer's sum takes it tile by tile."""
    return 0.0 if uses_bf16_optimizer(layout) else layout.element * layout.sizes(stage).embedding


def _joined_by_lookup(layout: ParallelLayout, stage: int) -> float:
    """The softmax's gradient of an embedding while the lookup's is added.

    The lookup's gradient is as large as a block on a GPU; on the CPU it is sparse, and added in place where no engine
    partitions the table.
    """
    in_place = not layout.fused and layout.zero["stage"] < 3 and len(layout.stages) == 1
    block = layout.element * layout.sizes(stage).embedding / layout.model.vocabulary_blocks
    return _softmax_gradient(layout, stage) + (0 if in_place else block)


def _gathered(layout: ParallelLayout, stage: int, modules: int) -> float:
    """Gathered weights under ZeRO-3: the tables, which belong to the root module, and `modules` more parameters."""
    return layout.element * (layout.sizes(stage).tables + modules) if _gathers(layout) else 0.0


def _gathers(layout: ParallelLayout) -> bool:
    """Whether weights are copied together before use: a single rank uses its own in place."""
    return layout.zero["stage"] == 3 and (layout.replicas > 1 or layout.engine.offload_parameters != "none")


def reused_weights(layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Parameters of generator and discriminator that ZeRO-3 holds until the backward pass.

    ZeRO-3 keeps a parameter that it needs again within `stage3_max_reuse_distance`. Between the two uses of a parameter
    lie all later ones twice, and the tables. Prefetching also keeps gathered parameters, up to
    `stage3_max_live_parameters`.
    """
    sizes = layout.sizes(stage)
    prefetched = (
        layout.zero["stage3_max_live_parameters"] - sizes.tables if layout.zero["stage3_prefetch_bucket_size"] else 0
    )
    reach = max(0, prefetched, (layout.zero["stage3_max_reuse_distance"] - sizes.tables) // 2)
    return max(0, min(sizes.generator, reach - sizes.discriminator)), min(sizes.discriminator, reach)


def _buckets(layout: ParallelLayout, stage: int, backward: bool) -> float:
    """Buffers that collect gradients before they are reduced, and that weights are gathered into."""
    if uses_bf16_optimizer(layout):
        return 0.0
    bucket = layout.zero["reduce_bucket_size"] * layout.element
    if layout.zero["stage"] == 3:
        ahead = min(layout.zero["stage3_prefetch_bucket_size"], layout.sizes(stage).total) if _gathers(layout) else 0
        return bucket + layout.element * ahead
    return (2 if layout.zero["overlap_comm"] else 1) * bucket if backward else 0.0


def _reducing(layout: ParallelLayout, stage: int, size: int) -> float:
    """Buffers for the sums of gradients over the ranks, `size` gradients at a time."""
    sizes = layout.sizes(stage)
    converted = layout.sum_bytes if layout.sum_bytes != layout.element else 0
    if uses_bf16_optimizer(layout):
        two = min(2 * max(sizes.largest, layout.zero["reduce_bucket_size"]), sizes.total)
        return _copies(layout, two, sizes.total)
    if layout.zero["stage"] == 3:  # converted, then joined rank by rank
        return size * (converted + layout.sum_bytes)
    return (layout.element + converted) * size


def _copies(layout: ParallelLayout, size: int, done: int) -> float:
    """Copies of `size` gradients that ZeRO-1 sends in another type, and this rank's part of `done` sums."""
    if layout.gradient_bytes == layout.sum_bytes or layout.replicas == 1:
        return 0.0
    return layout.sum_bytes * (size + done / layout.replicas)


def _updating(layout: ParallelLayout, stage: int) -> float:
    part = layout.sizes(stage).total / layout.replicas
    if uses_bf16_optimizer(layout):
        return _copies(layout, 0, layout.sizes(stage).total)
    if layout.offloads_optimizer:
        return 0.0
    if layout.zero["stage"] == 3:
        return FLOAT * min(part, layout.zero["sub_group_size"])
    return FLOAT * part if layout.element == FLOAT else 0.0
