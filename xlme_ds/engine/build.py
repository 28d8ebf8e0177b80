"""From settings to a ready engine: the one place where parallelism, precision and DeepSpeed's configuration meet."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..balance import describe_balance, pipeline_balance
from ..config import DataConfig, EngineConfig, ModelConfig, RunConfig, Training
from ..data.loader import Loader
from ..data.source import BatchSource
from ..data.vocabulary import Vocabulary
from ..models.compiled import Compile
from ..models.init import Known, Whole, initialise
from ..models.layers import TransformerLayer
from ..models.pipeline import parts
from ..objectives import objective_of
from ..objectives.protocol import Objective, Pretraining
from .engine import Engine
from .plain import PlainEngine
from .ranks import SharedError, on_gpu

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
_OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "data_types",
)


Fill = Callable[[nn.Module, Whole | None], None]
"""Gives every parameter of a model its first value; `Whole` is entered around each one."""


def deepspeed_settings(engine: EngineConfig) -> dict[str, Any]:
    """The engine keys of a file in ds_configs/ (by name) or at a path.

    Raises ValueError for a file that is missing, is no JSON, or holds keys that the recipe decides.
    """
    path = Path(engine.deepspeed) if engine.deepspeed.endswith(".json") else CONFIG_FOLDER / f"{engine.deepspeed}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in CONFIG_FOLDER.glob("*.json")))
        raise ValueError(f"engine.deepspeed {engine.deepspeed} is neither a path to a .json file nor one of: {known}")
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("zero_optimization"), dict):
        raise ValueError(f"{path} is no DeepSpeed configuration: it must be a JSON object with zero_optimization")
    if settings["zero_optimization"].get("stage") not in (1, 2, 3):
        raise ValueError(f"{path} must set zero_optimization.stage to 1, 2 or 3")
    for key in _OURS:
        if key in settings:
            raise ValueError(
                f"{path} sets {key}, which the recipe decides: remove it there and use the recipe's own setting"
            )
    return settings


def _stage(engine: EngineConfig) -> int:
    stage: int = deepspeed_settings(engine)["zero_optimization"]["stage"]
    return stage


def check_engine(engine: EngineConfig, compile: Compile = "none") -> None:
    """Raise ValueError for an engine that cannot be built, or not with this `model.compile`, before anything is."""
    if engine.kind == "plain":
        return
    stage = _stage(engine)
    if engine.kind == "pipeline" and stage != 1:
        raise ValueError(
            f"engine.deepspeed {engine.deepspeed} is ZeRO-{stage}, a pipeline runs with ZeRO-1: set it to pipe_zero1"
        )
    if stage == 3 and compile == "graphs":
        raise ValueError(
            f"engine.deepspeed {engine.deepspeed} is ZeRO-3, which gathers the weights somewhere else each time, and "
            "model.compile graphs reads them where they were: set it to layers"
        )
    if stage == 2 and engine.gradient_precision == "bf16":
        raise ValueError(
            f"engine.deepspeed {engine.deepspeed} is ZeRO-2, engine.gradient_precision bf16 needs ZeRO-1 or "
            "ZeRO-3: set it to zero1 "
            "or zero3"
        )
    if stage == 1 and engine.gradient_precision == "bf16" and engine.offload_optimizer != "none":
        raise ValueError(
            "engine.gradient_precision bf16 needs ZeRO-3 where engine.offload_optimizer is set: set "
            "engine.deepspeed to zero3"
        )
    if stage != 3 and (engine.offload_parameters != "none" or engine.offload_optimizer == "nvme"):
        raise ValueError(
            f"engine.deepspeed {engine.deepspeed} is ZeRO-{stage}, which offloads the optimizer to cpu and nothing "
            "else: "
            "set it to zero3"
        )


def resolve_precision(engine: EngineConfig) -> Literal["bf16", "fp32"]:
    """What the run computes in; `auto` takes bf16 where the processor has it and the engine can."""
    if engine.precision != "auto":
        return engine.precision
    if engine.kind == "plain":
        return "fp32"
    if on_gpu():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


def resolve_gradient_precision(engine: EngineConfig, precision: str, accumulation: int) -> Literal["bf16", "fp32"]:
    """What the `accumulation` micro-batches of a step add up in; `auto` takes bf16 for one, where the engine can.

    Raises ValueError for gradients in bf16 of a model in fp32.
    """
    if engine.gradient_precision == "bf16" and precision == "fp32":
        raise ValueError(
            "engine.gradient_precision bf16 is for computing in bf16, which is not so here: set it to auto"
        )
    if engine.gradient_precision != "auto":
        return engine.gradient_precision
    can = (
        engine.kind == "deepspeed"
        and precision == "bf16"
        and engine.offload_optimizer == "none"
        and _stage(engine) != 2
    )
    return "bf16" if can and accumulation == 1 else "fp32"


def open_data(
    config: RunConfig,
    folder: Path,
    rank: int = 0,
    world: int = 1,
    rows: DataConfig | None = None,
    like: Loader | None = None,
) -> Loader:
    """What `rank` of `world` reads of `folder` in a run, or `rows` of it instead; see `fitting`."""
    objective, languages = config.objective, config.model.language_embeddings
    arguments = config.seed, objective.mask_fraction, rank, world, languages, objective.pseudo_fractions
    return fitting(Loader(folder, rows or config.data, *arguments), config.model, like)


def fitting(loader: Loader, model: ModelConfig, like: Loader | None = None) -> Loader:
    """`loader`, if its data fit `model`, and have the vocabulary of `like`. Raises ValueError naming the setting."""
    folder = loader.folder
    if loader.vocabulary_size != model.vocabulary:
        raise ValueError(
            f"{folder} was encoded with a vocabulary of {loader.vocabulary_size}, the model has {model.vocabulary}: "
            f"set model.vocabulary to {loader.vocabulary_size}"
        )
    if loader.row_tokens > model.max_positions:
        raise ValueError(
            f"{folder} has rows of {loader.row_tokens} tokens, model.max_positions is {model.max_positions}: "
            f"raise it to {loader.row_tokens}"
        )
    if loader.layout != model.layout:
        raise ValueError(
            f"{folder} was mixed with --layout {loader.layout}, model.layout is {model.layout}: set it to "
            f"{loader.layout}"
        )
    if Vocabulary(folder / "vocab").sha256 != loader.vocabulary_sha256:
        raise ValueError(f"{folder / 'vocab'} is not the vocabulary of the rows next to it: mix {folder} again")
    if like is not None and loader.vocabulary_sha256 != like.vocabulary_sha256:
        raise ValueError(f"{folder} and {like.folder} were encoded with different vocabularies: encode both with one")
    return loader


def build_engine(config: RunConfig, loader: Loader, heldout: Loader | None, known: Known | None = None) -> Engine:
    """Model, optimizer and engine of `config`, initialised with `known` and from its seed.

    The process group, where the engine needs one, exists already. Raises ValueError for settings that do not fit.
    """
    objective = objective_of(config.objective)
    if config.engine.kind == "pipeline":
        return _build_pipeline(config, objective, loader, heldout, known)

    def fill(model: nn.Module, whole: Whole | None) -> None:
        initialise(model, config.seed, config.model.init_std, whole, known)

    return assemble(config, objective, fill, loader, heldout)


def assemble(
    config: Training, objective: Objective, fill: Fill, loader: BatchSource, heldout: BatchSource | None
) -> Engine:
    """A data-parallel engine around the objective's model, whose parameters `fill` gives their first values."""
    if config.engine.kind == "plain":
        model = objective.build(config.model)
        fill(model, None)
        device = torch.device("cuda" if on_gpu() else "cpu")
        return PlainEngine(model, objective, loader, heldout, device, config.optimizer)
    return _build_zero(config, objective, fill, loader, heldout)


