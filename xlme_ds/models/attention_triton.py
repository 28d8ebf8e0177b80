"""The attention of `attention.py` as Triton kernels: scores and bias exist a tile at a time, and where no item reaches,
never; the gate is computed from the queries where they are read.

B rows, H heads, T tokens, K head size, W distances. Of one head, in the notation of FlashAttention-2 (Dao 2023,
algorithms 1 and 2; in the code exp and log are those of base 2):

    g_i = 1 + α_i + (1 − α_i) w ρ_i with α_i = σ(q_i·u), ρ_i = σ(q_i·r)
    S = Q Kᵀ / √K + g_i d_{j−i} where i and j share an item, else −∞       L_i = log Σ_j exp S_ij
    P = exp(S − L)     O = P V     Δ_i = Σ_k dO_ik O_ik     dS = P ∘ (dO Vᵀ − Δ)
    dQ = dS K / √K + dα uᵀ + dρ rᵀ (before the sigmoids)     dK = dSᵀ Q / √K     dV = Pᵀ dO
    dg_i = Σ_j dS_ij d_{j−i}     dd_δ = Σ_i g_i dS_{i,i+δ}

Q, K and V are read from the output of one projection, and their gradients written as that output's. Every sum has a
fixed order and nothing is added atomically: the same inputs give the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .tiles import tiling

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite, so that a query that has seen no key yet makes no NaN


@triton.jit
def _rows(x, start, stride, tokens, TILE: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    row = start + tl.arange(0, TILE)[:, None]
    return tl.load(x + row * stride + tl.arange(0, K)[None, :], row < tokens, other=0.0)


@triton.jit
def _store_rows(x, values, start, stride, tokens, TILE: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    row = start + tl.arange(0, TILE)[:, None]
    tl.store(x + row * stride + tl.arange(0, K)[None, :], values.to(x.dtype.element_ty), row < tokens)


@triton.jit
def _items(first, end, start, tokens, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each position of a tile where its item begins and ends, and for all of them together, from the begin of a
    tile."""
    at = start + tl.arange(0, TILE)
    firsts, ends = tl.load(first + at, at < tokens, other=0), tl.load(end + at, at < tokens, other=0)
    last = tl.minimum(start + TILE, tokens) - 1
    return firsts, ends, tl.load(first + start) // TILE * TILE, tl.load(end + last)


