"""The plan of a run as one dictionary: the cost of the layout that its settings give, and the fastest of the tried
layouts (ZeRO 1 to 3 and pipelines, micro-batches of powers of two) that fit in memory."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..config import EngineConfig, RunConfig
from ..counting import (
    count_parameters,
    flops_of,
    flops_per_step,
    paper_forward_per_token,
    paper_training_flops,
    parameter_sizes,
)
from ..data.order import phases
from ..engine_file import zero_stage
from ..objectives import describe, objective_of
from .layout import ParallelLayout
from .memory import GIB, peak_memory
from .speed import GPU, GPUS, HOST_RATE, LINK_EFFICIENCY, UTILISATION, communication_bytes, speed

_MICRO_BATCH = re.compile(r"--data\.micro-batch \d+")
RESERVED = 0.1  # assumed fraction of a GPU's memory for the driver, NCCL and fragmentation
ACCOUNTING = (
    "discriminator = its encoder and head with the token embeddings, the figure that the paper publishes (279M, 840M, "
    "2.2B; a vocabulary of 500K is taken as 2^19 = 524,288); generator = its encoder and masked head without the "
    "embedding it shares; trained_total counts every parameter once"
)
ACCOUNTING_OF_ONE = "{} = it and its head with the token embeddings"  # for a model with one encoder
STANDARD = "matrix products, backward = 2 × forward, vocabulary softmax at the masked tokens, every token of every row"
PAPER = (
    "as in the paper's Table 4: matrix products, backward = forward, no vocabulary softmax, 2^20 tokens taken as "
    "1.0e6, pairs taken as half"
)
# The settings of EngineConfig that a layout sets, except `kind` and `deepspeed`.
_LAYOUT_SETTINGS = (
    "balance",
    "pipeline_stages",
    "pipeline_schedule",
    "gradient_precision",
    "offload_optimizer",
    "offload_parameters",
)
LAYOUT_FLAGS = (
    *(f"--engine.{name.replace('_', '-')}" for name in ("kind", "deepspeed", *_LAYOUT_SETTINGS)),
    "--data.micro-batch",
    "--model.activation-checkpointing",
    "--model.no-activation-checkpointing",
)
"""The flags that each layout of a plan sets itself, in place of those on the command line."""


def plan(
    run: RunConfig,
    gpus: int | None = None,
    gpu: GPU = GPUS["a100-80g"],
    utilisation: float = UTILISATION,
    layouts: int = 4,
    base: RunConfig | None = None,
) -> dict[str, Any]:
    """The cost of `run` on rows of `model.max_positions` tokens, and the fastest layouts, at most `layouts`. Of layouts
    that are equally fast and differ only in the size of the micro-batch, only the one with the largest size is listed.
    A layout's `settings` select it if they are added to `run` or to `base`, which is `run` in another layout.

    By default `gpus` is 1 or, in a pipeline, its number of stages. Raises ValueError if `run` cannot run on `gpus`
    GPUs.
    """
    gpu = with_precision(gpu, run.engine.precision)
    gpus = run.engine.processes_per_replica if gpus is None else gpus
    row_tokens = run.model.max_positions
    _, run_costs = _estimate(run, gpus, gpu, utilisation, run)
    ranked = _search(run, gpus, gpu, utilisation, base or run)
    mono, para = (int(rows * row_tokens * run.train.steps) for rows in run.data.mean_rows)
    encoders = objective_of(run.objective).encoders
    return {
        "recipe": run.name,
        "accounting": ACCOUNTING if len(encoders) > 1 else ACCOUNTING_OF_ONE.format(*encoders),
        "objective": describe(run.objective, (run.data.mono_rows, run.data.para_rows)),
        "parameters": count_parameters(run) | {"components": _components(run)},
        "tokens": {"per_row": row_tokens, "mono": mono, "para": para},
        "phases": _phases(run),
        "flops": _operations(run, mono, para),
        "hardware": {
            "gpus": gpus,
            "gpus_per_node": gpu.per_node,
            "gpu": gpu.name,
            "memory_gib": gpu.memory_gib,
            "peak_tflops": gpu.tflops,
            "precision": gpu.precision,
            "source": gpu.source,
        },
        "assumptions": {
            "utilisation": utilisation,
            "link_efficiency": LINK_EFFICIENCY,
            "memory_reserved": RESERVED,
            "host_bytes_per_s": HOST_RATE,
        },
        **run_costs,
        "layouts": _distinct(ranked)[:layouts],
        "layouts_that_fit": len(ranked),
    }


def check_numbers(gpus: int | None, utilisation: float, layouts: int) -> None:
    """Raise ValueError for an argument of `plan` that is out of range."""
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus is {gpus}: it must be at least 1")
    if layouts < 1:
        raise ValueError(f"layouts is {layouts}: it must be at least 1")
    if not 1e-6 <= utilisation <= 1:
        raise ValueError(
            f"utilisation is {utilisation}: it must be above 0 (1e-6 at least) and at most 1, as 0.4 for 40%"
        )


def with_precision(gpu: GPU, precision: str) -> GPU:
    """`gpu` with its peak rate in `precision`. Raises ValueError if that rate is unknown."""
    if precision in ("auto", gpu.precision):
        return gpu
    if precision != "fp32" or not gpu.fp32_tflops:
        raise ValueError(
            f"engine.precision {precision} has no rate on {gpu.name}: leave it at auto, which is {gpu.precision} there"
        )
    return replace(gpu, precision=precision, tflops=gpu.fp32_tflops)


def _phases(run: RunConfig) -> list[dict[str, float]]:
    """The record of each phase of the data. `tokens` is counted as if all rows were full; `mask_fraction` is the
    fraction of tokens that is predicted."""
    data_phases = phases(run.data, run.objective.mask_fraction)
    ends = [phase.first_step for phase in data_phases[1:]] + [run.train.steps]
    tokens_a_step = int(sum(run.data.mean_rows)) * run.model.max_positions
    return [
        {"first_step": first, "steps": end - first, "tokens": (end - first) * tokens_a_step, "mask_fraction": fraction}
        for (first, fraction, _), end in zip(data_phases, ends, strict=True)
    ]


def _operations(run: RunConfig, mono: int, para: int) -> dict[str, Any]:
    """The floating-point operations of the whole run, counted as STANDARD and as PAPER say. `mono` and `para` are the
    numbers of tokens of text and of pairs in the whole run."""
    row_tokens = run.model.max_positions
    flops = flops_of(run, row_tokens)
    mono_flops, para_flops = flops.training * mono, flops.training * para
    return {
        "forward_per_token": flops.forward,
        "per_step": flops_per_step(run, row_tokens),
        "standard": {
            "accounting": STANDARD,
            "mono": mono_flops,
            "both": mono_flops + para_flops,
            "both_para_half": mono_flops + para_flops / 2,
        },
        "paper_convention": {
            "accounting": PAPER,
            "forward_per_token": paper_forward_per_token(run, row_tokens),
            **paper_training_flops(run, row_tokens),
        },
    }


def _components(run: RunConfig) -> dict[str, int]:
    """The parameter count of each component of the model, in the model's order. Every parameter counts once."""
    counts: Counter[str] = Counter()
    for name, size in parameter_sizes(run.objective, run.model).items():
        component, *rest = name.split(".")
        if not rest:
            component = name.rsplit("_", 1)[0]  # TABLE_N is block N of a table
        elif component in objective_of(run.objective).encoders:
            component += f".{rest[0]}"
        counts[component] += size
    return dict(counts)


