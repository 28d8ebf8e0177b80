"""A training step counted without a GPU: the kernels of the real engine on fake tensors, and the time that their bytes
and operations take at least.

    python -m bench.roofline --recipe NAME [--gpu h200] [--gpus 1] [--json] [--section.key value ...]

The step is DeepSpeed's, of one process of `--gpus`, on `data.micro_batch` synthetic rows of each task.
`bench/roofline/counted.py` says how it is counted and what that cannot know. Needs g++ where torch is a build for the
CPU, and the package triton for the Triton kernels.
"""

import bench.roofline.fake_cuda  # isort: skip  # before torch

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

os.environ |= {"DS_ACCELERATOR": "cpu"} | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.gpu.steps import planned_memory
from bench.roofline.counted import GPUS, Counter, Formula, Totals
from bench.synthetic import SyntheticSource
from xlme_ds.cli import fail, parse
from xlme_ds.config import RunConfig
from xlme_ds.counting import flops_per_step
from xlme_ds.engine.build import assemble
from xlme_ds.engine.engine import Engine
from xlme_ds.models.attention import item_bounds
from xlme_ds.models.tiles import GROUP, tiling
from xlme_ds.objectives import objective_of
from xlme_ds.validate import validate


@dataclass(frozen=True)
class Settings:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    gpu: str = "h200"
    """One of h200, h100, a100: whose rates the time follows from."""
    gpus: int = 1
    """Processes of the run; one of them is counted, and what it sends is reported by bytes, not as time."""
    micro_batches: int = 1
    """Micro-batches of a step."""
    operators: bool = False
    """Also list the operators, the slowest first."""
    json: bool = False
    """Print the figures as JSON."""


