"""Attention with the gated relative position bias on the CPU, where torch's fused kernel has no gradient for a bias.

The scores are computed one tile at a time. A tile is as large as fits in the cores' caches. It covers several whole
rows, one row, or some heads of one row. If every position sees its whole item, a tile may cover only one item of a row.
No scores or weights are saved for the backward pass, which computes the weights again (as FlashAttention does; Dao et
al. 2022, section 3.1).

B rows, H heads, T tokens, K head size. A tile has R rows, S tokens of each row, and N pairs of a row and a head.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_BYTES = 2**21  # bytes of a tile's scores for each thread
_TILE_COST = 60_000  # overhead of a tile, as the number of scores that a thread computes in the same time
_MASK_COST = 0.1  # time to mask a score / time to compute it

Items = Sequence[tuple[int, int, int]]  # (row, first token, one after the last token) of every item
_WHOLE_ROW = slice(None)
# (rows, heads, tokens) of a tile. The tokens are those of one item or of whole rows; the heads are all or some.
Tile = tuple[slice, slice, slice]


def items_of(segments_BT: Tensor) -> Items:
    """Every item and every run of padding, as (row, first token, one after the last token). Each item must be
    contiguous in its row."""
    tokens = segments_BT.shape[1]
    is_first_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0), value=True)
    starts = [*is_first_BT.flatten().nonzero().flatten().tolist(), is_first_BT.numel()]
    return [(start // tokens, start % tokens, start % tokens + end - start) for start, end in pairwise(starts)]


def item_mask(segments_BT: Tensor) -> Tensor:
    """Attention mask, bool [B, 1, T, T]: true if query and key are in the same item. Padding (segment 0) sees padding,
    so that every query has a key."""
    return (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]


class _Attend(torch.autograd.Function):
    """softmax(q kᵀ / sqrt(K) + gate · d) v, [B, H, T, K], over the keys that a query may see. Either `allowed_B1TT` is
    true for these keys, or it is None, and their number in `segments_BT` is the query's. The arguments are those of
    `_output`; q, k, v and gate must be contiguous."""

    @staticmethod
    def forward(ctx, *tensors):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*tensors)
        return (_output_operator if torch.compiler.is_compiling() else _output)(*tensors)

    @staticmethod
    def backward(ctx, grad_BHTK):  # type: ignore[no-untyped-def]
        tensors = ctx.saved_tensors
        gradients: Callable[..., list[Tensor]] = _gradients_operator if torch.compiler.is_compiling() else _gradients
        results = iter(gradients(grad_BHTK.contiguous(), *tensors))
        return *(None if tensor is None else next(results) for tensor in tensors[:-2]), None, None


attend = _Attend.apply


def _output(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor | None,
    position_bias_HTT: Tensor | None,
    allowed_B1TT: Tensor | None,
    segments_BT: Tensor | None,
) -> Tensor:
    """The output of `_Attend`. `position_bias_HTT` is d, added without a factor if the gate is None; if d is None,
    nothing is added to the scores."""
    tiles = _Tiles(q_BHTK, k_BHTK, gate_BHT1, position_bias_HTT, allowed_B1TT, segments_BT)
    out_BHTK = torch.empty_like(q_BHTK)
    for tile in tiles.all:
        torch.bmm(tiles.weights(tile), _flat(v_BHTK[tile]), out=_flat(out_BHTK[tile]))
    return out_BHTK


def _gradients(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor | None,
    position_bias_HTT: Tensor | None,
    allowed_B1TT: Tensor | None,
    segments_BT: Tensor | None,
) -> list[Tensor]:
    """Returns the gradients of q, k and v, then of the gate and of d if these are given. `grad_BHTK` is the gradient of
    the output."""
    tiles = _Tiles(q_BHTK, k_BHTK, gate_BHT1, position_bias_HTT, allowed_B1TT, segments_BT)
    grad_q, grad_k, grad_v = (torch.empty_like(q_BHTK) for _ in range(3))
    grad_gate = None if gate_BHT1 is None else torch.empty_like(gate_BHT1)
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)  # type of sums over all items
    grad_position_bias = None if position_bias_HTT is None else torch.zeros_like(position_bias_HTT, dtype=wide)
    scale = q_BHTK.shape[-1] ** -0.5
    for tile in tiles.all:
        weights = tiles.weights(tile)
        q, k, v, grad = (_flat(x[tile]) for x in (q_BHTK, k_BHTK, v_BHTK, grad_BHTK))
        torch.bmm(weights.mT, grad, out=_flat(grad_v[tile]))
        grad_weights = torch.bmm(grad, v.mT, out=tiles.scratch(tile))
        # A score's gradient has the weight as a factor, so it is 0 where a query may not see a key.
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        _scaled_product(_flat(grad_q[tile]), grad_scores, k, scale, beta=0)
        _scaled_product(_flat(grad_k[tile]), grad_scores.mT, q, scale, beta=0)
        if position_bias_HTT is None or grad_position_bias is None:
            continue
        grad_RHSS = grad_scores.view(*grad_q[tile].shape[:3], -1)
        if gate_BHT1 is not None and grad_gate is not None:
            scratch_RHSS = grad_weights.view_as(grad_RHSS)  # `grad_weights` is not needed any more
            torch.mul(grad_RHSS, _bias_part(position_bias_HTT, tile), out=scratch_RHSS)
            torch.sum(scratch_RHSS, -1, keepdim=True, out=grad_gate[tile])
            grad_RHSS = torch.mul(grad_RHSS, gate_BHT1[tile], out=scratch_RHSS)
        grad_bias_HSS = _bias_part(grad_position_bias, tile)
        for grad_HSS in grad_RHSS:
            grad_bias_HSS.add_(grad_HSS)
    if position_bias_HTT is not None and grad_position_bias is not None:
        grad_position_bias = grad_position_bias.to(position_bias_HTT.dtype)
    return [grad for grad in (grad_q, grad_k, grad_v, grad_gate, grad_position_bias) if grad is not None]


# torch.compile must not trace into the functions above: they loop over tiles, whose number depends on the items.
_output_operator = torch.library.custom_op("xlme_ds::attend_cpu", _output, mutates_args=())
_output_operator.register_fake(lambda q_BHTK, *others: torch.empty_like(q_BHTK))
_gradients_operator = torch.library.custom_op("xlme_ds::attend_cpu_backward", _gradients, mutates_args=())
_gradients_operator.register_fake(
    lambda grad_BHTK, *inputs: [torch.empty_like(tensor) for tensor in inputs[:5] if tensor is not None]
)


class _Tiles:
    """The tiles of a batch's scores (`all`), and the attention weights of each tile. The arguments are those of
    `_output` without v; `position_bias` is d."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        gate: Tensor | None,
        position_bias: Tensor | None,
        allowed: Tensor | None,
        segments: Tensor | None,
    ):
        self.q, self.k, self.gate, self.position_bias, self.allowed = q, k, gate, position_bias, allowed
        self.segments: Any = segments  # a tensor if `allowed` is None
        rows, heads, tokens, size = q.shape
        self.scale = size**-0.5
        capacity = TILE_BYTES * torch.get_num_threads() // q.element_size()  # largest number of scores in a tile
        separate_items, whole_rows = _items_and_rows(
            [] if segments is None else items_of(segments), rows, heads, tokens, capacity
        )
        self.all: list[Tile] = [
            (slice(row, row + 1), some_heads, slice(first, end))
            for row, first, end in separate_items
            for some_heads in _heads(heads, end - first, capacity)
        ]
        self.all += _row_tiles(whole_rows, heads, tokens, capacity)
        self._scratch = q.new_empty(max(self._numel(tile) for tile in self.all))

    def _numel(self, tile: Tile) -> int:
        """The number of scores of a tile."""
        rows, heads, tokens, _ = self.q[tile].shape
        return rows * heads * tokens**2

    def scratch(self, tile: Tile) -> Tensor:
        """Working memory [N, S, S], valid until the next call of `weights`."""
        tokens = self.q[tile].shape[2]
        return self._scratch[: self._numel(tile)].view(-1, tokens, tokens)

    def weights(self, tile: Tile) -> Tensor:
        """Attention weights of a tile, [N, S, S]."""
        scores = self.scratch(tile)
        # This view shares the memory of `scores`. The bias is written there first, then the scores are added to it.
        bias_RHSS = scores.view(*self.q[tile].shape[:3], -1)
        if self.position_bias is None:
            bias_RHSS.zero_()
        elif self.gate is None:
            bias_RHSS.copy_(_bias_part(self.position_bias, tile))
        else:
            torch.mul(self.gate[tile], _bias_part(self.position_bias, tile), out=bias_RHSS)
        if tile[2] == _WHOLE_ROW:  # whole rows, unlike a single item, need a mask
            allowed_R1SS = item_mask(self.segments[tile[0]]) if self.allowed is None else self.allowed[tile[0]]
            bias_RHSS.add_(self.q.new_zeros(()).where(allowed_R1SS, float("-inf")))
        return _scaled_product(scores, _flat(self.q[tile]), _flat(self.k[tile]).mT, self.scale).softmax(-1)


