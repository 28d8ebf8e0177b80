"""The models of a comparison: trained ones, and untrained ones of the same shape."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import ModelConfig, ObjectiveConfig, RunConfig
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..models.text_encoder import TextEncoder, Which, take_encoder
from ..objectives import objective_of
from ..saved import first_of, load_encoder, read_config


class Compared(NamedTuple):
    """A model under the name that tables and plots use, and the layer that its scores are quoted at."""

    name: str
    folder: str
    encoder: TextEncoder
    vocabulary: Vocabulary
    layer: int

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.encoder.cfg.discriminator_layers


def paper_layer(depth: int) -> int:
    """The paper's layer 9 of 12, for another depth: three quarters of it, halves rounded up. Layer 0 is the embeddings."""
    return (3 * depth + 2) // 4


def load(
    folders: list[Path], layer: int | None, untrained: bool, which: Which | None = None
) -> list[Compared]:
    """The models in `folders`; with `untrained`, behind them one with initial weights for every shape and seed there is.

    Raises ValueError on a folder without a model and on a layer that a model does not have.
    """
    if not folders:
        raise ValueError("--model is missing: name the folder of a finished run, several times to compare")
    names = [folder.resolve().name for folder in folders]
    loaded = []
    for folder, name in zip(folders, names, strict=True):
        saved = load_encoder(folder, which)
        label = (name if names.count(name) == 1 else str(folder)) + _of(which)
        loaded.append(_compared(label, folder, saved.encoder, saved.vocabulary, layer))
    if untrained:
        loaded += _starts(folders, loaded, layer, which)
    if len({model.name for model in loaded}) < len(loaded):
        raise ValueError("two of the models have the same name: name every --model once")
    return loaded


def _starts(folders: list[Path], models: list[Compared], layer: int | None, which: Which | None) -> list[Compared]:
    """A model with initial weights for every shape, seed and vocabulary among `models`, named after the first that has it."""
    found: dict[tuple[ModelConfig, int, Any, str], tuple[Path, Compared]] = {}
    for folder, model in zip(folders, models, strict=True):
        found.setdefault((model.encoder.cfg, *_origin(folder), model.vocabulary.sha256), (folder, model))
    starts = []
    for (cfg, seed, name_of_objective, _), (folder, model) in found.items():
        objective = objective_of(ObjectiveConfig(name_of_objective))
        start, asked = objective.build(cfg), which or first_of(objective.encoders)
        initialise(start, seed, cfg.init_std)
        encoder = take_encoder(start.state_dict(), cfg, asked)
        name = f"untrained{_of(which)}, seed {seed}" + (f", as {model.name}" if len(found) > 1 else "")
        starts.append(_compared(name, folder, encoder, model.vocabulary, layer))
    return starts


def _of(which: Which | None) -> str:
    return f" ({which})" if which == "generator" else ""


def _origin(folder: Path) -> tuple[int, Any]:
    """Seed and objective of a run, which its initial weights follow from; of a model that is no run, the usual ones."""
    config, usual = read_config(folder).get("config", {}), RunConfig(name="")
    return int(config.get("seed", usual.seed)), config.get("objective", {}).get("name", usual.objective.name)


def _compared(name: str, folder: Path, encoder: TextEncoder, vocabulary: Vocabulary, layer: int | None) -> Compared:
    depth = encoder.cfg.discriminator_layers
    if layer is not None and not 0 <= layer <= depth:
        raise ValueError(f"--layer {layer} does not exist in {folder}: it has layers 0 (embeddings) to {depth}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Compared(name, str(folder), encoder.to(device), vocabulary, paper_layer(depth) if layer is None else layer)
