"""The softmax over the vocabulary at masked positions: losses, samples and predictions without complete rows of logits.

It computes one tile of ids at a time, so the logits of a batch never exist all at once. For every group of ids the
forward pass stores the highest logit h and the sum of exp(logit − h); if the sampling temperature t is not 1, also the
sum of exp((logit − h) / t). These numbers and the target's logit give the loss; with a uniform number, they tell which
group holds the inverse-CDF sample. The logits of this group, and of the group with the highest logit, are computed
again to find the sample and the most likely id. The backward pass computes a tile's logits again, then their gradient,
and writes the gradient of the tile's embeddings in one product. If an engine has given a block of the embedding a
method `gradient_adder`, the product is added to the gradient that the engine keeps. On a GPU in a 16-bit type the
kernels of `masked_head_triton.py` compute all but the products with the logits' gradient.

M masked positions, V vocabulary, C ids of a tile, G groups of K ids, D width, S sums of a group. For each position, W
groups are computed again: N = W · K ids.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .encoder import lookup
from .tiles import GROUP_SIZE

# On a GPU samples are drawn for as many positions at a time as fit into this memory.
_EMBEDDINGS_BYTES = 2**28  # without Triton: for the embeddings of two groups for each position
_SUMS_BYTES = 2**30  # with Triton: for the tensors of `inverse_cdf`


class MaskedHeadOutput(NamedTuple):
    """Loss, sample and prediction at the masked positions."""

    nll_M: Tensor  # float32, −log p(target); it carries the gradient
    sample_M: Tensor  # int64, the sampled token; without uniform numbers it is the most likely token
    predicted_M: Tensor  # int64, the most likely token


def vocabulary_softmax(
    hidden_MD: Tensor,
    blocks: Sequence[Tensor],
    bias_V: Tensor,
    targets_M: Tensor,
    uniforms_M: Tensor | None,
    chunk: int,
    kernels: str = "auto",
    temperature: float = 1.0,
    z_loss: float = 0.0,
) -> MaskedHeadOutput:
    """Softmax over the vocabulary at M positions, `chunk` ids at a time (rounded up to a multiple of 128).

    `blocks` are the blocks of the tied embedding, which have V rows in all. `targets_M` is int64. `uniforms_M` is
    float32 in [0, 1), or None to draw no samples. `kernels` is the setting `model.kernels`. Torch's operators need
    extra memory for one to two float32 tensors [M, `chunk`], depending on the temperature and on the type of the hidden
    states. The Triton kernels need one tensor [M, `chunk`] in that type in the backward pass, and up to about
    `_SUMS_BYTES` in the forward pass.

    The samples are drawn from softmax(logits / `temperature`). The loss has the value −log p, but the gradient of
    −log p + `z_loss` · log² Z, where Z is the sum of the logits' exponentials (PaLM, section 5).
    """
    if len(hidden_MD) == 0:  # nothing is masked
        empty = targets_M.new_empty(0)
        zero = sum(0 * parameter.sum() for parameter in (bias_V, *blocks))  # keeps the parameters in the graph
        return MaskedHeadOutput((hidden_MD.sum(1) + zero).float(), empty, empty)
    chunk = -(-chunk // GROUP_SIZE) * GROUP_SIZE
    gradient_adders = [getattr(block, "gradient_adder", None) for block in blocks]
    module = triton_kernels(kernels, hidden_MD)
    if module:
        hidden_MD, targets_M = hidden_MD.contiguous(), targets_M.contiguous()
    inputs = hidden_MD, bias_V, targets_M, uniforms_M, chunk, module, temperature, z_loss, gradient_adders, *blocks
    return MaskedHeadOutput(*_VocabularySoftmax.apply(*inputs))


def triton_kernels(choice: str, hidden_MD: Tensor) -> ModuleType | None:
    """The module `masked_head_triton`, or None if it cannot run or `choice` (`model.kernels`) excludes it.

    It runs on a GPU in bf16 or fp16, if D is a multiple of 16. If the choice is triton and TRITON_INTERPRET is 1, it
    also runs on a CPU in Triton's interpreter, which has no bf16 products. Raises ValueError if the choice is triton,
    the module could run, and the package is missing.
    """
    interpreted = choice == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    runs_on_cpu = interpreted and hidden_MD.dtype in (torch.float32, torch.float16)
    can_run = _is_16_bit_on_gpu(hidden_MD) if hidden_MD.is_cuda else runs_on_cpu
    if choice == "torch" or not can_run or hidden_MD.shape[1] % 16:
        return None
    try:
        from . import masked_head_triton
    except ImportError as missing:
        if choice == "auto":
            return None
        raise ValueError(
            "model.kernels triton needs the package triton, which torch's CUDA builds bring: install it, or set "
            "model.kernels to auto"
        ) from missing
    return masked_head_triton


class _VocabularySoftmax(torch.autograd.Function):
    """Computes the fields of `MaskedHeadOutput` from the arguments of `vocabulary_softmax`. `kernels` is the module of
    the Triton kernels, or None. `gradient_adders` has for each block its method `gradient_adder`, or None."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden_MD, bias_V, targets_M, uniforms_M, chunk, kernels, temperature, z_loss, gradient_adders, *blocks
    ):
        group_sums = kernels.group_sums if kernels else partial(_group_sums, chunk)
        highest_MG, sums_SMG, at_target_M = group_sums(hidden_MD, list(blocks), bias_V, targets_M, temperature)
        maximum_M1 = highest_MG.amax(1, keepdim=True)
        lse_M1 = (sums_SMG[0] * (highest_MG - maximum_M1).exp_()).sum(1, keepdim=True).log() + maximum_M1
        lse_M = lse_M1.squeeze(1)
        samples = _all_samples(
            hidden_MD, list(blocks), bias_V, highest_MG, sums_SMG[-1], uniforms_M, kernels, chunk, temperature
        )
        sample_M, predicted_M = samples.unbind(0)
        ctx.save_for_backward(hidden_MD, bias_V, targets_M, lse_M, *blocks)
        ctx.chunk, ctx.kernels, ctx.z_loss, ctx.gradient_adders = chunk, kernels, z_loss, gradient_adders
        ctx.mark_non_differentiable(sample_M, predicted_M)
        return lse_M - at_target_M, sample_M, predicted_M

    @staticmethod
    def backward(ctx, grad_M, _samples, _predicted):  # type: ignore[no-untyped-def]
        hidden_MD, bias_V, targets_M, lse_M, *blocks = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_MD, dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        grad_bias = torch.empty_like(bias_V)
        # For each block: the function that adds a product to the engine's gradient, or None if the block has no such
        # gradient.
        adders: list[Any] = [None if make_adder is None else make_adder() for make_adder in ctx.gradient_adders]
        grad_blocks = [
            torch.empty_like(block) if add is None else None for add, block in zip(adders, blocks, strict=True)
        ]
        tile_gradient = ctx.kernels.tile_gradient if ctx.kernels else _tile_gradient
        grad_M = grad_M.contiguous()
        for tile in _tiles(blocks, ctx.chunk):
            grad_block, rows_CD = grad_blocks[tile.block], blocks[tile.block][tile.rows]
            grad_MC, partial_sums = tile_gradient(
                hidden_MD, rows_CD, bias_V[tile.ids], targets_M, lse_M, grad_M, tile.ids.start, ctx.z_loss
            )
            grad_MC = grad_MC[:, : len(rows_CD)]  # the kernels' results end with a whole group
            grad_bias[tile.ids] = partial_sums.sum(0)[: len(rows_CD)]
            if grad_block is None:
                adders[tile.block](tile.rows, grad_MC.t() @ hidden_MD)
            else:
                torch.mm(grad_MC.t(), hidden_MD, out=grad_block[tile.rows])
            if _is_16_bit_on_gpu(hidden_MD):
                torch.addmm(grad_hidden, grad_MC, rows_CD, out_dtype=torch.float32, out=grad_hidden)
            else:
                grad_hidden += grad_MC @ rows_CD
            del grad_MC  # else it would take memory while the next tile is computed
        no_gradients = [None] * 7  # the arguments from targets_M to gradient_adders get no gradient
        return grad_hidden.to(hidden_MD.dtype), grad_bias, *no_gradients, *grad_blocks


