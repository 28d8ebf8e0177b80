"""Tile sizes of the Triton kernels, in a file of their own, because the planner needs them where Triton is missing."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("tilings.json")

HEAD_SIZES = (16, 32, 64, 128)  # head sizes that the attention kernels support
GROUP = 128  # consecutive ids whose exponentials the vocabulary softmax sums, in any kernel

SKEWED = 128  # rows of attention's table of distances: the largest tile
SUMMED_ROWS = 8  # rows of a batch whose gradients of distances one program adds up


class Tiling(NamedTuple):
    """Tile size of an attention kernel in queries and keys, and its options for the compiler."""

    queries: int
    keys: int
    warps: int
    stages: int


@functools.cache
def tiling(kernel: str, head_size: int, element: int, capability: str = "default") -> Tiling:
    """The tiling of `kernel` for a head size and elements of `element` bytes, on a GPU of a compute capability, as 9.0.

    The winners of `python -m bench.gpu --sections kernels` where it has run; elsewhere forms that spill next to nothing
    (tests/models/test_attention_kernels.py). `_backward_distances` takes squares.
    """
    if element == 4:  # multiplied without tensor cores: larger tiles overflow the registers
        return Tiling(32, 32, 4, 2)
    tilings, size = json.loads(TABLE.read_text(encoding="utf-8")), "64" if head_size <= 64 else "128"
    return Tiling(*(tilings.get(capability, {}).get(size) or tilings["default"][size])[kernel])
