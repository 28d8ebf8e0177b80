"""Peak memory of one GPU: the bytes of weights, gradients and so on at the fullest moment of a step.

For a stage of Ψ parameters on N replicas, at e bytes per element, DeepSpeed 0.19.8 holds these bytes (as in its
runtime/zero/ and runtime/bf16_optimizer.py):

| | weights | gradients | optimizer: float32 weights, two moments |
|---|---|---|---|
| ZeRO-1, bf16 (`BF16_Optimizer`) | eΨ | 4Ψ (2Ψ with one micro-batch per step), never freed | 12Ψ/N |
| ZeRO-1, fp32 | eΨ | 4Ψ/N after reduction; 4Ψ while micro-batches add up | 12Ψ/N |
| ZeRO-2 | eΨ | 4Ψ/N from the first reduction on | 12Ψ/N |
| ZeRO-3 | eΨ/N, and gathered weights | 4Ψ/N, or 2Ψ/N where they are added in bf16 | 12Ψ/N |

The ZeRO paper (arXiv:1910.02054, section 3) counts 2Ψ bytes of gradients; here the gradients of several micro-batches
are added in float32. Sums over the ranks are float32 too. For these sums, ZeRO-1 with one micro-batch needs float32
copies of two groups of gradients at a time, and 4Ψ/N for the results. ZeRO-2 and 3 need a copy of the gradients that
they reduce in one call.

tests/plan/test_memory.py compares the peak with what the engines allocate.
"""

import math

from .activations import (
    layer_backward_bytes,
    saved_generator_bytes,
    saved_layer_bytes,
    saved_stage_bytes,
    softmax_bytes,
    stage_transfer_bytes,
)
from .layout import ParallelLayout

FLOAT32_BYTES = 4
OPTIMIZER_BYTES = 3 * FLOAT32_BYTES  # bytes for each parameter: the float32 weight and two moments
GIB = 2.0**30
Memory = dict[str, float]  # bytes at one moment, by kind: weights, gradients, optimizer, activations, logits, buffers


def peak_memory(layout: ParallelLayout) -> tuple[str, Memory]:
    """Returns (name of the moment and stage with the highest memory use, memory at that moment)."""
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
    """The memory at each moment of a step that can have the highest use, by the moment's name."""
    sizes, part = layout.sizes(stage), layout.stages[stage]
    idle_buffers = _collection_buffer_bytes(layout, stage, backward=False)
    bucket_bytes = _collection_buffer_bytes(layout, stage, backward=True) - idle_buffers
    # `idle` is the memory that stays allocated all through the last micro-batch of a step.
    idle = Memory(
        weights=_weight_bytes(layout, stage),
        gradients=_kept_gradient_bytes(layout, stage),
        optimizer=0.0 if layout.offloads_optimizer else OPTIMIZER_BYTES * sizes.total / layout.replicas,
        activations=0.0,
        logits=0.0,
        buffers=idle_buffers,
    )
    # `busy` adds the activations of the other micro-batches in flight, and the tensors that stages exchange.
    busy = _plus(
        idle,
        activations=(layout.in_flight(stage) - 1) * saved_stage_bytes(layout, stage),
        buffers=layout.neighbours(stage) * layout.in_flight(stage) * stage_transfer_bytes(layout),
    )
    backward_start = _plus(
        busy,
        weights=_gathered_weight_bytes(layout, stage, sum(reused_weights(layout, stage))),
        activations=saved_stage_bytes(layout, stage),
    )
    moments = {
        "start of the backward pass": _plus(
            backward_start,
            gradients=_waiting_gradient_bytes(layout, stage),
            activations=layer_backward_bytes(layout),
            buffers=bucket_bytes,
        ),
        "update": _plus(
            idle, gradients=_reduced_gradient_bytes(layout, stage), buffers=_update_buffer_bytes(layout, stage)
        ),
    }
    if layout.flops.softmax_first and part.first:
        moments |= _first_softmax_moments(layout, stage, busy, bucket_bytes)
    if layout.flops.softmax_last and part.last:
        # A stage without an embedding has a copy of it, whose gradient exists whole.
        copy_gradient_bytes = layout.element_bytes * layout.embedding_copy_size
        table_gradient_bytes = _softmax_gradient_bytes(layout, stage) if sizes.embedding else copy_gradient_bytes
        moments |= {
            "vocabulary softmax, forward": _plus(
                backward_start, logits=softmax_bytes(layout, backward=False, last=True)
            ),
            "vocabulary softmax, backward": _plus(
                backward_start,
                gradients=table_gradient_bytes,
                logits=softmax_bytes(layout, backward=True, last=True),
                buffers=bucket_bytes,
            ),
        }
    if layout.flops.softmax_last and part.first:
        arrived_bytes = _arrived_gradient_bytes(layout, stage, sizes.discriminator)
        moments["embedding, backward"] = _plus(
            busy,
            weights=_gathered_weight_bytes(layout, stage, 0),
            gradients=arrived_bytes + _joined_gradient_bytes(layout, stage),
            buffers=bucket_bytes,
        )
    return moments | _reduction_moments(layout, stage, idle, backward_start, bucket_bytes)


