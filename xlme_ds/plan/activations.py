"""Bytes that the forward pass keeps for the backward pass, by part of the model, read off models/.

B rows, T tokens, H heads, D width, F feed-forward size, M masked positions, V vocabulary, C ids of a tile. Which
tensors autograd keeps is tested against autograd itself.
"""

from dataclasses import replace

from .layout import Layout

INTEGER = 8  # token ids, positions, segments
FLOAT = 4
_GROUP = 128  # models/heads.py's
_TILES = {2: 64, 4: 32}  # models/attention_triton.py's
_TILE = 2**21  # models/attention_cpu.py's, with one thread


def layer(of: Layout) -> float:
    """One Transformer layer, from what it reads to what the next one reads.

    D-wide, 8 in all: the inputs of both norms and what they give, what the output projection reads, and of attention q,
    k and v; on the GPU 2 more for the gate, which copies q for each of its two products. Dropout keeps what it dropped,
    a byte each, twice. Of attention that drops weights 1 more, the scaled q; it is no kernel.
    """
    cfg, rows = of.model, of.rows * of.row_tokens
    gated, dropping = cfg.relative_bias == "gated", cfg.attention_dropout > 0
    wide = (9 if dropping else 10 if gated and of.fused else 8) * rows * cfg.width
    feed_forward = 2 * rows * cfg.feed_forward
    gates = 5 if gated else int(of.triton)  # which takes a gate of ones where there is none
    per_head = rows * cfg.heads * (gates * of.element + (FLOAT if of.fused and not dropping else 0))
    norms = 4 * rows * (FLOAT if of.fused else of.element)
    dropped = 2 * rows * cfg.width if cfg.dropout else 0
    return (wide + feed_forward) * of.element + _scores(of) + per_head + norms + dropped


def _scores(of: Layout) -> float:
    """Of queries and keys: the bias that torch's kernel for the GPU takes, or d for the Triton kernels; on the CPU
    nothing. Where weights are dropped these, before and after, and a byte each, and on the CPU who may see whom."""
    cfg = of.model
    if cfg.attention_dropout:
        return of.tokens * of.row_tokens * (cfg.heads * (2 * of.element + 1) + (not of.fused))
    if of.triton:
        return cfg.heads * _distances(of) * FLOAT
    return of.fused * of.tokens * of.row_tokens * (1 if cfg.relative_bias == "none" else cfg.heads) * of.element


def _distances(of: Layout) -> int:
    """Numbers of d for one head, with what a tile may read beyond a row's ends."""
    return 2 * (of.row_tokens + _TILES[of.element]) - 1


def wide(of: Layout) -> float:
    """One tensor [B, T, D]."""
    return of.tokens * of.model.width * of.element


def kept_layer(of: Layout) -> float:
    """What a layer leaves until its backward pass: with checkpointing only what it read."""
    return wide(of) if of.model.activation_checkpointing else layer(of)


def encoder(of: Layout, layers: int, first: bool = True, last: bool = True) -> float:
    """The layers of an encoder and what stands around them."""
    cfg = of.model
    kept = layers * kept_layer(of)
    around = 0.0
    if first and (cfg.norm == "post" or cfg.embedding_norm):
        around += 2 * wide(of) if cfg.norm == "post" else wide(of)
    if first and cfg.dropout:
        around += of.tokens * cfg.width
    if last and cfg.norm == "pre":
        around += 2 * wide(of)
    # Where items begin and end; or who may see whom, a byte each, and d of all pairs.
    shared = of.tokens * (2 * FLOAT if of.triton else of.row_tokens)
    if cfg.relative_bias != "none" and not of.triton:
        shared += of.row_tokens**2 * (INTEGER + cfg.heads * of.element)
    blocks = 9 * cfg.vocabulary_blocks if cfg.vocabulary_blocks > 1 else INTEGER
    return kept + around + shared + (of.tokens * (blocks + INTEGER) if first else 0)


def masked_head(of: Layout) -> float:
    """Dense, GELU, norm at the masked positions, or what they read alone; of the softmax itself only a number a
    position."""
    wide = 4 if of.model.masked_head == "dense" else 1
    return of.objective.mask_fraction * of.tokens * (wide * of.model.width * of.element + 4 * INTEGER)


def replaced_head(of: Layout) -> float:
    """Dense, GELU, one logit a token and its loss."""
    return 2 * wide(of) + of.tokens * 6 * FLOAT


def generator(of: Layout) -> float:
    """Everything before the encoder that is cut; it drops nothing."""
    of = replace(of, model=replace(of.model, dropout=0.0, attention_dropout=0.0))
    return encoder(of, of.model.generator_layers) + masked_head(of) if of.work.before else 0.0


def stage(of: Layout, number: int) -> float:
    """All that one micro-batch leaves on a stage."""
    part = of.stages[number]
    kept = encoder(of, len(part.layers), part.first, part.last)
    head = replaced_head(of) if of.work.head else masked_head(of)
    return kept + (generator(of) if part.first else 0) + (head if part.last else 0)


def working(of: Layout) -> float:
    """What the backward pass of one layer holds besides: gradients in flight, and with checkpointing the layer
    itself."""
    feed_forward = 2 * of.tokens * of.model.feed_forward * of.element
    if of.triton:  # each tile of queries has its share of d's gradient
        scores = of.tokens / _TILES[of.element] * of.model.heads * _distances(of) * FLOAT
    elif of.fused or of.model.attention_dropout:
        heads = of.model.heads if of.model.relative_bias != "none" or of.model.attention_dropout else 1
        scores = 3 * of.tokens * of.row_tokens * heads * of.element - feed_forward
    else:  # of one row, in tiles; and gradients of q, k and v
        scores = 3 * min(of.row_tokens**2 * of.model.heads * of.element, _TILE) + 3 * wide(of)
    recomputed = layer(of) if of.model.activation_checkpointing else 0.0
    return max(feed_forward, scores) + 2 * wide(of) + recomputed


def logits(of: Layout, backward: bool) -> float:
    """What the vocabulary softmax holds at its peak: a tile, float32 [M, C] and beside it once the same in `element`;
    forward also two sums a group, and the rows of the table in which some positions' samples are looked for."""
    cfg, positions = of.model, of.objective.mask_fraction * of.tokens
    size = min(-(-cfg.head_chunk // _GROUP) * _GROUP, -(-cfg.vocabulary // cfg.vocabulary_blocks))
    tile = positions * size * (FLOAT + (0 if of.element == FLOAT else of.element))
    if backward:
        return tile + 2 * positions * cfg.width * FLOAT
    groups = positions * (cfg.vocabulary / _GROUP) * 2 * FLOAT
    at_once = min(positions, max(positions * cfg.head_chunk // (2 * _GROUP * cfg.width), 1))
    rows = at_once * 2 * _GROUP * (cfg.width * of.element + 3 * INTEGER)
    return groups + max(tile, rows)


def flow(of: Layout) -> float:
    """What crosses from stage to stage a micro-batch: hidden states, two kinds of integers, and of a generator its
    losses and one more; a key a row."""
    return wide(of) + of.tokens * (FLOAT + 3 * INTEGER if of.work.before else 2 * INTEGER) + of.rows * INTEGER


def between_stages(of: Layout, stage: int) -> float:
    """What a pipeline keeps of its traffic, each way."""
    sides = (stage > 0) + (stage < len(of.stages) - 1)
    return sides * of.in_flight(stage) * flow(of)
