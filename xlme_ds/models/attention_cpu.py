"""Attention with the gated relative position bias on the CPU, whose fused kernel of torch has no gradient for a bias.

A tile of scores at a time, as large as the cores' caches hold; between the passes nothing of that size is kept, the backward pass
computes the weights once more (as FlashAttention does; Dao et al. 2022, section 3.1).

B rows, H heads, T tokens, K head size, N heads of a tile, over one row or several.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_TILE = 2**21  # bytes of scores a thread


def attend(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    gate_BHT1: Tensor | None,
    distance_HTT: Tensor | None,
    allowed_B1TT: Tensor,
) -> Tensor:
    """softmax(q kᵀ / sqrt(K) + gate · d, where allowed) v, [B, H, T, K]; q, k, v and gate are contiguous."""
    out: Tensor = _Attend.apply(q_BHTK, k_BHTK, v_BHTK, gate_BHT1, distance_HTT, allowed_B1TT)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)
        return (_output_operator if torch.compiler.is_compiling() else _output)(*inputs)

    @staticmethod
    def backward(ctx, grad_BHTK):  # type: ignore[no-untyped-def]
        inputs = ctx.saved_tensors
        gradients = _gradients_operator if torch.compiler.is_compiling() else _gradients
        found = iter(gradients(grad_BHTK.contiguous(), *inputs))
        return *(None if given is None else next(found) for given in inputs[:-1]), None


def _output(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, distance_HTT: Tensor | None, allowed_B1TT: Tensor
) -> Tensor:
    tiles, out_BHTK = _Tiles(q_BHTK, k_BHTK, gate_BHT1, distance_HTT, allowed_B1TT), torch.empty_like(q_BHTK)
    for tile in tiles:
        torch.bmm(tiles.weights(tile), _flat(v_BHTK[tile]), out=_flat(out_BHTK[tile]))
    return out_BHTK


def _gradients(
    grad_BHTK: Tensor, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, gate_BHT1: Tensor | None, distance_HTT: Tensor | None,
    allowed_B1TT: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Of q, k, v, and of gate and d where they are; goes over the scores as seldom as can be, and while they are in the cache."""
    tiles = _Tiles(q_BHTK, k_BHTK, gate_BHT1, distance_HTT, allowed_B1TT)
    grad_q, grad_k, grad_v = (torch.empty_like(q_BHTK) for _ in range(3))
    grad_gate = None if gate_BHT1 is None else torch.empty_like(gate_BHT1)
    grad_distance = None if distance_HTT is None else torch.zeros_like(distance_HTT)
    scale = q_BHTK.shape[-1] ** -0.5
    for tile in tiles:
        weights, q, k, v, grad = (tiles.weights(tile), *(_flat(x[tile]) for x in (q_BHTK, k_BHTK, v_BHTK, grad_BHTK)))
        torch.bmm(weights.mT, grad, out=_flat(grad_v[tile]))
        product = torch.bmm(grad, v.mT, out=tiles.scratch(tile))
        # Where nothing may be seen the weight is 0, and so is this.
        of_scores = torch.ops.aten._softmax_backward_data(product, weights, -1, weights.dtype)
        _flat(grad_q[tile]).baddbmm_(of_scores, k, beta=0, alpha=scale)
        _flat(grad_k[tile]).baddbmm_(of_scores.mT, q, beta=0, alpha=scale)
        if distance_HTT is None or grad_distance is None:
            continue
        by_head, heads = of_scores.view(*grad_q[tile].shape[:3], -1), tile[1]
        if gate_BHT1 is None or grad_gate is None:
            grad_distance[heads].add_(by_head.sum(0))
            continue
        torch.sum(torch.mul(by_head, distance_HTT[heads], out=product.view_as(by_head)), -1, keepdim=True, out=grad_gate[tile])
        for of_row, gate in zip(by_head, gate_BHT1[tile], strict=True):
            grad_distance[heads].addcmul_(of_row, gate)
    return [found for found in (grad_q, grad_k, grad_v, grad_gate, grad_distance) if found is not None]


# torch.compile is not to look into them: loops over as many tiles as the row has.
_output_operator = torch.library.custom_op("xlme_ds::attend_cpu", _output, mutates_args=())
_gradients_operator = torch.library.custom_op("xlme_ds::attend_cpu_backward", _gradients, mutates_args=())
_output_operator.register_fake(lambda q_BHTK, *others: torch.empty_like(q_BHTK))
_gradients_operator.register_fake(
    lambda grad_BHTK, *inputs: [torch.empty_like(given) for given in inputs[:-1] if given is not None]
)


Tile = tuple[slice, slice]
"""Rows and heads: one row, or all heads of several."""


class _Tiles:
    """Which there are, and the weights of one."""

    def __init__(self, q: Tensor, k: Tensor, gate: Tensor | None, distance: Tensor | None, allowed: Tensor):
        self.q, self.k, self.gate, self.distance = q, k, gate, distance
        self.mask = q.new_zeros(()).where(allowed, float("-inf"))
        self.rows, self.heads, self.tokens, size = q.shape
        self.scale = size**-0.5
        room = max(1, _TILE * torch.get_num_threads() // (self.tokens**2 * q.element_size()))  # for heads
        self.rows_a_tile = min(max(1, room // self.heads), self.rows)
        tiles_a_row = -(-self.heads // room)
        self.heads_a_tile = -(-self.heads // tiles_a_row)
        self._scratch = q.new_empty(self.rows_a_tile * self.heads_a_tile, self.tokens, self.tokens)

    def __iter__(self) -> Iterator[Tile]:
        for head in range(0, self.heads, self.heads_a_tile):
            for row in range(0, self.rows, self.rows_a_tile):
                yield slice(row, row + self.rows_a_tile), slice(head, head + self.heads_a_tile)

    def scratch(self, tile: Tile) -> Tensor:
        """[N, T, T] to be written into, until the next call of `weights`."""
        rows, heads, *_ = self.q[tile].shape
        return self._scratch[: rows * heads]

    def weights(self, tile: Tile) -> Tensor:
        """What every query takes of every key, [N, T, T]."""
        scores, (rows, heads) = self.scratch(tile), tile
        by_head = scores.view(*self.q[tile].shape[:3], self.tokens)
        mask = self.mask[rows]
        if self.distance is None:
            by_head.copy_(mask)
        elif self.gate is None:
            torch.add(self.distance[heads], mask, out=by_head)
        else:
            torch.mul(self.gate[tile], self.distance[heads], out=by_head).add_(mask)
        scores.baddbmm_(_flat(self.q[tile]), _flat(self.k[tile]).mT, alpha=self.scale)
        return scores.softmax(-1)


def _flat(tile_RHTK: Tensor) -> Tensor:
    """Rows and heads of a tile as one, [N, T, K]; a view."""
    return tile_RHTK.view(-1, *tile_RHTK.shape[2:])
