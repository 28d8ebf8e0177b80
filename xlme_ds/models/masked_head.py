"""The vocabulary softmax at masked positions, in chunks: the logits of a batch never exist whole.

M masked positions, C positions of a chunk, D width, V vocabulary. One pass over a chunk gives the negative
log-likelihood of the target, the inverse-CDF sample and the prediction; the backward pass computes the logits again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_GROUP = 512  # the sampler sums probabilities in groups of this many ids, then looks inside one group


class MaskedTokens(NamedTuple):
    """What the generator says at the masked positions."""

    nll_M: Tensor
    """float32, −log p(target); carries the gradient."""
    sample_M: Tensor
    """int64, drawn from the softmax by the given uniforms; no gradient."""
    predicted_M: Tensor
    """int64, the most likely token."""


def inverse_cdf(weights_CV: Tensor, uniforms_C: Tensor) -> Tensor:
    """The token at which the cumulated unnormalised probabilities pass `uniforms_C` of their total; int64 [C].

    Two levels (groups of ids, then one group) read V numbers once instead of writing a cumulative sum of them.
    """
    vocabulary = weights_CV.shape[1]
    whole = vocabulary // _GROUP * _GROUP
    sums = [weights_CV[:, :whole].unflatten(1, (-1, _GROUP)).sum(-1)] if whole else []
    if whole < vocabulary:
        sums.append(weights_CV[:, whole:].sum(-1, keepdim=True))
    cdf_CG = torch.cat(sums, dim=1).double().cumsum(1)
    threshold_C1 = uniforms_C.double().unsqueeze(1) * cdf_CG[:, -1:]
    group_C1 = torch.searchsorted(cdf_CG, threshold_C1, right=True).clamp(max=cdf_CG.shape[1] - 1)
    before_C1 = torch.where(group_C1 > 0, cdf_CG.gather(1, (group_C1 - 1).clamp(min=0)), 0.0)
    ids = group_C1 * _GROUP + torch.arange(_GROUP, device=weights_CV.device)
    inside = weights_CV.gather(1, ids.clamp(max=vocabulary - 1)).double().masked_fill(ids >= vocabulary, 0.0)
    offset = torch.searchsorted(inside.cumsum(1), threshold_C1 - before_C1, right=True)
    # Where rounding lets the threshold pass the group's own sum, the last token of non-zero probability is meant.
    last = _GROUP - 1 - (inside > 0).flip(1).int().argmax(1, keepdim=True)
    # NaN weights, of a run that diverged, have no sample: any id will do, and the loss will tell.
    return (group_C1 * _GROUP + torch.minimum(offset, last)).squeeze(1).clamp(max=vocabulary - 1)


def _logits(hidden_CD: Tensor, blocks: Sequence[Tensor], bias_V: Tensor) -> Tensor:
    if len(blocks) == 1:
        return (hidden_CD @ blocks[0].t()).float().add_(bias_V.float())
    logits_CV = torch.empty(
        len(hidden_CD), len(bias_V), device=hidden_CD.device
    )  # filled in place: joining would hold it twice
    for part, block in zip(logits_CV.split([len(block) for block in blocks], dim=1), blocks, strict=True):
        part.copy_(hidden_CD @ block.t())
    return logits_CV.add_(bias_V.float())


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD, bias_V, targets_M, uniforms_M, chunk, *blocks):  # type: ignore[no-untyped-def]
        nll, samples, predicted, lse = [], [], [], []
        for start in range(0, len(hidden_MD), chunk):
            here = slice(start, start + chunk)
            logits_CV = _logits(hidden_MD[here], blocks, bias_V)
            at_target = logits_CV.gather(1, targets_M[here, None]).squeeze(1)
            highest, argmax = logits_CV.max(1, keepdim=True)
            weights_CV = logits_CV.sub_(highest).exp_()
            samples.append(inverse_cdf(weights_CV, uniforms_M[here]))
            lse.append(weights_CV.sum(1).log() + highest.squeeze(1))
            nll.append(lse[-1] - at_target)
            predicted.append(argmax.squeeze(1))
            del logits_CV, weights_CV  # or it would still be there while the next chunk is made
        ctx.save_for_backward(hidden_MD, bias_V, targets_M, torch.cat(lse), *blocks)
        ctx.chunk = chunk
        out = torch.cat(nll), torch.cat(samples), torch.cat(predicted)
        ctx.mark_non_differentiable(out[1], out[2])
        return out

    @staticmethod
    def backward(ctx, grad_M, _samples, _predicted):  # type: ignore[no-untyped-def]
        hidden_MD, bias_V, targets_M, lse_M, *blocks = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_MD)
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32)
        grad_blocks = [torch.zeros_like(block) for block in blocks]
        for start in range(0, len(hidden_MD), ctx.chunk):
            here = slice(start, start + ctx.chunk)
            grad_CV = _logits(hidden_MD[here], blocks, bias_V).sub_(lse_M[here, None]).exp_()
            grad_CV[torch.arange(len(grad_CV), device=grad_CV.device), targets_M[here]] -= 1
            grad_CV.mul_(grad_M[here, None])
            grad_bias += grad_CV.sum(0)
            parts = grad_CV.to(hidden_MD.dtype).split([len(block) for block in blocks], dim=1)
            for part, grad_block in zip(parts, grad_blocks, strict=True):
                grad_block.addmm_(part.t(), hidden_MD[here])
            grad_hidden[here] = sum(part @ block for part, block in zip(parts, blocks, strict=True))
            del grad_CV, parts, part
        return grad_hidden, grad_bias.to(bias_V.dtype), None, None, None, *grad_blocks


def masked_softmax(
    hidden_MD: Tensor, blocks: Sequence[Tensor], bias_V: Tensor, targets_M: Tensor, uniforms_M: Tensor, chunk: int
) -> MaskedTokens:
    """Softmax over the vocabulary (`blocks` are the tied embedding's, V rows in all) at M positions, `chunk` at a time.

    `targets_M` int64; `uniforms_M` float32 in [0, 1). Extra memory is little more than one float32 [chunk, V].
    """
    if len(hidden_MD) == 0:  # a row of padding alone; keeps the graph connected
        empty = targets_M.new_empty(0)
        return MaskedTokens(hidden_MD.sum(1).float() + 0 * bias_V.sum().float(), empty, empty)
    return MaskedTokens(*_MaskedSoftmax.apply(hidden_MD, bias_V, targets_M, uniforms_M, chunk, *blocks))
