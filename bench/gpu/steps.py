"""Measures matrix products, and training steps on synthetic rows: speed, memory, peers' speed, where time goes."""

import importlib
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.measure import Figures, by_turns
from bench.peers.steps import RATE, Compiled, MaskedPositions, ModernBert, PeerStep
from bench.synthetic import SyntheticSource
from xlme_ds.config import DataConfig, RunConfig
from xlme_ds.counting import flops_per_step
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine
from xlme_ds.engine.ranks import start_process_group
from xlme_ds.plan.layout import ParallelLayout
from xlme_ds.plan.memory import peak_memory
from xlme_ds.plan.speed import GPUS
from xlme_ds.recipes import recipe
from xlme_ds.validate import validate

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GIB = 2**30
# Steps that are timed together, and profiled together. The host prepares a step while the GPU still works on the one
# before, as in training.
STEPS_TOGETHER = 5
STEPS_PROFILED = 2
PEERS = {
    "Hugging Face's ELECTRA": MaskedPositions,
    "Hugging Face's ELECTRA, compiled": Compiled,
    "ModernBERT, no generator": ModernBert,
}

PLANNER_NAMES = {  # torch's name of a GPU -> its name in `xlme plan --gpu`
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100-80g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A10": "a10-24g",
}


@dataclass(frozen=True)
class Device:
    """The device of a measurement: `kind` is cuda (the first visible GPU) or cpu."""

    kind: str

    @property
    def torch(self) -> torch.device:
        """torch's device."""
        return torch.device(self.kind)

    def machine(self) -> Figures:
        """Names and sizes of the device, and versions of the libraries."""
        versions: Figures = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        if self.kind == "cpu":
            return {"device": f"CPU, {platform.machine()}"} | versions
        gpu = torch.cuda.get_device_properties(0)
        return {
            "device": gpu.name,
            "gpus": f"{torch.cuda.device_count()} visible, one used",
            "memory_gib": round(gpu.total_memory / GIB, 1),
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        } | versions

    def seconds(self, run: Callable[[], object], rounds: int, warm_up: int = 2) -> float:
        """Median seconds of `run` over `rounds` runs, after `warm_up` runs that do not count."""
        for _ in range(warm_up):
            run()
        return statistics.median(self.once(run) for _ in range(rounds))

    def once(self, run: Callable[[], object]) -> float:
        """The seconds of one run. On a GPU this is the time between two events in its stream."""
        if self.kind == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def measure_matmul(device: Device, dtype: str, shape: tuple[int, int, int], rounds: int) -> Figures:
    """Rate in TFLOP/s of the product [M, K] × [K, N] of normal random numbers (zeros would run faster)."""
    m, k, n = shape
    a, b = (torch.randn(size, device=device.torch).to(DTYPES[dtype]) for size in ((m, k), (k, n)))
    products = 10  # timed together
    seconds = device.seconds(lambda: [torch.mm(a, b) for _ in range(products)], rounds) / products
    return {"tflops": 2 * m * k * n / seconds / 1e12}


def run_config(name: str, rows: int, micro_batch: int, quick: bool, **settings: Any) -> RunConfig:
    """The recipe `name` in bf16 on one process, with `rows` rows of each task in a step. If `quick`, its model is tiny.
    `settings` replace settings of the model."""
    run = recipe(name)
    model = run.model
    if quick:
        model = replace(
            model, vocabulary=600, width=64, heads=4, feed_forward=128, generator_layers=1, discriminator_layers=2,
            max_positions=64, head_chunk=256,
        )  # fmt: skip
    model = replace(model, **settings)
    engine = replace(run.engine, precision="bf16")
    return validate(replace(run, model=model, data=DataConfig(rows, rows, micro_batch), engine=engine))


def synthetic_engine(run: RunConfig) -> Engine:
    """DeepSpeed's engine of `run` on synthetic rows, ready to train."""
    start_process_group(run.engine)
    source: Any = SyntheticSource(run, run.model.max_positions)
    return build_engine(run, source, None)


def _steps_in_a_row(engine: Engine, count: int = STEPS_TOGETHER) -> None:
    for _ in range(count):
        engine.train_batch(0, RATE, detailed=False, next_step=0)


def measure_step(run: RunConfig, device: Device, rounds: int, matmul_tflops: float) -> Figures:
    """Speed and memory of optimizer steps. `tflops` counts the operations of `flops_per_step`, which leaves
    recomputation out."""
    row_tokens = run.model.max_positions
    engine = synthetic_engine(run)
    seconds = device.seconds(lambda: _steps_in_a_row(engine), rounds, warm_up=1) / STEPS_TOGETHER
    metrics = engine.train_batch(0, RATE, detailed=True).metrics
    padding = torch.cat([batch.segments_BT for batch in engine.loader.micro_batches(0)]).eq(0).double().mean()
    tflops = flops_per_step(run, row_tokens) / seconds / 1e12
    return {
        "tokens_per_s": step_tokens(run) / seconds,
        "tflops": tflops,
        "fraction_of_matmul_peak": tflops / matmul_tflops if matmul_tflops else None,
        "seconds_per_step": seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / GIB if device.kind == "cuda" else None,
        "planned_memory_gib": sum(peak_memory(ParallelLayout.of(run, 1, "bf16", row_tokens))[1].values()) / GIB,
        "padding": float(padding),
        "loss": metrics["loss"],
    } | planner_options(device.machine()["device"], tflops)


