"""Counts the operations of a step on fake tensors: kernels, bytes, FLOPs, and the time that they take on a GPU.

A dispatch mode sees each call of an operator below autograd, with the shapes of all tensors. An operator counts as one
kernel that reads its inputs and writes its outputs once; the tables here list the exceptions. Its time is the largest
of bytes over the rate of memory, operations over the rate of their kind, and the floor of a launch, plus the gap to the
next kernel. The rates are those of the kernels of measured steps. Compiled layers run eagerly, and what lies between
their products counts with a share of its time.

The count cannot know whether another shape's kernels reach these rates, whether the host can launch as fast as the GPU
computes, and what other processes cost.
"""

import re
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Rates:
    """Rates that the kernels of a GPU reach, in operations and bytes a second, and times in seconds."""

    products: float  # of bf16 matrices
    triton: float  # of our kernels of the masked head
    forward: float  # of our attention kernels, for the products of the tiles that they compute
    backward: float
    attention: float  # of torch's memory-efficient attention with a bias
    single: float  # of float32 matrices
    memory: float
    floor: float
    gap: float  # from one kernel to the next
    hooks: float  # of the host, for each call of a module whose parameters ZeRO-3 gathers; the GPU computes meanwhile
    peak: float  # dense bf16 peak of the data sheet

    def scaled(self, peak: float, memory: float) -> "Rates":
        """The rates of a GPU that was not measured: the same shares of the operations and bytes of its data sheet."""
        scaled = ("products", "triton", "forward", "backward", "attention", "single")
        rates = {name: getattr(self, name) * peak / self.peak for name in scaled}
        return replace(self, **rates, memory=self.memory * memory / 4.8e12, peak=peak)


# Operations, or bytes, of the count over the time of their kernels in the profile of a step of Base on one H200, commit
# 104603e, and for attention in one of its present kernels (torch 2.11.0+cu130, docs/results/performance.md). torch's
# `attention` is fitted to the step with model.kernels torch, `hooks` to XL's under ZeRO-3, where a core of another
# machine took 1.2 ms.
_H200 = Rates(
    products=740e12, triton=490e12, forward=192e12, backward=242e12, attention=41e12, single=50e12,
    memory=4.0e12, floor=3e-6, gap=3e-6, hooks=1.13e-3, peak=989e12,
)  # fmt: skip
GPUS = {"h200": _H200, "h100": _H200.scaled(989e12, 3.35e12), "a100": _H200.scaled(312e12, 2.0e12)}
# The time of an operator there, over the time of its bytes at the rate of `memory`.
_TIMES = {
    "gelu": 1.3, "gelu_backward": 1.2, "native_layer_norm": 2.8, "native_layer_norm_backward": 5.4, "sum": 2.0,
    "add_": 1.6, "_to_copy": 1.2, "copy_": 1.2, "embedding_dense_backward": 3.3,
}  # fmt: skip
_COMPILED = 0.62  # time of inductor's kernels over that of the layers' eager operators between the products

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
# Operators that read as much of their first input as they write, or write as much as their other inputs hold.
_GATHERS = {"embedding", "index", "index_select", "gather"}
_SCATTERS = {"index_put_", "index_put", "index_add_", "scatter_add_", "index_copy_", "scatter_", "index_fill_"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_NONE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view", "detach",
    "_reshape_alias", "alias", "is_pinned", "_pin_memory", "split_with_sizes", "unbind", "record_stream",
}  # fmt: skip
# Kernels of operators that take several (torch 2.13, native/cuda).
_KERNELS = {
    "embedding_dense_backward": 8,  # a sort by id, then sums of equal ones
    "native_layer_norm_backward": 3, "cumsum": 2, "cummax": 2, "cummin": 2, "sort": 6,
    "index_put": 8, "index_put_": 8, "_unique2": 12, "unique_dim": 12, "nonzero": 4,
}  # fmt: skip
_WAITS = {"nonzero", "_unique2", "unique_dim", "masked_select", "bincount", "is_nonzero", "equal"}
TOTALS = ("kernels", "gigabytes", "tflops", "ms")
_IN_A_LIST = 50  # tensors that one kernel of a `_foreach_` operator takes


Formula = Callable[[Sequence[Any], Any], tuple[float, float, int, str]]
"""From arguments and outputs of an operator of ours to its FLOPs, bytes, kernels and the kind of its rate."""


