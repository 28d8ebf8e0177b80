"""Counts the bytes that the forward pass of the code in models/ saves for the backward pass, for each part of a model.

Dimensions: B rows, T tokens, D width, M masked positions, C vocabulary entries in a tile of logits.
"""

from dataclasses import replace

from ..models.encoder import layer_class
from ..models.layers import FLOAT32_BYTES, INT64_BYTES
from ..models.tiles import GROUP_SIZE
from ..objectives import objective_of
from .layout import ParallelLayout


def uncheckpointed_layer_bytes(layout: ParallelLayout) -> float:
    """Bytes that one Transformer layer saves without activation checkpointing, its input included."""
    return layer_class(layout.model).saved_bytes(layout.model, layout)


def hidden_bytes(layout: ParallelLayout) -> float:
    """Bytes of one tensor of hidden states, [B, T, D]."""
    return layout.tokens * layout.model.width * layout.element_bytes


def saved_layer_bytes(layout: ParallelLayout) -> float:
    """Bytes that a layer saves for the backward pass. With activation checkpointing it saves only its input."""
    return hidden_bytes(layout) if layout.model.activation_checkpointing else uncheckpointed_layer_bytes(layout)


def _saved_encoder_bytes(layout: ParallelLayout, layers: int, first: bool = True, last: bool = True) -> float:
    """Bytes that `layers` layers of an encoder save; `first` adds the embeddings, and `last` the output norm."""
    cfg = layout.model
    saved = layers * saved_layer_bytes(layout)
    if first and (cfg.norm == "post" or cfg.embedding_norm):
        saved += 2 * hidden_bytes(layout) if cfg.norm == "post" else hidden_bytes(layout)
    if first and cfg.dropout:
        saved += layout.tokens * cfg.width
    if last and cfg.norm == "pre":
        saved += 2 * hidden_bytes(layout)
    saved += layer_class(cfg).shared_bytes(cfg, layout)
    # The embedding's lookup saves each token's id or, for each of several blocks, an index and a mask.
    lookup_bytes = (INT64_BYTES + 1) * cfg.vocabulary_blocks if cfg.vocabulary_blocks > 1 else INT64_BYTES
    return saved + (layout.tokens * (lookup_bytes + INT64_BYTES) if first else 0)


def predicted_positions(layout: ParallelLayout, last: bool) -> float:
    """Number of positions of a micro-batch at which a masked head predicts. The head is that of the model's last part
    if `last`, else that of its first part."""
    fraction = layout.flops.predicted_last if last else 0.0
    return (fraction or layout.objective.mask_fraction) * layout.tokens


def _saved_head_bytes(layout: ParallelLayout, last: bool) -> float:
    """Bytes that a masked head saves. For each predicted position these are 4 integers of the softmax and 4 vectors (of
    dense layer, GELU and norm). A head without a dense layer saves 1 vector, its input, in place of the 4."""
    vectors = 4 if layout.model.masked_head == "dense" else 1
    return predicted_positions(layout, last) * (vectors * layout.model.width * layout.element_bytes + 4 * INT64_BYTES)


def saved_generator_bytes(layout: ParallelLayout) -> float:
    """Bytes that the generator saves, with its masked head; 0 without a generator. A generator has no dropout."""
    if not layout.flops.generator:
        return 0.0
    layout = replace(layout, model=replace(layout.model, dropout=0.0, attention_dropout=0.0))
    return _saved_encoder_bytes(layout, layout.model.generator_layers) + _saved_head_bytes(layout, last=False)


def saved_stage_bytes(layout: ParallelLayout, stage_index: int) -> float:
    """Bytes that one micro-batch saves on a stage over all its forward passes, because the backward pass comes last."""
    return sum(_saved_pass_bytes(pass_layout, stage_index) for pass_layout in _passes(layout))


def _passes(layout: ParallelLayout) -> list[ParallelLayout]:
    """For each forward pass over a micro-batch, the layout with the sizes of that pass; the largest pass is first."""
    return [
        replace(layout, tokens=batch.tokens, row_tokens=batch.row_tokens)
        for batch in objective_of(layout.objective).forward_passes(layout)
    ]


