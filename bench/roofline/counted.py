"""Counts the kernels, bytes and FLOPs of a step on fake tensors, and computes the time that they take on a GPU.

A dispatch mode sees each call of an operator below autograd, with the shapes of all tensors. An operator counts as one
kernel that reads its inputs and writes its outputs once; the tables here list the exceptions.

    time = max(slowdown · bytes / memory rate, FLOPs / FLOP rate, kernels · floor) + kernels · gap

The rates were measured in profiled training steps. torch.compile is not called. In layers that training would compile,
an operator without FLOPs takes `_COMPILED_SHARE` of its eager time; others, and our own operators, take all of it.

The count cannot know whether kernels reach these rates at other shapes, whether the host can launch as fast as the GPU
computes, and what other processes cost.
"""

import math
import re
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

# The FLOPs per second that kernels reach: counted FLOPs / measured time of the kernels, in a step of Base on one H200
# at commit 104603e (torch 2.11.0+cu130, docs/results/performance.md). The rates of our attention come from a later
# profile of its present kernels.
_FLOP_RATES = {
    "bf16_matmul": 740e12,
    "float32_matmul": 50e12,
    "masked_head": 490e12,  # our Triton kernels
    "attention_forward": 192e12,  # our Triton kernels; only the FLOPs of computed tiles count
    "attention_backward": 242e12,
    # torch's memory-efficient attention with a bias; fitted to a step of Base with model.kernels torch
    "torch_attention": 41e12,
}
_MEMORY_RATE = 4.0e12  # bytes per second, measured in the same way
_SHEET_BF16, _SHEET_MEMORY = 989e12, 4.8e12  # the H200's data sheet: dense bf16 peak, bandwidth
FLOOR, GAP = 3e-6, 3e-6  # seconds: of the shortest kernel, and from one kernel to the next
# Seconds of the host for a module's call under ZeRO-3; a step takes the longer of host and GPU time. Fitted to a step
# of XL.
ZERO3_CALL = 1.13e-3


def _rates(bf16: float, memory: float) -> dict[str, float]:
    """The rates of a GPU whose data sheet has the peaks `bf16` (FLOPs/s) and `memory` (bytes/s). FLOP rates are scaled
    by the ratio of the bf16 peaks, the memory rate by that of the memory peaks."""
    flops = {name: rate * bf16 / _SHEET_BF16 for name, rate in _FLOP_RATES.items()}
    return flops | {"memory": _MEMORY_RATE * memory / _SHEET_MEMORY, "sheet_bf16": bf16}


GPUS = {"h200": _rates(989e12, 4.8e12), "h100": _rates(989e12, 3.35e12), "a100": _rates(312e12, 2.0e12)}
# Measured time / (bytes / memory rate): by this factor an operator is slower than its memory traffic alone.
_SLOWDOWN = {
    "gelu": 1.3, "gelu_backward": 1.2, "native_layer_norm": 2.8, "native_layer_norm_backward": 5.4, "sum": 2.0,
    "xlme_ds::gelu": 1.3, "xlme_ds::gelu_backward": 1.2, "add_": 1.6, "_to_copy": 1.2, "copy_": 1.2,
    "embedding_dense_backward": 3.3,
}  # fmt: skip
_COMPILED_SHARE = 0.62  # time of inductor's kernels / time of the eager operators that they replace

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
# Gathers read only as many bytes of their first input as they write.
_GATHERS = {"embedding", "index", "index_select", "gather"}
# Scatters read and write only as many bytes of their first input as their other inputs hold.
_SCATTERS = {"index_put_", "index_put", "index_add_", "scatter_add_", "index_copy_", "scatter_", "index_fill_"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view", "detach",
    "_reshape_alias", "alias", "is_pinned", "_pin_memory", "split_with_sizes", "unbind", "record_stream",
}  # fmt: skip
# Number of kernels that an operator launches, if more than one (torch 2.13, native/cuda).
_KERNELS = {
    "embedding_dense_backward": 8,  # a sort by id, then sums over equal ids
    "native_layer_norm_backward": 3, "cumsum": 2, "cummax": 2, "cummin": 2, "sort": 6,
    "index_put": 8, "index_put_": 8, "_unique2": 12, "unique_dim": 12, "nonzero": 4,
}  # fmt: skip
# Operators that make the host wait for the GPU: it needs the shape or value of their output, which the GPU computes.
_WAITS = {"nonzero", "_unique2", "unique_dim", "masked_select", "bincount", "is_nonzero", "equal"}
TOTALS = ("kernels", "gigabytes", "tflops", "ms")
_TENSORS_PER_KERNEL = 50  # tensors that one kernel of a `_foreach_` operator processes

Formula = Callable[[Sequence[Any], Any], tuple[float, float, int, str]]
"""(arguments, output) of one of our own operators → (FLOPs, bytes, kernels, name of the FLOP rate in `GPUS`)."""