class Counter(TorchDispatchMode):
    """Counts the operators that run inside, by module.

    An operation of the backward pass belongs to the module that ran when its autograd node was made; nodes are
    numbered.
    """

    def __init__(self, rates: Rates, formulas: dict[str, Formula], part: Callable[[str], str]):
        super().__init__()
        self.rates, self.formulas, self.part = rates, formulas, part
        self.parts: dict[str, dict[str, float]] = {}  # totals by part of the model
        self.waits: dict[str, int] = defaultdict(int)  # times that the host waits for the GPU, by reason
        self.calls = 0  # of modules
        self.phase = ""  # "" inside forward and backward passes
        self.counting = True
        self.compiled = False
        self.names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        self._nodes: list[tuple[int, str]] = []  # up to which number the nodes since the last one are a module's
        self._hooks: list[Any] = []

    def __enter__(self) -> "Counter":
        def begin(module: nn.Module, inputs: Any) -> None:
            self._mark()
            self.calls += self.counting
            self._running.append(self.names.get(module, ""))

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            self._mark()
            self._running.pop()

        self._hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def wait(self, reason: str) -> None:
        """Count that the host waited, by the line of our code or DeepSpeed's."""
        if not self.counting:
            return
        frames = [frame for frame in traceback.extract_stack() if re.search(r"/(xlme_ds|deepspeed)/", frame.filename)]
        place = "/".join(frames[-1].filename.split("/")[-2:]) + f":{frames[-1].lineno}" if frames else "?"
        self.waits[f"{self.phase or 'passes'}: {reason}, {place}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.wait("a number read")
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0  # no flag set
        if name == "_pin_memory":
            return args[0].clone()
        out = func(*args, **(kwargs or {}))
        if self.counting:
            self._count(name, func, args, kwargs or {}, out)
        return out

    def _count(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            return
        if name in _WAITS:
            self.wait(name)
        between = name in ("_to_copy", "copy_") and any(not tensor.is_cuda for tensor in (*inputs, *outputs))
        if between and not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))):
            self.wait("a copy between host and GPU")
        if func.is_view or name in _NONE or name.startswith(("prim::", "c10d::")):
            return
        if name in self.formulas:
            self.add(name, *self.formulas[name](args, out))
            return
        flops, kind = self.flops(func, name, args, kwargs, out)
        kernels = _KERNELS.get(name, 1)
        if name.startswith("_foreach") or name == "_fused_adamw_":
            kernels = max(1, len(args[0]) // _IN_A_LIST)
        self.add(name, flops, moved(name, func, args, kwargs, out), kernels, kind)

    def add(self, name: str, flops: float, size: float, kernels: int, kind: str) -> None:
        """Add an operation of the module that runs: `size` bytes, and FLOPs at the rate of their `kind`."""
        rates = self.rates
        seconds = max(_TIMES.get(name, 1.0) * size / rates.memory, flops / getattr(rates, kind), rates.floor * kernels)
        if self.compiled and not flops and self._in_layer():
            seconds *= _COMPILED
        part = self.phase or self.part(self.module())
        milliseconds = 1e3 * (seconds + rates.gap * kernels)
        totals = self.parts.setdefault(part, dict.fromkeys(TOTALS, 0))
        for key, value in zip(TOTALS, (kernels, size / 1e9, flops / 1e12, milliseconds), strict=True):
            totals[key] += value

    def _in_layer(self) -> bool:
        return not self.phase and re.search(r"\blayers\.\d+", self.module()) is not None

    def module(self) -> str:
        """The name of the module that runs, in a forward pass, a recomputed one, or a backward pass."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._running:
            place = bisect_right(self._nodes, node._sequence_nr(), key=lambda item: item[0])
            return self._nodes[place][1] if place < len(self._nodes) else ""
        return self._running[-1] if self._running else ""

    def _mark(self) -> None:
        self._nodes.append((torch.autograd._get_sequence_nr(), self._running[-1] if self._running else ""))

    def flops(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[float, str]:
        """FLOPs of an operator, and the kind of their rate."""
        counted = flop_registry.get(func._overloadpacket)
        if counted is None:
            return 0.0, "products"
        kwargs = {key: value for key, value in kwargs.items() if key not in ("out", "out_dtype")}
        if name in _PRODUCTS:
            args = [arg for arg in args if not isinstance(arg, torch.dtype)]
        kind = "attention" if name in _ATTENTION else "single" if args[-1].dtype == torch.float32 else "products"
        return float(counted(*args, **kwargs, out_val=out)), kind


def moved(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Bytes that an operator reads and writes."""
    inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
    written = [
        tensor
        for spec, value in [*zip(func._schema.arguments, args, strict=False)]
        + [(spec, kwargs[spec.name]) for spec in func._schema.arguments if spec.name in kwargs]
        if spec.alias_info is not None and spec.alias_info.is_write
        for tensor in _tensors(value)
    ]
    fresh = [tensor for tensor in outputs if not any(tensor is other for other in written)]
    wrote = sum(map(_bytes, fresh)) + sum(map(_bytes, written))
    if name in _GATHERS:
        return 2 * wrote + sum(map(_bytes, inputs[1:]))
    if name in _SCATTERS:
        whole = 2 * _bytes(inputs[0]) if not written else 0.0  # a copy is made first
        return whole + 3 * sum(map(_bytes, inputs[1:]))
    if name == "embedding_dense_backward":
        return 3 * _bytes(inputs[0]) + _bytes(outputs[0]) + 8 * _bytes(inputs[1])
    overwritten = written if name in _OVERWRITES or func._schema.overload_name == "out" else []
    read = sum(_bytes(tensor) for tensor in inputs if not any(tensor is other for other in overwritten))
    return (wrote + read) * (2 if name.startswith("cum") else 1)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _bytes(tensor: Tensor) -> float:
    """Bytes in memory: an expanded dimension counts once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= int(size) if stride else min(int(size), 1)
    return float(numbers * tensor.element_size())
