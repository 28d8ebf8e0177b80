"""The small networks between an encoder and its loss.

The vocabulary softmax at masked positions takes some ids at a time: the logits of a batch never exist whole. The
forward pass saves of every group its highest logit and the sum of exponentials relative to it. They give the loss and
the group of the inverse-CDF sample; only that group's logits are then looked at. The backward pass computes a tile's
logits again and writes the gradient of the tile's embeddings in one product, straight into the sum of an engine that
has given the block a method `open_gradient`.

B rows, T tokens, M masked positions, V vocabulary, C ids of a tile, G groups of K ids, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..data.rows import UNK
from .encoder import lookup

GROUP = 128
_NEVER = -1e30  # logit of what is not to be predicted: its weight is an exact 0, where an infinity could give a NaN


class MaskedTokens(NamedTuple):
    """What the generator says at the masked positions."""

    nll_M: Tensor  # float32, −log p(target); carries the gradient
    sample_M: Tensor  # int64, drawn from the softmax by the given uniforms; no gradient
    predicted_M: Tensor  # int64, the most likely token


class _Tile(NamedTuple):
    """Consecutive ids of one block."""

    block: int
    rows: slice  # inside the block
    start: int  # first id
    size: int

    def local(self, ids_M: Tensor) -> tuple[Tensor, Tensor]:
        """(whether each id is in here, its place), both [M, 1]; the place of one that is not means nothing."""
        place_M1 = (ids_M - self.start).unsqueeze(1)
        return (place_M1 >= 0) & (place_M1 < self.size), place_M1.clamp(0, self.size - 1)


def _tiles(blocks: Sequence[Tensor], chunk: int) -> Iterator[_Tile]:
    start = 0
    for n, block in enumerate(blocks):
        for first in range(0, len(block), chunk):
            size = min(chunk, len(block) - first)
            yield _Tile(n, slice(first, first + size), start + first, size)
        start += len(block)


def _logits(hidden_MD: Tensor, blocks: Sequence[Tensor], bias_V: Tensor, tile: _Tile) -> Tensor:
    products_MC = hidden_MD @ blocks[tile.block][tile.rows].t()
    return products_MC.float().add_(bias_V[tile.start : tile.start + tile.size].float())


def choose(weights_MN: Tensor, thresholds_M1: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulated `weights_MN` (float64) pass the threshold, and the sum before it; both [M, 1].

    Never a place of weight 0; where rounding lets the threshold pass the total, the last one of another weight.
    """
    cumulated_MN = weights_MN.cumsum(1)
    last_M1 = weights_MN.shape[1] - 1 - (weights_MN > 0).flip(1).int().argmax(1, keepdim=True)
    place_M1 = torch.minimum(torch.searchsorted(cumulated_MN, thresholds_M1, right=True), last_M1)
    return place_M1, (cumulated_MN - weights_MN).gather(1, place_M1)


