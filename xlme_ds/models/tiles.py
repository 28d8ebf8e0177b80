"""How the Triton kernels cut their work: apart from them, for what plans with it where there is no Triton."""

from typing import NamedTuple

HEAD_SIZES = (16, 32, 64, 128)  # of the heads that attention's kernels know
GROUP = 128  # consecutive ids whose exponentials the vocabulary softmax sums, by any kernel


class Tiling(NamedTuple):
    """How attention cuts queries and keys, and what the compiler is given for it."""

    tile: int  # as many of both, so that a tile's positive distances are the next one's negative ones
    warps: int
    stages: int


def tiling(head_size: int, element: int) -> Tiling:
    """For heads of so many numbers of `element` bytes: eight warps are at work on a multiprocessor, and next to nothing
    spills (tests/models/test_attention_kernels.py)."""
    if element == 4:  # multiplied without tensor cores: larger tiles overflow the registers
        return Tiling(32, 4, 2)
    return Tiling(64, 4 if head_size <= 64 else 8, 2)
