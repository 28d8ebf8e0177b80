"""DeepSpeed's engine with ZeRO 1, 2 or 3, and where DeepSpeed's optimizers keep this rank's master weights and
moments."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..data.loader import Loader
from ..objectives.protocol import BatchSource, Objective
from .bf16_gradients import reduce_in_buffers, split_param_groups
from .deepspeed_compat import align_gradients, loading_extensions
from .engine import Engine
from .optimizer import build_optimizer
from .ranks import on_gpu
from .state_shards import Piece, StateShard
from .step import StepContext

# Each parameter begins at a multiple of this number of elements in DeepSpeed's flat buffers: 128 bytes of bf16.
_ALIGNMENT = 64


class ZeroEngine(Engine):
    """An engine in which DeepSpeed runs the backward pass, the reduction of gradients and the update.

    DeepSpeed averages gradients over ranks and micro-batches. Here a step's loss is the sum of the losses of all ranks
    and micro-batches, so `_backward` undoes the averaging.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: Loader | None,
        optimizer: OptimizerConfig,
        ds_config: dict[str, Any],
        bf16_gradients: bool = False,
    ):
        with loading_extensions():
            adam = build_optimizer(module, optimizer, objective)
            zero_settings = ds_config["zero_optimization"]
            stage, in_bf16 = zero_settings["stage"], ds_config["bf16"]["enabled"]
            world = dist.get_world_size()
            replicas = module.topology().get_dim("data") if isinstance(module, PipelineModule) else world
            # DeepSpeed chooses its BF16_Optimizer for these settings.
            uses_bf16_optimizer = stage == 1 and in_bf16 and "offload_optimizer" not in zero_settings
            if uses_bf16_optimizer and world > 1 and not isinstance(module, PipelineModule):
                split_param_groups(adam, module, zero_settings.get("reduce_bucket_size", 5e8))
            _add_fillers(module, adam, replicas, stage)
            with torch.no_grad():  # else DeepSpeed's flat buffers keep the parameters, and so the engine, for ever
                engine, *_ = deepspeed.initialize(model=module, optimizer=adam, config=ds_config)
            del module.fillers  # so that the module has the parameters of the model only
            reduce_in_buffers(engine, bf16_gradients)
            align_gradients(engine.optimizer)
        super().__init__(engine, objective, loader, heldout, engine.device, engine.optimizer)
        self.engine = engine
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._cpu_group = dist.new_group(backend="gloo") if on_gpu() else None  # for sums that do not wait for the GPU
        # DeepSpeed divides gradients by the numbers of ranks and accumulation steps, so the loss is multiplied by both.
        self._loss_factor = engine.dp_world_size * engine.gradient_accumulation_steps()
        self._context: StepContext | None = None  # the context of the step that is being taken
        self._norm = 0.0  # the last global gradient norm that `_step_if_accepted` has read
        # All of DeepSpeed's optimizers call `step` of torch's optimizer, some of them once for each buffer.
        inner = engine.optimizer.optimizer
        inner.step = partial(self._step_if_accepted, inner.step)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank has, by their names in the whole model."""
        return self.engine.module.named_parameters()

    def _step_if_accepted(self, take_step: Callable[[], None]) -> None:
        """Replaces `step` of torch's optimizer (`take_step`). DeepSpeed calls this function once it has computed the
        norm, but not if it skips the step itself, as it does for most norms that are not finite."""
        context = self._context
        assert context is not None
        if context.applied is None:
            self._norm = float(self.optimizer._global_grad_norm)
            context.applied = self._accepts(context, self._norm)
        if context.applied:
            take_step()

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self._loss_factor)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # DeepSpeed counts the micro-batches in `step`; `_update` calls it for the last one

    def _update(self, context: StepContext) -> float:
        self._context = context
        self.engine.step()
        return self._gradient_norm(context)

    def _gradient_norm(self, context: StepContext) -> float:
        """The norm of the step's gradients. If DeepSpeed skipped the step, `_step_if_accepted` has read no norm, and
        the norm is read from DeepSpeed. At other times this would wait for the update on the GPU."""
        skipped_by_deepspeed = context.applied is None
        return float(self.engine.get_global_grad_norm()) if skipped_by_deepspeed else self._norm

    def _all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=None if values.is_cuda else self._cpu_group)
        return values

    def _state_shards(self) -> list[StateShard]:
        names = {p: name for name, p in self.named_parameters()}
        zero = self.optimizer
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            return [
                _SubGroupShard(zero, index, _sub_group_pieces(group, names))
                for index, group in enumerate(zero.fp16_groups)
            ]
        if isinstance(zero, BF16_Optimizer):
            groups, masters = zero.bf16_groups, zero.fp32_groups_flat_partition
        else:
            groups, masters = zero.bit16_groups, zero.single_partition_of_fp32_groups
        return [
            StateShard(_partition_pieces(group, names), zero.optimizer, master)
            for group, master in zip(groups, masters, strict=True)
        ]

    def _sync_module_weights(self) -> None:
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer_Stage3):
            self.optimizer.checkpoint_event_prologue()  # frees gathered copies of the old weights
            self.optimizer.checkpoint_event_epilogue()  # gathers the small parameters that every rank keeps whole
        else:
            self.optimizer.update_lp_params()

    def full_state(self) -> dict[str, Tensor]:
        """As `Engine.full_state`, but in a pipeline the first process of each stage returns the stage's parameters."""
        state = {}
        for name, parameter in self.named_parameters():
            whole = safe_get_full_fp32_param(parameter)  # collective
            if self.rank % self.engine.dp_world_size == 0:
                state[name] = whole.detach().float().cpu().clone()
        return state

    def close(self) -> None:
        """As `Engine.close`: remove the gradient hooks, which hold the engine and are held by torch."""
        self.engine.destroy()


