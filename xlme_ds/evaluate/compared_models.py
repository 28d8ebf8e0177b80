"""Load the models of a comparison: encoders, or whole models that predict tokens. On request, untrained models of the
same shapes are added to the trained ones."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..checkpoint_names import run_and_step
from ..cli import note
from ..config import EncoderName, ModelConfig, ObjectiveConfig
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..io.files import real_path
from ..models.init import initialise
from ..models.text_encoder import TextEncoder, language_index
from ..objectives import objective_of
from ..objectives.protocol import Pretraining
from ..trained.config_json import is_export, objective_and_seed, read_config
from ..trained.encoders import initial_encoder, load_encoder, load_encoder_and_step, load_whole_export
from ..trained.exports import GENERATOR_FOLDER, read_heads
from ..trained.runs import TrainedRun, load_run
from ..trained.weights import weights_sha256

_MASKED_HEAD = "masked_head."  # the names of the masked language modelling head's weights begin with this

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ComparedModel:
    """A model of a comparison."""

    name: str  # in tables and plots
    folder: Path
    cfg: ModelConfig
    vocabulary: Vocabulary
    step: int | None  # step of the checkpoint that was read; None: a finished or untrained model
    untrained: bool

    @property
    def metadata(self) -> dict[str, Any]:
        """The beginning of the model's entry in the results."""
        return {"model": self.name, "folder": str(self.folder), "step": self.step}


@dataclass(frozen=True)
class ComparedEncoder(ComparedModel):
    """An encoder of a comparison."""

    encoder: TextEncoder
    layer: int  # the layer whose scores the tables quote

    @property
    def layerwise_metadata(self) -> dict[str, Any]:
        """`metadata` with more entries, for the results of tests that score every layer."""
        return self.metadata | {
            "weights": weights_sha256(self.encoder),
            "depth": self.cfg.discriminator_layers,
            "layer": self.layer,
        }


@dataclass(frozen=True)
class ComparedPredictor(ComparedModel):
    """A whole model of a comparison. If the model predicts masked tokens, `objective` masks the default share of the
    tokens, and shows each of them as `<mask>`."""

    objective: Pretraining
    model: nn.Module


Models = Path | str | Sequence[Path | str]  # folders of runs or of exports; RUN@STEP is a checkpoint of a run
Compared = TypeVar("Compared", bound=ComparedModel)


def default_layer(depth: int) -> int:
    """The paper's layer 9 of 12, scaled to another depth: three quarters of `depth`, halves rounded up. Layer 0 is the
    embeddings."""
    return (3 * depth + 2) // 4


def load_encoders(
    models: Models, layer: int | None, with_untrained: bool, which: EncoderName | None = None
) -> list[ComparedEncoder]:
    """The encoders in the folders; with `with_untrained`, followed by one for each of `_untrained_variants`.

    Raises ValueError for a folder without a model and for a layer that a model does not have.
    """
    encoders: list[ComparedEncoder] = []
    suffix = " (generator)" if which == "generator" else ""
    for folder, name in _with_names(models):
        (encoder, vocabulary), step = load_encoder_and_step(folder, which)
        depth = encoder.cfg.discriminator_layers
        if layer is not None and not 0 <= layer <= depth:
            raise ValueError(f"layer {layer} does not exist in {folder}: it has layers 0 (embeddings) to {depth}")
        encoders.append(
            ComparedEncoder(
                name + suffix,
                folder,
                encoder.cfg,
                vocabulary,
                step,
                untrained=False,
                encoder=_on_device(encoder),
                layer=default_layer(depth) if layer is None else layer,
            )
        )
    for trained, objective_name, seed, name in _untrained_variants(encoders, suffix) if with_untrained else []:
        encoder = initial_encoder(trained.cfg, objective_name, seed, which)
        encoders.append(replace(trained, name=name, step=None, untrained=True, encoder=_on_device(encoder)))
    return encoders


def load_predictors(models: Models, with_untrained: bool) -> list[ComparedPredictor]:
    """The whole models in the folders; with `with_untrained`, followed by one for each of `_untrained_variants`.

    Raises ValueError for a folder whose model predicts no tokens.
    """
    predictors: list[ComparedPredictor] = []
    for folder, name in _with_names(models):
        run = _exported_run(folder) if is_export(folder) else load_run(folder)
        if run.task:
            raise ValueError(f"{folder} was fine-tuned and predicts no tokens: name the run that it started from")
        # All models that mask tokens have an equally hard task: the same share of the tokens is masked, and each of
        # these becomes `<mask>`. A token that stays visible is easier to predict, one that another token replaces is
        # harder.
        objective = objective_of(
            replace(
                run.objective,
                mask_fraction=1.0 if run.objective.mask_fraction == 1.0 else ObjectiveConfig().mask_fraction,
                random_fraction=0.0,
                keep_fraction=0.0,
                generator_keep_fraction=0.0,
            )
        )
        if not objective.quantities[objective.terms[0]].unigram:
            raise ValueError(
                f"{folder} was trained for {run.objective.name} and predicts no tokens: name the run of another "
                "objective"
            )
        settings = read_config(folder).get("config") or {}  # an export has none
        if step := run.step or settings.get("train", {}).get("steps"):
            objective = objective.at(step - 1)  # with the loss weights of the last step
        model = objective.build(run.model)
        run.load_into(model)
        predictors.append(
            ComparedPredictor(
                name,
                folder,
                run.model,
                run.vocabulary,
                run.step,
                untrained=False,
                objective=objective,
                model=_on_device(model),
            )
        )
    for trained, _, seed, name in _untrained_variants(predictors) if with_untrained else []:
        model = trained.objective.build(trained.cfg)
        initialise(model, seed, trained.cfg.init_std)
        predictors.append(replace(trained, name=name, step=None, untrained=True, model=_on_device(model)))
    return predictors


