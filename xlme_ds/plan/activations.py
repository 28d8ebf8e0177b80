"""Bytes that the forward pass saves for the backward pass, by part of the model, as models/ computes it.

The dimensions: B rows, T tokens, H heads, D width, F feed-forward size, M masked positions, V vocabulary, C ids of a
tile. Which tensors autograd saves is tested against autograd itself.
"""

from dataclasses import replace

from ..models.tiles import GROUP, SKEWED, SUMMED_ROWS, tiling
from ..translate.decoder import decoder_depth
from .layout import ParallelLayout

INTEGER = 8  # token ids, positions, segments
FLOAT = 4
_TILE = 2**21  # models/attention_cpu.py's, with one thread


def layer(layout: ParallelLayout) -> float:
    """One Transformer layer, from its input to that of the next layer.

    Eight tensors of width D: the inputs and outputs of both norms, the input of the output projection, and q, k and v;
    on the GPU two more for the gate, which copies q for each of its two products. Dropout saves its mask, a byte an
    element, twice. Attention with dropout saves one more, the scaled q; it runs in no fused kernel. The Triton kernels
    save of the gate a number a head.
    """
    cfg, tokens = layout.model, layout.tokens
    gated, dropping = cfg.relative_bias == "gated", cfg.attention_dropout > 0
    copies = gated and layout.fused and not layout.triton
    wide_tensors = (9 if dropping else 10 if copies else 8) * tokens * cfg.width
    feed_forward = 2 * tokens * cfg.feed_forward
    gates = gated * (FLOAT if layout.triton else 5 * layout.element)
    per_head = tokens * cfg.heads * (gates + (FLOAT if layout.fused and not dropping else 0))
    norms = 4 * tokens * (FLOAT if layout.fused else layout.element)
    dropped = 2 * tokens * cfg.width if cfg.dropout else 0
    return (wide_tensors + feed_forward) * layout.element + _scores(layout) + per_head + norms + dropped


def _scores(layout: ParallelLayout) -> float:
    """Of pairs of a query and a key: the bias for torch's fused kernel; else nothing.

    Attention with dropout saves the weights before and after it, a mask of a byte, and on the CPU the mask of items.
    """
    cfg = layout.model
    if cfg.attention_dropout:
        return layout.tokens * layout.row_tokens * (cfg.heads * (2 * layout.element + 1) + (not layout.fused))
    if layout.triton:
        return 0.0
    heads = 1 if cfg.relative_bias == "none" else cfg.heads
    return layout.fused * layout.tokens * layout.row_tokens * heads * layout.element