class _Gpu(CPU_Accelerator):
    """What DeepSpeed asks of a GPU before and in a step, none being there."""

    waited = staticmethod(lambda: None)

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda"

    def current_device_name(self) -> str:
        return "cuda:0"

    def current_device(self) -> int:
        return 0

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cuda", 0)

    def communication_backend_name(self) -> str:
        return "fake"

    def is_bf16_supported(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        self.waited()


class _EfficientAttention(TorchFunctionMode):
    """torch chooses the kernel by the device that is there: here the one that it takes on a GPU where a bias has a
    gradient."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_efficient_attention(*args[:3], kwargs.get("attn_mask"), True)[0]
        return func(*args, **kwargs)


def _unchanged(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module._apply`, which cannot replace fake parameters: they have type and device already."""
    for parameter in module.parameters():
        assert convert(parameter) is parameter
    return module


def _fill(model: nn.Module, whole: Any) -> None:
    """Weights as DeepSpeed would make them."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and whole is None:  # ZeRO-3 has made its own
                values = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
                module._parameters[name] = nn.Parameter(values)


def _part(module: str) -> str:
    """The part of the model that a module belongs to."""
    found = re.match(r"(generator|discriminator|encoder)\b(\.layers\.\d+\.(attention|up|down)\b)?", module)
    if found is None:
        return module.split(".")[0].replace("_", " ") or "tables, losses, sums of gradients"
    inside = {"attention": "attention", "up": "feed-forward", "down": "feed-forward"}.get(found[3] or "", "rest")
    if re.fullmatch(r"\w+\.layers\.\d+", module):  # itself: compiled as one, its norms are counted with it
        inside = "layers"
    return f"{found[1]}: {inside}"


def _attention(share: Callable[[int], float], backward: bool, args: Any, out: Any) -> tuple[float, float, int, str]:
    """`share(off)` of the pairs of a query and a key lie in tiles that are computed, so many off the diagonal at most:
    two products forward, seven backward by two kernels that both read q, k, v and the output's gradient; a third one,
    at half of their rate, takes two for the distances that are told apart."""
    rows, tokens, _, heads, size = args[0].shape
    product = 2.0 * rows * heads * tokens**2 * size
    one = 2.0 * rows * tokens * heads * size
    if not backward:
        return 2 * product * share(tokens), 4 * one, 1, "forward"
    moved = 16 * one + 4.0 * sum(each.numel() for each in out[1:])
    return product * (7 * share(tokens) + 4 * share(args[-1])), moved, 4, "backward"


def _group_sums(args: Any, out: Any) -> tuple[float, float, int, str]:
    """The product of hidden states and table, and two numbers a group, three with a temperature; a kernel a block."""
    hidden_MD, blocks = args[:2]
    read = hidden_MD.numel() + sum(block.numel() for block in blocks)
    return (
        2.0 * len(hidden_MD) * (read - hidden_MD.numel()),
        2.0 * read + 4.0 * sum(each.numel() for each in out[:2]),
        len(blocks),
        "triton",
    )


def _logit_gradient(args: Any, out: Any) -> tuple[float, float, int, str]:
    """The same product for a tile of ids, whose gradient is written."""
    hidden_MD, rows_CD = args[:2]
    moved = 2.0 * (hidden_MD.numel() + rows_CD.numel() + out[0].numel()) + 4.0 * out[1].numel()
    return 2.0 * len(hidden_MD) * rows_CD.numel(), moved, 1, "triton"


def formulas(batch: Any) -> dict[str, Formula]:
    """Of our own operators, on rows as in `batch`."""
    tile = tiling("_forward", 64, 2).queries
    first_BT, end_BT = item_bounds(batch.segments_BT)
    tokens = first_BT.shape[1]
    starts = torch.arange(0, tokens, tile)
    low = (first_BT[:, starts] // tile).numpy()
    high = -(-end_BT[:, (starts + tile - 1).clamp(max=tokens - 1)] // tile).numpy()
    number = np.arange(len(starts))

    def share(off: int) -> float:
        near = np.minimum(high, number + off + 1) - np.maximum(low, number - off)
        return float(near.sum()) / (len(first_BT) * len(starts) ** 2)

    return {
        "xlme_ds::attend": partial(_attention, share, False),
        "xlme_ds::attend_backward": partial(_attention, share, True),
        "xlme_ds::masked_head_group_sums": _group_sums,
        "xlme_ds::masked_head_sample": lambda args, out: (
            4.0 * len(args[0]) * GROUP * args[0].shape[1],
            4.0 * args[0].numel() * GROUP,
            len(args[1]),
            "single",
        ),
        "xlme_ds::masked_head_gradient": _logit_gradient,
        # SplitMix64 in torch's integer operations, each reading and writing all of its words.
        "xlme_ds::derive": lambda args, out: (0.0, 0.0, 12, "products"),
        "xlme_ds::dropped": lambda args, out: (0.0, 26 * 2.0 * out.numel(), 13, "products"),
    }


@contextlib.contextmanager
def _pretended(gpus: int) -> Iterator[None]:
    """A GPU and `gpus` processes for DeepSpeed and torch, once in a process."""
    os.environ |= {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    set_accelerator(_Gpu())
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None  # there are no others
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    before, nn.Module._apply = nn.Module._apply, _unchanged  # type: ignore[assignment, method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), _EfficientAttention():
            yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]
        dist.destroy_process_group()


def count(settings: Settings) -> tuple[Counter, RunConfig, float]:
    """The operations of one step, after one that makes the optimizer's state, and the seconds of the host's hooks."""
    if not bench.roofline.fake_cuda.READY:
        raise ValueError(
            "torch was loaded before bench.roofline.fake_cuda: count in a process that imports bench.roofline first"
        )
    run, gpus = settings.run, settings.gpus
    rows = run.data.micro_batch * settings.micro_batches * gpus
    data = replace(run.data, mono_rows=rows * (run.data.mono_rows > 0), para_rows=rows * (run.data.para_rows > 0))
    run = replace(run, data=data, engine=replace(run.engine, precision="bf16"))
    run = validate(run, gpus)
    if run.engine.kind != "deepspeed":
        raise ValueError(f"engine.kind {run.engine.kind} cannot be counted: choose a recipe with DeepSpeed's ZeRO")
    source = SyntheticSource(run, run.model.max_positions, gpus)
    counter = Counter(GPUS[settings.gpu], formulas(source.batches[0]), _part)
    counter.compiled = {"auto": "layers"}.get(run.model.compile, run.model.compile)
    _Gpu.waited = staticmethod(lambda: counter.wait("DeepSpeed's synchronize"))
    with _pretended(gpus), counter:
        counter.counting = False
        engine = assemble(
            replace(run, model=replace(run.model, compile="none")), objective_of(run.objective), _fill, source, None
        )
        counter.counting = True
        _name_phases(engine, counter)
        counter.names = {module: name for name, module in engine.module.module.named_modules()}
        engine.train_batch(0, 1e-4, detailed=False)
        counter.forget()
        engine.train_batch(1, 1e-4, detailed=False)
    gathered = any(hasattr(parameter, "ds_id") for parameter in engine.module.module.parameters())
    return counter, run, counter.calls * counter.rates.hooks * gathered


def _name_phases(engine: Engine, counter: Counter) -> None:
    """What is read before and updated after the passes counts under these names."""

    def named(name: str, method: Any, *arguments: Any) -> Any:
        counter.phase = name
        try:
            return method(*arguments)
        finally:
            counter.phase = ""

    engine._read = partial(named, "reading", engine._read)  # type: ignore[method-assign]
    engine._update = partial(named, "optimizer", engine._update)  # type: ignore[method-assign]


def figures(settings: Settings) -> dict[str, Any]:
    """The counted step as numbers."""
    counter, run, hooks = count(settings)
    totals, rates = Totals.of(counter.operations), GPUS[settings.gpu]
    seconds, tokens = max(totals.all.ms / 1e3, hooks), sum(run.data.mean_rows) * run.model.max_positions / settings.gpus
    done = flops_per_step(run, run.model.max_positions) / settings.gpus
    return {
        "recipe": run.name,
        "gpu": settings.gpu,
        "rows": [run.data.mono_rows // settings.gpus, run.data.para_rows // settings.gpus],
        "tokens_per_s": tokens / seconds,
        "fraction_of_peak": done / seconds / rates.peak,
        "milliseconds": 1e3 * seconds,
        "gpu_milliseconds": totals.all.ms,
        "kernels": totals.all.kernels,
        "memory_gib": counter.peak / 2**30,
        "planned_memory_gib": planned_memory(run, run.model.max_positions, settings.gpus),
        "gigabytes": totals.all.gigabytes,
        "tflops": totals.all.tflops,
        "host_syncs_per_step": sum(counter.waits.values()),
        "host_syncs": dict(counter.waits),
        "sent_gigabytes": {name: size / 1e9 for name, size in counter.sent.items()},
        "by_part": {name: asdict(part) for name, part in totals.by_part.items()},
        "by_operator": {name: asdict(part) for name, part in totals.by_operator.items()},
        "rates": asdict(rates),
    }


def _show(found: dict[str, Any], kind: str, limit: int = 40) -> Table:
    table = Table(title=f"{found['recipe']} on one {found['gpu']}, {found['rows']} rows", title_justify="left")
    for column in (kind, "ms", "share", "kernels", "GB", "TFLOP"):
        table.add_column(column, justify="left" if column == kind else "right")
    parts = sorted(found[f"by_{kind}"].items(), key=lambda each: -each[1]["ms"])[:limit]
    for name, part in parts:
        share = part["ms"] / found["gpu_milliseconds"]
        numbers = f"{part['ms']:.2f}", f"{share:.1%}", f"{part['kernels']:,}", f"{part['gigabytes']:.1f}"
        table.add_row(name, *numbers, f"{part['tflops']:.2f}")
    numbers = f"{found['gpu_milliseconds']:.1f}", "", f"{found['kernels']:,}", f"{found['gigabytes']:.1f}"
    table.add_section()
    table.add_row("all", *numbers, f"{found['tflops']:.2f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    """Count and print; a user's mistake ends it with one sentence and exit code 2."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        settings = parse("python -m bench.roofline", Settings, __doc__ or "", given)
        if settings.gpu not in GPUS:
            raise ValueError(f"--gpu {settings.gpu} is not known: choose one of {', '.join(GPUS)}")
        with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed's log goes
            found = figures(settings)
    except ValueError as error:
        fail("bench.roofline", error)
    if settings.json:
        print(json.dumps(found, indent=1))
        return
    console = Console(highlight=False)
    for kind in ("part", "operator") if settings.operators else ("part",):
        console.print(_show(found, kind))

    def listed(values: dict[str, float]) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in values.items()) or "none"

    console.print(
        f"counted, not measured: {found['tokens_per_s']:,.0f} tokens/s, {found['fraction_of_peak']:.1%} of the dense "
        f"bf16 peak\na step: {found['milliseconds']:.1f} ms, of the GPU {found['gpu_milliseconds']:.1f}\n"
        f"tensors take {found['memory_gib']:.1f} GiB at the fullest moment, planned are "
        f"{found['planned_memory_gib']:.1f}\nthe host waits for the GPU {found['host_syncs_per_step']} times a step: "
        f"{listed(found['host_syncs'])}\nhanded to collectives, GB: {listed(found['sent_gigabytes'])}"
    )


if __name__ == "__main__":
    main()
