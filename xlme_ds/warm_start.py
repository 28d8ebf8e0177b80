"""First weights from a model that was trained before: `start.folder`, a finished run or an export."""

from pathlib import Path

import torch
from torch import Tensor

from .config import ModelConfig, RunConfig
from .data.vocabulary import Vocabulary
from .models.electra import block_sizes
from .models.init import Known
from .models.text_encoder import TextEncoder, Which
from .objectives import objective_of
from .trained import EXPORTED_SETTINGS, SavedRun, load_encoder, load_run, read_config, read_heads

_MAY_DIFFER = ("discriminator_layers", "init_std", "layout", "language_embeddings")
SHAPE = [name for name in EXPORTED_SETTINGS if name not in _MAY_DIFFER]
"""Settings of a model that must be those of the one that it starts from."""
_LAYERS: dict[Which, str] = {"generator": "generator_layers"}
"""The setting that says how many layers an encoder has, where it is not discriminator_layers."""
_OF_TWO = ("generator_layers", "embedding_sharing")


def starting_weights(config: RunConfig, vocabulary_sha256: str) -> Known | None:
    """The first value of every parameter that `config.start` names; None when it names no folder.

    Raises ValueError for a folder whose model has another vocabulary or shape.
    """
    start, model = config.start, config.model
    if not start.folder:
        return None
    folder = Path(start.folder)
    is_run = "config" in read_config(folder)
    run = load_run(folder) if is_run else None
    if run is not None and run.task:
        run = None  # fine-tuned: an encoder and no more
    if start.take == "all":
        return _everything(folder, run, config, vocabulary_sha256)
    if run is None:
        encoder, vocabulary = load_encoder(folder, start.take)
        heads = {} if is_run else read_heads(folder, start.take)
    else:
        encoder, vocabulary = run.encoder(start.take), run.vocabulary
        heads = {name: value for name, value in run.state.items() if name.startswith(run.encoders[start.take])}
    _check(folder, encoder.cfg, model, vocabulary, vocabulary_sha256)
    encoders = objective_of(config.objective).encoders
    known = tuple(encoders.values())
    values = _encoder(folder, encoder, model, list(encoders))
    return (values | {name: value for name, value in heads.items() if name.startswith(known)}).get


def _everything(folder: Path, run: SavedRun | None, config: RunConfig, vocabulary_sha256: str) -> Known:
    encoders = objective_of(config.objective).encoders
    alone = " or ".join(encoders)
    if run is None:
        raise ValueError(
            f"{folder} is not a pre-training run, of which start.take all takes every parameter: set start.take to {alone}"
        )
    if run.encoders != encoders:
        raise ValueError(
            f"{folder} was trained for {run.objective.name}, whose model has other parts than that of {config.objective.name}: "
            f"set start.take to {' or '.join(run.encoders)}"
        )
    _check(folder, run.model, config.model, run.vocabulary, vocabulary_sha256)
    for name in (*(_OF_TWO if len(encoders) > 1 else ()), "discriminator_layers", "vocabulary_blocks"):
        if getattr(run.model, name) != getattr(config.model, name):
            raise ValueError(
                f"{folder} has model.{name} {getattr(run.model, name)}, this run has {getattr(config.model, name)}: set it to "
                f"that, or start.take to {alone}"
            )
    return run.state.get


def _check(folder: Path, there: ModelConfig, here: ModelConfig, vocabulary: Vocabulary, vocabulary_sha256: str) -> None:
    if vocabulary.sha256 != vocabulary_sha256:
        raise ValueError(f"the model in {folder} has another vocabulary than the data: encode the data with its own")
    languages = there.language_embeddings
    if languages and languages != here.language_embeddings:
        raise ValueError(
            f"the model in {folder} has embeddings of the languages {' '.join(languages)}: set model.language_embeddings to those"
        )
    for name in SHAPE:
        if getattr(there, name) != getattr(here, name):
            raise ValueError(
                f"the model in {folder} has {name} {getattr(there, name)}, model.{name} is {getattr(here, name)}: "
                "set it to the same"
            )


def _encoder(folder: Path, encoder: TextEncoder, model: ModelConfig, names: list[Which]) -> dict[str, Tensor]:
    """The embedding, and the encoder under `names`."""
    layers = encoder.cfg.discriminator_layers
    for setting in (_LAYERS.get(name, "discriminator_layers") for name in reversed(names)):
        if getattr(model, setting) > layers:
            raise ValueError(
                f"the model in {folder} has {layers} layers, model.{setting} is {getattr(model, setting)}: lower it"
            )
    state = encoder.state_dict()
    blocks = [state.pop(f"embedding_{n}") for n in range(encoder.cfg.vocabulary_blocks)]
    ours = torch.cat(blocks).split(block_sizes(model))
    values = {f"embedding_{n}": block for n, block in enumerate(ours)}
    for which in names:
        values |= {which + name.removeprefix("encoder"): value for name, value in state.items()}
    return values