def _add_fillers(module: nn.Module, optimizer: torch.optim.Optimizer, replicas: int, zero_stage: int) -> None:
    """Add fillers, parameters of zeros, to the optimizer's groups, so that each real parameter is aligned in the
    buffers of `deepspeed.initialize`. DeepSpeed converts only parameters of `module`, so the fillers are also put into
    `module.fillers`, which must be removed afterwards.

    DeepSpeed lays the parameters of an optimizer group end to end, so a parameter of odd size (a gate's scale, a head's
    single bias) shifts all later ones to addresses that are no multiples of 16 bytes. For such addresses cuBLAS and
    layer norm choose kernels without vector loads: a step of Base took 1.2 times as long on an H200
    (docs/results/performance.md).

    Fillers get no gradient. Under ZeRO 1 and 2 each of the `replicas` owns an equal part of a group, so the group's
    size is made a multiple of `replicas` · _ALIGNMENT. ZeRO-3 on several ranks needs no fillers, because it gathers
    every parameter into memory of its own, which is aligned.
    """
    module.fillers = fillers = nn.ParameterList()
    if zero_stage == 3 and replicas > 1:
        return
    for group in optimizer.param_groups:
        parameters, size = group["params"], 0
        group["params"] = padded = []
        for parameter in parameters:
            padded.append(parameter)
            size += getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 empties the parameter's own tensor
            gap = -size % (_ALIGNMENT * replicas if parameter is parameters[-1] else _ALIGNMENT)
            if gap:
                fillers.append(nn.Parameter(torch.zeros(gap, dtype=parameter.dtype, device=parameter.device)))
                padded.append(fillers[-1])
                size += gap


class _SubGroupShard(StateShard):
    """The buffers of one sub-group of ZeRO-3, which may be on NVMe."""

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3, index: int, pieces: Iterable[Piece]):
        super().__init__(pieces, zero.optimizer, zero.fp32_partitioned_groups_flat[index])
        self.zero = zero
        self.index = index

    @contextmanager
    def opened(self, to_write: bool) -> Iterator[dict[str, Tensor]]:
        """As `StateShard.opened`. Buffers that are on a disk are read from it, and written back if `to_write`."""
        swapped = self.zero._swappable_optimizer_subgroup(self.index)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(self.index)
        with super().opened(to_write) as buffers:
            yield buffers
        if to_write:
            self.zero._reassign_or_swap_out_partitioned_parameters(self.index)
        if swapped and to_write:
            self.zero._optimizer_states_and_gradient_swap_out(self.index)
        elif swapped:
            self.zero._release_swap_buffers(self.index)


def _partition_pieces(group: list[Any], names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    """This rank's pieces of a group with ZeRO 1 and 2. The group's parameters are joined into one flat tensor, and the
    rank owns one range of the elements."""
    for parameter in group:
        if parameter in names and parameter._hp_mapping is not None:  # no filler, and in the rank's range
            in_parameter = parameter._hp_mapping.lp_fragment_address  # lp: low precision, the module's weights
            in_buffer = parameter._hp_mapping.hp_fragment_address  # hp: high precision, the master weights
            yield Piece(names[parameter], in_parameter.start, in_parameter.numel, in_buffer.start)


def _sub_group_pieces(group: list[Any], names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    """This rank's pieces of a sub-group with ZeRO-3: each rank owns an equal part of every parameter. The last parts
    are padded, so a piece may be shorter than its part, or missing."""
    offset = 0
    for parameter in group:
        size = parameter.partition_numel()
        start = size * dist.get_rank(group=parameter.ds_process_group)
        numel = min(size, parameter.ds_numel - start)
        if parameter in names and numel > 0:
            yield Piece(names[parameter], start, numel, offset)
        offset += size