class OperationCounter(TorchDispatchMode):
    """A context manager that counts the operators that run in it, by part of the model.

    An operation of the backward pass belongs to the module that was running when its autograd node was made. The node's
    sequence number tells which module that was.
    """

    def __init__(self, rates: dict[str, float], formulas: dict[str, Formula], part_of: Callable[[str], str]):
        super().__init__()
        self.rates, self.formulas, self.part_of = rates, formulas, part_of
        self.parts: dict[str, dict[str, float]] = {}  # part of the model, or `phase` if not empty -> its `TOTALS`
        self.waits: dict[str, int] = defaultdict(int)  # phase, reason and line -> how often the host waits for the GPU
        self.module_calls = 0
        self.phase = ""  # phase of the step; "" inside forward and backward passes
        self.counting = True
        self.compiled = False
        self.names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        # (n, module) in ascending order of n: the module made the autograd nodes from the previous n to n - 1.
        self._nodes: list[tuple[int, str]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "OperationCounter":
        def begin(module: nn.Module, inputs: Any) -> None:
            self._mark()
            self.module_calls += self.counting
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

    def in_phase(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call `method`, whose operators are counted as the phase `name`."""
        self.phase = name
        try:
            return method(*arguments)
        finally:
            self.phase = ""

    def wait(self, reason: str) -> None:
        """Count one wait of the host for the GPU, at the innermost line of xlme_ds or DeepSpeed on the stack."""
        if not self.counting:
            return
        frames = [frame for frame in traceback.extract_stack() if re.search(r"/(xlme_ds|deepspeed)/", frame.filename)]
        line = "/".join(frames[-1].filename.split("/")[-2:]) + f":{frames[-1].lineno}" if frames else "?"
        self.waits[f"{self.phase or 'passes'}: {reason}, {line}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.wait("a number read")
            if args[0].dtype == torch.bool:  # a fake tensor has no value: a bool is read as False, a number as 0
                return False
            return 0.0 if args[0].is_floating_point() else 0
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
        between_devices = not all(tensor.is_cuda for tensor in (*inputs, *outputs))
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        if name in ("_to_copy", "copy_") and between_devices and not non_blocking:
            self.wait("a copy between host and GPU")
        if func.is_view or name in _NO_KERNEL or name.startswith(("prim::", "c10d::")):
            return
        if name in self.formulas:
            self.add(name, *self.formulas[name](args, out))
            return
        flops, rate = self.flops(func, name, args, kwargs, out)
        kernels = _KERNELS.get(name, 1)
        if name.startswith("_foreach") or name == "_fused_adamw_":
            kernels = max(1, len(args[0]) // _TENSORS_PER_KERNEL)
        self.add(name, flops, bytes_moved(name, func, args, kwargs, out), kernels, rate)

    def add(self, name: str, flops: float, size: float, kernels: int, rate: str) -> None:
        """Add an operator to the totals of the phase, or else of the running module's part of the model. The operator
        moves `size` bytes; `rate` names the rate of its FLOPs in `GPUS`."""
        traffic, compute = _SLOWDOWN.get(name, 1.0) * size / self.rates["memory"], flops / self.rates[rate]
        seconds = max(traffic, compute, FLOOR * kernels)
        may_be_compiled = self.compiled and not flops and not self.phase and not name.startswith("xlme_ds::")
        if may_be_compiled and re.search(r"\blayers\.\d+", self.module()):
            seconds *= _COMPILED_SHARE
        milliseconds = 1e3 * (seconds + GAP * kernels)
        totals = self.parts.setdefault(self.phase or self.part_of(self.module()), dict.fromkeys(TOTALS, 0))
        for key, value in zip(TOTALS, (kernels, size / 1e9, flops / 1e12, milliseconds), strict=True):
            totals[key] += value

    def module(self) -> str:
        """The name of the module that runs, in a forward pass, a recomputed forward pass, or a backward pass."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._running:
            index = bisect_right(self._nodes, node._sequence_nr(), key=lambda entry: entry[0])
            return self._nodes[index][1] if index < len(self._nodes) else ""
        return self._running[-1] if self._running else ""

    def _mark(self) -> None:
        """Record which module made the autograd nodes since the last call."""
        self._nodes.append((torch.autograd._get_sequence_nr(), self._running[-1] if self._running else ""))

    def flops(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[float, str]:
        """FLOPs of an operator, and the name of their rate in `GPUS`."""
        counted = flop_registry.get(func._overloadpacket)
        if counted is None:
            return 0.0, "bf16_matmul"
        kwargs = {key: value for key, value in kwargs.items() if key not in ("out", "out_dtype")}
        if name in _PRODUCTS:
            args = [arg for arg in args if not isinstance(arg, torch.dtype)]
        flops = float(counted(*args, **kwargs, out_val=out))
        if name in _ATTENTION:
            return flops, "torch_attention"
        return flops, "float32_matmul" if args[-1].dtype == torch.float32 else "bf16_matmul"


def bytes_moved(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Bytes that an operator reads and writes."""
    schema = func._schema.arguments
    values = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    changed = [argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
    written = [tensor for name_of_argument in changed for tensor in _tensors(values.get(name_of_argument))]
    inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
    new = [tensor for tensor in outputs if not any(tensor is other for other in written)]
    write_bytes = sum(map(_bytes, new)) + sum(map(_bytes, written))
    if name in _GATHERS:
        return 2 * write_bytes + sum(map(_bytes, inputs[1:]))
    if name in _SCATTERS:
        copy_bytes = 0.0 if written else 2 * _bytes(inputs[0])  # an out-of-place operator copies its input first
        return copy_bytes + 3 * sum(map(_bytes, inputs[1:]))
    if name == "embedding_dense_backward":
        return 3 * _bytes(inputs[0]) + _bytes(outputs[0]) + 8 * _bytes(inputs[1])
    overwritten = written if name in _OVERWRITES or func._schema.overload_name == "out" else []
    read = [tensor for tensor in inputs if not any(tensor is other for other in overwritten)]
    return (write_bytes + sum(map(_bytes, read))) * (2 if name.startswith("cum") else 1)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _bytes(tensor: Tensor) -> float:
    """Bytes in memory; an expanded dimension counts as size 1."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return float(
        tensor.element_size() * math.prod(int(size) if stride else min(int(size), 1) for size, stride in sizes)
    )
