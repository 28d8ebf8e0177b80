"""First weights from a model that was trained before: `start.folder`, a finished run or an export."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .config import ModelConfig, RunConfig, refuse
from .data.vocabulary import Vocabulary
from .models.electra import block_sizes
from .models.init import Known
from .models.text_encoder import TextEncoder, Which
from .objectives import objective_of
from .trained import EXPORTED_SETTINGS, TrainedRun, load_encoder, load_run, read_config, read_heads

_MAY_DIFFER = ("discriminator_layers", "init_std", "layout", "language_embeddings")
# Settings of a model that must be those of the one that it starts from.
SHAPE = [name for name in EXPORTED_SETTINGS if name not in _MAY_DIFFER]


def starting_weights(config: RunConfig, vocabulary_sha256: str) -> Known | None:
    """The first value of every parameter that `config.start` names; None when it names no folder.

    Raises ValueError for a folder whose model has another vocabulary or shape.
    """
    if not config.start.folder:
        return None
    folder, take = Path(config.start.folder), config.start.take
    is_run = "config" in read_config(folder)
    run = load_run(folder) if is_run else None
    if run is not None and run.task:
        run = None  # fine-tuned: an encoder and no more
    if take == "all":
        return _everything(folder, run, config, vocabulary_sha256)
    if run is None:
        encoder, vocabulary = load_encoder(folder, take)
        heads = {} if is_run else read_heads(folder, take)
    else:
        encoder, vocabulary = run.encoder(take), run.vocabulary
        heads = {name: value for name, value in run.state.items() if name.startswith(run.encoders[take])}
    _check(folder, encoder.cfg, config.model, vocabulary, vocabulary_sha256)
    encoders = objective_of(config.objective).encoders
    ours = {name: value for name, value in heads.items() if name.startswith(tuple(encoders.values()))}
    return (_encoder(folder, encoder, config.model, list(encoders)) | ours).get


def _everything(folder: Path, run: TrainedRun | None, config: RunConfig, vocabulary_sha256: str) -> Known:
    encoders = objective_of(config.objective).encoders
    alone = " or ".join(encoders)
    if run is None:
        raise ValueError(
            f"{folder} is not a pre-training run, of which start.take all takes every parameter: set start.take to "
            f"{alone}"
        )
    other_parts = (
        f"{folder} was trained for {run.objective.name}, whose model has other parts than that of "
        f"{config.objective.name}: set start.take to {' or '.join(run.encoders)}"
    )
    refuse([(run.encoders == encoders, other_parts)])
    _check(folder, run.model, config.model, run.vocabulary, vocabulary_sha256)
    of_two = ("generator_layers", "embedding_sharing") if len(encoders) > 1 else ()
    for name in (*of_two, "discriminator_layers", "vocabulary_blocks"):
        there, here = getattr(run.model, name), getattr(config.model, name)
        sentence = f"{folder} has model.{name} {there}, this run has {here}: set it to that, or start.take to {alone}"
        refuse([(there == here, sentence)])
    return run.state.get


def _check(folder: Path, there: ModelConfig, here: ModelConfig, vocabulary: Vocabulary, vocabulary_sha256: str) -> None:
    model, languages = f"the model in {folder}", there.language_embeddings
    refuse(
        [
            (
                vocabulary.sha256 == vocabulary_sha256,
                f"{model} has another vocabulary than the data: encode the data with its own",
            ),
            (
                not languages or languages == here.language_embeddings,
                f"{model} has embeddings of the languages {' '.join(languages)}: set model.language_embeddings to "
                "those",
            ),
            *(
                (
                    getattr(there, name) == getattr(here, name),
                    f"{model} has {name} {getattr(there, name)}, model.{name} is {getattr(here, name)}: set it to the "
                    "same",
                )
                for name in SHAPE
            ),
        ]
    )


def _encoder(folder: Path, encoder: TextEncoder, model: ModelConfig, names: Sequence[Which]) -> dict[str, Tensor]:
    """The embedding, and the encoder under `names`."""
    layers = encoder.cfg.discriminator_layers
    for name in reversed(names):
        setting = "generator_layers" if name == "generator" else "discriminator_layers"
        asked = getattr(model, setting)
        refuse([(asked <= layers, f"the model in {folder} has {layers} layers, model.{setting} is {asked}: lower it")])
    state = encoder.state_dict()
    blocks = [state.pop(f"embedding_{n}") for n in range(encoder.cfg.vocabulary_blocks)]
    ours = torch.cat(blocks).split(block_sizes(model))
    values = {f"embedding_{n}": block for n, block in enumerate(ours)}
    for which in names:
        values |= {which + name.removeprefix("encoder"): value for name, value in state.items()}
    return values
