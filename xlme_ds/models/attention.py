"""Multi-head self-attention with the gated relative position bias, inside the items of a packed row.

B rows, H heads, T tokens, D width, K head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ModelConfig
from .relative_position import Gate


class AttentionBias(NamedTuple):
    """What all layers of an encoder share for one batch: computed once, read by each."""

    allowed_B1TT: Tensor
    """bool: query i may see key j, because both stand in one item."""
    distance_HTT: Tensor | None
    """d_{i-j}, or None without a relative bias."""


def item_mask(segments_BT: Tensor) -> Tensor:
    """Block-diagonal mask [B, 1, T, T]: true within one item. Padding (segment 0) sees padding, so no row is empty."""
    return (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]


class Attention(nn.Module):
    """Self-attention with fused query, key and value projections."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.output = nn.Linear(cfg.width, cfg.width)
        self.gate = Gate(cfg.heads, cfg.width // cfg.heads) if cfg.relative_bias == "gated" else None

    def forward(self, x_BTD: Tensor, bias: AttentionBias) -> Tensor:
        """Attention output, [B, T, D]."""
        rows, tokens, width = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = self.qkv(x_BTD).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out_BHTK = attend(q_BHTK, k_BHTK, v_BHTK, self._scores_bias(q_BHTK, bias))
        return self.output(out_BHTK.transpose(1, 2).reshape(rows, tokens, width))

    def _scores_bias(self, q_BHTK: Tensor, bias: AttentionBias) -> Tensor:
        """What is added to the scores: the gated distance bias inside an item, −inf outside; broadcasts to [B, H, T, T]."""
        distance = bias.distance_HTT
        if distance is None:
            distance = q_BHTK.new_zeros(())
        elif self.gate is not None:
            distance = distance * self.gate(q_BHTK)
        return torch.where(bias.allowed_B1TT, distance, float("-inf"))


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(K) + bias) v, [B, H, T, K]."""
    if q_BHTK.is_cuda:
        return fused_attend(q_BHTK, k_BHTK, v_BHTK, bias)
    # On the CPU the fused kernel has no gradient for the bias, and its fallback looks twice for rows that see nothing.
    scores_BHTT = (q_BHTK * q_BHTK.shape[-1] ** -0.5) @ k_BHTK.transpose(-1, -2) + bias
    return scores_BHTT.softmax(-1) @ v_BHTK


def fused_attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias: Tensor) -> Tensor:
    """`attend` by torch's kernels for the GPU; the scores never exist whole."""
    # cuDNN's kernel, torch's first choice on Hopper, has no gradient for the bias and misreads one of another type.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=bias.to(q_BHTK.dtype))