def _sample(
    hidden_MD: Tensor,
    highest_MG: Tensor,
    sums_MG: Tensor,
    uniforms_M: Tensor,
    blocks: Sequence[Tensor],
    bias_V: Tensor,
    starts_G: Tensor,
    ends_G: Tensor,
) -> tuple[Tensor, Tensor]:
    """The inverse-CDF sample and the most likely id of M positions, from the sums of the groups; int64 [M]."""
    maximum_M1, best_M1 = highest_MG.max(1, keepdim=True)
    weights_MG = (sums_MG * (highest_MG - maximum_M1).exp_()).double()
    thresholds_M1 = uniforms_M.double().unsqueeze(1) * weights_MG.sum(1, keepdim=True)
    group_M1, before_M1 = choose(weights_MG, thresholds_M1)
    groups_M2 = torch.cat([group_M1, best_M1], dim=1)
    ids_M2K = starts_G[groups_M2].unsqueeze(-1) + torch.arange(GROUP, device=starts_G.device)
    outside_M2K = ids_M2K >= ends_G[groups_M2].unsqueeze(-1)
    ids_M2K = ids_M2K.clamp(max=len(bias_V) - 1)
    products_MN1 = lookup(ids_M2K.flatten(1), blocks) @ hidden_MD.unsqueeze(-1)
    logits_M2K = products_MN1.view_as(ids_M2K).float() + bias_V.float()[ids_M2K]
    logits_M2K = logits_M2K.masked_fill_(outside_M2K, float("-inf"))
    inside_MK = (logits_M2K[:, 0] - maximum_M1).exp_().double()
    offset_M1, _ = choose(inside_MK, thresholds_M1 - before_M1)
    sample_M1 = ids_M2K[:, 0].gather(1, offset_M1)
    predicted_M1 = ids_M2K[:, 1].gather(1, logits_M2K[:, 1].argmax(1, keepdim=True))
    return sample_M1.squeeze(1), predicted_M1.squeeze(1)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden_MD, bias_V, targets_M, uniforms_M, chunk, open_gradients, *blocks
    ):
        highest: list[Tensor] = []
        sums: list[Tensor] = []
        borders: list[tuple[int, int]] = []  # of every group: first id, and one after the last
        at_target_M1 = torch.zeros(len(hidden_MD), 1, dtype=torch.float32, device=hidden_MD.device)
        for tile in _tiles(blocks, chunk):
            logits_MC = _logits(hidden_MD, blocks, bias_V, tile)
            inside_M1, place_M1 = tile.local(targets_M)
            at_target_M1 = torch.where(inside_M1, logits_MC.gather(1, place_M1), at_target_M1)
            ragged = -tile.size % GROUP
            if ragged:
                logits_MC = F.pad(logits_MC, (0, ragged), value=float("-inf"))
            logits_MGK = logits_MC.unflatten(1, (-1, GROUP))
            highest.append(logits_MGK.amax(-1))
            sums.append(logits_MGK.sub_(highest[-1].unsqueeze(-1)).exp_().sum(-1))
            end = tile.start + tile.size
            borders += [(start, min(start + GROUP, end)) for start in range(tile.start, end, GROUP)]
            del logits_MC, logits_MGK  # or they would still be there while the next tile is made
        highest_MG, sums_MG = torch.cat(highest, dim=1), torch.cat(sums, dim=1)
        maximum_M1 = highest_MG.amax(1, keepdim=True)
        lse_M1 = (sums_MG * (highest_MG - maximum_M1).exp_()).sum(1, keepdim=True).log() + maximum_M1
        table = blocks, bias_V, *torch.tensor(borders).to(hidden_MD.device, non_blocking=True).unbind(1)
        # Positions, each with the embeddings of two groups, that take no more numbers than a tile.
        at_once = max(len(hidden_MD) * chunk // (2 * GROUP * hidden_MD.shape[1]), 1)
        arrays = hidden_MD, highest_MG, sums_MG, uniforms_M
        parts = [_sample(*group, *table) for group in zip(*(array.split(at_once) for array in arrays), strict=True)]
        ctx.save_for_backward(hidden_MD, bias_V, targets_M, lse_M1, *blocks)
        ctx.chunk, ctx.open_gradients = chunk, open_gradients
        sample_M, predicted_M = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.mark_non_differentiable(sample_M, predicted_M)
        return (lse_M1 - at_target_M1).squeeze(1), sample_M, predicted_M

    @staticmethod
    def backward(ctx, grad_M, _samples, _predicted):  # type: ignore[no-untyped-def]
        hidden_MD, bias_V, targets_M, lse_M1, *blocks = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_MD, dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        grad_bias = torch.empty_like(bias_V)
        opened: list[Any] = [None if each is None else each() for each in ctx.open_gradients]
        grad_blocks = [
            torch.empty_like(block) if add is None else None for add, block in zip(opened, blocks, strict=True)
        ]
        for tile in _tiles(blocks, ctx.chunk):
            grad_MC = _logits(hidden_MD, blocks, bias_V, tile).sub_(lse_M1).exp_()
            inside_M1, place_M1 = tile.local(targets_M)
            grad_MC.scatter_add_(1, place_M1, -inside_M1.to(grad_MC.dtype))
            grad_MC.mul_(grad_M[:, None])
            grad_bias[tile.start : tile.start + tile.size] = grad_MC.sum(0)
            part_MC = grad_MC.to(hidden_MD.dtype)
            grad_block = grad_blocks[tile.block]
            if grad_block is None:
                opened[tile.block](tile.rows, part_MC.t() @ hidden_MD)
            else:
                torch.mm(part_MC.t(), hidden_MD, out=grad_block[tile.rows])
            grad_hidden += part_MC @ blocks[tile.block][tile.rows]
            del grad_MC, part_MC
        return grad_hidden.to(hidden_MD.dtype), grad_bias, None, None, None, None, *grad_blocks


def masked_softmax(
    hidden_MD: Tensor, blocks: Sequence[Tensor], bias_V: Tensor, targets_M: Tensor, uniforms_M: Tensor, chunk: int
) -> MaskedTokens:
    """Softmax over the vocabulary (`blocks` are the tied embedding's, V rows in all) at M positions, `chunk` ids at a
    time (rounded up to a multiple of 128).

    `targets_M` int64; `uniforms_M` float32 in [0, 1). Extra memory is little more than one float32 [M, `chunk`].
    """
    if len(hidden_MD) == 0:  # a row of padding alone; keeps the graph connected
        empty, nothing = targets_M.new_empty(0), sum(0 * each.sum() for each in (bias_V, *blocks))
        return MaskedTokens((hidden_MD.sum(1) + nothing).float(), empty, empty)
    chunk = -(-chunk // GROUP) * GROUP
    open_gradients = [getattr(block, "open_gradient", None) for block in blocks]
    return MaskedTokens(*_MaskedSoftmax.apply(hidden_MD, bias_V, targets_M, uniforms_M, chunk, open_gradients, *blocks))


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm, then the decoder tied to the embedding plus a bias; or this decoder alone
    (`model.masked_head`)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.chunk = cfg.head_chunk
        between = cfg.masked_head == "dense"
        self.dense = nn.Linear(cfg.width, cfg.width) if between else None
        self.norm = nn.LayerNorm(cfg.width, eps=cfg.norm_epsilon) if between else None
        self.bias = nn.Parameter(torch.empty(cfg.vocabulary))

    def forward(
        self,
        hidden_MD: Tensor,
        table: Callable[[], Sequence[Tensor]],
        targets_M: Tensor,
        uniforms_M: Tensor,
        ordinary: bool = False,
    ) -> MaskedTokens:
        """Loss, sample and prediction at the masked positions; `table` gives the blocks of the tied embedding.

        Given as they are, ZeRO-3 puts views in their places (0.19.8), for which it holds the whole table until the
        backward pass, and on one process with parameters on a disk they show by then whatever was read into the same
        buffer since. `ordinary`: the prediction is written into the text, so no special token; the loss then means
        nothing.
        """
        bias_V: Tensor = self.bias
        if ordinary:
            bias_V = bias_V.detach().clone()
            for never in (bias_V[: UNK + 1], bias_V[-1]):
                never.fill_(_NEVER)  # assigned, the number would be copied to a GPU, for which the host waits
        if self.dense is not None and self.norm is not None:
            hidden_MD = self.norm(F.gelu(self.dense(hidden_MD)))
        return masked_softmax(hidden_MD, table(), bias_V, targets_M, uniforms_M, self.chunk)


class ReplacedTokenHead(nn.Module):
    """Dense, GELU, linear to one logit a token: positive says the token was replaced."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(cfg.width, cfg.width)
        self.output = nn.Linear(cfg.width, 1)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Logits, [B, T]."""
        return self.output(F.gelu(self.dense(hidden_BTD))).squeeze(-1)
