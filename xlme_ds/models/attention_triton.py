"""The attention of `attention.py` as Triton kernels: scores and bias exist a tile at a time, and where no item reaches,
never.

B rows, H heads, T tokens, K head size, W distances. Of one head, in the notation of FlashAttention-2 (Dao 2023,
algorithms 1 and 2; in the code exp and log are those of base 2):

    S = Q Kᵀ / √K + g_i d_{j−i} where i and j share an item, else −∞       L_i = log Σ_j exp S_ij
    P = exp(S − L)     O = P V     Δ_i = Σ_k dO_ik O_ik     dS = P ∘ (dO Vᵀ − Δ)
    dQ = dS K / √K     dK = dSᵀ Q / √K     dV = Pᵀ dO     dg_i = Σ_j dS_ij d_{j−i}     dd_δ = Σ_i g_i dS_{i,i+δ}

Every sum has a fixed order and nothing is added atomically: the same inputs give the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# Queries and keys of a tile, by the bytes of a number; as many of both, so that a tile's positive distances are the
# next one's negative ones. fp32 is multiplied without tensor cores: larger tiles overflow the registers.
TILES = {2: 64, 4: 32}
WARPS, STAGES = 4, 2  # so that two tiles are at work on a multiprocessor (tests/models/test_attention_kernels.py)
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
def _scores(a, b, scale, gate, bias, seen):  # type: ignore[no-untyped-def]
    """S in base 2, from queries and keys, or its transpose from keys and queries."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * (scale * LOG2_E) + gate * LOG2_E * bias
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, gate, d, first, end, out, lse,
    scale, tokens, heads, row_stride, head_stride, token_stride, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """O [B, T, H, K] and L [B, H, T] of a tile of queries."""
    start, bh = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    b, h, width = bh // heads, bh % heads, 2 * (tokens + TILE) - 1
    d_0 = d + h * width + width // 2
    i = start + tl.arange(0, TILE)
    inputs, outputs, vectors = b * row_stride + h * head_stride, (b * tokens * heads + h) * K, bh * tokens
    firsts, ends, low, high = _items(first + b * tokens, end + b * tokens, start, tokens, TILE)
    q_i = _rows(q + inputs, start, token_stride, tokens, TILE, K)
    gate_i = tl.load(gate + vectors + i, i < tokens, other=0.0).to(tl.float32)
    top, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, K], tl.float32)
    for begin in range(low, high, TILE):
        j = begin + tl.arange(0, TILE)[None, :]
        k_j = _rows(k + inputs, begin, token_stride, tokens, TILE, K)
        v_j = _rows(v + inputs, begin, token_stride, tokens, TILE, K)
        seen = (j >= firsts[:, None]) & (j < ends[:, None])
        s = _scores(q_i, k_j, scale, gate_i[:, None], tl.load(d_0 + j - i[:, None]), seen)
        higher = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
        top, total = higher, total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * shrink[:, None], input_precision="ieee")
    _store_rows(out + outputs, acc / total[:, None], start, heads * K, tokens, TILE, K)
    tl.store(lse + vectors + i, top + tl.log2(total), i < tokens)


