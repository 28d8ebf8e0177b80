"""Count the kernels, bytes and operations of a training step, and compute the least time that they take. No GPU is
needed, because the real engine runs on fake tensors.

    xlme bench roofline --recipe NAME [--gpu h200] [--gpus 1] [--json] [--section.key value ...]

The count is of one of `--gpus` DeepSpeed processes, with `data.micro_batch` synthetic rows of each task in a
micro-batch. `bench/roofline/counted.py` describes the count and its limits. The bench needs g++ if torch is a build for
the CPU, and the package triton for the Triton kernels.
"""

import bench.roofline.fake_cuda  # isort: skip  # before torch

import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

os.environ |= {"DS_ACCELERATOR": "cpu"} | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.measure import Figures, markdown, one_sentence, printed
from bench.roofline.counted import GPUS, TOTALS, ZERO3_CALL, Formula, OperationCounter
from bench.synthetic import SyntheticSource
from xlme_ds.cli import parse
from xlme_ds.config import ModelConfig, RunConfig
from xlme_ds.counting import flops_per_step
from xlme_ds.engine.build import build_data_parallel_engine
from xlme_ds.models.attention import item_bounds
from xlme_ds.models.tiles import GROUP_SIZE, tiling_of
from xlme_ds.objectives import objective_of
from xlme_ds.validate import validate


@dataclass(frozen=True)
class Settings:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    gpu: Literal["h200", "h100", "a100"] = "h200"
    """GPU whose rates are used."""
    gpus: int = 1
    """Number of processes of the run; one process is counted, without its communication."""
    micro_batches: int = 1
    """Number of micro-batches of a process in a step."""
    json: bool = False
    """Print the figures as JSON."""


class _EfficientAttention(TorchFunctionMode):
    """Calls the attention kernel that torch chooses on a GPU if the bias needs a gradient."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_efficient_attention(*args[:3], kwargs.get("attn_mask"), True)[0]
        return func(*args, **kwargs)


def _unchanged(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """Replaces `nn.Module._apply`, which cannot replace fake parameters. The parameters already have the type and
    device that `convert` would give them."""
    for parameter in module.parameters():
        assert convert(parameter) is parameter
    return module


def _fill(model: nn.Module, whole: Any) -> None:
    """Create the weights on the fake GPU in bf16. Under ZeRO-3 (`whole` is not None) DeepSpeed has created them
    already."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and whole is None:
                values = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
                module._parameters[name] = nn.Parameter(values)


def _part(module: str) -> str:
    """The name of the table's row in which the operators of `module` are counted."""
    match = re.match(r"(generator|discriminator|encoder)\b(\.layers\.\d+\.(attention|up|down)\b)?", module)
    if match is None:
        return module.split(".")[0].replace("_", " ") or "tables, losses, sums of gradients"
    sublayer = {"attention": "attention", "up": "feed-forward", "down": "feed-forward"}.get(match[3] or "", "rest")
    if re.fullmatch(r"\w+\.layers\.\d+", module):  # operators of the layer itself, outside its submodules
        sublayer = "layers"
    return f"{match[1]}: {sublayer}"


def _attention(share: Callable[[int], float], backward: bool, args: Any, out: Any) -> tuple[float, float, int, str]:
    """The cost of attention in the layer that runs. `share(distance)` is the fraction of all (query, key) pairs that
    lie in computed tiles at most `distance` tiles from the diagonal.

    The forward pass has two matrix products. The backward pass has seven, in two kernels that both read q, k, v and the
    output's gradient. With a bias, a third kernel computes the gradient of the bias near the diagonal (`near_tiles`),
    with two more products. This kernel runs at half the rate of the others, so its two products count as four.
    """
    rows, tokens, _, heads, head_size = args[0].shape
    product_flops = 2.0 * rows * heads * tokens**2 * head_size
    tensor_bytes = 2.0 * rows * tokens * heads * head_size  # bytes of q, k, v or the output, in bf16
    if not backward:
        return 2 * product_flops * share(tokens), 4 * tensor_bytes, 1, "attention_forward"
    moved = 16 * tensor_bytes + 4.0 * sum(tensor.numel() for tensor in out[1:])
    bias_kernels = 0 if args[4] is None else 1
    flops = product_flops * (7 * share(tokens) + 4 * bias_kernels * share(args[-1]))
    return flops, moved, 3 + bias_kernels, "attention_backward"


