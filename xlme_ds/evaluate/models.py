"""The models of a comparison: trained ones, and untrained ones of the same shape."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import ModelConfig, ObjectiveConfig, RunConfig
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..models.text_encoder import TextEncoder, Which, take_encoder
from ..objectives import objective_of
from ..trained import first_of, load_encoder, read_config


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
    """The paper's layer 9 of 12, for another depth: three quarters of it, halves rounded up. Layer 0 is the
    embeddings."""
    return (3 * depth + 2) // 4


def load(folders: list[Path], layer: int | None, untrained: bool, which: Which | None = None) -> list[Compared]:
    """The models in `folders`; with `untrained`, behind them one with initial weights for every shape and seed there
    is.

    Raises ValueError on a folder without a model and on a layer that a model does not have.
    """
    loaded = []
    for folder, label in names_of(folders):
        saved = load_encoder(folder, which)
        require_finite(saved.encoder, folder)
        loaded.append(_compared(label + _of(which), folder, saved.encoder, saved.vocabulary, layer))
    if untrained:
        known = [(folder, model.encoder.cfg, model.vocabulary) for folder, model in zip(folders, loaded, strict=True)]
        loaded += [_start(beginning, loaded[beginning.like], layer, which) for beginning in beginnings(known)]
    require_distinct([model.name for model in loaded])
    return loaded


def names_of(folders: list[Path]) -> list[tuple[Path, str]]:
    """Every folder with the name of its model: its last part, or all of it where two are alike."""
    if not folders:
        raise ValueError("--model is missing: name the folder of a finished run, several times to compare")
    names = [folder.resolve().name for folder in folders]
    return [
        (folder, name if names.count(name) == 1 else str(folder)) for folder, name in zip(folders, names, strict=True)
    ]


def require_finite(model: nn.Module, folder: Path) -> None:
    """Raise ValueError for weights that are not numbers, with which every nearest neighbour is the first."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"{folder}: {name} is not finite, the training diverged: name an earlier checkpoint's weights"
            )


def require_distinct(names: list[str]) -> None:
    """Raise ValueError when two models have one name."""
    if len(set(names)) < len(names):
        raise ValueError("two of the models have the same name: name every --model once")


class Beginning(NamedTuple):
    """The initial weights that one or several of the models started from."""

    like: int
    """Number of the first of them."""
    seed: int
    objective: ObjectiveConfig
    alone: bool
    """All of the models started from it."""

    def name(self, said: str, first: str) -> str:
        """What to call a model of these weights, `first` being the name of that first one."""
        return f"untrained{said}, seed {self.seed}" + ("" if self.alone else f", as {first}")


def beginnings(models: list[tuple[Path, ModelConfig, Vocabulary]]) -> list[Beginning]:
    """One for every shape, seed, objective and vocabulary among `models`."""
    found: dict[tuple[ModelConfig, int, Any, str], int] = {}
    for number, (folder, cfg, vocabulary) in enumerate(models):
        found.setdefault((cfg, *_origin(folder), vocabulary.sha256), number)
    return [
        Beginning(number, seed, ObjectiveConfig(name), len(found) == 1) for (_, seed, name, _), number in found.items()
    ]


def _start(beginning: Beginning, model: Compared, layer: int | None, which: Which | None) -> Compared:
    objective, cfg = objective_of(beginning.objective), model.encoder.cfg
    start = objective.build(cfg)
    initialise(start, beginning.seed, cfg.init_std)
    encoder = take_encoder(start.state_dict(), cfg, which or first_of(objective.encoders))
    name = beginning.name(_of(which), model.name)
    return _compared(name, Path(model.folder), encoder, model.vocabulary, layer)


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