@triton.jit
def _backward_queries(  # type: ignore[no-untyped-def]
    q, k, v, gate, d, first, end, out, lse, grad, delta, grad_q, grad_gate, grad_d,
    scale, tokens, heads, row_stride, head_stride, token_stride, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Δ and dg [B, H, T] and dQ [B, T, H, K] of a tile of queries, and its share of dd, [B, H, tiles, W]."""
    start, bh = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    b, h, width = bh // heads, bh % heads, 2 * (tokens + TILE) - 1
    d_0 = d + h * width + width // 2
    i, column = start + tl.arange(0, TILE), tl.arange(0, TILE)
    inputs, outputs, vectors = b * row_stride + h * head_stride, (b * tokens * heads + h) * K, bh * tokens
    firsts, ends, low, high = _items(first + b * tokens, end + b * tokens, start, tokens, TILE)
    q_i = _rows(q + inputs, start, token_stride, tokens, TILE, K)
    grad_i = _rows(grad + outputs, start, heads * K, tokens, TILE, K)
    out_i = _rows(out + outputs, start, heads * K, tokens, TILE, K)
    gate_i = tl.load(gate + vectors + i, i < tokens, other=0.0).to(tl.float32)
    lse_i = tl.load(lse + vectors + i, i < tokens, other=0.0)
    delta_i = tl.sum(out_i.to(tl.float32) * grad_i.to(tl.float32), 1)
    # Row r turned left by r + 1: column c has distance c + 1 where the row did not wrap, c + 1 − TILE where it did.
    turn = tl.arange(0, TILE)[:, None] + column[None, :] + 1
    of_d = grad_d + (bh * tl.num_programs(0) + tl.program_id(0)) * width + low - start + tokens + column
    acc, gates, carry = tl.zeros([TILE, K], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for begin in range(low, high, TILE):
        j = begin + column[None, :]
        k_j = _rows(k + inputs, begin, token_stride, tokens, TILE, K)
        v_j = _rows(v + inputs, begin, token_stride, tokens, TILE, K)
        bias = tl.load(d_0 + j - i[:, None])
        seen = (j >= firsts[:, None]) & (j < ends[:, None])
        p = tl.exp2(_scores(q_i, k_j, scale, gate_i[:, None], bias, seen) - lse_i[:, None])
        ds = p * (tl.dot(grad_i, tl.trans(v_j), input_precision="ieee") - delta_i[:, None])
        acc = tl.dot(ds.to(k_j.dtype), k_j, acc, input_precision="ieee")
        gates += tl.sum(ds * bias, 1)
        turned = tl.gather(ds * gate_i[:, None], turn % TILE, 1)
        tl.store(of_d, carry + tl.sum(tl.where(turn < TILE, 0.0, turned), 0))
        carry, of_d = tl.sum(tl.where(turn < TILE, turned, 0.0), 0), of_d + TILE
    tl.store(of_d, carry)
    _store_rows(grad_q + outputs, acc * scale, start, heads * K, tokens, TILE, K)
    tl.store(grad_gate + vectors + i, gates.to(grad_gate.dtype.element_ty), i < tokens)
    tl.store(delta + vectors + i, delta_i, i < tokens)


@triton.jit
def _backward_keys(  # type: ignore[no-untyped-def]
    q, k, v, gate, d, first, end, lse, grad, delta, grad_k, grad_v,
    scale, tokens, heads, row_stride, head_stride, token_stride, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dK and dV [B, T, H, K] of a tile of keys; scores are transposed, a key a row."""
    start, bh = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    b, h, width = bh // heads, bh % heads, 2 * (tokens + TILE) - 1
    d_0 = d + h * width + width // 2
    j = start + tl.arange(0, TILE)
    inputs, outputs, vectors = b * row_stride + h * head_stride, (b * tokens * heads + h) * K, bh * tokens
    firsts, ends, low, high = _items(first + b * tokens, end + b * tokens, start, tokens, TILE)
    k_j = _rows(k + inputs, start, token_stride, tokens, TILE, K)
    v_j = _rows(v + inputs, start, token_stride, tokens, TILE, K)
    of_k, of_v = tl.zeros([TILE, K], tl.float32), tl.zeros([TILE, K], tl.float32)
    for begin in range(low, high, TILE):
        i = begin + tl.arange(0, TILE)
        q_i = _rows(q + inputs, begin, token_stride, tokens, TILE, K)
        grad_i = _rows(grad + outputs, begin, heads * K, tokens, TILE, K)
        gate_i = tl.load(gate + vectors + i, i < tokens, other=0.0).to(tl.float32)
        lse_i = tl.load(lse + vectors + i, i < tokens, other=0.0)
        delta_i = tl.load(delta + vectors + i, i < tokens, other=0.0)
        bias = tl.load(d_0 + j[:, None] - i[None, :])
        seen = (i[None, :] >= firsts[:, None]) & (i[None, :] < ends[:, None])
        p = tl.exp2(_scores(k_j, q_i, scale, gate_i[None, :], bias, seen) - lse_i[None, :])
        of_v = tl.dot(p.to(grad_i.dtype), grad_i, of_v, input_precision="ieee")
        ds = p * (tl.dot(v_j, tl.trans(grad_i), input_precision="ieee") - delta_i[None, :])
        of_k = tl.dot(ds.to(q_i.dtype), q_i, of_k, input_precision="ieee")
    _store_rows(grad_k + outputs, of_k * scale, start, heads * K, tokens, TILE, K)
    _store_rows(grad_v + outputs, of_v, start, heads * K, tokens, TILE, K)


def attend(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor | None,
    distance_HW: Tensor | None,
    first_BT: Tensor,
    end_BT: Tensor,
) -> Tensor:
    """O [B, H, T, K] of bf16, fp16 or fp32 inputs, products in their type and sums in fp32; K is 16, 32, 64 or 128.

    `distance_HW` is d in float32, for distances 1−T to T−1; `first_BT` and `end_BT` are attention.item_bounds's.
    """
    rows, heads, tokens, _ = q_BHTK.shape
    if gate_BHT1 is None:
        gate_BHT1 = q_BHTK.new_ones(rows, heads, tokens, 1)
    if distance_HW is None:
        distance_HW = torch.zeros(heads, 2 * tokens - 1, device=q_BHTK.device)
    # A tile may reach as far past the row's end as it is wide.
    padded_HW = F.pad(distance_HW, [TILES[q_BHTK.element_size()]] * 2)
    return _Attend.apply(q_BHTK, k_BHTK, v_BHTK, gate_BHT1, padded_HW, first_BT, end_BT)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHTK, k_BHTK, v_BHTK, gate_BHT1, padded_HW, first_BT, end_BT):  # type: ignore[no-untyped-def]
        # Fused projections give all three the same strides; three tensors from elsewhere may differ.
        if not (q_BHTK.stride() == k_BHTK.stride() == v_BHTK.stride() and q_BHTK.stride(-1) == 1):
            q_BHTK, k_BHTK, v_BHTK = q_BHTK.contiguous(), k_BHTK.contiguous(), v_BHTK.contiguous()
        given = q_BHTK, k_BHTK, v_BHTK, gate_BHT1.contiguous(), padded_HW, first_BT, end_BT
        out_BTHK, lse_BHT = _outputs(*given)
        ctx.save_for_backward(*given, out_BTHK, lse_BHT)
        return out_BTHK.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad_BHTK):  # type: ignore[no-untyped-def]
        grad_BTHK = grad_BHTK.transpose(1, 2).contiguous()
        *grads, grad_gate, shares_BHNW = _gradients(*ctx.saved_tensors, grad_BTHK)
        return *(grad.transpose(1, 2) for grad in grads), grad_gate, shares_BHNW.sum((0, 2)), None, None


