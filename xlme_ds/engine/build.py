"""From settings to a ready engine: the one place where parallelism, precision and DeepSpeed's configuration meet."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from ..config import EngineConfig, ModelConfig, RunConfig
from ..data.loader import Loader
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..objectives import OBJECTIVES
from .plain import PlainEngine
from .processes import on_gpu
from .protocol import Engine

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


def check_engine(engine: EngineConfig) -> None:
    """Raise ValueError for an engine that cannot be built, before anything is."""
    if engine.kind == "deepspeed":
        deepspeed_settings(engine)


def resolve_precision(engine: EngineConfig) -> Literal["bf16", "fp32"]:
    """What the run computes in; `auto` takes bf16 where the processor has it and the engine can."""
    if engine.precision != "auto":
        return engine.precision
    if engine.kind == "plain":
        return "fp32"
    if on_gpu():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


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
    if Vocabulary(folder / "vocab").sha256 != loader.vocabulary_sha256:
        raise ValueError(f"{folder / 'vocab'} is not the vocabulary of the rows beside it: mix {folder} again")
    if like is not None and loader.vocabulary_sha256 != like.vocabulary_sha256:
        raise ValueError(f"{folder} and {like.folder} were encoded with different vocabularies: encode both with one")
    return loader


def build_engine(config: RunConfig, loader: Loader, heldout: Loader | None) -> Engine:
    """Model, optimizer and engine of `config`, freshly initialised from its seed.

    The process group, where the engine needs one, exists already. Raises ValueError for settings that do not fit.
    """
    objective = OBJECTIVES[config.objective.name](config.objective)
    if config.engine.kind == "plain":
        model = objective.build(config.model)
        initialise(model, config.seed, config.model.init_std)
        device = torch.device("cuda" if on_gpu() else "cpu")
        return PlainEngine(model, objective, loader, heldout, device, config.optimizer)
    return _build_zero(config, loader, heldout)


def _build_zero(config: RunConfig, loader: Loader, heldout: Loader | None) -> Engine:
    from .zero import ZeroEngine, partitioned_construction, whole_parameter

    objective = OBJECTIVES[config.objective.name](config.objective)
    ds_config = deepspeed_settings(config.engine) | {
        "train_micro_batch_size_per_gpu": sum(loader.plan.micro),
        "gradient_accumulation_steps": loader.plan.accumulation,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": resolve_precision(config.engine) == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**31,
    }
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if stage == 3:
        with partitioned_construction(ds_config):
            model = objective.build(config.model)
        initialise(model, config.seed, config.model.init_std, whole_parameter)
    else:
        model = objective.build(config.model)
        initialise(model, config.seed, config.model.init_std)
    return ZeroEngine(model, objective, loader, heldout, config.optimizer, ds_config)
