"""Whole training steps of Base and Large on synthetic rows, and where the time of one goes."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu_device import Device
from bench.gpu_rows import SyntheticSource
from xlme_ds.config import DataConfig, RunConfig
from xlme_ds.engine.plain import PlainEngine
from xlme_ds.flops import flops_per_step
from xlme_ds.models.init import initialise
from xlme_ds.objectives import objective_of
from xlme_ds.recipes import recipe

Figures = dict[str, Any]


class MasterWeights(PlainEngine):
    """The plain engine's loop in bf16 as DeepSpeed runs it: gradients add up and AdamW updates in float32."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.masters = list(self.module.parameters())  # the optimizer's
        self.module = copy.deepcopy(self.module).bfloat16()
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        for master, weight in zip(self.masters, self.module.parameters(), strict=True):
            if weight.grad is not None:
                master.grad += weight.grad
                weight.grad = None

    def _update(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        for master, weight in zip(self.masters, self.module.parameters(), strict=True):
            weight.data.copy_(master)
        return float(norm)


def run_config(
    name: str, rows: int, micro_batch: int, checkpointing: bool, chunk: int, quick: bool,
    kernel: str = "sdpa", compile: str = "none",
) -> RunConfig:  # fmt: skip
    """A recipe on one process with `rows` of each task a step; `quick`: the same shape of model, tiny."""
    run = recipe(name)
    model = replace(
        run.model, activation_checkpointing=checkpointing, head_chunk=chunk, attention=kernel, compile=compile
    )
    if quick:
        model = replace(
            model, vocabulary=600, width=64, heads=4, feed_forward=128, generator_layers=1, discriminator_layers=2,
            max_positions=64,
        )  # fmt: skip
    engine = replace(run.engine, precision="bf16")
    return replace(run, model=model, data=DataConfig(rows, rows, micro_batch), engine=engine).validate()


@contextmanager
def built(run: RunConfig, device: Device, engine: str) -> Iterator[Any]:
    """The engine of `run`, ready to train: DeepSpeed's, or `plain` for `MasterWeights`."""
    torch.compiler.reset()  # what is compiled, and its CUDA graphs, would outlive the case
    source = SyntheticSource(run, run.model.max_positions)
    if engine == "deepspeed":
        from xlme_ds.engine.build import build_engine
        from xlme_ds.engine.ranks import start_process_group

        start_process_group(run.engine)
        yield build_engine(run, source, None)  # type: ignore[arg-type]
    else:
        objective = objective_of(run.objective)
        model = objective.build(run.model)
        initialise(model, run.seed, run.model.init_std)
        yield MasterWeights(model, objective, source, None, device.torch, run.optimizer)


def step(run: RunConfig, device: Device, engine: str, rounds: int, matmul_tflops: float) -> Figures:
    """Speed and memory of optimizer steps; operations by the standard count, recomputation is no work done."""
    row_tokens = run.model.max_positions
    with built(run, device, engine) as trained:
        seconds = device.seconds(lambda: trained.train_batch(0, 1e-4, detailed=False), rounds)
        metrics = trained.train_batch(0, 1e-4, detailed=True).metrics
        padding = torch.cat([batch.segments_BT for batch in trained.loader.step(0)]).eq(0).double().mean()
    tflops = flops_per_step(run, row_tokens) / seconds / 1e12
    return {
        "tokens_per_s": (run.data.mono_rows + run.data.para_rows) * row_tokens / seconds,
        "tflops": tflops,
        "fraction_of_matmul_peak": tflops / matmul_tflops if matmul_tflops else None,
        "seconds_per_step": seconds,
        "peak_memory_gib": device.peak_gib(),
        "planned_memory_gib": planned_memory(run, row_tokens),
        "padding": float(padding),
        "loss": metrics["loss"],
    }


def planned_memory(run: RunConfig, row_tokens: int) -> float | str:
    """The planner's peak for `run` under DeepSpeed, or why there is none."""
    try:
        from xlme_ds.plan.layout import Layout
        from xlme_ds.plan.memory import peak
    except ImportError as error:
        return f"the planner cannot be imported: {error}"
    return peak(Layout.of(run, 1, "bf16", row_tokens))[1].gib()["total"]


def where_time_goes(run: RunConfig, device: Device, engine: str, top: int = 15) -> Figures:
    """The kernels that took longest in one step (operators on the CPU), and where the host waited for the device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.kind == "cuda")
    with built(run, device, engine) as trained:
        device.seconds(lambda: trained.train_batch(0, 1e-4, detailed=False), rounds=1)
        waits = host_waits(lambda: trained.train_batch(0, 1e-4, detailed=False), device)
        with profile(activities=activities) as recorded:
            trained.train_batch(0, 1e-4, detailed=False)
    times: dict[str, tuple[float, int]] = {}
    for event in recorded.key_averages():
        if getattr(event, "is_user_annotation", False):  # a span over kernels that are there themselves
            continue
        if device.kind == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.self_cpu_time_total if device.kind == "cpu" else _device_time(event)
            before, calls = times.get(event.key, (0.0, 0))
            times[event.key] = before + spent, calls + event.count
    total = sum(spent for spent, _ in times.values())
    longest = sorted(times.items(), key=lambda one: -one[1][0])[:top]
    kernels = [
        {"name": name, "ms": spent / 1000, "share": spent / total, "calls": calls} for name, (spent, calls) in longest
    ]
    return {"total_ms": total / 1000, "kernels": kernels, "host_waits": waits}


def _device_time(event: Any) -> float:
    return float(getattr(event, "self_device_time_total", None) or getattr(event, "self_cuda_time_total", 0.0))


def host_waits(run: Any, device: Device) -> dict[str, int] | str:
    """Places where `run` made the host wait for the GPU, as torch's synchronisation check names them, with counts."""
    if device.kind == "cpu":
        return "not on the CPU"
    places: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            place = f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"
            places[place] = places.get(place, 0) + 1
    return places
