"""Trained encoders from the folders that hold them: of a finished run, or in Hugging Face's form.

The latter is written by `xlme_ds.export`; this file says what its names mean, for both directions.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .cli import note
from .config import ModelConfig, ObjectiveConfig, refuse
from .data.schema import read_json
from .data.vocabulary import MODEL_FILE, Vocabulary
from .models.text_encoder import TextEncoder, Which, take_encoder
from .objectives import objective_of

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_FOLDER = "model"  # of a run: float32 weights and vocabulary, written when the last step is done

MODEL_TYPE = "xlme"  # `model_type` in the `config.json` of an export
GENERATOR_FOLDER = "generator"  # of an export: the generator, an export of its own
SENTENCEPIECE_FILE = "sentencepiece.bpe.model"
PREFIX = f"{MODEL_TYPE}."  # of the encoder's parameters in an export; a bare AutoModel saves them without it
EMBEDDING = "embedding.weight"
# What of ModelConfig shapes one encoder, under its name in an export.
EXPORTED_SETTINGS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "discriminator_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "norm": "norm",
    "norm_epsilon": "layer_norm_eps",
    "masked_head": "masked_head",
    "embedding_norm": "embedding_norm",
    "absolute_positions": "absolute_positions",
    "relative_bias": "relative_bias",
    "relative_buckets": "relative_buckets",
    "relative_max_distance": "relative_max_distance",
    "layout": "layout",
    "language_embeddings": "languages",
}
# Of exports that were written before they could have these.
_YOUNGER = {"layout": "xlme", "languages": (), "masked_head": "dense"}


def first_of(encoders: Mapping[Which, str]) -> Which:
    """The encoder that a pre-trained model is for."""
    return next(iter(encoders))


class TrainedEncoder(NamedTuple):
    """A trained encoder and the vocabulary that it reads."""

    encoder: TextEncoder
    vocabulary: Vocabulary


class RunSettings(NamedTuple):
    """What of a run's settings says what its model is."""

    model: ModelConfig
    task: str
    objective: ObjectiveConfig


class TrainedRun(NamedTuple):
    """The whole model of a finished run."""

    folder: Path
    state: dict[str, Tensor]
    model: ModelConfig
    vocabulary: Vocabulary
    task: str  # what it was fine-tuned on; empty after pre-training
    objective: ObjectiveConfig  # what it was pre-trained for

    @property
    def encoders(self) -> Mapping[Which, str]:
        """Its encoders and their heads (see `Pretraining`); the one encoder of a fine-tuned run."""
        return {"encoder": "head."} if self.task else objective_of(self.objective).encoders

    def encoder(self, which: Which | None = None) -> TextEncoder:
        """One of its encoders, by default the first, in evaluation mode. Raises ValueError when it is not there."""
        which = which or first_of(self.encoders)
        has_none = f"{self.folder} was trained for {self.objective.name} and has no {which}"
        refuse(
            [
                (
                    not self.task or which != "generator",
                    f"{self.folder} was fine-tuned and has no generator: name the run that it started from",
                ),
                (bool(self.task) or which in self.encoders, f"{has_none}: name {' or '.join(self.encoders)}"),
            ]
        )
        try:
            if not self.task:
                return take_encoder(self.state, self.model, which)
            return _encoder_with(_without_prefix(self.state, "encoder."), self.model)
        except (KeyError, RuntimeError) as error:
            raise mismatch(self.folder / MODEL_FOLDER / WEIGHTS_FILE, self.folder, error) from None

    def load_into(self, whole: nn.Module) -> None:
        """Its parameters into the whole model that its objective builds. Raises ValueError when they do not fit."""
        try:
            whole.load_state_dict(self.state)
        except RuntimeError as error:
            raise mismatch(self.folder / MODEL_FOLDER / WEIGHTS_FILE, self.folder, error) from None


def load_encoder(folder: Path, which: Which | None = None) -> TrainedEncoder:
    """The encoder in `folder`, by default the first that it has, float32 on the CPU in evaluation mode.

    Raises ValueError in one sentence when the folder holds none.
    """
    if read_config(folder).get("model_type") == MODEL_TYPE:
        return _load_export(_exported(folder, which))
    run = load_run(folder)
    return TrainedEncoder(run.encoder(which), run.vocabulary)


def load_run(folder: Path) -> TrainedRun:
    """Weights (float32, on the CPU), settings and vocabulary of a finished run; ValueError when it is none."""
    settings = read_settings(folder)
    weights = folder / MODEL_FOLDER / WEIGHTS_FILE
    if not weights.exists():
        raise ValueError(f"{weights} does not exist: the run is not finished, start its command again first")
    vocabulary = known_vocabulary(folder, weights.parent)
    return TrainedRun(folder, read_weights(weights), vocabulary=vocabulary, **settings._asdict())


