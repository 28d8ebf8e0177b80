"""Where DeepSpeed's optimizers (0.19.8) keep the master weights and moments of this rank, stage by stage."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from .state import Bucket, Piece


class _SubGroup(Bucket):
    """A sub-group of ZeRO-3, perhaps on NVMe."""

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3, index: int, pieces: list[Piece]):
        partly = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"  # offloaded with a ratio below 1
        optimizer = zero.backup_optimizer if partly else zero.optimizer
        super().__init__(pieces, optimizer, zero.fp32_partitioned_groups_flat[index])
        self.zero = zero
        self.index = index

    @contextmanager
    def opened(self, to_write: bool) -> Iterator[dict[str, Tensor]]:
        """See `Bucket`."""
        swapped = self.zero._swappable_optimizer_subgroup(self.index)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(self.index)
        yield self._buffers()
        if to_write:
            self.zero._reassign_or_swap_out_partitioned_parameters(self.index)
        if swapped and to_write:
            self.zero._optimizer_states_and_gradient_swap_out(self.index)
        elif swapped:
            self.zero._release_swap_buffers(self.index)


def buckets(optimizer: Any, names: Mapping[nn.Parameter, str]) -> list[Bucket]:
    """The parts of the state that this rank owns under ZeRO 1, 2 or 3; `names`: the model's name of every parameter."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return [_SubGroup(optimizer, index, _sub_group_pieces(group, names))
                for index, group in enumerate(optimizer.fp16_groups)]  # fmt: skip
    if isinstance(optimizer, BF16_Optimizer):
        groups, masters = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    else:
        groups, masters = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    return [Bucket(_partition_pieces(group, names), optimizer.optimizer, master)
            for group, master in zip(groups, masters, strict=True)]  # fmt: skip


def publish(optimizer: Any) -> None:
    """After the master weights were written: every rank's weights to compute with; collective."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()
        optimizer.checkpoint_event_epilogue()  # gathers the small parameters that every rank keeps whole
    else:
        optimizer.update_lp_params()


def _partition_pieces(group: list[Any], names: Mapping[nn.Parameter, str]) -> list[Piece]:
    """ZeRO 1 and 2: a rank owns a stretch of all parameters laid end to end."""
    pieces = []
    for parameter in group:
        if parameter._hp_mapping is not None:
            mine, held = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            pieces.append(Piece(names[parameter], mine.start, mine.numel, held.start))
    return pieces


def _sub_group_pieces(group: list[Any], names: Mapping[nn.Parameter, str]) -> list[Piece]:
    """ZeRO-3: a rank owns an equal part of every parameter, the last ranks' padded at the end."""
    pieces, offset = [], 0
    for parameter in group:
        size = parameter.partition_numel()
        start = size * dist.get_rank(group=parameter.ds_process_group)
        numel = min(size, parameter.ds_numel - start)
        if numel > 0:
            pieces.append(Piece(names[parameter], start, numel, offset))
        offset += size
    return pieces
