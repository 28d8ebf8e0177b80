"""A linear map whose gradient of the weights is computed some tokens at a time where that is faster.

N tokens, I numbers in, O out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TOKENS, _PIECES = 512, 8  # of a piece at least; pieces at most, since their sum is rounded to bf16 with each


class Linear(nn.Linear):
    """`nn.Linear`; for bf16 on the CPU with our own backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if x.is_cuda or x.dtype != torch.bfloat16 or not torch.is_grad_enabled():
            return super().forward(x)
        out: Tensor = _Linear.apply(x, self.weight, self.bias)
        return out


class _Linear(torch.autograd.Function):
    """oneDNN takes twice as long for gᵀ x as for other products of that size, but not with few tokens."""

    @staticmethod
    def forward(ctx, x, weight_OI, bias_O):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight_OI = ctx.saved_tensors
        x_NI, grad_NO = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_weight = torch.empty_like(weight_OI)
        size = max(_TOKENS, -(-len(x_NI) // _PIECES))
        for number, (part_NI, part_NO) in enumerate(zip(x_NI.split(size), grad_NO.split(size), strict=True)):
            torch.addmm(grad_weight, part_NO.t(), part_NI, beta=min(number, 1), out=grad_weight)
        return (grad_NO @ weight_OI).view_as(x), grad_weight, grad_NO.sum(0)