def _group_sums(
    chunk: int, hidden_MD: Tensor, blocks: list[Tensor], bias_V: Tensor, targets_M: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (highest logit h of each group [M, G], sums of exponentials relative to h [S, M, G], targets' logits
    [M]), all float32.

    The first sum adds up exp(logit − h). If the temperature t is not 1, a second sum adds up exp((logit − h) / t).
    """
    highest: list[Tensor] = []
    sums: list[Tensor] = []
    at_target_M1 = torch.zeros(len(hidden_MD), 1, dtype=torch.float32, device=hidden_MD.device)
    for tile in _tiles(blocks, chunk):
        logits_MC = _logits(hidden_MD, blocks[tile.block][tile.rows], bias_V[tile.ids])
        in_tile_M1, offset_M1 = _offsets(targets_M, tile.ids.start, logits_MC.shape[1])
        at_target_M1 = torch.where(in_tile_M1, logits_MC.gather(1, offset_M1), at_target_M1)
        padding = -logits_MC.shape[1] % GROUP_SIZE  # number of ids that the tile's last group lacks
        if padding:
            logits_MC = F.pad(logits_MC, (0, padding), value=float("-inf"))
        logits_MGK = logits_MC.unflatten(1, (-1, GROUP_SIZE))
        highest.append(logits_MGK.amax(-1))
        logits_MGK.sub_(highest[-1].unsqueeze(-1))
        tempered = [] if temperature == 1.0 else [(logits_MGK * (1 / temperature)).exp_().sum(-1)]
        sums.append(torch.stack([logits_MGK.exp_().sum(-1), *tempered]))
        del logits_MC, logits_MGK  # else they would take memory while the next tile is computed
    return torch.cat(highest, dim=1), torch.cat(sums, dim=2), at_target_M1.squeeze(1)


def _all_samples(
    hidden_MD: Tensor,
    blocks: list[Tensor],
    bias_V: Tensor,
    highest_MG: Tensor,
    sums_MG: Tensor,
    uniforms_M: Tensor | None,
    kernels: ModuleType | None,
    chunk: int,
    temperature: float,
) -> Tensor:
    """The samples and the most likely ids of all positions, int64 [2, M]. They are computed for some positions at a
    time. `highest_MG` and `sums_MG` are results of `_group_sums`, the sums those for the temperature."""
    if kernels:
        sample = kernels.sample
        group_bytes = 32  # memory that `inverse_cdf` needs at most for one group at one position
        positions_at_once = _SUMS_BYTES // (group_bytes * highest_MG.shape[1])
    else:
        borders = torch.tensor([(group.ids.start, group.ids.stop) for group in _tiles(blocks, GROUP_SIZE)])
        starts_G, ends_G = borders.to(hidden_MD.device, non_blocking=True).unbind(1)
        sample = partial(_sample, starts_G, ends_G, uniforms_M is not None)
        elements = 2 * GROUP_SIZE * hidden_MD.shape[1]  # number of elements in the embeddings of two groups
        if hidden_MD.is_cuda:
            positions_at_once = _EMBEDDINGS_BYTES // (elements * hidden_MD.element_size())
        else:  # the embeddings of a piece have at most as many elements as a tile has logits
            positions_at_once = len(hidden_MD) * chunk // elements
    parts = []
    by_position = hidden_MD, highest_MG, sums_MG, *(() if uniforms_M is None else (uniforms_M,))
    pieces = (tensor.split(max(positions_at_once, 1)) for tensor in by_position)
    for piece_MD, *group_inputs in zip(*pieces, strict=True):
        groups = _choose_groups(temperature, *group_inputs)
        parts.append(sample(piece_MD, blocks, bias_V, *groups, temperature))
    ids_2M = torch.cat(parts, dim=1)
    return ids_2M if uniforms_M is not None else ids_2M[1:].repeat(2, 1)  # the kernels always draw


def _choose_groups(
    temperature: float, highest_MG: Tensor, sums_MG: Tensor, uniforms_M: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The groups to compute again for each position, and two numbers to find the sample; all [M].

    Returns (group with the sample, group with the highest logit, highest logit, threshold). The most likely id is in
    the second group. The threshold is float64: the sample is the first id of its group at which the cumulative sum of
    exp((logit − highest logit) / temperature) over the group is above the threshold. Without `uniforms_M` the sample is
    the most likely id, so both groups are the same.
    """
    maximum_M1, best_group_M1 = highest_MG.max(1, keepdim=True)
    maximum_M, best_group_M = maximum_M1.squeeze(1), best_group_M1.squeeze(1)
    if uniforms_M is None:
        return best_group_M, best_group_M, maximum_M, torch.zeros_like(maximum_M).double()
    weights_MG = (sums_MG * (highest_MG - maximum_M1).mul_(1 / temperature).exp_()).double()
    thresholds_M1 = uniforms_M.double().unsqueeze(1) * weights_MG.sum(1, keepdim=True)
    sampled_group_M1, weight_before_M1 = inverse_cdf(weights_MG, thresholds_M1)
    return sampled_group_M1.squeeze(1), best_group_M, maximum_M, (thresholds_M1 - weight_before_M1).squeeze(1)


def inverse_cdf(weights_MN: Tensor, thresholds_M1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (index, sum before) for each row of the weights, float64 with any N. The index, int64 [M, 1], is the
    first at which the cumulative sum is above the threshold. The sum before, [M, 1], adds up the weights before the
    index.

    The weight at the index is never 0: if rounding puts the threshold at or above the total, the index is the last one
    with a weight above 0.
    """
    cumulated_MN = weights_MN.cumsum(1)
    last_M1 = weights_MN.shape[1] - 1 - (weights_MN > 0).flip(1).byte().argmax(1, keepdim=True)
    index_M1 = torch.minimum(torch.searchsorted(cumulated_MN, thresholds_M1, right=True), last_M1)
    return index_M1, cumulated_MN.gather(1, index_M1) - weights_MN.gather(1, index_M1)


def _sample(
    starts_G: Tensor,
    ends_G: Tensor,
    draw_samples: bool,
    hidden_MD: Tensor,
    blocks: list[Tensor],
    bias_V: Tensor,
    sampled_group_M: Tensor,
    best_group_M: Tensor,
    maximum_M: Tensor,
    threshold_M: Tensor,
    temperature: float,
) -> Tensor:
    """The inverse-CDF samples (row 0) and the most likely ids (row 1) at M positions, int64 [2, M]. If `draw_samples`
    is false, both are the most likely ids. `starts_G` and `ends_G` have each group's first id and one after its last
    id. The arguments of shape [M] are the results of `_choose_groups`."""
    groups_MW = torch.stack([sampled_group_M, best_group_M] if draw_samples else [best_group_M], dim=1)
    ids_MWK = starts_G[groups_MW].unsqueeze(-1) + torch.arange(GROUP_SIZE, device=starts_G.device)
    outside_MWK = ids_MWK >= ends_G[groups_MW].unsqueeze(-1)
    ids_MWK = ids_MWK.clamp(max=len(bias_V) - 1)
    rows_MND = lookup(ids_MWK.flatten(1), blocks)
    if _is_16_bit_on_gpu(hidden_MD):
        products_MN1 = torch.bmm(rows_MND, hidden_MD.unsqueeze(-1), out_dtype=torch.float32)
    else:
        products_MN1 = rows_MND @ hidden_MD.unsqueeze(-1)
    logits_MWK = products_MN1.view_as(ids_MWK).float() + bias_V.float()[ids_MWK]
    logits_MWK.masked_fill_(outside_MWK, float("-inf"))
    predicted_M1 = ids_MWK[:, -1].gather(1, logits_MWK[:, -1].argmax(1, keepdim=True))
    sample_M1 = predicted_M1
    if draw_samples:
        weights_MK = (logits_MWK[:, 0] - maximum_M[:, None]).mul_(1 / temperature).exp_().double()
        sample_M1 = ids_MWK[:, 0].gather(1, inverse_cdf(weights_MK, threshold_M[:, None])[0])
    return torch.stack([sample_M1.squeeze(1), predicted_M1.squeeze(1)])


def _tile_gradient(
    hidden_MD: Tensor,
    rows_CD: Tensor,
    bias_C: Tensor,
    targets_M: Tensor,
    lse_M: Tensor,
    grad_M: Tensor,
    first_id: int,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Returns (gradient of a tile's logits [M, C], its sum over positions [1, C]). The gradient has the type of the
    hidden states.

    The tile's ids begin with `first_id` and have the embeddings `rows_CD` and the biases `bias_C`. `lse_M` is the log
    of the sum of the exponentials of all logits, and `grad_M` the gradient of nll_M.
    """
    grad_MC = _logits(hidden_MD, rows_CD, bias_C).sub_(lse_M[:, None]).exp_()
    if z_loss:
        grad_MC.mul_((1 + 2 * z_loss * lse_M)[:, None])
    in_tile_M1, offset_M1 = _offsets(targets_M, first_id, len(rows_CD))
    grad_MC.scatter_add_(1, offset_M1, -in_tile_M1.to(grad_MC.dtype))
    grad_MC.mul_(grad_M[:, None])
    return grad_MC.to(hidden_MD.dtype), grad_MC.sum(0, keepdim=True)


def _logits(hidden_MD: Tensor, rows_CD: Tensor, bias_C: Tensor) -> Tensor:
    """The logits of a tile, float32 [M, C]."""
    if _is_16_bit_on_gpu(hidden_MD):
        return torch.mm(hidden_MD, rows_CD.t(), out_dtype=torch.float32).add_(bias_C.float())
    return (hidden_MD @ rows_CD.t()).float().add_(bias_C.float())


def _offsets(ids_M: Tensor, first_id: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns (whether each id is in a tile, its offset in the tile), both [M, 1]. The tile has `size` ids from
    `first_id` on. For ids outside the tile, the offset is valid but has no meaning."""
    offset_M1 = (ids_M - first_id).unsqueeze(1)
    return (offset_M1 >= 0) & (offset_M1 < size), offset_M1.clamp(0, size - 1)


def _is_16_bit_on_gpu(tensor: Tensor) -> bool:
    """Whether `tensor` is on a GPU in a 16-bit type. Its products can then return float32 sums: torch.mm has the
    argument `out_dtype` only on CUDA."""
    return tensor.is_cuda and tensor.element_size() == 2


class _Tile(NamedTuple):
    """Consecutive ids of one block of the embedding."""

    block: int  # index of the block
    rows: slice  # rows of the block
    ids: slice  # the ids


def _tiles(blocks: Sequence[Tensor], chunk: int) -> Iterator[_Tile]:
    """Yield tiles of up to `chunk` ids that cover all blocks, in the order of the ids."""
    start = 0
    for n, block in enumerate(blocks):
        for first in range(0, len(block), chunk):
            end = min(first + chunk, len(block))
            yield _Tile(n, slice(first, end), slice(start + first, start + end))
        start += len(block)