def planner_options(device: str, tflops: float) -> Figures:
    """Returns `plan_with`, the options of `xlme plan` for GPUs of this kind that reach `tflops`, or no figure if the
    planner does not know the device."""
    name = PLANNER_NAMES.get(device)
    return {"plan_with": f"--gpu {name} --utilisation {tflops / GPUS[name].tflops:.2g}"} if name else {}


def step_tokens(run: RunConfig) -> int:
    """The number of tokens of a step, padding included."""
    return (run.data.mono_rows + run.data.para_rows) * run.model.max_positions


def compare_peers(device: Device, rounds: int, quick: bool, seconds: float) -> Iterator[Figures]:
    """Yield a row with the tokens/s of our step, and a row for each peer's step. The steps take turns. If a peer fails,
    its row says so, and the others run.

    All take 64 + 64 rows in one micro-batch. Hugging Face's ELECTRA runs with SDPA, and computes logits at masked
    positions only. Raises ModuleNotFoundError if transformers is not installed.
    """
    importlib.import_module("transformers")
    torch.set_float32_matmul_precision("high")
    deadline = time.monotonic() + seconds
    rows = 2 if quick else 64
    ours, run = "ours, by default", run_config("base_zero1", rows, rows, quick)
    tokens = STEPS_TOGETHER * step_tokens(run)
    engine = synthetic_engine(run)
    runs: dict[str, Callable[[], object]] = {ours: lambda: _steps_in_a_row(engine)}
    runs[ours]()  # not measured: it compiles the model
    for name, peer in PEERS.items():
        try:
            steps = partial(_peers_steps, peer(run, device.torch))
            steps()
            runs[name] = steps
        except torch.cuda.OutOfMemoryError as error:
            yield {"step": name, "out_of_memory": str(error).split(". ")[0]}
        except Exception as error:
            yield {"step": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    turns = by_turns({name: partial(device.once, steps) for name, steps in runs.items()}, 2 * rounds, 0, deadline)
    rates = {name: tokens / statistics.median(turn[name] for turn in turns) for name in runs}
    for name, rate in rates.items():
        slowest = tokens / max(turn[name] for turn in turns)
        yield {"step": name, "tokens_per_s": rate, "slowest": slowest, "ours_is_faster": rates[ours] / rate}


def _peers_steps(peer: PeerStep) -> None:
    for _ in range(STEPS_TOGETHER):
        peer.step()


def profile_step(run: RunConfig, device: Device, top: int = 45) -> Figures:
    """A profile of a step: its slowest kernels (on the CPU: operators), how long at least one kernel ran (`busy_ms`),
    the sum of all kernels' times (`total_ms`), the longest pauses between kernels, and at which lines of code the host
    waited for the GPU. Times and counts are means of `STEPS_PROFILED` steps in a row; the pauses are of all of them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    engine = synthetic_engine(run)
    seconds = device.seconds(lambda: _steps_in_a_row(engine), rounds=3, warm_up=1) / STEPS_TOGETHER
    waits = host_waits(lambda: _steps_in_a_row(engine, 1), device)
    with profile(activities=activities) as recorded:
        _steps_in_a_row(engine, STEPS_PROFILED)
    times: dict[str, tuple[float, float]] = {}
    spans = []
    for event in recorded.events():
        if getattr(event, "is_user_annotation", False):  # the kernels in its time range have events of their own
            continue
        if device.kind == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.self_cpu_time_total if device.kind == "cpu" else event.time_range.elapsed_us()
            before, calls = times.get(event.name, (0.0, 0.0))
            times[event.name] = before + spent / STEPS_PROFILED, calls + 1 / STEPS_PROFILED
            spans.append((event.time_range.start, event.time_range.end, event.name))
    total = sum(spent for spent, _ in times.values())
    kernels = [
        {"name": name[:110], "ms": spent / 1000, "share": spent / total, "calls": calls}
        for name, (spent, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:top]
    ]
    busy, pauses = busy_and_pauses(spans)
    return {
        "step_ms": 1000 * seconds, "busy_ms": busy / 1000 / STEPS_PROFILED, "total_ms": total / 1000,
        "launches": sum(calls for _, calls in times.values()), "kernels": kernels, "pauses": pauses[:20],
        "host_waits": waits,
    }  # fmt: skip


def busy_and_pauses(spans: Sequence[tuple[float, float, str]]) -> tuple[float, list[Figures]]:
    """From (start, end, name) of each kernel, in microseconds: how long at least one kernel ran, and the pauses,
    longest first, with the kernels before and after each."""
    busy, pauses, busy_until, last = 0.0, [], -math.inf, ""
    for start, end, name in sorted(spans):  # spans may overlap
        if start > busy_until and last:
            pauses.append({"ms": (start - busy_until) / 1000, "after": last[:60], "before": name[:60]})
        busy += max(end - max(start, busy_until), 0.0)
        if end > busy_until:
            busy_until, last = end, name
    return busy, sorted(pauses, key=lambda pause: -float(pause["ms"]))


def host_waits(run: Callable[[], object], device: Device) -> dict[str, int] | str:
    """Returns how often `run` made the host wait for the GPU, by line of code, as torch's synchronisation check finds
    it. On the CPU, returns a remark in place of the counts."""
    if device.kind == "cpu":
        return "not on the CPU"
    counts: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            line = f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"
            counts[line] = counts.get(line, 0) + 1
    return counts
