"""Models that predict tokens, whole and under the objective that they were trained for: what a perplexity is asked
of."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..config import ModelConfig, ObjectiveConfig
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..models.text_encoder import Which
from ..objectives import objective_of
from ..objectives.protocol import Pretraining
from ..trained import GENERATOR_FOLDER, MODEL_TYPE, load_encoder, load_run, read_config, read_heads
from .models import beginnings, names_of, require_distinct, require_finite

_HEAD = "masked_head."


class Predictor(NamedTuple):
    """A model under the name that tables use; every token that it is to predict shows `<mask>`, if any of them is
    hidden."""

    name: str
    folder: Path
    objective: Pretraining
    model: nn.Module
    cfg: ModelConfig
    vocabulary: Vocabulary


def load_predictors(folders: list[Path], untrained: bool) -> list[Predictor]:
    """The models in `folders`; with `untrained`, behind them one with initial weights for every shape and seed there
    is.

    Raises ValueError on a folder whose model predicts no tokens.
    """
    models = [_load(folder, name) for folder, name in names_of(folders)]
    for model in models:
        require_finite(model.model, model.folder)
    if untrained:
        for beginning in beginnings([(model.folder, model.cfg, model.vocabulary) for model in models]):
            like = models[beginning.like]
            start = like.objective.build(like.cfg)
            initialise(start, beginning.seed, like.cfg.init_std)
            models.append(like._replace(name=beginning.name("", like.name), model=_ready(start)))
    require_distinct([model.name for model in models])
    return models


def _load(folder: Path, name: str) -> Predictor:
    if read_config(folder).get("model_type") == MODEL_TYPE:
        return _exported(folder, name)
    run = load_run(folder)
    if run.task:
        raise ValueError(f"{folder} was fine-tuned and predicts no tokens: name the run that it started from")
    objective = _masking_all(run.objective)
    model = objective.build(run.model)
    run.load_into(model)
    return Predictor(name, folder, objective, _ready(model), run.model, run.vocabulary)


def _exported(folder: Path, name: str) -> Predictor:
    """An export is an encoder with its head: the generator's where there is one, else its own."""
    which: Which | None = "generator" if (folder / GENERATOR_FOLDER).is_dir() else None
    encoder, vocabulary = load_encoder(folder, which)
    heads = {key: value for key, value in read_heads(folder, which).items() if key.startswith(_HEAD)}
    if not heads:
        raise ValueError(f"{folder} has no {_HEAD}*, so it predicts no tokens: export the whole pre-trained run")
    objective = _masking_all(ObjectiveConfig("mlm"))
    model = objective.build(encoder.cfg)
    model.load_state_dict(encoder.state_dict() | heads)
    return Predictor(name, folder, objective, _ready(model), encoder.cfg, vocabulary)


def _masking_all(objective: ObjectiveConfig) -> Pretraining:
    """The objective without the tokens that masking would leave in place or replace, which are easier or harder to
    predict."""
    return objective_of(replace(objective, random_fraction=0.0, keep_fraction=0.0))


def _ready(model: nn.Module) -> nn.Module:
    return model.float().eval().to("cuda" if torch.cuda.is_available() else "cpu")