def _head_product(args: Any, out: Any) -> tuple[float, float, int, str]:
    """The cost of multiplying the hidden states by blocks of the embedding table, with one kernel for each block. The
    kernels write sums over groups of logits, or, in the backward pass, the gradient of the logits and its sums."""
    hidden_MD, blocks = args[0], [args[1]] if isinstance(args[1], torch.Tensor) else args[1]
    table_size = sum(block.numel() for block in blocks)
    moved = 2.0 * (hidden_MD.numel() + table_size) + sum(tensor.numel() * tensor.element_size() for tensor in out[:2])
    return 2.0 * len(hidden_MD) * table_size, moved, len(blocks), "masked_head"


def _sample(args: Any, out: Any) -> tuple[float, float, int, str]:
    """The cost of computing the logits of two groups of ids for each hidden state: the group of the sample and the
    group of the most likely id."""
    multiplications = args[0].numel() * GROUP_SIZE
    return 4.0 * multiplications, 4.0 * multiplications, len(args[1]), "float32_matmul"


def formulas(batch: Any, cfg: ModelConfig, module: Callable[[], str]) -> dict[str, Formula]:
    """The cost formulas of our own operators, for the rows of `batch`. `module()` names the module that is running."""
    tile = tiling_of("_forward", 64, 2).queries
    first_BT, end_BT = item_bounds(batch.segments_BT)
    tokens = first_BT.shape[1]
    starts, position_T = torch.arange(0, tokens, tile), torch.arange(tokens)
    tile_index = np.arange(len(starts))

    def tiles(window: int) -> tuple[np.ndarray, np.ndarray]:
        """For each tile of queries, the range [first, end) of the tiles of keys that it sees. A query sees `window`
        tokens on each side, inside its item."""
        firsts, ends = first_BT.maximum(position_T - window), end_BT.minimum(position_T + window + 1)
        last = ends[:, (starts + tile - 1).clamp(max=tokens - 1)]
        return (firsts[:, starts] // tile).numpy(), -(-last // tile).numpy()

    global_tiles, local_tiles = tiles(tokens), tiles(cfg.local_window // 2)

    def share(distance: int) -> float:
        layer = re.search(r"layers\.(\d+)", module())
        is_local = cfg.body == "modern" and layer is not None and int(layer[1]) % cfg.global_every > 0
        first, end = local_tiles if is_local else global_tiles
        computed = np.minimum(end, tile_index + distance + 1) - np.maximum(first, tile_index - distance)
        return float(computed.sum()) / (len(first_BT) * len(starts) ** 2)

    return {
        "xlme_ds::attend": partial(_attention, share, False),
        "xlme_ds::attend_backward": partial(_attention, share, True),
        "xlme_ds::masked_head_group_sums": _head_product,
        "xlme_ds::masked_head_sample": _sample,
        "xlme_ds::masked_head_gradient": _head_product,
        # `derive_seeds` and `dropped` compute SplitMix64 with integer operations of torch. Each operation of `dropped`
        # reads and writes 2 bytes per element. The seeds of `derive_seeds` are too few to count.
        "xlme_ds::derive_seeds": lambda args, out: (0.0, 0.0, 12, "bf16_matmul"),
        "xlme_ds::dropped": lambda args, out: (0.0, 26 * 2.0 * out.numel(), 13, "bf16_matmul"),
    }


def _pretend(gpus: int, on_synchronize: Callable[[], None]) -> None:
    """Give DeepSpeed and torch a fake GPU and `gpus` fake processes, until this process ends. DeepSpeed calls
    `on_synchronize` where it waits for the GPU."""
    os.environ |= {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    gpu: Any = CPU_Accelerator()
    gpu.device_name = lambda device_index=None: "cuda"
    gpu.current_device_name, gpu.current_device = lambda: "cuda:0", lambda: 0
    gpu.device = lambda device_index=None: torch.device("cuda", 0)
    gpu.communication_backend_name = lambda: "fake"
    gpu.synchronize = lambda device_index=None: on_synchronize()
    set_accelerator(gpu)
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None  # no other rank exists
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    nn.Module._apply = _unchanged  # type: ignore[assignment, method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)


def figures(settings: Settings) -> Figures:
    """Count the second step, because the first step also creates the optimizer's state. Returns the step's figures. A
    process can do this only once."""
    if not bench.roofline.fake_cuda.READY:
        raise ValueError("torch was loaded before bench.roofline: count in a process that imports bench.roofline first")
    run, gpus = settings.run, settings.gpus
    rows = run.data.micro_batch * settings.micro_batches * gpus
    data = replace(run.data, mono_rows=rows * (run.data.mono_rows > 0), para_rows=rows * (run.data.para_rows > 0))
    run = validate(replace(run, data=data, engine=replace(run.engine, precision="bf16")), gpus)
    if run.engine.kind != "deepspeed":
        raise ValueError(f"engine.kind {run.engine.kind} cannot be counted: choose a recipe with DeepSpeed's ZeRO")
    source = SyntheticSource(run, run.model.max_positions, gpus)
    counter = OperationCounter(
        GPUS[settings.gpu], formulas(source.batches[0], run.model, lambda: counter.module()), _part
    )
    counter.counting, counter.compiled = False, run.model.compile != "none"
    eager = replace(run, model=replace(run.model, compile="none"))
    _pretend(gpus, lambda: counter.wait("DeepSpeed's synchronize"))
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), _EfficientAttention(), counter:
        engine: Any = build_data_parallel_engine(eager, objective_of(run.objective), _fill, source, None)
        # Two phases are counted apart: while the engine reads a batch, and its update.
        engine._read = partial(counter.in_phase, "reading", engine._read)
        engine._update = partial(counter.in_phase, "optimizer", engine._update)
        counter.names = {module: name for name, module in engine.module.module.named_modules()}
        engine.train_batch(0, 1e-4, detailed=False)
        counter.counting = True
        engine.any_rank(False)  # as training asks before every step whether it is to stop
        engine.train_batch(1, 1e-4, detailed=False)
    totals = {key: sum(part[key] for part in counter.parts.values()) for key in TOTALS}
    is_zero3 = any(hasattr(parameter, "ds_id") for parameter in engine.module.module.parameters())
    # Under ZeRO-3 the host needs longer than the GPU if modules are small.
    seconds = max(totals["ms"] / 1e3, counter.module_calls * ZERO3_CALL * is_zero3)
    tokens = sum(run.data.mean_rows) * run.model.max_positions / gpus
    step_flops = flops_per_step(run, run.model.max_positions) / gpus
    return {
        "recipe": run.name,
        "gpu": settings.gpu,
        "rows": [run.data.mono_rows // gpus, run.data.para_rows // gpus],
        "tokens_per_s": tokens / seconds,
        "fraction_of_peak": step_flops / seconds / counter.rates["sheet_bf16"],
        "milliseconds": 1e3 * seconds,
        "gpu_milliseconds": totals["ms"],
        "kernels": totals["kernels"],
        "gigabytes": totals["gigabytes"],
        "tflops": totals["tflops"],
        "host_syncs_per_step": sum(counter.waits.values()),
        "host_syncs": dict(counter.waits),
        "by_part": counter.parts,
    }


def text(counted: Figures) -> str:
    """The figures as text: a Markdown table of the parts, the slowest first, and then sentences."""
    rows = sorted(counted["by_part"].items(), key=lambda item: -item[1]["ms"])
    cells = [
        [name, f"{row['ms']:.2f}", f"{row['ms'] / counted['gpu_milliseconds']:.1%}", f"{row['kernels']:,}",
         f"{row['gigabytes']:.1f}", f"{row['tflops']:.2f}"]
        for name, row in [*rows, ("all", counted | {"ms": counted["gpu_milliseconds"]})]
    ]  # fmt: skip
    table = markdown(("part", "ms", "share", "kernels", "GB", "TFLOP"), cells)
    waits = ", ".join(f"{place} {times}" for place, times in counted["host_syncs"].items()) or "none"
    return (
        f"{counted['recipe']} on one {counted['gpu']}, {counted['rows']} rows\n\n{table}\n"
        f"counted, not measured: {counted['tokens_per_s']:,.0f} tokens/s, {counted['fraction_of_peak']:.1%} of the "
        f"dense bf16 peak\na step: {counted['milliseconds']:.1f} ms, on the GPU {counted['gpu_milliseconds']:.1f}\n"
        f"the host waits for the GPU {counted['host_syncs_per_step']} times a step: {waits}"
    )


if __name__ == "__main__":
    with one_sentence("xlme bench roofline"):
        settings = parse("xlme bench roofline", Settings, __doc__, sys.argv[1:])
        with redirect_stdout(sys.stderr):
            counted = figures(settings)
    print(printed(counted, settings.json, text(counted)))
