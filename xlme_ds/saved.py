"""Trained models from where they were left: the folder of a finished run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from .config import ModelConfig
from .data.vocabulary import Vocabulary
from .models.text_encoder import TextEncoder, Which, take_encoder

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_FOLDER = "model"
"""Of a run: float32 weights and vocabulary, written when the last step is done."""


class Saved(NamedTuple):
    """A trained encoder and the vocabulary that it reads."""

    encoder: TextEncoder
    vocabulary: Vocabulary


def load_encoder(folder: Path, which: Which = "discriminator") -> Saved:
    """The encoder in `folder`, float32 on the CPU in evaluation mode.

    Raises ValueError in one sentence when the folder holds none.
    """
    config = _read_config(folder)
    if "config" not in config:
        raise ValueError(f"{folder / CONFIG_FILE} is not of a run: name the folder of a finished run")
    weights = folder / MODEL_FOLDER / WEIGHTS_FILE
    if not weights.exists():
        raise ValueError(f"{weights} does not exist: the run is not finished, start its command again first")
    cfg = ModelConfig(**config["config"]["model"])
    try:
        return Saved(take_encoder(load_file(weights), cfg, which), Vocabulary(weights.parent))
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{weights} does not hold the model of {folder / CONFIG_FILE}: {error}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{folder} has no {CONFIG_FILE}: name the folder of a finished run") from None
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} is not JSON: {error}") from None
    return config
