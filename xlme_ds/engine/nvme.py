"""Gradients that DeepSpeed 0.19.8 reads back wrong from a disk, without a word.

Its files are read by direct input, which fails where the address in memory is no multiple of 512 bytes, and nobody
looks at what became of a read: the buffer keeps what it held. A gradient is read to its place in its group, which may
be any.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor


def align_gradients(optimizer: Any) -> None:
    """Have a ZeRO-3 optimizer whose state is on a disk read there only what lies at a multiple; others have nothing to
    mend."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        swapper._adjust_for_misaligned_lengths = partial(_aligned, swapper)


def _aligned(swapper: Any, tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """In place of `_adjust_for_misaligned_lengths`: flat gradients in parts, of which the short ends stay in memory.

    DeepSpeed cuts off what exceeds a multiple at the end alone.
    """
    parts, starts, multiple = [], [], swapper.numel_alignment
    for tensor, offset in zip(tensors, offsets, strict=True):
        cuts = [0, tensor.numel()]
        if swapper.is_swappable_tensor(tensor=tensor):
            first = -offset % multiple
            cuts[1:1] = [first, first + (tensor.numel() - first) // multiple * multiple]
        for begin, end in pairwise(cuts):
            if begin < end:
                part = tensor[begin:end]
                parts.append(part.clone() if len(part) < multiple else part)  # a view would keep all of the gradient
                starts.append(offset + begin)
    return parts, starts
