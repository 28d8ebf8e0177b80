"""Build an engine from the settings; only this file decides parallelism, precision and DeepSpeed's configuration."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..cli import note
from ..config import EngineConfig, RunConfig, Training
from ..counting import flops_of
from ..data.loader import Loader
from ..engine_file import deepspeed_settings, zero_stage
from ..models.encoder import layer_class
from ..models.execution import resolve_compile, wrap_layers
from ..models.init import GatherParameter, InitialValues, initialise
from ..models.kernel_check import check_kernels
from ..models.pipeline import describe_balance, pipeline_balance, split_layers
from ..objectives import objective_of
from ..objectives.protocol import BatchSource, Objective
from .engine import Engine
from .optimizer import build_optimizer
from .ranks import all_gather, on_all_ranks, on_gpu


def build_engine(
    config: RunConfig, loader: Loader, heldout: Loader | None, initial_values: InitialValues | None = None
) -> Engine:
    """The engine of `config`, with its model and optimizer. A parameter without a value in `initial_values` starts at
    random.

    The process group must exist already if the engine needs one, and `require_engine` must have passed. Raises
    ValueError for settings that cannot be combined.
    """
    objective = objective_of(config.objective)
    if config.engine.kind == "pipeline":
        from .pipeline_engine import PipelineEngine

        flops, checkpointing = flops_of(config, loader.row_tokens), config.model.activation_checkpointing
        if torch.distributed.get_rank() == 0:
            print(describe_balance(config.engine, flops, checkpointing), flush=True)
        parts = split_layers(pipeline_balance(config.engine, flops, checkpointing))
        ds_config = _deepspeed_config(config, loader, gradient_precision="fp32")
        return PipelineEngine(config, objective, parts, loader, heldout, initial_values, ds_config)

    def fill(model: nn.Module, gather_parameter: GatherParameter | None) -> None:
        initialise(model, config.seed, config.model.init_std, gather_parameter, initial_values)

    return build_data_parallel_engine(config, objective, fill, loader, heldout)


def build_data_parallel_engine(
    config: Training,
    objective: Objective,
    fill: Callable[[nn.Module, GatherParameter | None], None],
    loader: BatchSource,
    heldout: Loader | None,
) -> Engine:
    """A data-parallel engine for the objective's model. `fill` gives every parameter of a model its first value, inside
    a `GatherParameter` context if there is one."""
    if config.engine.kind == "plain":
        device = torch.device("cuda" if on_gpu() else "cpu")
        model = wrap_layers(objective.build(config.model), config.model, on_gpu())
        fill(model, None)
        optimizer = build_optimizer(model.to(device), config.optimizer, objective)
        return Engine(model, objective, loader, heldout, device, optimizer, config.optimizer.clip)
    import deepspeed

    from .deepspeed_compat import loading_extensions
    from .zero import ZeroEngine

    precision = resolve_precision(config.engine)
    gradient_precision = resolve_gradient_precision(config.engine, precision, loader.plan.accumulation)
    ds_config = _deepspeed_config(config, loader, gradient_precision)
    if zero_stage(config.engine) == 3:
        # The configuration gives the data type: DeepSpeed 0.19.8 ignores the argument for it on the CPU.
        with loading_extensions(), deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = objective.build(config.model)
        if resolve_compile(model, config.model, on_gpu()) != "none":
            # So ZeRO-3 gathers and releases all parameters of a layer together, outside of the layer's compiled code.
            deepspeed.utils.set_z3_leaf_modules(model, [layer_class(config.model)])
        gather_parameter = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
    else:
        model, gather_parameter = objective.build(config.model), None
    model = wrap_layers(model, config.model, on_gpu())
    fill(model, gather_parameter)
    bf16_gradients = gradient_precision == "bf16"
    engine = ZeroEngine(model, objective, loader, heldout, config.optimizer, ds_config, bf16_gradients)
    if zero_stage(config.engine) == 3 and hasattr(model, "any_rank"):  # a translation model, which decodes
        # Each decoded token needs a forward pass, which gathers weights from all ranks. So a rank whose translations
        # are complete must decode on until the last rank is done.
        model.any_rank = engine.any_rank  # type: ignore[assignment]
    return engine


def _deepspeed_config(config: Training, loader: BatchSource, gradient_precision: str) -> dict[str, Any]:
    """DeepSpeed's configuration for a run. `gradient_precision`: the precision in which the gradients of micro-batches
    are added."""
    engine, settings = config.engine, deepspeed_settings(config.engine)
    zero = settings["zero_optimization"]
    nvme_path = {"nvme_path": str(Path(engine.nvme_folder).absolute())} if engine.nvme_folder else {}
    for key, device in ("offload_optimizer", engine.offload_optimizer), ("offload_param", engine.offload_parameters):
        if device != "none":
            zero[key] = zero.get(key, {}) | {"device": device, **nvme_path}
    # Under ZeRO-1 our own code keeps gradients in bf16 (`bf16_gradients.py`). If grad_accum_dtype were bf16, DeepSpeed
    # would use ZeRO-2's optimizer, and a step would take a third more time (docs/lab/engines.md).
    grad_accum_dtype = gradient_precision if zero["stage"] == 3 else "fp32"
    return settings | {
        "train_micro_batch_size_per_gpu": loader.plan.micro_batch_size,
        "gradient_accumulation_steps": loader.plan.accumulation,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": resolve_precision(engine) == "bf16", "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": grad_accum_dtype},
        # In bf16 the error of a sum grows with the number of ranks, and changes the loss curve (docs/lab/engines.md).
        # So sums are in bf16 only if the setting `gradient_precision` is bf16, not with `auto`.
        "communication_data_type": "bf16" if engine.gradient_precision == "bf16" else "fp32",
        # The optimizer is torch's on every engine, so that their curves agree.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,  # never
        "timers": {"throughput": {"enabled": False}},  # not used here; it would wait for the GPU twice per micro-batch
    }


def with_shared_precision(engine: EngineConfig) -> EngineConfig:
    """`engine` with the precision of the run: bf16 if `resolve_precision` gives it on every rank. Collective."""
    by_rank = all_gather(resolve_precision(engine))
    return replace(engine, precision="fp32" if "fp32" in by_rank else "bf16")


def resolve_precision(engine: EngineConfig) -> Literal["bf16", "fp32"]:
    """The precision of the run's computations; `auto` takes bf16 where processor and engine support it."""
    if engine.precision != "auto":
        return engine.precision
    if engine.kind == "plain":
        return "fp32"
    if on_gpu():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


