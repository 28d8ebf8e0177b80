"""The attention of `attention.py` as Triton kernels: scores and bias exist one tile at a time, tiles whose queries and
keys have no item in common are skipped, and the gate is computed from the queries in the kernel.

B rows, H heads, T tokens, K head size, W distances, M queries and N keys of a tile. The formulas are for one head, in
the notation of FlashAttention-2 (Dao 2023, algorithms 1 and 2): Q, K and V are queries, keys and values, but √K has the
head size. d alone is the distance bias, and d before a name means its gradient (dd: the gradient of d), but dα and dρ
are the gradients of the sigmoids' inputs. The gate's vector v of `attention.py` is called r here. The formulas have exp
and log to base e, the code to base 2.

    g_i = 1 + α_i + (1 − α_i) w ρ_i with α_i = σ(q_i·u), ρ_i = σ(q_i·r)
    S = Q Kᵀ / √K + g_i d_{j−i} where i and j share an item, else −∞       L_i = log Σ_j exp S_ij
    P = exp(S − L)     O = P V     Δ_i = Σ_k dO_ik O_ik     dS = P ∘ (dO Vᵀ − Δ)
    dQ = dS K / √K + dα uᵀ + dρ rᵀ     dK = dSᵀ Q / √K     dV = Pᵀ dO
    dg_i = Σ_j dS_ij d_{j−i}     dd_δ = Σ_i g_i dS_{i,i+δ}

Q, K and V are the output of one projection, [B, T, 3, H, K], and their gradients have this shape too. A tile of d is
loaded from the table that `skew` makes. Row y of the table is d shifted by y distances, so each row of a tile is
contiguous and aligned in the table, and is copied 16 bytes at a time. Tiles inside one item need no mask. dd has its
own kernel: each program takes one head and a few rows, adds up the tiles at one distance from the diagonal, and sums
the total tile along its diagonals. Every sum has a fixed order and nothing is added atomically: the same inputs give
the same bits.

In the kernels `i` and `j` are positions of queries and keys, `first` and `end` the bounds of a position's item, `lse`
is L to base 2 (L · log2 e), `grad` is dO, `delta` is Δ, `factor` is 1/√K, and EVEN means that no tile passes the end of
a row. u, r and w are the weights `update`, `reset` and `scale` of the gate. Three offsets say where the data of one row
and head begin: `inputs` in the projection, `outputs` in O and dO, and `vectors` in tensors [B, H, T].
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .tiles import SKEWED_ROWS, SUMMED_ROWS, Tiling, tiling_of

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: if all keys so far are masked, −inf would give −inf − (−inf) = NaN


@triton.jit
def _load_rows(x, start, stride, tokens, TILE: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The vectors of the tokens from `start` on, [TILE, K]; 0 past the row's end."""
    token = start + tl.arange(0, TILE)[:, None]
    at = x + token * stride + tl.arange(0, K)[None, :]
    return tl.load(at, None if EVEN else token < tokens, other=None if EVEN else 0.0)