def known_vocabulary(folder: Path, path: Path) -> Vocabulary:
    """The vocabulary at `path`, if it is that of the run or export in `folder`. Raises ValueError where it is another.

    Where an older version wrote the folder without its fingerprint any is taken, with a note.
    """
    config, vocabulary = read_config(folder), Vocabulary(path)
    data = config if config.get("model_type") == MODEL_TYPE else config.get("data")
    known = data.get("vocabulary_sha256") if isinstance(data, dict) else None
    if known is None:
        note(
            f"{folder / CONFIG_FILE} is of an older version and does not tell the vocabulary: {vocabulary.path} is "
            "taken as it is"
        )
    elif known != vocabulary.sha256:
        raise ValueError(
            f"{vocabulary.path} is not the vocabulary that the model in {folder} was trained with: restore or name "
            "that one"
        )
    return vocabulary


def read_settings(folder: Path) -> RunSettings:
    """What a run, finished or not, is; ValueError when the folder holds none."""
    config = read_config(folder)
    if "config" not in config:
        raise ValueError(f"{folder / CONFIG_FILE} is not of a run: name the folder of a finished run")
    settings = config["config"]
    try:
        model = model_config(settings["model"])
        objective = ObjectiveConfig(**settings.get("objective", {}))
        objective = replace(objective, pseudo_fractions=tuple(objective.pseudo_fractions))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} was written by another version of this package: {error!r}") from None
    return RunSettings(model, settings.get("task", ""), objective)


def model_config(settings: Mapping[str, Any]) -> ModelConfig:
    """From what JSON has, which are lists for tuples."""
    model = ModelConfig(**settings)
    return replace(model, language_embeddings=tuple(model.language_embeddings))


def write_model(folder: Path, state: Mapping[str, Tensor], vocabulary: Path) -> None:
    """Write the folder `model` of a run: float32 parameters of the whole model, and a copy of the SentencePiece
    file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in (
        (MODEL_FILE, lambda partial: shutil.copyfile(vocabulary, partial)),
        (WEIGHTS_FILE, lambda partial: save_file(dict(state), partial)),  # last: they say that the folder is whole
    ):
        partial = folder / f"{name}.tmp"
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.rename(folder / name)


def read_heads(folder: Path, which: Which | None = None) -> dict[str, Tensor]:
    """What an export holds next to its encoder, under the names of the heads (`masked_head.bias`, …)."""
    folder = _exported(folder, which)
    return {name: value for name, value in read_weights(folder / WEIGHTS_FILE).items() if not name.startswith(PREFIX)}


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a run or an export; ValueError when there is none."""
    try:
        config: dict[str, Any] = read_json(folder / CONFIG_FILE, dict)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} has no {CONFIG_FILE}: name the folder of a finished run or of an export") from None
    return config


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError when it is none."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def export_state(encoder: TextEncoder) -> dict[str, Tensor]:
    """The parameters of an encoder under their names in an export."""
    state = encoder.state_dict()
    blocks = [state.pop(f"embedding_{n}") for n in range(encoder.cfg.vocabulary_blocks)]
    return {PREFIX + EMBEDDING: torch.cat(blocks)} | {PREFIX + name: value for name, value in state.items()}


def _exported(folder: Path, which: Which | None) -> Path:
    return folder / GENERATOR_FOLDER if which == "generator" else folder


def _load_export(folder: Path) -> TrainedEncoder:
    config = read_config(folder)
    from_export = "copy it from the folder that `python -m xlme_ds.export` wrote"
    files = (WEIGHTS_FILE, SENTENCEPIECE_FILE)
    refuse(((folder / name).exists(), f"{folder} has no {name}: {from_export}") for name in files)
    state = read_weights(folder / WEIGHTS_FILE)
    state = _without_prefix(state, PREFIX) if PREFIX + EMBEDDING in state else state
    try:
        state["embedding_0"] = state.pop(EMBEDDING)
        cfg = model_config({ours: (_YOUNGER | config)[theirs] for ours, theirs in EXPORTED_SETTINGS.items()})
        encoder = _encoder_with(state, cfg)
    except (KeyError, RuntimeError) as error:
        raise mismatch(folder / WEIGHTS_FILE, folder, error) from None
    return TrainedEncoder(encoder, known_vocabulary(folder, folder / SENTENCEPIECE_FILE))


def _without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What `prefix` marks, without it; the rest is a head's."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _encoder_with(state: Mapping[str, Tensor], cfg: ModelConfig) -> TextEncoder:
    encoder = TextEncoder(cfg)
    encoder.load_state_dict(state)
    return encoder.float().eval()


def mismatch(weights: Path, folder: Path, error: Exception) -> ValueError:
    """What to raise when parameters lack (KeyError) or do not fit (torch's RuntimeError)."""
    lines = str(error).splitlines()  # of load_state_dict the second is the first that says something
    why = f"no {error}" if isinstance(error, KeyError) else lines[1 % len(lines)].strip()[:200]
    return ValueError(f"{weights} does not hold the model of {folder / CONFIG_FILE}: {why}")
