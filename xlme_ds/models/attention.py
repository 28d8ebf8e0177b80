"""Attention with the gated relative position bias (XLM-E section 3.3), inside the items (texts or translation pairs) of
a packed row.

`attention_bias` chooses the kernels for a forward pass: it returns mask and bias as a `TorchBias` or a `TritonBias`,
whose method `attend` runs the kernels.

B rows, H heads, T tokens, K head size, W = 2T−1 distances.

The bias r is added to the scores. With q_i, a head's query after the projection and before the scale 1/sqrt(K):

    g_update, g_reset = sigmoid(q_i·u), sigmoid(q_i·v)
    r_{j−i} = d_{j−i} · [1 + g_update + (1 − g_update) · w · g_reset]

d is a learned table with a number for each bucket of distances and each head; the layers of an encoder share it. Each
layer has its own vectors u and v, and a scalar w for each head.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ModelConfig
from .attention_cpu import attend, item_mask
from .dropout import drop_weights
from .tiles import HEAD_SIZES


@functools.cache
def _bucket_boundaries(half: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance in each of the `half` buckets of one sign, except the first bucket, which begins at 0."""
    exact = half // 2
    logarithmic = half - exact
    boundaries, distance = list(range(1, exact + 1)), exact
    # The smallest distance ≥ exact · (max_distance / exact)^(step / logarithmic), in integers, so without rounding.
    for step in range(1, logarithmic):
        while distance**logarithmic < exact ** (logarithmic - step) * max_distance**step:
            distance += 1
        boundaries.append(distance)
    return tuple(boundaries)


def relative_position_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance j − i, as in T5's bidirectional attention. Each sign has half of the buckets (0
    counts as negative). Half of a sign's buckets hold a single distance. The ranges of the others grow exponentially up
    to `max_distance`, and the last bucket also holds all larger distances.

    `distance` has integers in any shape. Returns the indices of the buckets, int64, in the same shape.
    """
    half = buckets // 2
    # The boundaries are made on the CPU: creating them on the GPU would make the host wait for all queued work.
    boundaries = torch.tensor(_bucket_boundaries(half, max_distance)).to(distance.device, non_blocking=True)
    return torch.bucketize(distance.abs(), boundaries, right=True) + half * (distance > 0).long()


class RelativePositionTable(nn.Module):
    """The learned table d of one encoder, `buckets` × heads."""

    def __init__(self, heads: int, buckets: int, max_distance: int):
        super().__init__()
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def forward(self, tokens: int) -> Tensor:
        """d for the distances 1−T to T−1 in a row of T = `tokens` tokens, float32 or float64 [H, W]."""
        # The lookup is not in bf16: the gradient of each bucket is a long sum, which bf16 would round too often.
        distances = torch.arange(1 - tokens, tokens, device=self.weight.device)
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return weight[relative_position_bucket(distances, self.weight.shape[0], self.max_distance)].t()


def toeplitz(position_bias_HW: Tensor) -> Tensor:
    """A table by query i and key j, [H, T, T], from a table by distance j − i, [H, W]."""
    tokens = (position_bias_HW.shape[1] + 1) // 2
    position_T = torch.arange(tokens, device=position_bias_HW.device)
    return position_bias_HW[:, position_T[None, :] - position_T[:, None] + tokens - 1]


class Gate(nn.Module):
    """The gate of one layer: u (`update`), v (`reset`) and w (`scale`)."""

    def __init__(self, heads: int, head_size: int):
        super().__init__()
        self.update = nn.Parameter(torch.empty(head_size))
        self.reset = nn.Parameter(torch.empty(head_size))
        self.scale = nn.Parameter(torch.empty(heads))

    def forward(self, q_BHTK: Tensor) -> Tensor:
        """The factor by which each query multiplies d, 1 + g_update + (1 − g_update) · w · g_reset, [B, H, T, 1]."""
        update = torch.sigmoid(q_BHTK @ self.update)
        reset = torch.sigmoid(q_BHTK @ self.reset)
        return (1 + update + (1 - update) * self.scale[:, None] * reset).unsqueeze(-1)


class TorchBias(NamedTuple):
    """Mask and bias for all kernels except Triton's; all layers of an encoder share them in one pass."""

    allowed_B1TT: Tensor | None  # bool, whether query i may see key j; None: if their `segments_BT` are equal
    position_bias_HTT: Tensor | None  # d_{j−i}, or None without a relative bias
    segments_BT: Tensor | None = None  # the item of each position, for the kernels on the CPU
    # The number of tokens in a full row, which decides which weights dropout drops. None: the rows here are full.
    row_tokens: int | None = None

    def attend(self, qkv_BT3HK: Tensor, gate: Gate | None, dropout: float, seeds_B: Tensor | None) -> Tensor:
        """Returns the attention output, [B, T, H, K]. A fraction `dropout` of the weights is dropped, chosen by the
        rows' seeds `seeds_B`; if `seeds_B` is None, no weight is dropped."""
        dropping = seeds_B is not None and dropout > 0
        kernel = fused_attend if qkv_BT3HK.is_cuda else cpu_attend
        qkv = qkv_BT3HK.permute(2, 0, 3, 1, 4)
        if dropping or kernel is cpu_attend:
            qkv = qkv.contiguous()  # `dropout_attend` and `cpu_attend` read q, k and v several times
        q_BHTK, k_BHTK, v_BHTK = qkv
        gate_BHT1 = None if gate is None else gate(q_BHTK)
        if dropping:
            assert seeds_B is not None
            out_BHTK = dropout_attend(q_BHTK, k_BHTK, v_BHTK, gate_BHT1, self, dropout, seeds_B)
        else:
            out_BHTK = kernel(q_BHTK, k_BHTK, v_BHTK, gate_BHT1, self)
        return out_BHTK.transpose(1, 2)


