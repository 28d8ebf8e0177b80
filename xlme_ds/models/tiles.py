"""Tile sizes of the Triton kernels. They have a file of their own, because the planner needs them without Triton."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TILINGS_FILE = Path(__file__).with_name("tilings.json")

HEAD_SIZES = (16, 32, 64, 128)  # head sizes that the attention kernels support
GROUP_SIZE = 128  # number of consecutive ids over which all kernels of the vocabulary softmax sum exponentials

SKEWED_ROWS = 128  # number of rows in the table of `attention_triton.skew`, enough for the queries or keys of any tile
SUMMED_ROWS = 2  # number of a batch's rows over which one program of `_backward_distances` sums the gradient of d


class Tiling(NamedTuple):
    """The tile size of an attention kernel in queries and keys, and its compiler options."""

    queries: int
    keys: int
    warps: int
    stages: int


_run_tilings: Mapping[str, Any] = {}


def tilings() -> Mapping[str, Any]:
    """The tilings in use, by compute capability, head size and kernel. They are those that `use_tilings` has set, or
    else those of the file `TILINGS_FILE`."""
    return _run_tilings or json.loads(TILINGS_FILE.read_text(encoding="utf-8"))


def use_tilings(run_tilings: Mapping[str, Any]) -> None:
    """Use the tilings with which a run began, so that it continues bit for bit even if `TILINGS_FILE` has changed. If
    the mapping is empty, `TILINGS_FILE` is used."""
    global _run_tilings
    _run_tilings = run_tilings
    tiling_of.cache_clear()


@functools.cache
def tiling_of(kernel: str, head_size: int, element_bytes: int, capability: str = "default") -> Tiling:
    """The tiling of `kernel` for a head size and elements of `element_bytes` bytes, on a GPU with the compute
    capability `capability`, such as "9.0".

    If `python -m bench.gpu --sections kernels` has timed such a GPU, this is the fastest tiling that it found. For
    other GPUs it is one with hardly any register spills (tests/models/test_attention_kernels.py). The tiles of
    `_backward_distances` must be square.
    """
    if element_bytes == 4:  # float32 is multiplied without tensor cores, and larger tiles overflow the registers
        return Tiling(32, 32, 4, 2)
    table, size = tilings(), "64" if head_size <= 64 else "128"
    return Tiling(*(table.get(capability, {}).get(size) or table["default"][size])[kernel])