def require_languages(models: Sequence[ComparedModel], codes: Collection[str]) -> None:
    """Raise ValueError, before any model is scored, for a language that a model with language embeddings does not
    have."""
    for model in models:
        for code in codes:
            language_index(model.cfg, code)


def trained_on_entry(model: ComparedModel, store: RowStore) -> dict[str, bool]:
    """Returns {"trained_on": True} for the model's entry in the results if the model's run read the text in `store`, or
    if this text is the training part of a split; a note is printed then. For other text, and for an untrained model,
    the dict is empty."""
    manifest = store.manifest
    run_data: dict[str, Any] = read_config(model.folder).get("data") or {}
    fingerprints_of_run = {
        *run_data.get("fingerprints", {}).values(),
        *run_data.get("phases", {}).values(),
        *run_data.get("encoded", ()),
    }
    same_text = not fingerprints_of_run.isdisjoint((manifest.fingerprint(), manifest.settings.get("encoded")))
    if model.untrained or not (same_text or manifest.settings.get("split") == "train"):
        return {}
    note(f"{store.folder} is text that {model.folder} was trained on: its scores say nothing about unseen text")
    return {"trained_on": True}


def trained_on_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A list with one note for a table, which names the models that were trained on the test's text; empty if there are
    none. `results`: the models' entries in the results."""
    names = [result["model"] for result in results if result.get("trained_on")]
    text = f"not unseen: text that {', '.join(names)} {'was' if len(names) == 1 else 'were'} trained on"
    return [text] if names else []


def _exported_run(folder: Path) -> TrainedRun:
    """The whole model of an export. If the export has only encoders, returns the encoder that predicts tokens (of two
    encoders, the generator) with its masked language modelling head."""
    if run := load_whole_export(folder):
        return run
    which: EncoderName | None = "generator" if (folder / GENERATOR_FOLDER).is_dir() else None
    encoder, vocabulary = load_encoder(folder, which)
    heads = {key: value for key, value in read_heads(folder, which).items() if key.startswith(_MASKED_HEAD)}
    if not heads:
        raise ValueError(
            f"{folder} has no {_MASKED_HEAD}*, so it predicts no tokens: name the run that it was exported from"
        )
    if which is not None:
        note(f"{folder}: only the generator of an export is scored; name the run for the discriminator's losses")
    return TrainedRun(folder, encoder.state_dict() | heads, encoder.cfg, vocabulary, "", ObjectiveConfig("mlm"))


def _with_names(models: Models) -> list[tuple[Path, str]]:
    """Returns (folder, name of its model) for every folder; of a link, the folder that it points to. The name is the
    last part of the folder's path, or the whole path if another path has the same last part."""
    folders = [Path(folder) for folder in ([models] if isinstance(models, os.PathLike | str) else models)]
    for index, (run, step) in enumerate(map(run_and_step, folders)):
        if run.name != real_path(run).name:
            folders[index] = Path(f"{real_path(run)}{'' if step is None else f'@{step}'}")
    last_parts = [folder.name for folder in folders]
    names = [folder.name if last_parts.count(folder.name) == 1 else str(folder) for folder in folders]
    if not folders:
        raise ValueError("no model is named: name the folder of a run, or several to compare")
    if len(set(names)) != len(names):
        raise ValueError("two of the models have the same name: name each model once")
    return list(zip(folders, names, strict=True))


def _on_device(model: Model) -> Model:
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _untrained_variants(models: Sequence[Compared], suffix: str = "") -> list[tuple[Compared, str, int, str]]:
    """Returns (model, objective_name, seed, name) for each combination of shape, objective, seed and vocabulary among
    `models`: the first model with this combination, the objective's name, the seed, and a name for the untrained model,
    in which `suffix` follows the word untrained."""
    first_models: dict[tuple[ModelConfig, str, int, str], Compared] = {}
    for model in models:
        first_models.setdefault((model.cfg, *objective_and_seed(model.folder), model.vocabulary.sha256), model)
    several = len(first_models) > 1
    return [
        (trained, objective_name, seed, f"untrained{suffix}, seed {seed}" + (f", as {trained.name}" if several else ""))
        for (_, objective_name, seed, _), trained in first_models.items()
    ]
