"""Counts the operations of a Transformer layer and the bytes that it saves for the backward pass, for the code of
`layers.py` and of the attention kernels.

B rows, T tokens, H heads, D width, F feed-forward size. Tests compare the saved bytes with those that autograd saves.
"""

from dataclasses import dataclass

from ..config import ModelConfig
from .attention_cpu import TILE
from .tiles import SKEWED, SUMMED_ROWS, tiling

INTEGER = 8  # bytes of a token id, position or segment (int64)
FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class MicroBatch:
    """The sizes of a micro-batch on one device, and the kernels in which its attention runs."""

    rows: int  # number of rows of both tasks
    row_tokens: int  # number of positions in a row
    tokens: int  # number of positions in all rows
    element: int  # bytes of a weight or activation
    fused: bool  # whether attention runs in fused kernels on a GPU, torch's or Triton's
    triton: bool  # whether attention runs in the Triton kernels
    pairs: int  # number of rows that hold translation pairs


def operations(cfg: ModelConfig, row_tokens: int) -> float:
    """Floating-point operations per token of a layer's forward pass: projections, feed-forward network, scores and
    weighted sums."""
    return 2.0 * (4 * cfg.width**2 + 2 * cfg.width * cfg.feed_forward + 2 * row_tokens * cfg.width)


def saved_bytes(cfg: ModelConfig, batch: MicroBatch) -> float:
    """Bytes that the forward pass of one layer saves for the backward pass; its input is included, its output is not.

    Eight tensors [B, T, D] are saved: the inputs and outputs of both norms, the input of the output projection, and q,
    k and v. With torch's fused kernel the gate saves two more, because it copies q for each of its two products.
    Attention with dropout, which no fused kernel computes, saves one more instead, the scaled q. Dropout of the
    sublayers' outputs saves two masks with a byte for each element. For each token and head the gate saves five
    numbers (in the Triton kernels, one), and a fused kernel saves the log of the softmax's sum.
    """
    tokens, gated, dropping = batch.tokens, cfg.relative_bias == "gated", cfg.attention_dropout > 0
    gate_copies = gated and batch.fused and not batch.triton
    wide_tensors = (9 if dropping else 10 if gate_copies else 8) * tokens * cfg.width
    feed_forward = 2 * tokens * cfg.feed_forward
    gate_bytes = (FLOAT if batch.triton else 5 * batch.element) if gated else 0
    per_head = tokens * cfg.heads * (gate_bytes + (FLOAT if batch.fused and not dropping else 0))
    norms = 4 * tokens * (FLOAT if batch.fused else batch.element)  # mean and scale of each norm
    dropout_masks = 2 * tokens * cfg.width if cfg.dropout else 0
    return (wide_tensors + feed_forward) * batch.element + score_bytes(cfg, batch) + per_head + norms + dropout_masks


def score_bytes(cfg: ModelConfig, batch: MicroBatch) -> float:
    """Bytes that one layer saves for all pairs of a query and a key.

    Attention with dropout saves the weights before and after dropout, a dropout mask (one byte for each weight), and on
    the CPU the mask of items. Without dropout, torch's fused kernel saves the bias, and other kernels save nothing.
    """
    if cfg.attention_dropout:
        mask = 0 if batch.fused else 1
        return batch.tokens * batch.row_tokens * (cfg.heads * (2 * batch.element + 1) + mask)
    if batch.triton or not batch.fused:
        return 0.0
    heads = 1 if cfg.relative_bias == "none" else cfg.heads
    return batch.tokens * batch.row_tokens * heads * batch.element


def shared_bytes(cfg: ModelConfig, batch: MicroBatch) -> float:
    """Saved bytes that all layers of an encoder share.

    The Triton kernels save where each token's item begins and ends, and a table of the distance bias d. The other
    kernels save a mask, which has a byte for each query and key of every row. They also save d and an index into it for
    each query and key; all rows share these.
    """
    saved = batch.tokens * (2 * FLOAT if batch.triton else batch.row_tokens)
    if cfg.relative_bias == "none":
        return saved
    if batch.triton:
        columns = 2 * SKEWED * (-(-batch.row_tokens // SKEWED) + 1)
        return saved + 2 * cfg.heads * SKEWED * columns * batch.element
    return saved + batch.row_tokens**2 * (INTEGER + cfg.heads * batch.element)


def backward_bytes(cfg: ModelConfig, batch: MicroBatch) -> float:
    """Bytes of the gradients that the backward pass of one layer holds at its peak."""
    hidden = batch.tokens * cfg.width * batch.element
    feed_forward = 2 * batch.tokens * cfg.feed_forward * batch.element
    if batch.triton:  # sums along the diagonals of tiles, for each group of SUMMED_ROWS rows
        side = tiling("_backward_distances", cfg.width // cfg.heads, batch.element).keys
        scores = -(-batch.rows // SUMMED_ROWS) * cfg.heads * 4.0 * (batch.row_tokens + side) * FLOAT
    elif batch.fused or cfg.attention_dropout:
        heads = cfg.heads if cfg.relative_bias != "none" or cfg.attention_dropout else 1
        scores = 3 * batch.tokens * batch.row_tokens * heads * batch.element
        scores -= feed_forward  # the backward pass of the feed-forward network comes first and frees its saved tensors
    else:  # three tensors of the scores of one row, at most a thread's tile, and the gradients of q, k and v
        scores = 3 * min(batch.row_tokens**2 * cfg.heads * batch.element, TILE) + 3 * hidden
    return max(feed_forward, scores) + 2 * hidden
