"""From settings to a ready engine: the one place where parallelism, precision and DeepSpeed's configuration meet."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from ..config import EngineConfig, RunConfig
from ..data.loader import Loader
from ..models.init import initialise
from ..objectives import OBJECTIVES
from .plain import PlainEngine
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
    for key in _OURS:
        if key in settings:
            raise ValueError(
                f"{path} sets {key}, which the recipe decides: remove it there and use the recipe's own setting"
            )
    return settings


def resolve_precision(precision: Literal["auto", "bf16", "fp32"]) -> Literal["bf16", "fp32"]:
    """bf16 or fp32; `auto` takes bf16 where the processor computes in it."""
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


def build_engine(config: RunConfig, loader: Loader, heldout: Loader | None) -> Engine:
    """Model, optimizer and engine of `config`, freshly initialised from its seed.

    The process group, where the engine needs one, exists already. Raises ValueError for settings that do not fit.
    """
    if loader.vocabulary_size != config.model.vocabulary:
        raise ValueError(
            f"the data was encoded with a vocabulary of {loader.vocabulary_size}, the model has {config.model.vocabulary}: "
            f"set model.vocabulary to {loader.vocabulary_size}"
        )
    if loader.row_tokens > config.model.max_positions:
        raise ValueError(
            f"the data has rows of {loader.row_tokens} tokens, model.max_positions is {config.model.max_positions}: "
            f"raise it to {loader.row_tokens}"
        )
    objective = OBJECTIVES[config.objective.name](config.objective)
    if config.engine.kind == "plain":
        model = objective.build(config.model)
        initialise(model, config.seed, config.model.init_std)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return PlainEngine(model, objective, loader, heldout, device, config.optimizer)
    return _build_zero(config, loader, heldout)


def _build_zero(config: RunConfig, loader: Loader, heldout: Loader | None) -> Engine:
    from .zero import ZeroEngine, partitioned_construction, whole_parameter

    objective = OBJECTIVES[config.objective.name](config.objective)
    ds_config = deepspeed_settings(config.engine) | {
        "train_micro_batch_size_per_gpu": sum(loader.plan.micro),
        "gradient_accumulation_steps": loader.plan.accumulation,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": resolve_precision(config.engine.precision) == "bf16"},
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
