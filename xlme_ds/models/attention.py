"""Attention with the gated relative position bias, inside the items of a packed row: one function a kernel.

B rows, H heads, T tokens, K head size, W = 2T−1 distances.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention_cpu import attend
from .dropout import drop
from .relative_position import spread


class AttentionBias(NamedTuple):
    """What all layers of an encoder share for one batch: computed once, read by each."""

    allowed_B1TT: Tensor | None
    """bool: query i may see key j, because both are in one item; None where `segments_BT` says so."""
    distance_HTT: Tensor | None
    """d_{i-j}, or None without a relative bias."""
    segments_BT: Tensor | None = None
    """On the CPU, where every position sees its whole item: the item's number."""


class ItemBias(NamedTuple):
    """The same as the Triton kernels read it, which make mask and bias a tile at a time."""

    first_BT: Tensor
    """int32: where the item of each position begins."""
    end_BT: Tensor
    """int32: one after where it ends."""
    distance_HW: Tensor | None
    """float32: d by distance j − i, from 1−T to T−1."""


def item_mask(segments_BT: Tensor) -> Tensor:
    """Block-diagonal mask [B, 1, T, T]: true within one item. Padding (segment 0) sees padding, so no row is empty."""
    return (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]


def item_bounds(segments_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Where the item of every position begins, and one after where it ends, int32 [B, T]; items are contiguous."""
    position_T = torch.arange(segments_BT.shape[1], dtype=torch.int32, device=segments_BT.device)
    border = segments_BT[:, 1:] != segments_BT[:, :-1]
    first_BT = torch.where(F.pad(border, (1, 0), value=True), position_T, 0).cummax(1).values
    end_BT = torch.where(F.pad(border, (0, 1), value=True), position_T + 1, len(position_T))
    return first_BT, end_BT.flip(1).cummin(1).values.flip(1)


def shared_bias(
    kernel: str,
    groups_BT: Tensor,
    distance_HW: Tensor | None,
    dtype: torch.dtype,
    allowed: Callable[[Tensor], Tensor] = item_mask,
) -> AttentionBias | ItemBias:
    """What the layers share, for the kernel that `model.attention` names. `allowed` says of the groups who sees whom;
    triton knows no other than `item_mask`."""
    # Triton runs on a GPU, and in its interpreter on the CPU.
    if kernel == "triton" and (groups_BT.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return ItemBias(*item_bounds(groups_BT), distance_HW)
    distance_HTT = None if distance_HW is None else spread(distance_HW).to(dtype)
    if allowed is item_mask and not groups_BT.is_cuda:
        return AttentionBias(None, distance_HTT, groups_BT)
    return AttentionBias(allowed(groups_BT), distance_HTT)


def plain_attend(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, bias: AttentionBias
) -> Tensor:
    """softmax(q kᵀ / sqrt(K) + gate · d, inside items) v, [B, H, T, K], on the CPU."""
    read = q_BHTK.contiguous(), k_BHTK.contiguous(), v_BHTK.contiguous(), gate_BHT1
    return attend(*read, bias.distance_HTT, bias.allowed_B1TT, bias.segments_BT)


def fused_attend(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, bias: AttentionBias
) -> Tensor:
    """The same by torch's kernels for the GPU; the scores never exist whole."""
    distance = q_BHTK.new_zeros(()) if bias.distance_HTT is None else bias.distance_HTT
    if gate_BHT1 is not None:
        distance = distance * gate_BHT1
    assert bias.allowed_B1TT is not None
    mask = torch.where(bias.allowed_B1TT, distance, float("-inf")).to(q_BHTK.dtype)
    # cuDNN's kernel, torch's first choice on Hopper, has no gradient for the bias and misreads one of another type.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask)


def dropping_attend(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor | None,
    bias: AttentionBias,
    rate: float,
    keys_B: Tensor,
) -> Tensor:
    """The same with weights dropped by `keys_B`, on any device: its scores exist whole, those of a row as heads × T
    rows of T."""
    scores_BHTT = (q_BHTK * q_BHTK.shape[-1] ** -0.5) @ k_BHTK.mT
    if bias.distance_HTT is not None:
        scores_BHTT = scores_BHTT + (bias.distance_HTT if gate_BHT1 is None else bias.distance_HTT * gate_BHT1)
    allowed_B1TT = bias.allowed_B1TT
    if allowed_B1TT is None:
        assert bias.segments_BT is not None
        allowed_B1TT = item_mask(bias.segments_BT)
    weights_BHTT = torch.where(allowed_B1TT, scores_BHTT, float("-inf")).softmax(-1)
    return drop(weights_BHTT.flatten(1, 2), rate, keys_B).view_as(weights_BHTT) @ v_BHTK


def triton_attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, bias: ItemBias) -> Tensor:
    """The same by our kernels: neither scores nor bias exist whole, and tiles without a common item are passed over."""
    try:
        from .attention_triton import attend
    except ImportError:
        raise ValueError(
            "model.attention triton needs the package triton, which torch's CUDA builds bring: install it, or set "
            "model.attention to sdpa"
        ) from None
    return attend(q_BHTK, k_BHTK, v_BHTK, gate_BHT1, bias.distance_HW, bias.first_BT, bias.end_BT)