def _items_and_rows(items: Items, rows: int, heads: int, tokens: int, capacity: int) -> tuple[Items, list[int]]:
    """Returns (items that get tiles of their own, indices of rows that are computed whole), whichever is cheaper for a
    row. If `items` is empty, all rows are computed whole. Costs are measured in scores."""
    tile_cost = _TILE_COST * torch.get_num_threads()
    # The cost of a row that is computed whole: its scores with their mask, plus its share of a tile's overhead.
    row_cost = (1 + _MASK_COST) * heads * tokens**2 + tile_cost / max(1, capacity // (heads * tokens**2))
    separate_items: list[tuple[int, int, int]] = []
    for _, group in groupby(items, key=itemgetter(0)):
        row_items = list(group)
        if sum(tile_cost + heads * (end - first) ** 2 for _, first, end in row_items) < row_cost:
            separate_items += row_items
    return separate_items, sorted(set(range(rows)) - {row for row, _, _ in separate_items})


def _row_tiles(rows: Sequence[int], heads: int, tokens: int, capacity: int) -> Iterator[Tile]:
    """Yield tiles that cover `rows`. A tile has at most as many neighbouring rows as fit. If not even one row fits, a
    tile has some of a row's heads."""
    tile_rows = max(1, capacity // (heads * tokens**2))
    for some_heads in _heads(heads, tokens, capacity):
        for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
            run = [row for _, row in group]  # consecutive rows: row − index is constant
            for first in range(run[0], run[-1] + 1, tile_rows):
                yield slice(first, min(first + tile_rows, run[-1] + 1)), some_heads, _WHOLE_ROW


def _heads(heads: int, tokens: int, capacity: int) -> Iterator[slice]:
    """Slices of the heads, of one size except for the last. The scores of a slice's heads, `tokens`² for each head, fit
    into a tile. If those of one head do not fit, every slice has one head."""
    slices = -(-heads // max(1, capacity // tokens**2))
    size = -(-heads // slices)
    return (slice(head, head + size) for head in range(0, heads, size))


def _bias_part(table_HTT: Tensor, tile: Tile) -> Tensor:
    """A view of the part of the table `table_HTT` (by head, query and key) that a tile needs, [heads, S, S]. The table
    depends only on the distance of query and key, so its first S rows and columns serve an item anywhere in a row."""
    first, end, _ = tile[2].indices(table_HTT.shape[1])
    return table_HTT[tile[1], : end - first, : end - first]


def _scaled_product(out: Tensor, a: Tensor, b: Tensor, scale: float, beta: int = 1) -> Tensor:
    """out = beta · out + scale · a b, for every head."""
    return torch.baddbmm(out, a, b, beta=beta, alpha=scale, out=out)  # not baddbmm_, which torch's FLOP counter misses


def _flat(tile_RHSK: Tensor) -> Tensor:
    """A view [N, S, K] of a tile, with rows and heads in one dimension."""
    return tile_RHSK.view(-1, *tile_RHSK.shape[2:])
