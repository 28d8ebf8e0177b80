"""DeepSpeed's engine with ZeRO 1, 2 or 3."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..data.source import BatchSource
from ..models.layers import TransformerLayer
from ..objectives.protocol import Objective
from .bf16_gradients import spare_passes
from .engine import Engine
from .extensions import loading_extensions
from .nvme import align_gradients
from .optimizer import applied_rate, build_optimizer, set_learning_rate
from .partitions import buckets, publish
from .state import Bucket


class ZeroEngine(Engine):
    """See `Engine`."""

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
        super().__init__(engine, objective, loader, heldout, engine.device)
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
            self._applied = self._accepts(float(self.engine.optimizer._global_grad_norm))
            self._decided = True
        if self._applied:
            take_step()

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self._undo_averaging)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def _update(self, learning_rate: float) -> float:
        set_learning_rate(self.engine.optimizer, learning_rate)
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def _rate(self) -> float:
        return applied_rate(self.engine.optimizer)

    def _reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def canonical_names(self) -> dict[str, str]:
        """The model's name of every parameter that this rank knows, by DeepSpeed's name for it."""
        return {name: name for name, _ in self.engine.module.named_parameters()}

    def _buckets(self) -> list[Bucket]:
        names = self.canonical_names()
        return buckets(self.engine.optimizer, {p: names[name] for name, p in self.engine.module.named_parameters()})

    def _publish(self) -> None:
        publish(self.engine.optimizer)

    def full_state(self) -> dict[str, Tensor]:
        """See `Engine`."""
        state = {}
        for name, parameter in self.engine.module.named_parameters():
            whole = safe_get_full_fp32_param(parameter)  # collective
            if self.rank == 0:
                state[name] = whole.detach().float().cpu().clone()
        return state


@contextlib.contextmanager
def whole_parameter(parameter: nn.Parameter):  # type: ignore[no-untyped-def]
    """Hold one parameter whole on every rank, and keep what was written into it."""
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


def gather_layers_whole(model: nn.Module) -> None:
    """Have ZeRO-3 gather and release a layer's parameters together, outside of the code that is compiled for it."""
    set_z3_leaf_modules(model, [TransformerLayer])


def partitioned_construction(ds_config: dict[str, Any]):  # type: ignore[no-untyped-def]
    """Context in which modules are built in parts, so that no rank ever holds the whole model (ZeRO-3)."""
    # The data type comes from the configuration: given as an argument, DeepSpeed 0.19.8 ignores it on the CPU.
    return deepspeed.zero.Init(config_dict_or_path=ds_config)