# Operators of their own, into which torch.compile does not look.
@torch.library.custom_op("xlme_ds::attend", mutates_args=())
def _outputs(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor,
    padded_HW: Tensor,
    first_BT: Tensor,
    end_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """O [B, T, H, K] and L [B, H, T]."""
    out_BTHK, lse_BHT = _empty_outputs(q_BHTK)
    _launch(_forward, q_BHTK, q_BHTK, k_BHTK, v_BHTK, gate_BHT1, padded_HW, first_BT, end_BT, out_BTHK, lse_BHT)
    return out_BTHK, lse_BHT


@torch.library.custom_op("xlme_ds::attend_backward", mutates_args=())
def _gradients(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor, padded_HW: Tensor,
    first_BT: Tensor, end_BT: Tensor, out_BTHK: Tensor, lse_BHT: Tensor, grad_BTHK: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV [B, T, H, K], dg, and the shares of dd [B, H, tiles, W]."""
    given = q_BHTK, k_BHTK, v_BHTK, gate_BHT1, padded_HW, first_BT, end_BT
    grad_q, grad_k, grad_v, grad_gate, shares_BHNW = _empty_gradients(q_BHTK, gate_BHT1, padded_HW)
    delta_BHT = torch.empty_like(lse_BHT)
    of_queries = out_BTHK, lse_BHT, grad_BTHK, delta_BHT, grad_q, grad_gate, shares_BHNW
    _launch(_backward_queries, q_BHTK, *given, *of_queries)
    _launch(_backward_keys, q_BHTK, *given, lse_BHT, grad_BTHK, delta_BHT, grad_k, grad_v)
    return grad_q, grad_k, grad_v, grad_gate, shares_BHNW


def _empty_outputs(q_BHTK: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, tokens, size = q_BHTK.shape
    return q_BHTK.new_empty(rows, tokens, heads, size), q_BHTK.new_empty(rows, heads, tokens, dtype=torch.float32)


def _empty_gradients(
    q_BHTK: Tensor, gate_BHT1: Tensor, padded_HW: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, heads, tokens, size = q_BHTK.shape
    tiles = triton.cdiv(tokens, TILES[q_BHTK.element_size()])
    grad_q, grad_k, grad_v = (q_BHTK.new_empty(rows, tokens, heads, size) for _ in range(3))
    # A tile of queries reaches few distances of a packed row; the others stay 0.
    shares_BHNW = padded_HW.new_zeros(rows, heads, tiles, padded_HW.shape[1])
    return grad_q, grad_k, grad_v, torch.empty_like(gate_BHT1), shares_BHNW


_outputs.register_fake(lambda q_BHTK, *others: _empty_outputs(q_BHTK))
_gradients.register_fake(
    lambda q_BHTK, k, v, gate_BHT1, padded_HW, *others: _empty_gradients(q_BHTK, gate_BHT1, padded_HW)
)


def _launch(kernel: Any, q_BHTK: Tensor, *tensors: Tensor) -> None:
    rows, heads, tokens, size = q_BHTK.shape
    tile = TILES[q_BHTK.element_size()]
    grid = triton.cdiv(tokens, tile), rows * heads
    numbers = size**-0.5, tokens, heads, *q_BHTK.stride()[:3]
    kernel[grid](*tensors, *numbers, TILE=tile, K=size, num_warps=WARPS, num_stages=STAGES)