def resolve_gradient_precision(engine: EngineConfig, precision: str, accumulation: int) -> Literal["bf16", "fp32"]:
    """The precision in which the gradients of a step's `accumulation` micro-batches are added.

    `auto` takes bf16 if the run is in bf16 under ZeRO-1 without offloading, and a step has one micro-batch. Then no bit
    is lost, because the gradients of a single micro-batch are not added up, and sums over ranks are in float32.

    Raises ValueError if the setting is bf16 and the run computes in fp32.
    """
    if engine.gradient_precision == "bf16" and precision == "fp32":
        raise ValueError(
            "engine.gradient_precision bf16 needs a run that computes in bf16, but this run computes in fp32: set it "
            "to auto"
        )
    if engine.gradient_precision != "auto":
        return engine.gradient_precision
    loses_nothing_in_bf16 = (
        engine.kind == "deepspeed"
        and precision == "bf16"
        and engine.offload_optimizer == "none"
        and zero_stage(engine) == 1
        and accumulation == 1
    )
    return "bf16" if loses_nothing_in_bf16 else "fp32"


def require_engine(config: Training) -> None:
    """Raise SharedError if any rank's machine cannot run the engine or the kernels of `config`; collective."""
    engine = config.engine
    on_all_ranks(lambda: require_kernels(config))
    on_all_ranks(lambda: require_engine_file(engine))
    if "nvme" in (engine.offload_optimizer, engine.offload_parameters):
        on_all_ranks(lambda: _require_nvme(Path(engine.nvme_folder)))


def require_kernels(config: Training) -> None:
    """Raise ValueError if the model's Triton kernels cannot run on this rank's GPU or in Triton's interpreter, or if
    their results are wrong."""
    in_bf16 = resolve_precision(config.engine) == "bf16"
    triton_chosen = config.model.kernels == "triton"
    compiled = on_gpu() and (in_bf16 or triton_chosen)
    interpreted = triton_chosen and not on_gpu() and os.environ.get("TRITON_INTERPRET") == "1"
    if not (compiled or interpreted):
        return
    if interpreted and in_bf16:
        raise ValueError(
            "model.kernels triton runs on this CPU in Triton's interpreter (TRITON_INTERPRET), but the interpreter has "
            "no bf16 products: set engine.precision to fp32, or unset TRITON_INTERPRET"
        )
    if find_spec("triton") is None and triton_chosen:
        raise ValueError("model.kernels triton needs the package triton: install it, or set model.kernels to auto")
    if find_spec("triton") is None and config.model.kernels == "auto":
        note("model.kernels auto: uses torch's operations, because the package triton is not installed")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    check_kernels(config.model, device, dtype)


def require_engine_file(engine: EngineConfig) -> None:
    """Raise ValueError if `engine.deepspeed` is a user's file with a section zero_optimization that DeepSpeed does not
    accept."""
    if engine.kind == "plain" or not engine.deepspeed.endswith(".json"):
        return
    from deepspeed.runtime.zero.config import get_zero_config
    from pydantic import ValidationError

    try:
        get_zero_config(deepspeed_settings(engine))
    except ValidationError as error:
        first_error = error.errors()[0]
        name = ".".join(map(str, ("zero_optimization", *first_error["loc"])))
        raise ValueError(f"{engine.deepspeed}: {name}: {first_error['msg']}: correct the file") from None


def _require_nvme(folder: Path) -> None:
    """Raise ValueError if this rank cannot offload to `folder`. The folder need not exist: DeepSpeed makes it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(f"engine.nvme_folder {folder} cannot be written: name a folder on a local disk")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ValueError(
            "offloading to nvme compiles DeepSpeed's async_io, which needs libaio: apt-get install libaio-dev, or "
            "offload to cpu"
        )
