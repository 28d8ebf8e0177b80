"""DeepSpeed's engine with ZeRO 1, 2 or 3, and where its optimizers keep this rank's master weights and moments."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..objectives.protocol import BatchSource, Objective
from .bf16_gradients import spare_passes
from .deepspeed_compat import align_gradients, loading_extensions
from .engine import Engine
from .optimizer import build_optimizer
from .state import Bucket, Piece


class ZeroEngine(Engine):
    """DeepSpeed goes backward, reduces and updates; its averaging is undone here, in one place."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: BatchSource | None,
        optimizer: OptimizerConfig,
        ds_config: dict[str, Any],
        halved_gradients: bool = False,
    ):
        with loading_extensions():
            adam = build_optimizer(module, optimizer)
            engine, *_ = deepspeed.initialize(model=module, optimizer=adam, config=ds_config)
            spare_passes(engine, halved_gradients)
            align_gradients(engine.optimizer)
        super().__init__(engine, objective, loader, heldout, engine.device, engine.optimizer)
        self.engine = engine
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # DeepSpeed divides by the accumulation steps and averages over the ranks; our losses are terms of one sum.
        self._undo_averaging = self.world * engine.gradient_accumulation_steps()
        # Every kind of DeepSpeed's optimizers calls torch's, some of them for one buffer after the other.
        for inner in (engine.optimizer.optimizer, getattr(engine.optimizer, "backup_optimizer", None)):
            if inner is not None:
                inner.step = partial(self._guarded, inner.step)
        self._decided = False

    def _begin(self, norm_limit: float) -> None:
        super()._begin(norm_limit)
        self._decided = False

    def _guarded(self, take_step: Callable[[], None]) -> None:
        """In place of the step of torch's optimizer; DeepSpeed knows the norm by then, and skips most infinite ones
        itself."""
        if not self._decided:
            self._applied = self._accepts(float(self.optimizer._global_grad_norm))
            self._decided = True
        if self._applied:
            take_step()

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self._undo_averaging)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def _update(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def _reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def canonical_names(self) -> dict[str, str]:
        """The model's name of every parameter that this rank knows, by DeepSpeed's name for it."""
        return {name: name for name, _ in self.engine.module.named_parameters()}

    def _buckets(self) -> list[Bucket]:
        names = self.canonical_names()
        return buckets(self.optimizer, {p: names[name] for name, p in self.engine.module.named_parameters()})

    def _publish(self) -> None:
        publish(self.optimizer)

    def full_state(self) -> dict[str, Tensor]:
        """The whole model in float32 on the CPU of rank 0, by parameter name; empty on the other ranks."""
        state = {}
        for name, parameter in self.engine.module.named_parameters():
            whole = safe_get_full_fp32_param(parameter)  # collective
            if self.rank == 0:
                state[name] = whole.detach().float().cpu().clone()
        return state


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
        """The buffers by kind, read from the disk where they are there, and written back where `to_write`."""
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
