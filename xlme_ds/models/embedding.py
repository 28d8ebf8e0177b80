"""Token lookup in an embedding that is stored as one or several blocks of the vocabulary.

Blocks bound what an engine moves at once: a single parameter of 524,288 × 1,536 makes every swap buffer as large as
itself.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class _Lookup(torch.autograd.Function):
    """Rows of a table whose gradient adds up in float32: a frequent token sums thousands of rows, too many for bf16."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.sparse = weight.shape, weight.dtype, sparse
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        used, position = ids.flatten().unique(return_inverse=True)
        sums = grad.new_zeros(len(used), ctx.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32))
        sums = sums.index_add_(0, position, grad.flatten(0, -2).to(sums.dtype)).to(ctx.dtype)
        if ctx.sparse:
            table = torch.sparse_coo_tensor(used[None], sums, ctx.shape, is_coalesced=True, check_invariants=False)
        else:
            table = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device).index_copy_(0, used, sums)
        return None, table, None


class _ReadWhole(torch.autograd.Function):
    """The same tensor. A view made by torch would hand its gradient on as a view too, and nothing is added to one in
    place."""

    @staticmethod
    def forward(ctx, block: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block.view_as(block)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return grad


def lookup(ids: Tensor, blocks: Sequence[Tensor], sparse: bool = False) -> Tensor:
    """Embeddings of `ids` (int64, any shape) as [..., D]; block n holds the ids that follow block n−1's.

    `sparse`: the table gets a dense gradient besides, by `read_whole`, which this one is added to; it never exists
    whole (CPU).
    """

    def one(ids: Tensor, block: Tensor) -> Tensor:
        if ids.is_cuda:  # whose own backward sorts, and accumulates in float32
            return F.embedding(ids, block)
        out: Tensor = _Lookup.apply(ids, block, sparse)
        return out

    if len(blocks) == 1:
        return one(ids, blocks[0])
    out, start = None, 0
    for block in blocks:
        local = ids - start
        inside = (local >= 0) & (local < len(block))
        part = one(local.clamp(0, len(block) - 1), block) * inside.unsqueeze(-1)
        out = part if out is None else out + part
        start += len(block)
    assert out is not None
    return out


def read_whole(blocks: Sequence[Tensor]) -> list[Tensor]:
    """`blocks` for what gives them a dense gradient; taken before the sparse lookups of the same pass.

    autograd goes back through what came first last: the dense gradient then meets the sparse ones, and takes them in
    place; the other way round it would be copied. Not where an engine partitions the blocks, which a view would keep
    whole, nor where it takes the dense gradient itself.
    """
    if not torch.is_grad_enabled():
        return list(blocks)
    return [
        block if hasattr(block, "ds_id") or hasattr(block, "open_gradient") else _ReadWhole.apply(block)
        for block in blocks
    ]