def _first_softmax_moments(layout: ParallelLayout, stage: int, busy: Memory, bucket_bytes: float) -> dict[str, Memory]:
    """The memory at the moments around the vocabulary softmax of the first part. `busy` is the memory with other
    micro-batches in flight, and `bucket_bytes` the bytes that the buckets of gradients add in the backward pass."""
    sizes = layout.sizes(stage)
    forward_base = _plus(busy, weights=_gathered_weight_bytes(layout, stage, reused_weights(layout, stage)[0]))
    # With a tied embedding, the gradient from the discriminator's lookup exists already. On a GPU it is as large as the
    # embedding.
    lookup_gradient_bytes = layout.element_bytes * sizes.embedding if layout.on_gpu and not sizes.difference else 0
    arrived_bytes = _arrived_gradient_bytes(layout, stage, sizes.discriminator + sizes.difference)
    backward_base = _plus(forward_base, gradients=arrived_bytes, buffers=bucket_bytes)
    saved_bytes = saved_generator_bytes(layout)
    return {
        "vocabulary softmax, forward": _plus(
            forward_base, activations=saved_bytes, logits=softmax_bytes(layout, backward=False, last=False)
        ),
        "vocabulary softmax, backward": _plus(
            backward_base,
            gradients=_softmax_gradient_bytes(layout, stage) + lookup_gradient_bytes,
            activations=saved_bytes,
            logits=softmax_bytes(layout, backward=True, last=False),
        ),
        "embedding, backward": _plus(backward_base, gradients=_joined_gradient_bytes(layout, stage)),
    }


