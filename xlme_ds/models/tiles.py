"""Tile sizes of the Triton kernels, in a file of their own, because the planner needs them where Triton is missing."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("tilings.json")

HEAD_SIZES = (16, 32, 64, 128)  # head sizes that the attention kernels support
GROUP = 128  # consecutive ids whose exponentials the vocabulary softmax sums, in any kernel

SKEWED = 128  # rows of attention's table of distances: the largest tile
SUMMED_ROWS = 2  # rows of a batch whose gradients of distances one program adds up


class Tiling(NamedTuple):
    """Tile size of an attention kernel in queries and keys, and its options for the compiler."""

    queries: int
    keys: int
    warps: int
    stages: int


_of_run: Mapping[str, Any] = {}


def tilings() -> Mapping[str, Any]:
    """The tilings in use, by compute capability, size of heads and kernel: a run's own, else those of `TABLE`."""
    return _of_run or json.loads(TABLE.read_text(encoding="utf-8"))


def use_tilings(of_run: Mapping[str, Any]) -> None:
    """Take the tilings that a run began with, so that it continues bit for bit after `TABLE` has changed; empty: those
    of `TABLE`."""
    global _of_run
    _of_run = of_run
    tiling.cache_clear()


@functools.cache
def tiling(kernel: str, head_size: int, element: int, capability: str = "default") -> Tiling:
    """The tiling of `kernel` for a head size and elements of `element` bytes, on a GPU of a compute capability, as 9.0.

    The winners of `python -m bench.gpu --sections kernels` where it has run; elsewhere forms that spill next to nothing
    (tests/models/test_attention_kernels.py). `_backward_distances` takes squares.
    """
    if element == 4:  # multiplied without tensor cores: larger tiles overflow the registers
        return Tiling(32, 32, 4, 2)
    table, size = tilings(), "64" if head_size <= 64 else "128"
    return Tiling(*(table.get(capability, {}).get(size) or table["default"][size])[kernel])