def _estimate(
    run: RunConfig, gpus: int, gpu: GPU, utilisation: float, *bases: RunConfig
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Returns (sort key, rounded costs) of `run`, which is each of `bases` in another layout.

    The key sorts the fastest layouts first. Speeds are rounded to five digits; if they are equal, fewer micro-batches
    per step come first, and then less memory. Raises ValueError if `run` cannot run on `gpus`.
    """
    layout = ParallelLayout.of(run, gpus, gpu.precision, run.model.max_positions)
    moment, memory = peak_memory(layout)
    memory["total"] = sum(memory.values())
    rates = speed(run, layout, gpu, utilisation)
    costs = {
        "settings": _options(run, *bases),
        "rows_per_micro_batch": layout.rows,
        "accumulation": layout.accumulation,
        "memory_per_gpu_gib": {kind: round(size / GIB, 3) for kind, size in memory.items()},
        "fullest_at": moment,
        "fits": memory["total"] <= (1 - RESERVED) * gpu.memory_gib * GIB,
        "communication_bytes_per_step": {kind: round(size) for kind, size in communication_bytes(layout).items()},
        "seconds_per_step": {
            kind: _rounded(rates[kind]) for kind in ("compute", "bubble", "transfer", "offload", "step")
        },
        "tokens_per_s": round(rates["tokens_per_s"]),
        "tokens_per_s_per_gpu": round(rates["tokens_per_s"] / layout.gpus),
        "of_peak": round(rates["of_peak"], 4),
        "days": _rounded(rates["days"]),
        "gpu_hours": _rounded(24 * rates["days"] * layout.gpus),
    }
    return (-_rounded(rates["tokens_per_s"], 5), layout.accumulation, memory["total"]), costs


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _search(run: RunConfig, gpus: int, gpu: GPU, utilisation: float, *bases: RunConfig) -> list[dict[str, Any]]:
    """The costs of the layouts that are valid and fit in memory, the fastest first."""
    keys_and_costs = []
    for variant in _variants(run, gpus):
        with suppress(ValueError):  # a variant is invalid if, for example, rows do not divide, or a stage is empty
            keys_and_costs.append(_estimate(variant, gpus, gpu, utilisation, run, *bases))
    return [costs for _, costs in sorted(keys_and_costs, key=lambda pair: pair[0]) if costs["fits"]]


def _distinct(layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each group of `layouts` that are equally fast and differ only in the size of the micro-batch."""
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for layout in layouts:
        key = _MICRO_BATCH.sub("", layout["settings"]), _rounded(layout["tokens_per_s"], 5)
        groups.setdefault(key, layout)
    return list(groups.values())


def _variants(run: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Yield `run` with each engine of `_engines` and each power of two as the micro-batch, with and without activation
    checkpointing; translation without ZeRO-3, which gathers all weights again for each token that a model decodes. Some
    of these runs are invalid."""
    for engine in _engines(run.engine, gpus):
        if run.objective.name == "mt" and zero_stage(engine) == 3:
            continue
        replicas = gpus // engine.processes_per_replica
        rows_per_replica = max(run.data.mono_rows, run.data.para_rows) // replicas
        for power in range(max(1, rows_per_replica).bit_length()):
            for checkpointing in (False, True):
                yield replace(
                    run,
                    engine=engine,
                    data=replace(run.data, micro_batch=2**power),
                    model=replace(run.model, activation_checkpointing=checkpointing),
                )


def _engines(engine: EngineConfig, gpus: int) -> Iterator[EngineConfig]:
    """Yield `engine` in these variants: ZeRO 1, 2 and 3; ZeRO 2 and 3 with the optimizer offloaded; pipelines of 2, 4,
    8, … stages, where this number divides `gpus`."""
    base = replace(
        engine,
        kind="deepspeed",
        balance=(),
        pipeline_stages=EngineConfig.pipeline_stages,
        pipeline_schedule="1f1b",
        gradient_precision="auto",
        offload_optimizer="none",
        offload_parameters="none",
    )
    yield from (replace(base, deepspeed=name) for name in ("zero1", "zero2", "zero3"))
    yield from (replace(base, deepspeed=name, offload_optimizer="cpu") for name in ("zero2", "zero3_offload"))
    for power in range(1, gpus.bit_length()):
        if gpus % 2**power == 0:
            yield replace(base, kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=2**power)


def _options(run: RunConfig, *bases: RunConfig) -> str:
    """The command-line options that give each run of `bases` the layout of `run`. A setting in `_LAYOUT_SETTINGS` is
    left out if all these runs have its default, except for the number of stages of a pipeline."""
    engine = run.engine
    options = [f"--engine.kind {engine.kind}", f"--engine.deepspeed {engine.deepspeed}"]
    for name in _LAYOUT_SETTINGS:
        value, default = getattr(engine, name), getattr(EngineConfig, name)
        always_shown = name == "pipeline_stages" and engine.kind == "pipeline"
        if always_shown or any(getattr(one.engine, name) != default for one in (run, *bases)):
            text = " ".join(map(str, value)) if name == "balance" else value
            options.append(f"--engine.{name.replace('_', '-')} {text}")
    prefix = "" if run.model.activation_checkpointing else "no-"
    options += [f"--data.micro-batch {run.data.micro_batch}", f"--model.{prefix}activation-checkpointing"]
    return " ".join(option.strip() for option in options)