@triton.jit
def _store_rows(x, values, start, stride, tokens, TILE: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    token = start + tl.arange(0, TILE)[:, None]
    at, values = x + token * stride + tl.arange(0, K)[None, :], values.to(x.dtype.element_ty)
    tl.store(at, values, None if EVEN else token < tokens)


@triton.jit
def _item_bounds(first, end, start, tokens, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (firsts, ends, low, high, inner, inner_end) of a tile: `first` and `end` of each of its positions, the
    range [low, high) that at least one of these positions sees, and the range [inner, inner_end) that all of them see.
    Positions past the row's end change neither range."""
    at = start + tl.arange(0, TILE)
    firsts, ends = tl.load(first + at, at < tokens, other=0), tl.load(end + at, at < tokens, other=2147483647)
    last = tl.minimum(start + TILE, tokens) - 1
    return firsts, ends, tl.load(first + start), tl.load(end + last), tl.max(firsts, 0), tl.min(ends, 0)


@triton.jit
def _load_bias(skewed, start, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """d of a tile, float32 [ROWS, COLUMNS]. `start` is the position of the tile's first column minus the position of
    its first row. `width` is the number of columns in the table."""
    at = skewed + tl.arange(0, ROWS)[:, None] * width + (width // 2 + start + tl.arange(0, COLUMNS))[None, :]
    return tl.load(at).to(tl.float32)


@triton.jit
def _gates(q_i, update, reset, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (α, ρ, u, r), all float32. α and ρ have a value for each query of a tile."""
    q_i, k = q_i.to(tl.float32), tl.arange(0, K)
    u, r = tl.load(update + k).to(tl.float32), tl.load(reset + k).to(tl.float32)
    return tl.sigmoid(tl.sum(q_i * u[None, :], 1)), tl.sigmoid(tl.sum(q_i * r[None, :], 1)), u, r


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv, update, reset, scale, skewed, first, end, out, lse, gate,
    factor, tokens, heads, width, rows,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    SKEWED_ROWS: tl.constexpr,
):  # fmt: skip
    """Write O [B, T, H, K], L to base 2 [B, H, T] and, if GATED, g [B, H, T], for a tile of queries."""
    query_start, bh = tl.program_id(0) * M, tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = query_start + tl.arange(0, M)
    outputs, vectors, stride = (b * tokens * heads + h) * K, bh * tokens, 3 * heads * K
    q = qkv + b * tokens * stride + h * K
    if BIASED:
        skewed += h * SKEWED_ROWS * width
    firsts, ends, low, high, inner, inner_end = _item_bounds(
        first + b * tokens, end + b * tokens, query_start, tokens, M
    )
    q_i = _load_rows(q, query_start, stride, tokens, M, K, EVEN)
    gate_i = tl.full([M], 1.0, tl.float32)
    if GATED:
        alpha, rho, _, _ = _gates(q_i, update, reset, K)
        gate_i = 1 + alpha + (1 - alpha) * tl.load(scale + h).to(tl.float32) * rho
        tl.store(gate + vectors + i, gate_i, i < tokens)
    gate_i *= LOG2_E
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, K], tl.float32)
    for key_start in range(low // N * N, high, N):
        j = key_start + tl.arange(0, N)[None, :]
        k_j = _load_rows(q + heads * K, key_start, stride, tokens, N, K, EVEN)
        v_j = _load_rows(q + 2 * heads * K, key_start, stride, tokens, N, K, EVEN)
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * (factor * LOG2_E)
        if BIASED:
            s += gate_i[:, None] * _load_bias(skewed, key_start - query_start, width, M, N)
        if (key_start < inner) | (key_start + N > inner_end):
            s = tl.where((j >= firsts[:, None]) & (j < ends[:, None]), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
        top, total = higher, total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * shrink[:, None], input_precision="ieee")
    _store_rows(out + outputs, acc / total[:, None], query_start, heads * K, tokens, M, K, EVEN)
    tl.store(lse + vectors + i, top + tl.log2(total), i < tokens)


@triton.jit
def _backward_queries(  # type: ignore[no-untyped-def]
    qkv, update, reset, scale, skewed, first, end, out, lse, gate, grad, delta, grad_qkv, grad_gates, grad_scale,
    grad_far, near, factor, tokens, heads, width, rows,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    SKEWED_ROWS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Write Δ [B, H, T] and dQ for a tile of queries, and what the tile adds to the gate's gradients du and dr [B, H,
    tiles, 2, K] and dw [B, H, tiles]. Write to `grad_far` [B, H, tiles, 2] what the tile adds to dd with its far keys:
    those more than `near` tiles of SIDE positions before (index 0) or after (index 1) the queries."""
    query_start, bh = tl.program_id(0) * M, tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = query_start + tl.arange(0, M)
    outputs, vectors, stride = (b * tokens * heads + h) * K, bh * tokens, 3 * heads * K
    inputs = b * tokens * stride + h * K
    q = qkv + inputs
    if BIASED:
        skewed += h * SKEWED_ROWS * width
    firsts, ends, low, high, inner, inner_end = _item_bounds(
        first + b * tokens, end + b * tokens, query_start, tokens, M
    )
    q_i = _load_rows(q, query_start, stride, tokens, M, K, EVEN)
    grad_i = _load_rows(grad + outputs, query_start, heads * K, tokens, M, K, EVEN)
    out_i = _load_rows(out + outputs, query_start, heads * K, tokens, M, K, EVEN)
    gate_i = tl.load(gate + vectors + i, i < tokens, other=0.0) if GATED else tl.full([M], 1.0, tl.float32)
    gate_i *= LOG2_E
    lse_i = tl.load(lse + vectors + i, i < tokens, other=0.0)
    delta_i = tl.sum(out_i.to(tl.float32) * grad_i.to(tl.float32), 1)
    tl.store(delta + vectors + i, delta_i, i < tokens)
    acc, grad_gate = tl.zeros([M, K], tl.float32), tl.zeros([M], tl.float32)  # dQ and dg
    before, after = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)  # Σ_j dS_ij over the far keys
    for key_start in range(low // N * N, high, N):
        j = key_start + tl.arange(0, N)[None, :]
        k_j = _load_rows(q + heads * K, key_start, stride, tokens, N, K, EVEN)
        v_j = _load_rows(q + 2 * heads * K, key_start, stride, tokens, N, K, EVEN)
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * (factor * LOG2_E)
        if BIASED:
            bias = _load_bias(skewed, key_start - query_start, width, M, N)
            s += gate_i[:, None] * bias
        if (key_start < inner) | (key_start + N > inner_end):
            s = tl.where((j >= firsts[:, None]) & (j < ends[:, None]), s, float("-inf"))
        p = tl.exp2(s - lse_i[:, None])
        ds = p * (tl.dot(grad_i, tl.trans(v_j), input_precision="ieee") - delta_i[:, None])
        acc = tl.dot(ds.to(k_j.dtype), k_j, acc, input_precision="ieee")
        if GATED:
            grad_gate += tl.sum(ds * bias, 1)
        if BIASED:
            offset, summed = key_start // SIDE - query_start // SIDE, tl.sum(ds, 1)
            before += tl.where(offset < -near, summed, 0.0)
            after += tl.where(offset > near, summed, 0.0)
    acc *= factor
    tile = bh * tl.num_programs(0) + tl.program_id(0)
    if BIASED:
        tl.store(grad_far + 2 * tile, tl.sum(before * gate_i, 0) / LOG2_E)
        tl.store(grad_far + 2 * tile + 1, tl.sum(after * gate_i, 0) / LOG2_E)
    if GATED:  # queries past the row's end add 0: their dO is 0
        alpha, rho, u, r = _gates(q_i, update, reset, K)
        w = tl.load(scale + h).to(tl.float32)
        grad_alpha = grad_gate * (1 - w * rho) * alpha * (1 - alpha)
        grad_rho = grad_gate * (1 - alpha) * w * rho * (1 - rho)
        acc += grad_alpha[:, None] * u[None, :] + grad_rho[:, None] * r[None, :]
        du_at = grad_gates + tile * 2 * K + tl.arange(0, K)  # dr follows du
        tl.store(du_at, tl.sum(q_i.to(tl.float32) * grad_alpha[:, None], 0))
        tl.store(du_at + K, tl.sum(q_i.to(tl.float32) * grad_rho[:, None], 0))
        tl.store(grad_scale + tile, tl.sum(grad_gate * (1 - alpha) * rho, 0))
    _store_rows(grad_qkv + inputs, acc, query_start, stride, tokens, M, K, EVEN)


@triton.jit
def _backward_keys(  # type: ignore[no-untyped-def]
    qkv, update, reset, scale, skewed, first, end, lse, gate, grad, delta, grad_qkv,
    factor, tokens, heads, width, rows,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    SKEWED_ROWS: tl.constexpr,
):  # fmt: skip
    """Write dK and dV for a tile of keys. The scores are transposed: they have a row for each key."""
    key_start, bh = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    outputs, vectors, stride = (b * tokens * heads + h) * K, bh * tokens, 3 * heads * K
    inputs = b * tokens * stride + h * K
    q = qkv + inputs
    if BIASED:
        skewed += (heads + h) * SKEWED_ROWS * width
    firsts, ends, low, high, inner, inner_end = _item_bounds(first + b * tokens, end + b * tokens, key_start, tokens, N)
    k_j = _load_rows(q + heads * K, key_start, stride, tokens, N, K, EVEN)
    v_j = _load_rows(q + 2 * heads * K, key_start, stride, tokens, N, K, EVEN)
    dk, dv = tl.zeros([N, K], tl.float32), tl.zeros([N, K], tl.float32)
    for query_start in range(low // M * M, high, M):
        i = query_start + tl.arange(0, M)
        q_i = _load_rows(q, query_start, stride, tokens, M, K, EVEN)
        grad_i = _load_rows(grad + outputs, query_start, heads * K, tokens, M, K, EVEN)
        lse_i, delta_i = _load_vector(lse + vectors, i, tokens, EVEN), _load_vector(delta + vectors, i, tokens, EVEN)
        s = tl.dot(k_j, tl.trans(q_i), input_precision="ieee") * (factor * LOG2_E)
        if BIASED:
            bias = _load_bias(skewed, query_start - key_start, width, N, M)
            bias *= (_load_vector(gate + vectors, i, tokens, EVEN) * LOG2_E)[None, :] if GATED else LOG2_E
            s += bias
        if (query_start < inner) | (query_start + M > inner_end):
            s = tl.where((i[None, :] >= firsts[:, None]) & (i[None, :] < ends[:, None]), s, float("-inf"))
        p = tl.exp2(s - lse_i[None, :])
        dv = tl.dot(p.to(grad_i.dtype), grad_i, dv, input_precision="ieee")
        ds = p * (tl.dot(v_j, tl.trans(grad_i), input_precision="ieee") - delta_i[None, :])
        dk = tl.dot(ds.to(q_i.dtype), q_i, dk, input_precision="ieee")
    _store_rows(grad_qkv + inputs + heads * K, dk * factor, key_start, stride, tokens, N, K, EVEN)
    _store_rows(grad_qkv + inputs + 2 * heads * K, dv, key_start, stride, tokens, N, K, EVEN)


@triton.jit
def _load_vector(x, at, tokens, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of the tokens at the positions `at`; 0 past the row's end."""
    return tl.load(x + at, None if EVEN else at < tokens, other=None if EVEN else 0.0)


@triton.jit
def _distance_tile(  # type: ignore[no-untyped-def]
    q, first, end, lse, gate, grad, delta, bias, start, begin,
    factor, tokens, heads, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """g_i dS_ij of a tile, [N, N]. Its queries begin at the position `start`, its keys at the position `begin`."""
    i, j = start + tl.arange(0, N), begin + tl.arange(0, N)[None, :]
    q_i = _load_rows(q, start, 3 * heads * K, tokens, N, K, EVEN)
    k_j = _load_rows(q + heads * K, begin, 3 * heads * K, tokens, N, K, EVEN)
    v_j = _load_rows(q + 2 * heads * K, begin, 3 * heads * K, tokens, N, K, EVEN)
    grad_i = _load_rows(grad, start, heads * K, tokens, N, K, EVEN)
    gate_i = _load_vector(gate, i, tokens, EVEN) if GATED else tl.full([N], 1.0, tl.float32)
    s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * (factor * LOG2_E)
    s += (gate_i * LOG2_E)[:, None] * bias
    if MASKED:
        firsts, ends = _load_vector(first, i, tokens, EVEN), _load_vector(end, i, tokens, EVEN)
        s = tl.where((j >= firsts[:, None]) & (j < ends[:, None]), s, float("-inf"))
    p = tl.exp2(s - _load_vector(lse, i, tokens, EVEN)[:, None])
    dp = tl.dot(grad_i, tl.trans(v_j), input_precision="ieee")
    return p * (dp - _load_vector(delta, i, tokens, EVEN)[:, None]) * gate_i[:, None]


@triton.jit
def _backward_distances(  # type: ignore[no-untyped-def]
    qkv, update, reset, scale, skewed, first, end, lse, gate, grad, delta, grad_d,
    factor, tokens, heads, width, rows,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    SKEWED_ROWS: tl.constexpr, SUMMED_ROWS: tl.constexpr,
):  # fmt: skip
    """Write to `grad_d` [row groups, H, offsets, 2 N] what SUMMED_ROWS rows (a row group) add to dd in the tiles whose
    keys begin `offset` tiles after their queries. These tiles are added up to one, which is then summed along its
    diagonals. Sum number x is for the distance offset · N + x + 1 − N."""
    tiles, h, row_group = tl.cdiv(tokens, N), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offset = tl.program_id(0) - tl.num_programs(0) // 2
    c = tl.arange(0, N)
    bias = _load_bias(skewed + h * SKEWED_ROWS * width, offset * N, width, N, N)
    acc = tl.zeros([N, N], tl.float32)
    first_row = row_group * SUMMED_ROWS
    row_count = tl.minimum(SUMMED_ROWS, rows - first_row).to(tl.int32)
    low, high = tl.maximum(0, -offset), tl.minimum(tiles, tiles - offset)
    masked = 0  # number of rows that need a mask: those whose first query does not see the whole row, all unless EVEN
    for n in range(0, row_count):
        masked += ((tl.load(end + (first_row + n) * tokens) < tokens) | (not EVEN)).to(tl.int32)
    # One loop for rows and tiles, so that the compiler loads the next tile while this one is computed.
    for step in range(0, tl.where(masked == 0, row_count * (high - low), 0)):
        row_start, query_start = (first_row + step // (high - low)) * tokens, (low + step % (high - low)) * N
        acc += _distance_tile(
            qkv + (row_start * 3 * heads + h) * K, first + row_start, end + row_start,
            lse + row_start * heads + h * tokens, gate + row_start * heads + h * tokens,
            grad + (row_start * heads + h) * K, delta + row_start * heads + h * tokens,
            bias, query_start, query_start + offset * N, factor, tokens, heads, N, K, GATED, True, False,
        )  # fmt: skip
    for n in range(0, tl.where(masked > 0, row_count, 0)):
        row_start = (first_row + n) * tokens
        firsts, ends, vectors = first + row_start, end + row_start, row_start * heads + h * tokens
        for tile in range(low, high):
            query_start, key_start = tile * N, (tile + offset) * N
            last = tl.minimum(query_start + N, tokens) - 1
            if (key_start < tl.load(ends + last)) & (key_start + N > tl.load(firsts + query_start)):
                acc += _distance_tile(
                    qkv + (row_start * 3 * heads + h) * K, firsts, ends, lse + vectors, gate + vectors,
                    grad + (row_start * heads + h) * K, delta + vectors, bias, query_start, key_start,
                    factor, tokens, heads, N, K, GATED, EVEN, True,
                )  # fmt: skip
    # Row y is rotated left by y + 1. Then column c holds distance c + 1, or c + 1 − N where the row has wrapped around.
    turn = c[:, None] + c[None, :] + 1
    turned = tl.gather(acc, turn % N, 1)
    dd_at = grad_d + ((row_group * tl.num_programs(1) + h) * tl.num_programs(0) + tl.program_id(0)) * 2 * N + c
    tl.store(dd_at, tl.sum(tl.where(turn < N, 0.0, turned), 0))
    tl.store(dd_at + N, tl.sum(tl.where(turn < N, turned, 0.0), 0))


def skew(position_bias_HW: Tensor, dtype: torch.dtype) -> Tensor:
    """The table that `_load_bias` reads, in `dtype`, [2, H, SKEWED_ROWS, X] with X of about 2T. In row y and column X/2
    + x, part 0 holds d of distance x − y, and part 1, for transposed scores, d of distance y − x. For distances of T or
    more the table holds 0."""
    tokens = (position_bias_HW.shape[1] + 1) // 2
    half = -(-tokens // SKEWED_ROWS) * SKEWED_ROWS + SKEWED_ROWS
    # Number of columns to add before distance 1 − T: the first of them is for distance 1 − SKEWED_ROWS − half.
    left = half + SKEWED_ROWS - tokens
    two_signs = torch.stack([position_bias_HW, position_bias_HW.flip(1)]).to(dtype)
    two_signs = F.pad(two_signs, (left, 2 * half + SKEWED_ROWS - 1 - left - two_signs.shape[2]))
    return two_signs.unfold(2, 2 * half, 1).flip(2).contiguous()


def near_tiles(reach: int, tokens: int, head_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """The number of tiles on each side of the diagonal in which each distance needs its own gradient. From distance
    `reach` on, d is one number on each side of the diagonal, so one sum for each side is enough. This sum is added to
    the gradient of the side's largest distance."""
    side = _tiling_on_device(_backward_distances, head_size, dtype, device).keys
    return min(-(-(reach - 1) // side), triton.cdiv(tokens, side) - 1)


def attend(
    qkv_BT3HK: Tensor,
    gate_weights: tuple[Tensor, Tensor, Tensor] | None,
    position_bias_HW: Tensor | None,
    skewed: Tensor | None,
    first_BT: Tensor,
    end_BT: Tensor,
    near: int,
) -> Tensor:
    """Returns O [B, T, H, K]. `qkv_BT3HK` is bf16, fp16 or fp32: its numbers are multiplied in this type and summed in
    fp32. K must be 16, 32, 64 or 128.

    `gate_weights` is (u [K], r [K], w [H]). The arguments after it are the fields of `attention.TritonBias`. d is read
    from `skewed`, but its gradient goes to `position_bias_HW`.
    """
    assert gate_weights is None or position_bias_HW is not None
    weights = gate_weights or (None,) * 3
    return _Attend.apply(position_bias_HW, qkv_BT3HK.contiguous(), *weights, skewed, first_BT, end_BT, near)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, position_bias_HW, *inputs):  # type: ignore[no-untyped-def]
        ctx.near = inputs[-1]
        out_BTHK, lse_BHT, gate_BHT = _outputs(*inputs[:-1])
        ctx.save_for_backward(*inputs[:-1], out_BTHK, lse_BHT, gate_BHT)
        return out_BTHK

    @staticmethod
    def backward(ctx, grad_BTHK):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once: in a checkpointed layer each access recomputes them
        qkv, update, _, scale, skewed, *_ = saved
        grad_qkv, grad_d, grad_far, grad_gates, grad_scale = _gradients(*saved, grad_BTHK.contiguous(), ctx.near)
        grad_weights = None, None, None  # gradients of the gate's three weights
        if update is not None:
            grad_weights = *grad_gates.sum((0, 1, 2)).to(update.dtype), grad_scale.sum((0, 2)).to(scale.dtype)
        grad_position_bias = None
        if skewed is not None:
            grad_position_bias = _by_distance(grad_d.sum(0), grad_far.sum((0, 2)), ctx.near, qkv.shape[1])
        return grad_position_bias, grad_qkv, *grad_weights, None, None, None, None


def _by_distance(grad_d: Tensor, grad_far: Tensor, near: int, tokens: int) -> Tensor:
    """The gradient of d, [H, W]. `grad_d` [H, offsets, 2 N] has the sums of `_backward_distances`; the upper N sums of
    an offset and the lower N sums of the next offset are for the same distances. `grad_far` [H, 2] has the sums of the
    far tiles before and after the diagonal; each is added to the largest distance on its side."""
    side = grad_d.shape[2] // 2
    lower, upper = grad_d.unflatten(2, (2, -1)).unbind(2)
    # The first column of `sums` is for the distance 1 − (near + 1) · N.
    sums = (F.pad(lower, (0, 0, 0, 1)) + F.pad(upper, (0, 0, 1, 0))).flatten(1)
    beyond = tokens - (near + 1) * side
    sums = F.pad(sums, (beyond, beyond - 1))  # negative padding removes values
    return torch.cat([sums[:, :1] + grad_far[:, :1], sums[:, 1:-1], sums[:, -1:] + grad_far[:, 1:]], 1)


# Custom operators, into which torch.compile does not trace.
@torch.library.custom_op("xlme_ds::attend", mutates_args=())
def _outputs(
    qkv_BT3HK: Tensor, update_K: Tensor | None, reset_K: Tensor | None, scale_H: Tensor | None,
    skewed: Tensor | None, first_BT: Tensor, end_BT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (O [B, T, H, K], L to base 2 [B, H, T], g [B, H, T]). Without a gate, g is empty."""
    out = _empty_outputs(qkv_BT3HK, update_K)
    _launch(_forward, qkv_BT3HK, update_K, reset_K, scale_H, skewed, first_BT, end_BT, *out)
    return out


@torch.library.custom_op("xlme_ds::attend_backward", mutates_args=())
def _gradients(
    qkv_BT3HK: Tensor, update_K: Tensor | None, reset_K: Tensor | None, scale_H: Tensor | None, skewed: Tensor | None,
    first_BT: Tensor, end_BT: Tensor, out_BTHK: Tensor, lse_BHT: Tensor, gate_BHT: Tensor, grad_BTHK: Tensor, near: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (grad_qkv, grad_d, grad_far, grad_gates, grad_scale). grad_qkv [B, T, 3, H, K] is dQ, dK and dV. The
    others hold summands: grad_d [row groups, H, offsets, 2 N] (a row group is SUMMED_ROWS rows) and grad_far [B, H,
    tiles, 2] of dd, grad_gates [B, H, tiles, 2, K] of du and dr, and grad_scale [B, H, tiles] of dw."""
    gradients = _empty_gradients(qkv_BT3HK, update_K, skewed, near)
    grad_qkv, grad_d, grad_far, grad_gates, grad_scale = gradients
    inputs = qkv_BT3HK, update_K, reset_K, scale_H, skewed, first_BT, end_BT
    by_query = lse_BHT, gate_BHT, grad_BTHK, torch.empty_like(lse_BHT)  # the last one is Δ
    of_queries = grad_qkv, grad_gates, grad_scale, grad_far
    _launch(_backward_queries, *inputs, out_BTHK, *by_query, *of_queries, near=near)
    _launch(_backward_keys, *inputs, *by_query, grad_qkv)
    if skewed is not None:
        _launch(_backward_distances, *inputs, *by_query, grad_d, near=near)
    return gradients


def _empty_outputs(qkv_BT3HK: Tensor, update_K: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, _, heads, size = qkv_BT3HK.shape
    shapes = (rows, heads, tokens), (rows, heads, tokens if update_K is not None else 0)
    lse_BHT, gate_BHT = (qkv_BT3HK.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return qkv_BT3HK.new_empty(rows, tokens, heads, size), lse_BHT, gate_BHT


def _empty_gradients(
    qkv_BT3HK: Tensor, update_K: Tensor | None, skewed: Tensor | None, near: int, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, tokens, _, heads, size = qkv_BT3HK.shape
    side, tile = (
        (tiling or _tiling_for_input(kernel, qkv_BT3HK)).queries for kernel in (_backward_distances, _backward_queries)
    )
    offsets, tiles = 2 * near + 1 if skewed is not None else 0, triton.cdiv(tokens, tile)
    gated = tiles if update_K is not None else 0
    of_distances = (triton.cdiv(rows, SUMMED_ROWS), heads, offsets, 2 * side), (rows, heads, tiles, 2)
    shapes = *of_distances, (rows, heads, gated, 2, size), (rows, heads, gated)
    grad_d, grad_far, grad_gates, grad_scale = (qkv_BT3HK.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return torch.empty_like(qkv_BT3HK), grad_d, grad_far, grad_gates, grad_scale


_outputs.register_fake(lambda qkv_BT3HK, update_K, *others: _empty_outputs(qkv_BT3HK, update_K))
_gradients.register_fake(
    lambda qkv_BT3HK, update_K, reset, scale, skewed, *others: _empty_gradients(qkv_BT3HK, update_K, skewed, others[-1])
)


def _tiling_for_input(kernel: Any, qkv_BT3HK: Tensor) -> Tiling:
    return _tiling_on_device(kernel, qkv_BT3HK.shape[-1], qkv_BT3HK.dtype, qkv_BT3HK.device)


def _tiling_on_device(kernel: Any, head_size: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    capability = "default"
    if device.type == "cuda" and torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return tiling_of(kernel.__name__, head_size, dtype.itemsize, capability)


def _launch(kernel: Any, *tensors: Any, near: int | None = None, tiling: Tiling | None = None) -> None:
    """Run `kernel`. `tensors` are the kernel's, in its order; the first seven are the arguments of `_outputs`. `near`:
    see `near_tiles`; only two of the backward kernels need it. `tiling` is by default that of `_tiling_for_input`."""
    qkv, update, _, _, skewed, *_ = tensors
    rows, tokens, _, heads, size = qkv.shape
    tiling = tiling or _tiling_for_input(kernel, qkv)
    grid: tuple[int, ...] = (
        triton.cdiv(tokens, tiling.keys if kernel is _backward_keys else tiling.queries),
        rows * heads,
    )
    options = {"M": tiling.queries, "N": tiling.keys, "K": size, "SKEWED_ROWS": SKEWED_ROWS}
    options |= {"GATED": update is not None, "BIASED": skewed is not None}
    options |= {"num_warps": tiling.warps, "num_stages": tiling.stages}
    scalars = [size**-0.5, tokens, heads, 0 if skewed is None else skewed.shape[-1], rows]
    if kernel is _backward_queries:
        options["SIDE"] = _tiling_for_input(_backward_distances, qkv).keys
        assert max(tiling.queries, tiling.keys) <= options["SIDE"], "a tile is near or far as a whole"
        scalars.insert(0, near)
    if kernel is _backward_distances:
        assert near is not None
        grid = 2 * near + 1, heads, triton.cdiv(rows, SUMMED_ROWS)
        options["SUMMED_ROWS"] = SUMMED_ROWS
    options["EVEN"] = tokens % tiling.queries == tokens % tiling.keys == 0
    kernel[grid](*tensors, *scalars, **options)