def _offload(engine: EngineConfig, zero: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's keys for what `engine` keeps off the accelerator, with the buffer sizes that `zero` has for it."""
    wanted = {"offload_optimizer": engine.offload_optimizer, "offload_param": engine.offload_parameters}
    folder = {"nvme_path": str(Path(engine.nvme_folder).absolute())} if engine.nvme_folder else {}
    return {key: zero.get(key, {}) | {"device": device, **folder} for key, device in wanted.items() if device != "none"}


def _gradient_precision(config: Training, loader: BatchSource) -> Literal["bf16", "fp32"]:
    return resolve_gradient_precision(config.engine, resolve_precision(config.engine), loader.plan.accumulation)


def _deepspeed_config(config: Training, loader: BatchSource) -> dict[str, Any]:
    settings = deepspeed_settings(config.engine)
    settings["zero_optimization"] |= _offload(config.engine, settings["zero_optimization"])
    if config.engine.offload_parameters == "nvme":  # DeepSpeed 0.19.8 reads a weight twice, and fails
        settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    # Under ZeRO-1 bf16 gradients are ours, in place of the float32 ones of its BF16_Optimizer: with bf16 asked for here
    # DeepSpeed takes its optimizer of ZeRO-2, and a step takes a third more (docs/lab_log.md).
    gradients = _gradient_precision(config, loader) if _stage(config.engine) == 3 else "fp32"
    return settings | {
        "train_micro_batch_size_per_gpu": loader.plan.micro_rows,
        "gradient_accumulation_steps": loader.plan.accumulation,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": resolve_precision(config.engine) == "bf16", "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": gradients},
        # The optimizer is torch's on every engine, so that their curves agree.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


def _build_zero(
    config: Training, objective: Objective, fill: Fill, loader: BatchSource, heldout: BatchSource | None
) -> Engine:
    if config.model.compile == "graphs" and not (on_gpu() and resolve_precision(config.engine) == "bf16"):
        raise SharedError("model.compile graphs needs a GPU that computes in bf16: set it to layers or none")
    import deepspeed

    from .zero import ZeroEngine

    if "nvme" in (config.engine.offload_optimizer, config.engine.offload_parameters):
        _check_nvme()
    ds_config = _deepspeed_config(config, loader)
    if ds_config["zero_optimization"]["stage"] == 3:
        # The data type comes from the configuration: given as an argument, DeepSpeed 0.19.8 ignores it on the CPU.
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = objective.build(config.model)
        if config.model.compile != "none":
            # ZeRO-3 gathers and releases a layer's parameters together, outside of the code that is compiled for it.
            deepspeed.utils.set_z3_leaf_modules(model, [TransformerLayer])
        fill(model, lambda parameter: deepspeed.zero.GatheredParameters([parameter], modifier_rank=0))
    else:
        model = objective.build(config.model)
        fill(model, None)
    halved = _gradient_precision(config, loader) == "bf16"
    return ZeroEngine(model, objective, loader, heldout, config.optimizer, ds_config, halved)


def _check_nvme() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise SharedError(
            "offloading to nvme compiles DeepSpeed's async_io, which needs libaio: apt-get install libaio-dev, or "
            "offload to cpu"
        )


def _build_pipeline(
    config: RunConfig, objective: Pretraining, loader: Loader, heldout: Loader | None, known: Known | None
) -> Engine:
    from .pipeline_engine import PipelineEngine

    needed = 2 * config.engine.pipeline_stages if config.engine.pipeline_schedule == "dualpipev" else 1
    if loader.plan.accumulation < needed:
        raise SharedError(
            f"engine.pipeline_schedule dualpipev needs at least {needed} micro-batches a step, "
            f"data.micro_batch {config.data.micro_batch} gives {loader.plan.accumulation}: lower it, or use 1f1b"
        )
    work = objective.work(config.model, loader.row_tokens)
    counted = config.engine, work, config.model.activation_checkpointing
    if torch.distributed.get_rank() == 0:
        print(describe_balance(*counted), flush=True)
    balance = parts(pipeline_balance(*counted))
    return PipelineEngine(config, objective, balance, loader, heldout, known, _deepspeed_config(config, loader))