class TritonBias(NamedTuple):
    """The keys that each query sees, and d, for the Triton kernels, which make mask and bias one tile at a time."""

    first_BT: Tensor  # int32: the first key that each query sees, of its item or (`modern.py`) its window
    end_BT: Tensor  # int32: one after the last key that it sees
    position_bias_HW: Tensor | None  # float32: d by distance j − i, from 1−T to T−1; the gradient goes to this tensor
    skewed: Tensor | None  # `attention_triton.skew` of `position_bias_HW`, in the type of the queries
    near: int  # d is constant farther than this many tiles from the diagonal (`attention_triton.near_tiles`)

    def attend(self, qkv_BT3HK: Tensor, gate: Gate | None, dropout: float, seeds_B: Tensor | None) -> Tensor:
        """Returns the attention output, [B, T, H, K]. `dropout` and `seeds_B` are not used: `uses_triton` excludes
        attention dropout."""
        gate_parameters = None if gate is None else (gate.update, gate.reset, gate.scale)
        return _triton_kernels().attend(
            qkv_BT3HK, gate_parameters, self.position_bias_HW, self.skewed, self.first_BT, self.end_BT, self.near
        )


def item_bounds(segments_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (`first_BT`, `end_BT`) of `TritonBias`, int32 [B, T]. Each item must be contiguous in its row."""
    position_T = torch.arange(segments_BT.shape[1], dtype=torch.int32, device=segments_BT.device)
    is_border = segments_BT[:, 1:] != segments_BT[:, :-1]
    is_first_BT, is_last_BT = (F.pad(is_border, sides, value=True) for sides in ((1, 0), (0, 1)))
    # From left to right, cummax copies an item's start to all its positions; from right to left, cummin copies its end.
    first_BT = torch.where(is_first_BT, position_T, 0).cummax(1).values
    end_BT = torch.where(is_last_BT, position_T + 1, len(position_T)).flip(1).cummin(1).values.flip(1)
    return first_BT, end_BT


def causal_mask(segments_BT: Tensor) -> Tensor:
    """Causal mask inside items, bool [B, 1, T, T]: a position sees itself and the positions of its item before it."""
    tokens = segments_BT.shape[1]
    return item_mask(segments_BT) & torch.ones(tokens, tokens, dtype=torch.bool, device=segments_BT.device).tril()


def uses_triton(cfg: ModelConfig, make_mask: Callable[[Tensor], Tensor], on_gpu: bool, in_16_bit: bool) -> bool:
    """Whether attention runs in the Triton kernels if Triton is installed. `make_mask` is the function that makes the
    attention mask. `in_16_bit`: whether the model computes in a 16-bit type."""
    if cfg.width // cfg.heads not in HEAD_SIZES or cfg.attention_dropout or make_mask is not item_mask:
        return False
    if cfg.kernels == "triton":  # on a CPU only in Triton's interpreter
        return on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
    return cfg.kernels == "auto" and on_gpu and in_16_bit


def attention_bias(
    cfg: ModelConfig,
    groups_BT: Tensor,
    position_bias_HW: Tensor | None,
    dtype: torch.dtype,
    make_mask: Callable[[Tensor], Tensor] = item_mask,
    row_tokens: int | None = None,
) -> TorchBias | TritonBias:
    """The mask and the bias that all layers share in one pass, in the form that the chosen kernels need.

    `groups_BT` has a number for every position, such as the index of its item. From these numbers `make_mask` makes the
    attention mask, bool [B, 1, T, T]. `position_bias_HW` is d, or None without a relative bias. `dtype` is the type of
    the queries. `row_tokens` is explained in `TorchBias`.
    """
    in_16_bit = dtype in (torch.bfloat16, torch.float16)
    # With `model.kernels` triton, `_triton_kernels` raises an error if the package is missing.
    installed = cfg.kernels == "triton" or importlib.util.find_spec("triton") is not None
    if uses_triton(cfg, make_mask, groups_BT.is_cuda, in_16_bit) and installed:
        kernels = _triton_kernels()
        skewed = None if position_bias_HW is None else kernels.skew(position_bias_HW.detach(), dtype)
        last_boundary = _bucket_boundaries(cfg.relative_buckets // 2, cfg.relative_max_distance)[-1]
        near = kernels.near_tiles(last_boundary, groups_BT.shape[1], cfg.width // cfg.heads, dtype, groups_BT.device)
        return TritonBias(*item_bounds(groups_BT), position_bias_HW, skewed, near)
    position_bias_HTT = None if position_bias_HW is None else toeplitz(position_bias_HW).to(dtype)
    if make_mask is item_mask and not groups_BT.is_cuda:
        return TorchBias(None, position_bias_HTT, groups_BT, row_tokens)
    return TorchBias(make_mask(groups_BT), position_bias_HTT, None, row_tokens)


def cpu_attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, bias: TorchBias) -> Tensor:
    """softmax(q kᵀ / sqrt(K) + gate · d) v over the keys that each query may see, [B, H, T, K], on the CPU."""
    q_BHTK, k_BHTK, v_BHTK = q_BHTK.contiguous(), k_BHTK.contiguous(), v_BHTK.contiguous()
    return attend(q_BHTK, k_BHTK, v_BHTK, gate_BHT1, bias.position_bias_HTT, bias.allowed_B1TT, bias.segments_BT)


def fused_attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, bias: TorchBias) -> Tensor:
    """The result of `cpu_attend`, from torch's kernels for the GPU, which do not store the scores of a layer. On a CPU
    torch stores them."""
    added = q_BHTK.new_zeros(()) if bias.position_bias_HTT is None else bias.position_bias_HTT
    if gate_BHT1 is not None:
        added = added * gate_BHT1
    assert bias.allowed_B1TT is not None
    mask = torch.where(bias.allowed_B1TT, added, float("-inf")).to(q_BHTK.dtype)
    # cuDNN's kernel, torch's first choice on Hopper, has no gradient for the bias, and misreads a bias of another type.
    # On a GPU torch may use only the memory-efficient kernel, or raise an error: other kernels store all scores.
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q_BHTK.is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask)


def dropout_attend(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor | None,
    bias: TorchBias,
    rate: float,
    seeds_B: Tensor,
) -> Tensor:
    """The result of `cpu_attend`, on any device, with dropout: a fraction `rate` of the weights is dropped, chosen by
    `seeds_B`. All scores are stored."""
    scores_BHTT = (q_BHTK * q_BHTK.shape[-1] ** -0.5) @ k_BHTK.mT
    if bias.position_bias_HTT is not None:
        scores_BHTT = scores_BHTT + (
            bias.position_bias_HTT if gate_BHT1 is None else bias.position_bias_HTT * gate_BHT1
        )
    allowed_B1TT = bias.allowed_B1TT
    if allowed_B1TT is None:
        assert bias.segments_BT is not None
        allowed_B1TT = item_mask(bias.segments_BT)
    weights_BHTT = torch.where(allowed_B1TT, scores_BHTT, float("-inf")).softmax(-1)
    return drop_weights(weights_BHTT, rate, seeds_B, bias.row_tokens or scores_BHTT.shape[-1]) @ v_BHTK


def _triton_kernels() -> Any:
    """The module of the Triton kernels. Raises ValueError if the package triton is not installed."""
    try:
        from . import attention_triton
    except ImportError:
        raise ValueError(
            "model.kernels triton needs the package triton, which torch's CUDA builds bring: install it, or set "
            "model.kernels to auto"
        ) from None
    return attention_triton