def _saved_pass_bytes(layout: ParallelLayout, stage_index: int) -> float:
    """Bytes that one forward pass saves on a stage. `layout` is one that `_passes` returned."""
    part, flops = layout.stages[stage_index], layout.flops
    saved = _saved_encoder_bytes(layout, len(part.layers), part.first, part.last)
    if part.first:
        saved += saved_generator_bytes(layout)
    if part.last and flops.head:  # dense layer, GELU, one logit per token and its loss
        saved += 2 * hidden_bytes(layout) + layout.tokens * 6 * FLOAT32_BYTES
    if part.last and flops.softmax_last:
        saved += _saved_head_bytes(layout, last=True)
    if flops.decoder_layers:
        saved += _saved_encoder_bytes(layout, flops.decoder_layers)
        if not layout.model.activation_checkpointing:  # cross-attention saves what a layer without feed-forward saves
            feed_forward = 2 * layout.tokens * layout.model.feed_forward * layout.element_bytes
            saved += flops.cross_attentions * (uncheckpointed_layer_bytes(layout) - feed_forward)
    return saved


def layer_backward_bytes(layout: ParallelLayout) -> float:
    """Bytes that one layer's backward pass needs in addition to what was saved. These are gradients and, with
    checkpointing, the layer's recomputed activations."""
    recomputed = uncheckpointed_layer_bytes(layout) if layout.model.activation_checkpointing else 0.0
    return layer_class(layout.model).backward_bytes(layout.model, layout) + recomputed


def softmax_bytes(layout: ParallelLayout, backward: bool, last: bool) -> float:
    """Peak bytes of the vocabulary softmax in the model's first part, or in its last part if `last`. The softmax holds
    a tile of logits [M, C] in float32, and for a moment the same tile in the type of the weights, if that is another.
    In the backward pass it also holds two float32 tensors [M, D].

    The forward pass also holds two numbers for each position and group of vocabulary entries. For several positions at
    a time it holds the embeddings of two groups: the sample's, and that of the likeliest token. Sampling with a
    temperature needs a third number for each position and group and, without Triton, two float32 tiles. On a GPU in
    bf16, Triton kernels hold neither a tile nor embeddings in the forward pass, but cumulative sums of the groups'
    weights in float64. In the backward pass these kernels hold no float32 tile.
    """
    cfg = layout.model
    positions = predicted_positions(_passes(layout)[0], last)
    chunk = -(-cfg.head_chunk // GROUP_SIZE) * GROUP_SIZE  # rounded up to whole groups
    block = -(-cfg.vocabulary // cfg.vocabulary_blocks)
    logit_count = positions * min(chunk, block)  # number of logits in a tile
    uses_kernels = layout.on_gpu and layout.element_bytes < FLOAT32_BYTES and cfg.kernels != "torch"
    tile_bytes = logit_count * (FLOAT32_BYTES + (0 if layout.element_bytes == FLOAT32_BYTES else layout.element_bytes))
    if backward:
        # The kernels also hold float32 sums over every 128 positions: FLOAT32_BYTES / 128 bytes per logit.
        gradient_bytes = logit_count * (layout.element_bytes + FLOAT32_BYTES / 128) if uses_kernels else tile_bytes
        return gradient_bytes + 2 * positions * cfg.width * FLOAT32_BYTES
    position_group_count = positions * (cfg.vocabulary / GROUP_SIZE)
    tempered = layout.objective.generator_temperature != 1.0
    group_bytes = position_group_count * (3 if tempered else 2) * FLOAT32_BYTES
    if uses_kernels:
        return group_bytes + min(position_group_count * 24, 2**30)
    if tempered:
        tile_bytes = logit_count * 2 * FLOAT32_BYTES
    # Number of elements in the embeddings of two groups: the sample's group, and the group of the likeliest token.
    elements = 2 * GROUP_SIZE * cfg.width
    on_cpu = max(positions * cfg.head_chunk // elements, 1)
    sampled_at_once = min(positions, 2**28 // (elements * layout.element_bytes) if layout.on_gpu else on_cpu)
    embedding_bytes = sampled_at_once * 2 * GROUP_SIZE * (cfg.width * layout.element_bytes + 3 * INT64_BYTES)
    return group_bytes + max(tile_bytes, embedding_bytes)


def stage_transfer_bytes(layout: ParallelLayout) -> float:
    """Bytes that one stage sends to the next for a micro-batch: hidden states, the relative bias d, two integers for
    each token and a seed of dropout for each row. With a generator, also the generator's loss and one more integer for
    each token."""
    cfg = layout.model
    bias_bytes = 0 if cfg.relative_bias == "none" else cfg.heads * (2 * layout.row_tokens - 1) * FLOAT32_BYTES
    per_token = FLOAT32_BYTES + 3 * INT64_BYTES if layout.flops.generator else 2 * INT64_BYTES
    per_token += INT64_BYTES if layout.flops.softmax_first and layout.flops.softmax_last else 0  # the original tokens
    return hidden_bytes(layout) + bias_bytes + layout.tokens * per_token + layout.rows * INT64_BYTES