@triton.jit
def _scores(a, b, factor, gate, bias, seen):  # type: ignore[no-untyped-def]
    """S in base 2, from queries and keys, or its transpose from keys and queries."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * (factor * LOG2_E) + gate * LOG2_E * bias
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _gates(q_i, update, reset, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """α and ρ of a tile of queries, and the vectors u and r, in float32."""
    q_i, k = q_i.to(tl.float32), tl.arange(0, K)
    u, r = tl.load(update + k).to(tl.float32), tl.load(reset + k).to(tl.float32)
    return tl.sigmoid(tl.sum(q_i * u[None, :], 1)), tl.sigmoid(tl.sum(q_i * r[None, :], 1)), u, r


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv, update, reset, scale, d, first, end, out, lse, gate,
    factor, tokens, heads, TILE: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """O [B, T, H, K], L and g [B, H, T] of a tile of queries."""
    start, bh = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    b, h, width = bh // heads, bh % heads, 2 * (tokens + TILE) - 1
    d_0 = d + h * width + width // 2
    i = start + tl.arange(0, TILE)
    outputs, vectors, stride = (b * tokens * heads + h) * K, bh * tokens, 3 * heads * K
    q = qkv + b * tokens * stride + h * K
    firsts, ends, low, high = _items(first + b * tokens, end + b * tokens, start, tokens, TILE)
    q_i = _rows(q, start, stride, tokens, TILE, K)
    gate_i = tl.full([TILE], 1.0, tl.float32)
    if GATED:
        alpha, rho, _, _ = _gates(q_i, update, reset, K)
        gate_i = 1 + alpha + (1 - alpha) * tl.load(scale + h).to(tl.float32) * rho
        tl.store(gate + vectors + i, gate_i, i < tokens)
    top, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, K], tl.float32)
    for begin in range(low, high, TILE):
        j = begin + tl.arange(0, TILE)[None, :]
        k_j = _rows(q + heads * K, begin, stride, tokens, TILE, K)
        v_j = _rows(q + 2 * heads * K, begin, stride, tokens, TILE, K)
        seen = (j >= firsts[:, None]) & (j < ends[:, None])
        s = _scores(q_i, k_j, factor, gate_i[:, None], tl.load(d_0 + j - i[:, None]), seen)
        higher = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
        top, total = higher, total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * shrink[:, None], input_precision="ieee")
    _store_rows(out + outputs, acc / total[:, None], start, heads * K, tokens, TILE, K)
    tl.store(lse + vectors + i, top + tl.log2(total), i < tokens)


@triton.jit
def _backward_queries(  # type: ignore[no-untyped-def]
    qkv, update, reset, scale, d, first, end, out, lse, gate, grad, delta, grad_qkv, grad_d, grad_gates, grad_scale,
    factor, tokens, heads, TILE: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Δ [B, H, T] and dQ of a tile of queries, and its share of dd [B, H, tiles, W], of du and dr [B, H, tiles, 2, K]
    and of dw [B, H, tiles]."""
    start, bh = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    b, h, width = bh // heads, bh % heads, 2 * (tokens + TILE) - 1
    d_0 = d + h * width + width // 2
    i, column = start + tl.arange(0, TILE), tl.arange(0, TILE)
    outputs, vectors, stride = (b * tokens * heads + h) * K, bh * tokens, 3 * heads * K
    inputs = b * tokens * stride + h * K
    q = qkv + inputs
    firsts, ends, low, high = _items(first + b * tokens, end + b * tokens, start, tokens, TILE)
    q_i = _rows(q, start, stride, tokens, TILE, K)
    grad_i = _rows(grad + outputs, start, heads * K, tokens, TILE, K)
    out_i = _rows(out + outputs, start, heads * K, tokens, TILE, K)
    gate_i = tl.full([TILE], 1.0, tl.float32)
    if GATED:
        gate_i = tl.load(gate + vectors + i, i < tokens, other=0.0)
    lse_i = tl.load(lse + vectors + i, i < tokens, other=0.0)
    delta_i = tl.sum(out_i.to(tl.float32) * grad_i.to(tl.float32), 1)
    # Row r turned left by r + 1: column c has distance c + 1 where the row did not wrap, c + 1 − TILE where it did.
    turn = tl.arange(0, TILE)[:, None] + column[None, :] + 1
    of_d = grad_d + (bh * tl.num_programs(0) + tl.program_id(0)) * width + low - start + tokens + column
    acc, gates, carry = tl.zeros([TILE, K], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for begin in range(low, high, TILE):
        j = begin + column[None, :]
        k_j = _rows(q + heads * K, begin, stride, tokens, TILE, K)
        v_j = _rows(q + 2 * heads * K, begin, stride, tokens, TILE, K)
        bias = tl.load(d_0 + j - i[:, None])
        seen = (j >= firsts[:, None]) & (j < ends[:, None])
        p = tl.exp2(_scores(q_i, k_j, factor, gate_i[:, None], bias, seen) - lse_i[:, None])
        ds = p * (tl.dot(grad_i, tl.trans(v_j), input_precision="ieee") - delta_i[:, None])
        acc = tl.dot(ds.to(k_j.dtype), k_j, acc, input_precision="ieee")
        gates += tl.sum(ds * bias, 1)
        turned = tl.gather(ds * gate_i[:, None], turn % TILE, 1)
        tl.store(of_d, carry + tl.sum(tl.where(turn < TILE, 0.0, turned), 0))
        carry, of_d = tl.sum(tl.where(turn < TILE, turned, 0.0), 0), of_d + TILE
    tl.store(of_d, carry)
    acc *= factor
    if GATED:  # a query past the row's end has no gradient
        alpha, rho, u, r = _gates(q_i, update, reset, K)
        w, place = tl.load(scale + h).to(tl.float32), bh * tl.num_programs(0) + tl.program_id(0)
        grad_alpha = gates * (1 - w * rho) * alpha * (1 - alpha)
        grad_rho = gates * (1 - alpha) * w * rho * (1 - rho)
        acc += grad_alpha[:, None] * u[None, :] + grad_rho[:, None] * r[None, :]
        of_u = grad_gates + place * 2 * K + tl.arange(0, K)
        tl.store(of_u, tl.sum(q_i.to(tl.float32) * grad_alpha[:, None], 0))
        tl.store(of_u + K, tl.sum(q_i.to(tl.float32) * grad_rho[:, None], 0))
        tl.store(grad_scale + place, tl.sum(gates * (1 - alpha) * rho, 0))
    _store_rows(grad_qkv + inputs, acc, start, stride, tokens, TILE, K)
    tl.store(delta + vectors + i, delta_i, i < tokens)


@triton.jit
def _backward_keys(  # type: ignore[no-untyped-def]
    qkv, d, first, end, lse, gate, grad, delta, grad_qkv,
    factor, tokens, heads, TILE: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys; scores are transposed, a key a row."""
    start, bh = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    b, h, width = bh // heads, bh % heads, 2 * (tokens + TILE) - 1
    d_0 = d + h * width + width // 2
    j = start + tl.arange(0, TILE)
    outputs, vectors, stride = (b * tokens * heads + h) * K, bh * tokens, 3 * heads * K
    inputs = b * tokens * stride + h * K
    q = qkv + inputs
    firsts, ends, low, high = _items(first + b * tokens, end + b * tokens, start, tokens, TILE)
    k_j = _rows(q + heads * K, start, stride, tokens, TILE, K)
    v_j = _rows(q + 2 * heads * K, start, stride, tokens, TILE, K)
    of_k, of_v = tl.zeros([TILE, K], tl.float32), tl.zeros([TILE, K], tl.float32)
    for begin in range(low, high, TILE):
        i = begin + tl.arange(0, TILE)
        q_i = _rows(q, begin, stride, tokens, TILE, K)
        grad_i = _rows(grad + outputs, begin, heads * K, tokens, TILE, K)
        gate_i = tl.full([TILE], 1.0, tl.float32)
        if GATED:
            gate_i = tl.load(gate + vectors + i, i < tokens, other=0.0)
        lse_i = tl.load(lse + vectors + i, i < tokens, other=0.0)
        delta_i = tl.load(delta + vectors + i, i < tokens, other=0.0)
        bias = tl.load(d_0 + j[:, None] - i[None, :])
        seen = (i[None, :] >= firsts[:, None]) & (i[None, :] < ends[:, None])
        p = tl.exp2(_scores(k_j, q_i, factor, gate_i[None, :], bias, seen) - lse_i[None, :])
        of_v = tl.dot(p.to(grad_i.dtype), grad_i, of_v, input_precision="ieee")
        ds = p * (tl.dot(v_j, tl.trans(grad_i), input_precision="ieee") - delta_i[None, :])
        of_k = tl.dot(ds.to(q_i.dtype), q_i, of_k, input_precision="ieee")
    _store_rows(grad_qkv + inputs + heads * K, of_k * factor, start, stride, tokens, TILE, K)
    _store_rows(grad_qkv + inputs + 2 * heads * K, of_v, start, stride, tokens, TILE, K)


def attend(
    qkv_BT3HK: Tensor,
    gate: tuple[Tensor, Tensor, Tensor] | None,
    distance_HW: Tensor | None,
    first_BT: Tensor,
    end_BT: Tensor,
) -> Tensor:
    """O [B, T, H, K] of bf16, fp16 or fp32 inputs, products in their type and sums in fp32; K is 16, 32, 64 or 128.

    `gate` has u [K], r [K] and w [H]; `distance_HW` is d in float32, for distances 1−T to T−1; `first_BT` and `end_BT`
    are attention.item_bounds's.
    """
    _, tokens, _, heads, size = qkv_BT3HK.shape
    if distance_HW is None:
        distance_HW = torch.zeros(heads, 2 * tokens - 1, device=qkv_BT3HK.device)
    # A tile may reach as far past the row's end as it is wide.
    padded_HW = F.pad(distance_HW, [tiling(size, qkv_BT3HK.element_size()).tile] * 2)
    return _Attend.apply(qkv_BT3HK.contiguous(), *(gate or (None,) * 3), padded_HW, first_BT, end_BT)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):  # type: ignore[no-untyped-def]
        out_BTHK, lse_BHT, gate_BHT = _outputs(*given)
        ctx.save_for_backward(*given, out_BTHK, lse_BHT, gate_BHT)
        return out_BTHK

    @staticmethod
    def backward(ctx, grad_BTHK):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # once: a checkpointed layer makes them when they are asked for
        _, update, _, scale, *_ = saved
        grad_qkv, of_d, of_gates, of_scale = _gradients(*saved, grad_BTHK.contiguous())
        grads = None, None, None
        if update is not None:
            grads = *of_gates.sum((0, 1, 2)).to(update.dtype), of_scale.sum((0, 2)).to(scale.dtype)
        return grad_qkv, *grads, of_d.sum((0, 2)), None, None


# Operators of their own, into which torch.compile does not look.
@torch.library.custom_op("xlme_ds::attend", mutates_args=())
def _outputs(
    qkv_BT3HK: Tensor, update_K: Tensor | None, reset_K: Tensor | None, scale_H: Tensor | None,
    padded_HW: Tensor, first_BT: Tensor, end_BT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O [B, T, H, K], and L and g [B, H, T]; without a gate the last is empty."""
    out = _empty_outputs(qkv_BT3HK, update_K)
    _launch(_forward, qkv_BT3HK, update_K, reset_K, scale_H, padded_HW, first_BT, end_BT, *out, gated=update_K)
    return out


@torch.library.custom_op("xlme_ds::attend_backward", mutates_args=())
def _gradients(
    qkv_BT3HK: Tensor, update_K: Tensor | None, reset_K: Tensor | None, scale_H: Tensor | None, padded_HW: Tensor,
    first_BT: Tensor, end_BT: Tensor, out_BTHK: Tensor, lse_BHT: Tensor, gate_BHT: Tensor, grad_BTHK: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV as one, and the shares of dd [B, H, tiles, W], of du and dr [B, H, tiles, 2, K] and of dw
    [B, H, tiles]."""
    grad_qkv, *shares = _empty_gradients(qkv_BT3HK, update_K, padded_HW)
    delta_BHT, bounds, passed = torch.empty_like(lse_BHT), (padded_HW, first_BT, end_BT), (lse_BHT, gate_BHT, grad_BTHK)
    given = qkv_BT3HK, update_K, reset_K, scale_H, *bounds, out_BTHK, *passed, delta_BHT, grad_qkv, *shares
    _launch(_backward_queries, *given, gated=update_K)
    _launch(_backward_keys, qkv_BT3HK, *bounds, *passed, delta_BHT, grad_qkv, gated=update_K)
    return grad_qkv, *shares  # type: ignore[return-value]


def _empty_outputs(qkv_BT3HK: Tensor, update_K: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, _, heads, size = qkv_BT3HK.shape
    of_queries = [(rows, heads, tokens), (rows, heads, tokens if update_K is not None else 0)]
    lse_BHT, gate_BHT = (qkv_BT3HK.new_empty(shape, dtype=torch.float32) for shape in of_queries)
    return qkv_BT3HK.new_empty(rows, tokens, heads, size), lse_BHT, gate_BHT


def _empty_gradients(
    qkv_BT3HK: Tensor, update_K: Tensor | None, padded_HW: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, tokens, _, heads, size = qkv_BT3HK.shape
    tiles = triton.cdiv(tokens, tiling(size, qkv_BT3HK.element_size()).tile)
    # A tile of queries reaches few distances of a packed row; the others stay 0.
    of_d = padded_HW.new_zeros(rows, heads, tiles, padded_HW.shape[1])
    gated = tiles if update_K is not None else 0
    of_gates, of_scale = padded_HW.new_empty(rows, heads, gated, 2, size), padded_HW.new_empty(rows, heads, gated)
    return torch.empty_like(qkv_BT3HK), of_d, of_gates, of_scale


_outputs.register_fake(lambda qkv_BT3HK, update_K, *others: _empty_outputs(qkv_BT3HK, update_K))
_gradients.register_fake(
    lambda qkv_BT3HK, update_K, reset, scale, padded_HW, *others: _empty_gradients(qkv_BT3HK, update_K, padded_HW)
)


def _launch(kernel: Any, *tensors: Any, gated: Tensor | None) -> None:
    """`tensors` begins with the queries, keys and values."""
    rows, tokens, _, heads, size = tensors[0].shape
    tile, warps, stages = tiling(size, tensors[0].element_size())
    grid = triton.cdiv(tokens, tile), rows * heads
    options = {"TILE": tile, "K": size, "GATED": gated is not None, "num_warps": warps, "num_stages": stages}
    kernel[grid](*tensors, size**-0.5, tokens, heads, **options)
