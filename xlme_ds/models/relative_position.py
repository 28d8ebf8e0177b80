"""Gated relative position bias (XLM-E section 3.3).

B rows, H heads, T tokens, K head size, W = 2T−1 distances. For head query q_i (after the projection, before the
1/sqrt(K) scale):

    g_update, g_reset = sigmoid(q_i·u), sigmoid(q_i·v)
    r_{i-j} = d_{i-j} · [1 + g_update + (1 − g_update) · w · g_reset]

d is a learned table of (bucket, head), shared by the layers of one encoder; u, v are vectors and w a scalar a head, of
each layer.
"""

import functools

import torch
from torch import Tensor, nn


@functools.cache
def _borders(half: int, max_distance: int) -> tuple[int, ...]:
    """Smallest distance of every bucket of one sign but the first; in integers, so that no device rounds a border
    away."""
    exact = half // 2
    logarithmic = half - exact
    borders, size = list(range(1, exact + 1)), exact
    for step in range(1, logarithmic):  # size ≥ exact · (max_distance / exact)^(step / logarithmic)
        while size**logarithmic < exact ** (logarithmic - step) * max_distance**step:
            size += 1
        borders.append(size)
    return tuple(borders)


def bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets: half for each sign, half of those exact, the rest logarithmic up to `max_distance`.

    `distance` is j − i as integers of any shape; returns int64 bucket numbers of the same shape.
    """
    half = buckets // 2
    # Made on the GPU at once, they would let the host wait for all that is queued there.
    borders = torch.tensor(_borders(half, max_distance)).to(distance.device, non_blocking=True)
    return torch.bucketize(distance.abs(), borders, right=True) + half * (distance > 0).long()


class RelativePositionTable(nn.Module):
    """The learned d of one encoder: `buckets` × heads."""

    def __init__(self, heads: int, buckets: int, max_distance: int):
        super().__init__()
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def forward(self, tokens: int) -> Tensor:
        """d for the distances 1−T to T−1 of a row of T = `tokens` tokens, float32 (or wider) [H, W]."""
        # Only these exist; gathering from them in float32 keeps the gradient's long sums exact enough for bf16.
        distances = torch.arange(1 - tokens, tokens, device=self.weight.device)
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return weight[bucket(distances, self.weight.shape[0], self.max_distance)].t()


def spread(distance_HW: Tensor) -> Tensor:
    """[H, W] by distance j − i to [H, T, T] by query i and key j."""
    tokens = (distance_HW.shape[1] + 1) // 2
    position = torch.arange(tokens, device=distance_HW.device)
    return distance_HW[:, position[None, :] - position[:, None] + tokens - 1]


class Gate(nn.Module):
    """The gate of one layer: how strongly each query weighs the distance bias."""

    def __init__(self, heads: int, head_size: int):
        super().__init__()
        self.update = nn.Parameter(torch.empty(head_size))
        self.reset = nn.Parameter(torch.empty(head_size))
        self.scale = nn.Parameter(torch.empty(heads))

    def forward(self, q_BHTK: Tensor) -> Tensor:
        """The factor of d for every query, [B, H, T, 1]."""
        update = torch.sigmoid(q_BHTK @ self.update)
        reset = torch.sigmoid(q_BHTK @ self.reset)
        return (1 + update + (1 - update) * self.scale[:, None] * reset).unsqueeze(-1)