def _skewed(layout: ParallelLayout) -> float:
    """The Triton kernels' table of d, which all layers of an encoder read."""
    columns = 2 * SKEWED * (-(-layout.row_tokens // SKEWED) + 1)
    return 2 * layout.model.heads * SKEWED * columns * layout.element


def wide(layout: ParallelLayout) -> float:
    """One tensor [B, T, D]."""
    return layout.tokens * layout.model.width * layout.element


def saved_layer(layout: ParallelLayout) -> float:
    """Bytes that a layer saves until its backward pass: with checkpointing only its input."""
    return wide(layout) if layout.model.activation_checkpointing else layer(layout)


def _encoder(layout: ParallelLayout, layers: int, first: bool = True, last: bool = True) -> float:
    """The layers of an encoder with its embeddings (`first`) and its output norm (`last`)."""
    cfg = layout.model
    saved = layers * saved_layer(layout)
    if first and (cfg.norm == "post" or cfg.embedding_norm):
        saved += 2 * wide(layout) if cfg.norm == "post" else wide(layout)
    if first and cfg.dropout:
        saved += layout.tokens * cfg.width
    if last and cfg.norm == "pre":
        saved += 2 * wide(layout)
    # Shared by all layers: where items begin and end; or a mask of all pairs, a byte each, and d of all pairs.
    saved += layout.tokens * (2 * FLOAT if layout.triton else layout.row_tokens)
    if cfg.relative_bias != "none" and layout.triton:
        saved += _skewed(layout)
    elif cfg.relative_bias != "none":
        saved += layout.row_tokens**2 * (INTEGER + cfg.heads * layout.element)
    blocks = 9 * cfg.vocabulary_blocks if cfg.vocabulary_blocks > 1 else INTEGER
    return saved + (layout.tokens * (blocks + INTEGER) if first else 0)


def predicted(layout: ParallelLayout, last: bool) -> float:
    """Positions of a micro-batch at which the masked head of the first or the last part predicts."""
    return ((last and layout.work.predicted_last) or layout.objective.mask_fraction) * layout.tokens


def _masked_head(layout: ParallelLayout, last: bool) -> float:
    """Dense, GELU, norm at the predicted positions, or their input alone; the softmax saves a number a position."""
    tensors = 4 if layout.model.masked_head == "dense" else 1
    size = tensors * layout.model.width * layout.element + 4 * INTEGER
    return predicted(layout, last) * size


def generator(layout: ParallelLayout) -> float:
    """The encoder in front of the one that a pipeline cuts, with its masked head; it has no dropout."""
    if not layout.work.before:
        return 0.0
    layout = replace(layout, model=replace(layout.model, dropout=0.0, attention_dropout=0.0))
    return _encoder(layout, layout.model.generator_layers) + _masked_head(layout, last=False)


def _sides(layout: ParallelLayout) -> list[ParallelLayout]:
    """What each of the two networks of a translating model reads, for every term of the loss, the most first: all
    tokens of a sentence, of which denoising and back-translation have sources about as long, and half of a pair's."""
    pairs, row_tokens, cfg = layout.pairs, layout.row_tokens, layout.objective
    sentences = replace(layout, tokens=(layout.rows - pairs) * row_tokens)
    found = [sentences] * (bool(cfg.denoising) + bool(cfg.back_translation))
    if pairs:
        found.append(replace(layout, tokens=pairs * row_tokens // 2, row_tokens=row_tokens // 2))
    return sorted(found, key=lambda side: -side.tokens)


def _translator(side: ParallelLayout) -> float:
    """Encoder and decoder for one term; cross-attention is taken for as much as self-attention."""
    cfg, depth = side.model, decoder_depth(side.model)
    saved = _encoder(side, cfg.discriminator_layers) + _encoder(side, depth) + _masked_head(side, last=True)
    if cfg.decoder == "xlm" and not cfg.activation_checkpointing:
        saved += depth * (layer(side) - 2 * side.tokens * cfg.feed_forward * side.element)
    return saved


def stage(layout: ParallelLayout, number: int) -> float:
    """All that the forward pass of one micro-batch saves on a stage."""
    if layout.work.decoder:
        return sum(map(_translator, _sides(layout)))  # all are in one graph
    part = layout.stages[number]
    saved = _encoder(layout, len(part.layers), part.first, part.last)
    if part.first:
        saved += generator(layout)
    if part.last and layout.work.head:  # dense, GELU, one logit a token and its loss
        saved += 2 * wide(layout) + layout.tokens * 6 * FLOAT
    if part.last and layout.work.softmax_last:
        saved += _masked_head(layout, last=True)
    return saved


def working(layout: ParallelLayout) -> float:
    """What the backward pass of one layer also holds: gradients in flight, and with checkpointing the layer
    itself."""
    cfg, tokens = layout.model, layout.tokens
    feed_forward = 2 * tokens * cfg.feed_forward * layout.element
    if layout.triton:  # of some rows the sums along diagonals, twice a tile
        side = tiling("_backward_distances", cfg.width // cfg.heads, layout.element).keys
        scores = -(-layout.rows // SUMMED_ROWS) * cfg.heads * 4.0 * (layout.row_tokens + side) * FLOAT
    elif layout.fused or cfg.attention_dropout:
        heads = cfg.heads if cfg.relative_bias != "none" or cfg.attention_dropout else 1
        scores = 3 * tokens * layout.row_tokens * heads * layout.element - feed_forward
    else:  # of one row, in tiles; and gradients of q, k and v
        scores = 3 * min(layout.row_tokens**2 * cfg.heads * layout.element, _TILE) + 3 * wide(layout)
    recomputed = layer(layout) if cfg.activation_checkpointing else 0.0
    return max(feed_forward, scores) + 2 * wide(layout) + recomputed


def logits(layout: ParallelLayout, backward: bool, last: bool) -> float:
    """The vocabulary softmax of the first or the last part at its peak: a tile [M, C] in float32, and for a moment also
    in the type of the weights.

    The forward pass also holds two sums a group, and the rows of the table that some positions draw their samples from.
    Samples under a temperature take a second sum of exponentials a group, and another tile without the kernels. On a
    GPU in bf16, Triton kernels hold neither tile nor rows in the forward pass, and no float32 tile in the backward
    pass; the groups' weights are cumulated in float64.
    """
    cfg, positions = layout.model, predicted(_sides(layout)[0] if layout.work.decoder else layout, last)
    size = min(-(-cfg.head_chunk // GROUP) * GROUP, -(-cfg.vocabulary // cfg.vocabulary_blocks))
    kernels = layout.fused and layout.element < FLOAT and cfg.kernels != "torch"
    tile = positions * size * (FLOAT + (0 if layout.element == FLOAT else layout.element))
    if backward:
        # The kernels' sums over each 128 positions are a 64th of the tile in bf16.
        return (
            positions * size * (layout.element + FLOAT / 128) if kernels else tile
        ) + 2 * positions * cfg.width * FLOAT
    groups, tempered = positions * (cfg.vocabulary / GROUP), layout.objective.generator_temperature != 1.0
    sums = groups * (2 + tempered) * FLOAT
    if kernels:
        return sums + min(groups * 24, 2**30)
    if tempered:
        tile = positions * size * 2 * FLOAT
    at_once = min(positions, max(positions * cfg.head_chunk // (2 * GROUP * cfg.width), 1))
    if layout.fused:
        at_once = min(positions, 2**28 // (2 * GROUP * cfg.width * layout.element))
    rows = at_once * 2 * GROUP * (cfg.width * layout.element + 3 * INTEGER)
    return sums + max(tile, rows)


def between_stages(layout: ParallelLayout) -> float:
    """Bytes from one stage to the next a micro-batch: hidden states and two kinds of integers; a key a row.

    After a generator also its losses and one more kind of integers.
    """
    per_token = FLOAT + 3 * INTEGER if layout.work.before else 2 * INTEGER
    per_token += INTEGER if layout.work.softmax_first and layout.work.softmax_last else 0  # the original tokens
    return wide(layout) + layout.tokens * per_token + layout.rows * INTEGER
