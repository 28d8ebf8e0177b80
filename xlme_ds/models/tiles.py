"""Tile sizes of the Triton kernels; a separate file, because the planner needs them without Triton."""

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


_run_tilings: Mapping[str, Any] = {}


def tilings() -> Mapping[str, Any]:
    """The tilings in use, by compute capability, size of heads and kernel: a run's own, else those of `TABLE`."""
    return _run_tilings or json.loads(TABLE.read_text(encoding="utf-8"))


def use_tilings(run_tilings: Mapping[str, Any]) -> None:
    """Use the tilings with which a run began, so that it continues bit for bit even if `TABLE` has changed; empty: use
    those of `TABLE`."""
    global _run_tilings
    _run_tilings = run_tilings
    tiling.cache_clear()


@functools.cache
def tiling(kernel: str, head_size: int, element: int, capability: str = "default") -> Tiling:
    """The tiling of `kernel` for a head size and elements of `element` bytes, on a GPU with a compute capability
    such as 9.0.

    It is the fastest in `python -m bench.gpu --sections kernels`, if that has run on such a GPU; else one with hardly
    any register spills (tests/models/test_attention_kernels.py). `_backward_distances` needs square tiles.
    """
    if element == 4:  # multiplied without tensor cores: larger tiles overflow the registers
        return Tiling(32, 32, 4, 2)
    table, size = tilings(), "64" if head_size <= 64 else "128"
    return Tiling(*(table.get(capability, {}).get(size) or table["default"][size])[kernel])
