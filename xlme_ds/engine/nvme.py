"""What DeepSpeed 0.19.8 reads back wrong from a disk, without a word, and what is done instead.

Its files are read by direct input, which fails where an address in memory is no multiple of 512 bytes, and nobody looks at what
became of a read: the buffer keeps what it held.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor


def _gather_alone(gather: Callable[[list[Any]], Any], parameters: Iterable[Any]) -> Any:
    """In place of gathering on one process, which on the CPU hands out the very buffer that a weight was read into.

    Once its module is released other weights are read into that, and a view that autograd keeps of the old ones shows the new ones.
    On several processes, and on a GPU, what is gathered has memory of its own.
    """
    parameters = list(parameters)
    handle = gather(parameters)
    for parameter in parameters:
        shared = parameter.data_ptr() == parameter.ds_tensor.data_ptr()
        if shared and parameter.ds_tensor.final_location == OffloadDeviceEnum.nvme:
            parameter.data = parameter.data.clone()
    return handle


partition_parameters._no_gather_coalesced = partial(_gather_alone, partition_parameters._no_gather_coalesced)


def align_gradients(optimizer: Any) -> None:
    """Have a ZeRO-3 optimizer whose state is on a disk read every gradient to where direct input can put it."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        swapper._adjust_for_misaligned_lengths = partial(_aligned, swapper)


def _aligned(swapper: Any, tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """In place of `_adjust_for_misaligned_lengths`: the parts of flat gradients that go to the disk, and the ends that stay.

    A gradient is read back to its place in its group; DeepSpeed sees to it that the length is a multiple, but not the place.
    """
    parts, starts = [], []
    for tensor, offset in zip(tensors, offsets, strict=True):
        cuts = [0, tensor.numel()]
        if swapper.is_swappable_tensor(tensor=tensor):
            first = -offset % swapper.numel_alignment
            cuts[1:1] = [first, first + (tensor.numel() - first) // swapper.numel_alignment * swapper.numel_alignment]
        for begin, end in pairwise(cuts):
            if begin < end:
                part = tensor[begin:end]
                parts.append(part.clone() if len(part) < swapper.numel_alignment else part)  # an end would keep all of it
                starts.append(offset + begin)
    return parts, starts
