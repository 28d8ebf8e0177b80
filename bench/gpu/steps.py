"""Measures matrix products, and training steps on synthetic rows: speed, memory, peers' speed, where time goes."""

import importlib
import math
import os
import platform
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.measure import Figures, by_turns, repeat, timed
from bench.peers.steps import RATE, Compiled, MaskedPositions, ModernBert
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


def machine(device: torch.device) -> Figures:
    """Names and sizes of the device, and versions of the libraries."""
    versions: Figures = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if device.type == "cpu":
        return {"device": f"CPU, {platform.machine()}"} | versions
    gpu = torch.cuda.get_device_properties(device)
    return {
        "device": gpu.name,
        "gpus": f"{torch.cuda.device_count()} visible, one used",
        "memory_gib": round(gpu.total_memory / GIB, 1),
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    } | versions


def failure(error: Exception) -> Figures:
    """The row of what did not run: with `out_of_memory`, `left_out` (a library is not installed) or `failed`."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return {"out_of_memory": str(error).split(". ")[0]}
    if isinstance(error, ModuleNotFoundError):
        return {"left_out": f"not installed: {error.name}"}
    return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    """The seconds of one run. On a GPU this is the time between two events in its stream."""
    if device.type == "cpu":
        return float(timed(run)["wall"])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def median_seconds(
    device: torch.device, runs: Mapping[Any, Callable[[], object]], together: int, rounds: int, warm_up: int
) -> dict[Any, float]:
    """Median seconds of each of `runs`, of which `together` are timed at once. The runs take turns, in `rounds` rounds
    after `warm_up` rounds that do not count."""
    contenders = {key: partial(seconds_of, device, partial(repeat, run, together)) for key, run in runs.items()}
    turns = by_turns(contenders, rounds, warm_up)
    return {key: statistics.median(turn[key] for turn in turns) / together for key in runs}


def measure_matmul(device: torch.device, dtype: str, shape: tuple[int, int, int], rounds: int) -> Figures:
    """Rate in TFLOP/s of the product [M, K] × [K, N] of normal random numbers (zeros would run faster)."""
    m, k, n = shape
    a, b = (torch.randn(size, device=device).to(DTYPES[dtype]) for size in ((m, k), (k, n)))
    seconds = median_seconds(device, {dtype: partial(torch.mm, a, b)}, 10, rounds, warm_up=2)
    return {"tflops": 2 * m * k * n / seconds[dtype] / 1e12}


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


def training_step(engine: Engine) -> Callable[[], object]:
    """A function that takes one step, and reads the next step's rows meanwhile, as training does."""
    return partial(engine.train_batch, 0, RATE, detailed=False, next_step=0)


def measure_step(run: RunConfig, device: torch.device, rounds: int, matmul_tflops: float) -> Figures:
    """Speed and memory of optimizer steps. `tflops` counts the operations of `flops_per_step`, which leaves
    recomputation out."""
    row_tokens = run.model.max_positions
    engine = synthetic_engine(run)
    seconds = median_seconds(device, {"": training_step(engine)}, STEPS_TOGETHER, rounds, warm_up=1)[""]
    metrics = engine.train_batch(0, RATE, detailed=True).metrics
    padding = torch.cat([batch.segments_BT for batch in engine.loader.micro_batches(0)]).eq(0).double().mean()
    tflops = flops_per_step(run, row_tokens) / seconds / 1e12
    return {
        "tokens_per_s": step_tokens(run) / seconds,
        "tflops": tflops,
        "fraction_of_matmul_peak": tflops / matmul_tflops if matmul_tflops else None,
        "seconds_per_step": seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
        "planned_memory_gib": sum(peak_memory(ParallelLayout.of(run, 1, "bf16", row_tokens))[1].values()) / GIB,
        "padding": float(padding),
        "loss": metrics["loss"],
    } | planner_options(machine(device)["device"], tflops)


def planner_options(device: str, tflops: float) -> Figures:
    """Returns `plan_with`, the options of `xlme plan` for GPUs of this kind that reach `tflops`, or no figure if the
    planner does not know the device."""
    name = PLANNER_NAMES.get(device)
    return {"plan_with": f"--gpu {name} --utilisation {tflops / GPUS[name].tflops:.2g}"} if name else {}


def step_tokens(run: RunConfig) -> int:
    """The number of tokens of a step, padding included."""
    return (run.data.mono_rows + run.data.para_rows) * run.model.max_positions


def compare_peers(device: torch.device, rounds: int, quick: bool, seconds: float) -> Iterator[Figures]:
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
    our_step = training_step(synthetic_engine(run))
    runs: dict[str, Callable[[], object]] = {ours: partial(repeat, our_step, STEPS_TOGETHER)}
    runs[ours]()  # not measured: it compiles the model
    for name, peer in PEERS.items():
        try:
            steps = partial(repeat, peer(run, device).step, STEPS_TOGETHER)
            steps()
            runs[name] = steps
        except Exception as error:
            yield {"step": name} | failure(error)
    contenders = {name: partial(seconds_of, device, steps) for name, steps in runs.items()}
    turns = by_turns(contenders, 2 * rounds, 0, deadline)
    rates = {name: tokens / statistics.median(turn[name] for turn in turns) for name in runs}
    for name, rate in rates.items():
        slowest = tokens / max(turn[name] for turn in turns)
        yield {"step": name, "tokens_per_s": rate, "slowest": slowest, "ours_is_faster": rates[ours] / rate}


def profile_step(run: RunConfig, device: torch.device) -> Figures:
    """A profile of a step: its slowest kernels (on the CPU: operators), how long at least one kernel ran (`busy_ms`),
    the sum of all kernels' times (`total_ms`), the longest pauses between kernels, and at which lines of code the host
    waited for the GPU. Times and counts are means of `STEPS_PROFILED` steps in a row; the pauses are of all of them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    step = training_step(synthetic_engine(run))
    seconds = median_seconds(device, {"": step}, STEPS_TOGETHER, rounds=3, warm_up=1)[""]
    waits = host_waits(step, device)
    with profile(activities=activities) as recorded:
        repeat(step, STEPS_PROFILED)
    times, spans = defaultdict(list), []  # microseconds of each call, by kernel; (start, end, kernel)
    for event in recorded.events():
        if getattr(event, "is_user_annotation", False):  # the kernels in its time range have events of their own
            continue
        if device.type == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range
            times[event.name].append(event.self_cpu_time_total if device.type == "cpu" else span.elapsed_us())
            spans.append((span.start, span.end, event.name))
    total = sum(map(sum, times.values())) / STEPS_PROFILED
    kernels = [
        {"name": name[:110], "ms": sum(spent) / 1000 / STEPS_PROFILED, "share": sum(spent) / STEPS_PROFILED / total,
         "calls": len(spent) / STEPS_PROFILED}
        for name, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[:45]
    ]  # fmt: skip
    busy, pauses = busy_and_pauses(spans)
    return {
        "step_ms": 1000 * seconds, "busy_ms": busy / 1000 / STEPS_PROFILED, "total_ms": total / 1000,
        "launches": len(spans) / STEPS_PROFILED, "kernels": kernels, "pauses": pauses[:20],
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


def host_waits(run: Callable[[], object], device: torch.device) -> dict[str, int] | str:
    """Returns how often `run` made the host wait for the GPU, by line of code, as torch's synchronisation check finds
    it. On the CPU, returns a remark in place of the counts."""
    if device.type == "cpu":
        return "not on the CPU"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return Counter(f"{'/'.join(wait.filename.split('/')[-3:])}:{wait.lineno}" for wait in waits)
