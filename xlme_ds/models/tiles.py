"""How the Triton kernels cut their work: apart from them, for what plans with it where there is no Triton."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("tilings.json")

HEAD_SIZES = (16, 32, 64, 128)  # of the heads that attention's kernels know
GROUP = 128  # consecutive ids whose exponentials the vocabulary softmax sums, by any kernel

SKEWED = 128  # rows of attention's table of distances, the most that a tile has
SUMMED_ROWS = 8  # of a batch, whose gradient of the distances one program adds up


class Tiling(NamedTuple):
    """How a kernel of attention cuts queries and keys, and what the compiler is given for it."""

    queries: int
    keys: int
    warps: int
    stages: int


@functools.cache
def tiling(kernel: str, head_size: int, element: int, capability: str = "default") -> Tiling:
    """For heads of so many numbers of `element` bytes, on a GPU of a compute capability, as 9.0.

    The winners of `python -m bench.gpu --sections kernels` where it has run; elsewhere forms that spill next to nothing
    (tests/models/test_attention_kernels.py). `_backward_distances` takes squares.
    """
    if element == 4:  # multiplied without tensor cores: larger tiles overflow the registers
        return Tiling(32, 32, 4, 2)
    known, size = json.loads(TABLE.read_text(encoding="utf-8")), "64" if head_size <= 64 else "128"
    return Tiling(*(known.get(capability, {}).get(size) or known["default"][size])[kernel])
