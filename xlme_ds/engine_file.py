"""The file of DeepSpeed settings that `engine.deepspeed` names, in ds_configs/ or at a path that the user gives."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .config import EngineConfig, Training
from .data.order import plan_step

Config = TypeVar("Config", bound=Training)

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "ds_configs"
_DECIDED_BY_THE_RECIPE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "data_types",
    "communication_data_type",
    "torch_autocast",
)
# Keys that a file may set. They change how a step is computed and what it prints or records. Only the keys `_LOSSY` of
# zero_optimization would also change the loss curve.
_ALLOWED = (
    "zero_optimization",
    "aio",
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "tensorboard",
    "wall_clock_breakdown",
)
# Sections of zero_optimization, each with DeepSpeed's former key for the device `cpu`, and the setting that decides.
_OFFLOADS = (
    ("offload_optimizer", "cpu_offload", "offload_optimizer"),
    ("offload_param", "cpu_offload_param", "offload_parameters"),
)
# Keys of zero_optimization and of its offload_optimizer that work with DeepSpeed's own optimizers only, and the value
# that switches each off.
_OWN_OPTIMIZERS = {"zenflow": None, "super_offload": False, "ratio": 1.0}
_LOSSY = (  # keys that round the numbers that ranks send each other, or the master weights
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "fp16_master_weights_and_gradients",
)


def deepspeed_settings(engine: EngineConfig) -> dict[str, Any]:
    """The contents of the file that `engine.deepspeed` names, without prefetching if weights are on NVMe.

    Raises ValueError for a file that is missing or unreadable, is no JSON object with zero_optimization, or has a key
    that the recipe decides or that may change the loss curve.
    """
    path = Path(engine.deepspeed) if engine.deepspeed.endswith(".json") else CONFIG_FOLDER / f"{engine.deepspeed}.json"
    if not path.exists():
        names = ", ".join(["auto (for pre-training)", *sorted(file.stem for file in CONFIG_FOLDER.glob("*.json"))])
        raise ValueError(f"engine.deepspeed {engine.deepspeed} is neither a path to a .json file nor one of: {names}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a readable file") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("zero_optimization"), dict):
        raise ValueError(f"{path} is no DeepSpeed configuration: it must be a JSON object with zero_optimization")
    if fault := _fault(settings):
        raise ValueError(f"{path} {fault}")
    if engine.offload_parameters == "nvme":  # if DeepSpeed 0.19.8 prefetches weights, it reads a weight twice and fails
        settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    return settings


def _fault(settings: dict[str, Any]) -> str:
    """The first fault in a file's `settings`, as words that follow the file's path; empty if there is none."""
    zero = settings["zero_optimization"]
    if zero.get("stage") not in (1, 2, 3):
        return "must set zero_optimization.stage to 1, 2 or 3"
    if any(not isinstance(zero[key], dict) for key in ("offload_optimizer", "offload_param") if key in zero):
        return "sets an offload_* of zero_optimization that is no object: give a JSON object, or leave it out"
    for key, former_key, setting in _OFFLOADS:
        if zero.get(key, {}).get("device", "none") != "none":
            return f"sets zero_optimization.{key}.device, which engine.{setting} decides: remove it from the file"
        if former_key in zero:  # in any form DeepSpeed refuses it next to the section
            return f"sets zero_optimization.{former_key}, which engine.{setting} decides: remove it from the file"
    for key, off in _OWN_OPTIMIZERS.items():
        if (zero | zero.get("offload_optimizer", {})).get(key, off) != off:
            return f"sets {key}, which works with DeepSpeed's own optimizers only: remove it"
    for key, value in zero.items():
        if value == "auto":
            return (
                f"sets zero_optimization.{key} to auto, which is for Hugging Face's trainer: give a number, or leave "
                "it out"
            )
    for key in settings:
        if key in _DECIDED_BY_THE_RECIPE:
            return f"sets {key}, which the recipe decides: remove it from the file and use the recipe's setting"
        if key not in _ALLOWED:
            return f"sets {key}, which may change the loss curve: remove it (the file may set {', '.join(_ALLOWED)})"
    for key in _LOSSY:
        if zero.get(key):
            return f"sets zero_optimization.{key}, which rounds numbers of the training: remove it"
    return ""


def zero_stage(engine: EngineConfig) -> int:
    """The ZeRO stage that the engine's file sets."""
    return deepspeed_settings(engine)["zero_optimization"]["stage"]


def resolve_engine_file(config: Config, world: int) -> Config:
    """`config` in which `engine.deepspeed auto` is replaced by the file to use on `world` processes.

    If a rank has one micro-batch per step, the file is zero3: ZeRO-3 sends as many bytes as ZeRO-1 if it can hold the
    gathered weights until the backward pass, and sends more of these bytes during computation. If a rank has several
    micro-batches, the file is zero1, because ZeRO-3 sends the parameters again for each micro-batch. Raises ValueError
    if the rows of a step do not divide among the processes.
    """
    if config.engine.deepspeed != "auto":
        return config
    step = plan_step(config.data, world // config.engine.processes_per_replica)
    return replace(config, engine=replace(config.engine, deepspeed="zero3" if step.accumulation == 1 else "zero1"))