def _reduction_moments(
    layout: ParallelLayout, stage: int, idle: Memory, backward_start: Memory, bucket_bytes: float
) -> dict[str, Memory]:
    """The memory at the moments when gradients are reduced. `idle` is the memory without activations, `backward_start`
    that at the start of the backward pass, and `bucket_bytes` the bytes that the buckets of gradients add in that
    pass."""
    sizes = layout.sizes(stage)
    layers = len(layout.stages[stage].layers)
    reduced_bytes = _reduced_gradient_bytes(layout, stage)
    bucket_size = min(layout.zero["reduce_bucket_size"], sizes.total)
    # Number of layers that the backward pass has finished when it has filled the first bucket.
    finished_layers = min(layers, bucket_size * layers // max(1, sizes.discriminator))
    if uses_bf16_optimizer(layout):
        return {
            "first reduction": _plus(
                backward_start,
                activations=-finished_layers * saved_layer_bytes(layout),
                buffers=_converted_copy_bytes(layout, bucket_size, bucket_size),
            ),
            "reduction": _plus(
                idle, gradients=reduced_bytes, buffers=_reduction_buffer_bytes(layout, stage, sizes.total)
            ),
        }
    arrived_bytes = _arrived_gradient_bytes(layout, stage, bucket_size) + _waiting_gradient_bytes(layout, stage)
    # The sum may count the waiting gradient twice, but no gradient exists twice.
    if layout.element_bytes == FLOAT32_BYTES:
        arrived_bytes = min(arrived_bytes, FLOAT32_BYTES * sizes.total)
    first_bucket_full = _plus(
        backward_start,
        gradients=arrived_bytes,
        activations=-finished_layers * saved_layer_bytes(layout),
        buffers=bucket_bytes,
    )
    # In fp32 under ZeRO 1 and 2 `reduced_bytes` already includes the largest gradient.
    includes_largest = layout.element_bytes == FLOAT32_BYTES and layout.zero["stage"] < 3
    largest_gradient_bytes = 0 if includes_largest else layout.element_bytes * sizes.largest
    return {
        "first reduction": _plus(first_bucket_full, buffers=_reduction_buffer_bytes(layout, stage, bucket_size)),
        "after the first reduction": _plus(first_bucket_full, activations=layer_backward_bytes(layout)),
        "reduction of the largest parameter": _plus(
            idle,
            weights=_gathered_weight_bytes(layout, stage, 0),
            gradients=reduced_bytes + largest_gradient_bytes,
            buffers=bucket_bytes + _reduction_buffer_bytes(layout, stage, sizes.largest),
        ),
    }


def uses_bf16_optimizer(layout: ParallelLayout) -> bool:
    """Whether DeepSpeed uses `BF16_Optimizer`. `engine/bf16_gradients.py` then adds and reduces the gradients."""
    return layout.zero["stage"] == 1 and layout.element_bytes == 2 and not layout.offloads_optimizer


def _weight_bytes(layout: ParallelLayout, stage: int) -> float:
    """Bytes of this rank's weights, without those that ZeRO-3 gathers."""
    is_last = stage == len(layout.stages) - 1
    weight_bytes = layout.element_bytes * (layout.sizes(stage).total + (layout.embedding_copy_size if is_last else 0))
    if layout.zero["stage"] < 3:
        return weight_bytes
    return weight_bytes / layout.replicas if layout.engine.offload_parameters == "none" else 0.0


def _kept_gradient_bytes(layout: ParallelLayout, stage: int) -> float:
    """Bytes of the gradients that exist all through a step's last micro-batch."""
    size = layout.sizes(stage).total
    copy_bytes = FLOAT32_BYTES * layout.embedding_copy_size if stage == len(layout.stages) - 1 else 0
    if uses_bf16_optimizer(layout):
        return copy_bytes + layout.gradient_element_bytes * size
    if layout.zero["stage"] == 3:
        gradient_bytes = layout.gradient_element_bytes * size / layout.replicas
        return copy_bytes + (0 if layout.offloads_optimizer else gradient_bytes)
    if layout.accumulation == 1:
        return copy_bytes
    return copy_bytes + FLOAT32_BYTES * size / (layout.replicas if layout.zero["stage"] == 2 else 1)


def _arrived_gradient_bytes(layout: ParallelLayout, stage: int, produced: int) -> float:
    """Bytes of gradients, in addition to `_kept_gradient_bytes`, once the backward pass has computed the gradients of
    `produced` elements."""
    reduced_at_end = layout.zero["stage"] == 1 and (len(layout.stages) > 1 or not layout.zero["overlap_comm"])
    if reduced_at_end and not uses_bf16_optimizer(layout):  # before the reduction, gradients stay as autograd made them
        return layout.element_bytes * produced if layout.accumulation == 1 else 0.0
    return _reduced_gradient_bytes(layout, stage, produced)


def _reduced_gradient_bytes(layout: ParallelLayout, stage: int, produced: float = math.inf) -> float:
    """Bytes of gradients, in addition to `_kept_gradient_bytes`, once the gradients of `produced` elements are
    reduced."""
    sizes = layout.sizes(stage)
    added_after_reduction = layout.accumulation > 1 and layout.zero["stage"] == 2 and layout.element_bytes == 2
    if uses_bf16_optimizer(layout) or layout.zero["stage"] == 3 or added_after_reduction:
        return 0.0
    # In fp32 the largest parameter's gradient is held whole, even if the rank owns a part of it.
    if layout.element_bytes == FLOAT32_BYTES:
        return FLOAT32_BYTES * min(sizes.total, sizes.total / layout.replicas + min(sizes.largest, produced))
    return FLOAT32_BYTES * sizes.total / layout.replicas


def _waiting_gradient_bytes(layout: ParallelLayout, stage: int) -> float:
    """Bytes of the embedding's gradient from the softmax while it waits for the lookup's gradient: autograd adds the
    two before any reduction."""
    return _softmax_gradient_bytes(layout, stage) if layout.flops.softmax_last and len(layout.stages) == 1 else 0.0


def _softmax_gradient_bytes(layout: ParallelLayout, stage: int) -> float:
    """Bytes of the softmax's gradient for the stage's own embedding. With `BF16_Optimizer` it is added tile by tile and
    never exists whole: then the result is 0."""
    return 0.0 if uses_bf16_optimizer(layout) else layout.element_bytes * layout.sizes(stage).embedding


def _joined_gradient_bytes(layout: ParallelLayout, stage: int) -> float:
    """Bytes of the embedding's two gradients, from the softmax and from the lookup, while they are added.

    On a GPU the lookup's gradient is as large as a block of the table. On the CPU it is sparse, and is added in place
    unless ZeRO-3 or a pipeline is used.
    """
    in_place = not layout.on_gpu and layout.zero["stage"] < 3 and len(layout.stages) == 1
    block_bytes = layout.element_bytes * layout.sizes(stage).embedding / layout.model.vocabulary_blocks
    return _softmax_gradient_bytes(layout, stage) + (0 if in_place else block_bytes)


def _gathered_weight_bytes(layout: ParallelLayout, stage: int, other_elements: int) -> float:
    """Bytes of the weights that ZeRO-3 has gathered: the tables, which belong to the root module, and `other_elements`
    elements of other modules."""
    return layout.element_bytes * (layout.sizes(stage).tables + other_elements) if _gathers_weights(layout) else 0.0


def _gathers_weights(layout: ParallelLayout) -> bool:
    """Whether ZeRO-3 copies weights before it uses them. A single rank without offloading uses them in place."""
    return layout.zero["stage"] == 3 and (layout.replicas > 1 or layout.engine.offload_parameters != "none")


def reused_weights(layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Returns the element counts of the parameters that ZeRO-3 holds until the backward pass, as (generator's,
    discriminator's).

    ZeRO-3 keeps a parameter if it uses fewer than `stage3_max_reuse_distance` elements until it uses the parameter
    again. Between these uses, all later parameters are used twice and the tables once: distance = 2 · later + tables.
    Prefetching also keeps gathered parameters, up to `stage3_max_live_parameters`.
    """
    sizes = layout.sizes(stage)
    prefetched_reach = (
        layout.zero["stage3_max_live_parameters"] - sizes.tables if layout.zero["stage3_prefetch_bucket_size"] else 0
    )
    reach = max(0, prefetched_reach, (layout.zero["stage3_max_reuse_distance"] - sizes.tables) // 2)
    return max(0, min(sizes.generator, reach - sizes.discriminator)), min(sizes.discriminator, reach)


def _collection_buffer_bytes(layout: ParallelLayout, stage: int, backward: bool) -> float:
    """Bytes of the buffers that collect gradients before their reduction, and of those that hold prefetched weights: in
    the backward pass if `backward`, else at other times."""
    if uses_bf16_optimizer(layout):
        return 0.0
    bucket_bytes = layout.zero["reduce_bucket_size"] * layout.element_bytes
    if layout.zero["stage"] == 3:
        prefetched = min(layout.zero["stage3_prefetch_bucket_size"], layout.sizes(stage).total)
        return bucket_bytes + (layout.element_bytes * prefetched if _gathers_weights(layout) else 0)
    return (2 if layout.zero["overlap_comm"] else 1) * bucket_bytes if backward else 0.0


def _reduction_buffer_bytes(layout: ParallelLayout, stage: int, size: int) -> float:
    """Bytes of the buffers that sum gradients over the ranks, `size` elements at a time."""
    if uses_bf16_optimizer(layout):
        sizes = layout.sizes(stage)
        two_groups_size = min(2 * max(sizes.largest, layout.zero["reduce_bucket_size"]), sizes.total)
        return _converted_copy_bytes(layout, two_groups_size, sizes.total)
    converted_bytes = layout.reduced_element_bytes if layout.reduced_element_bytes != layout.element_bytes else 0
    if layout.zero["stage"] == 3:  # gradients are converted, and then copied again to join them rank by rank
        return size * (converted_bytes + layout.reduced_element_bytes)
    return size * (converted_bytes + layout.element_bytes)


def _converted_copy_bytes(layout: ParallelLayout, size: int, summed: int) -> float:
    """Bytes of ZeRO-1's copies of gradients in the type in which they are sent: `size` elements to send, and this
    rank's part of the sums of `summed` elements."""
    if layout.gradient_element_bytes == layout.reduced_element_bytes or layout.replicas == 1:
        return 0.0
    return layout.reduced_element_bytes * (size + summed / layout.replicas)


def _update_buffer_bytes(layout: ParallelLayout, stage: int) -> float:
    """Bytes of the buffers that the optimizer's update needs."""
    size = layout.sizes(stage).total
    if uses_bf16_optimizer(layout):
        return _converted_copy_bytes(layout, 0, size)
    if layout.offloads_optimizer:
        return 0.0
    owned = size / layout.replicas
    if layout.zero["stage"] == 3:
        return FLOAT32_BYTES * min(owned, layout.zero["sub_group_size"])
    return FLOAT32_BYTES * owned if layout.element_bytes == FLOAT32_BYTES else 0.0
