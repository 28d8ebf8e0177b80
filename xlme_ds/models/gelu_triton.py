"""GELU whose backward pass is one Triton kernel. The kernel also sums the gradient of the bias that was added to GELU's
input, which otherwise takes another pass over the gradient.

    y = x Φ(x)     dx = dy (Φ(x) + x φ(x)) with Φ(x) = (1 + erf(x / √2)) / 2 and φ(x) = exp(−x² / 2) / √(2π)

N tokens, F feed-forward size, G groups of `ROWS` tokens. A program takes `COLUMNS` columns of a group, `STEP` tokens at
a time, and writes one summand of each column's bias gradient. Every sum has a fixed order.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

INVERSE_ROOT_2 = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # φ(0)
ROWS, STEP, COLUMNS, WARPS = 256, 16, 128, 8  # the fastest of six forms on an H200


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x, grad, grad_x, sums, tokens, columns,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write dx [N, F] and the summands of the bias gradient, float32 [G, F]. EVEN: `ROWS` and `COLUMNS` divide N and
    F."""
    group, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for step in range(0, ROWS, STEP):
        token = group * ROWS + step + tl.arange(0, STEP)[:, None]
        at = token * columns + column
        inside = None if EVEN else (token < tokens) & (column < columns)
        values = tl.load(x + at, inside, other=None if EVEN else 0.0).to(tl.float32)
        grads = tl.load(grad + at, inside, other=None if EVEN else 0.0).to(tl.float32)
        grads *= 0.5 + 0.5 * tl.erf(values * INVERSE_ROOT_2) + values * DENSITY_AT_0 * tl.exp(-0.5 * values * values)
        tl.store(grad_x + at, grads.to(grad_x.dtype.element_ty), inside)
        total += grads
    tl.store(sums + group * columns + column, tl.sum(total, 0)[None, :], None if EVEN else column < columns)


class _GeluOfBiased(torch.autograd.Function):
    """GELU of `x` [..., F], to which `bias_F` was added without its gradient: the gradient comes from here."""

    @staticmethod
    def forward(ctx, x, bias_F):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        grad_x, sums_GF = _gradients(x, grad.contiguous())
        return grad_x, sums_GF.sum(0).to(x.dtype)


gelu_of_biased = _GeluOfBiased.apply


# Custom operators, into which torch.compile does not trace. Inductor's own kernel for GELU is slower than torch's, and
# runs again in the backward pass.
@torch.library.custom_op("xlme_ds::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@torch.library.custom_op("xlme_ds::gelu_backward", mutates_args=())
def _gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (dx, summands of the bias gradient, float32 [G, F])."""
    grad_x, sums_GF = _empty_gradients(x)
    columns = x.shape[-1]
    tokens = x.numel() // columns
    options = {"ROWS": ROWS, "STEP": STEP, "COLUMNS": COLUMNS, "EVEN": tokens % ROWS == columns % COLUMNS == 0}
    grid = len(sums_GF), triton.cdiv(columns, COLUMNS)
    _backward[grid](x, grad, grad_x, sums_GF, tokens, columns, **options, num_warps=WARPS)
    return grad_x, sums_GF


def _empty_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = triton.cdiv(x.numel() // x.shape[-1], ROWS)
    return torch.empty_like(x), x.new_empty(groups, x.shape[-1], dtype=torch.float32)


_gelu.register_fake(torch.empty_like)
_gradients.register_fake(lambda x, grad: _empty_gradients(x))
