"""The models of a comparison, encoders alone or whole models that predict tokens: trained ones, and untrained ones of
the same shape."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import ModelConfig, ObjectiveConfig, RunConfig
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..models.text_encoder import TextEncoder, Which, take_encoder
from ..objectives import objective_of
from ..objectives.protocol import Pretraining
from ..trained import GENERATOR_FOLDER, MODEL_TYPE, first_of, load_encoder, load_run, read_config, read_heads

_HEAD = "masked_head."


class ComparedEncoder(NamedTuple):
    """An encoder under the name that tables and plots use, and the layer whose scores the tables quote."""

    name: str
    folder: Path
    encoder: TextEncoder
    cfg: ModelConfig
    vocabulary: Vocabulary
    layer: int


class Predictor(NamedTuple):
    """A whole model under the name that tables use; `objective` replaces every token to predict by `<mask>`, if it
    replaces any."""

    name: str
    folder: Path
    objective: Pretraining
    model: nn.Module
    cfg: ModelConfig
    vocabulary: Vocabulary


def paper_layer(depth: int) -> int:
    """The paper's layer 9 of 12, for another depth: three quarters of it, halves rounded up. Layer 0 is the
    embeddings."""
    return (3 * depth + 2) // 4


def load_encoders(
    folders: list[Path], layer: int | None, untrained: bool, which: Which | None = None
) -> list[ComparedEncoder]:
    """The encoders in `folders`; with `untrained`, after them one with initial weights for every shape and seed.

    Raises ValueError on a folder without a model and on a layer that a model does not have.
    """
    found: list[ComparedEncoder] = []
    which_name = f" ({which})" if which == "generator" else ""
    for folder, name in _named(folders):
        encoder, vocabulary = load_encoder(folder, which)
        _require_finite(encoder, folder)
        depth = encoder.cfg.discriminator_layers
        if layer is not None and not 0 <= layer <= depth:
            raise ValueError(f"--layer {layer} does not exist in {folder}: it has layers 0 (embeddings) to {depth}")
        chosen = paper_layer(depth) if layer is None else layer
        found.append(ComparedEncoder(name + which_name, folder, _on_device(encoder), encoder.cfg, vocabulary, chosen))
    for start in _starts(found, which_name) if untrained else []:
        like, objective = found[start.like], objective_of(start.objective)
        model = objective.build(like.cfg)
        initialise(model, start.seed, like.cfg.init_std)
        encoder = take_encoder(model.state_dict(), like.cfg, which or first_of(objective.encoders))
        found.append(like._replace(name=start.name, encoder=_on_device(encoder)))
    return found


def load_predictors(folders: list[Path], untrained: bool) -> list[Predictor]:
    """The whole models in `folders`; with `untrained`, after them one with initial weights for every shape and seed.

    Raises ValueError on a folder whose model predicts no tokens.
    """
    found = [_load_predictor(folder, name) for folder, name in _named(folders)]
    for predictor in found:
        _require_finite(predictor.model, predictor.folder)
    for start in _starts(found) if untrained else []:
        like = found[start.like]
        model = like.objective.build(like.cfg)
        initialise(model, start.seed, like.cfg.init_std)
        found.append(like._replace(name=start.name, model=_on_device(model.eval())))
    return found


def _load_predictor(folder: Path, name: str) -> Predictor:
    if read_config(folder).get("model_type") != MODEL_TYPE:
        run = load_run(folder)
        if run.task:
            raise ValueError(f"{folder} was fine-tuned and predicts no tokens: name the run that it started from")
        predictor = _build_predictor(name, folder, run.objective, run.model, run.vocabulary)
        run.load_into(predictor.model)
        return predictor
    # Of an export with two encoders the generator has the masked language modelling head.
    which: Which | None = "generator" if (folder / GENERATOR_FOLDER).is_dir() else None
    encoder, vocabulary = load_encoder(folder, which)
    heads = {key: value for key, value in read_heads(folder, which).items() if key.startswith(_HEAD)}
    if not heads:
        raise ValueError(f"{folder} has no {_HEAD}*, so it predicts no tokens: export the whole pre-trained run")
    predictor = _build_predictor(name, folder, ObjectiveConfig("mlm"), encoder.cfg, vocabulary)
    predictor.model.load_state_dict(encoder.state_dict() | heads)
    return predictor


def _build_predictor(
    name: str, folder: Path, trained_for: ObjectiveConfig, cfg: ModelConfig, vocabulary: Vocabulary
) -> Predictor:
    # Tokens that masking leaves in place or replaces by others are easier or harder to predict.
    objective = objective_of(replace(trained_for, random_fraction=0.0, keep_fraction=0.0))
    return Predictor(name, folder, objective, _on_device(objective.build(cfg).eval()), cfg, vocabulary)


def _named(folders: list[Path]) -> list[tuple[Path, str]]:
    """Every folder with the name of its model: its last part, or all of it where two are alike."""
    if not folders:
        raise ValueError("--model is missing: name the folder of a finished run, several times to compare")
    names = [folder.resolve().name for folder in folders]
    names = [name if names.count(name) == 1 else str(folder) for folder, name in zip(folders, names, strict=True)]
    if len(set(names)) < len(names):
        raise ValueError("two of the models have the same name: name every --model once")
    return list(zip(folders, names, strict=True))


def _require_finite(model: nn.Module, folder: Path) -> None:
    """Raise ValueError for weights that are not numbers, with which every nearest neighbour is the first."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"{folder}: {name} is not finite, the training diverged: name an earlier checkpoint's weights"
            )


class _Start(NamedTuple):
    """The initial weights that one or several models started from; `like` is the number of the first of them."""

    like: int
    seed: int
    objective: ObjectiveConfig
    name: str


def _starts(models: Sequence[ComparedEncoder | Predictor], which_name: str = "") -> list[_Start]:
    """One for every shape, seed, objective and vocabulary among `models`."""
    found: dict[tuple[ModelConfig, int, Any, str], int] = {}
    usual = RunConfig(name="")  # of a model that is no run
    for number, model in enumerate(models):
        config = read_config(model.folder).get("config", {})
        seed = int(config.get("seed", usual.seed))
        objective = config.get("objective", {}).get("name", usual.objective.name)
        found.setdefault((model.cfg, seed, objective, model.vocabulary.sha256), number)
    starts = []
    for (_, seed, objective, _), number in found.items():
        like = "" if len(found) == 1 else f", as {models[number].name}"
        starts.append(_Start(number, seed, ObjectiveConfig(objective), f"untrained{which_name}, seed {seed}{like}"))
    return starts


def _on_device(model: Any) -> Any:
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
