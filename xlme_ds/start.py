"""First weights from a model that was trained before: `start.folder`, a finished run or an export."""

from pathlib import Path

import torch
from torch import Tensor

from .config import ModelConfig, StartConfig
from .data.vocabulary import Vocabulary
from .models.electra import block_sizes
from .models.init import Known
from .models.text_encoder import TextEncoder, Which
from .saved import EXPORTED_SETTINGS, SavedRun, load_encoder, load_run, read_config

_DEPTH = ("discriminator_layers", "init_std")  # may differ
_SHAPE = [name for name in EXPORTED_SETTINGS if name not in _DEPTH]
_HEADS: dict[Which, str] = {"generator": "masked_head.", "discriminator": "replaced_head."}


def starting_weights(start: StartConfig, model: ModelConfig, vocabulary_sha256: str) -> Known | None:
    """The first value of every parameter of `model` that `start` names; None when it names no folder.

    Raises ValueError for a folder whose model has another vocabulary or shape.
    """
    if not start.folder:
        return None
    folder = Path(start.folder)
    run = load_run(folder) if "config" in read_config(folder) else None
    if run is not None and run.task:
        run = None  # fine-tuned: an encoder and no more
    if start.take == "all":
        return _everything(folder, run, model, vocabulary_sha256)
    if run is None:
        source = load_encoder(folder, start.take)
        encoder, vocabulary = source.encoder, source.vocabulary
    else:
        encoder, vocabulary = run.encoder(start.take), run.vocabulary
    _check(folder, encoder.cfg, model, vocabulary, vocabulary_sha256)
    values = _encoder(folder, encoder, model)
    if run is not None:
        values |= {name: value for name, value in run.state.items() if name.startswith(_HEADS[start.take])}
    return values.get


def _everything(folder: Path, run: SavedRun | None, model: ModelConfig, vocabulary_sha256: str) -> Known:
    if run is None:
        raise ValueError(
            f"{folder} is not a pre-training run, of which start.take all takes every parameter: set start.take to discriminator"
        )
    _check(folder, run.model, model, run.vocabulary, vocabulary_sha256)
    for name in ("generator_layers", "discriminator_layers", "embedding_sharing", "vocabulary_blocks"):
        if getattr(run.model, name) != getattr(model, name):
            raise ValueError(
                f"{folder} has model.{name} {getattr(run.model, name)}, this run has {getattr(model, name)}: set it to that, "
                "or start.take to discriminator"
            )
    return run.state.get


def _check(folder: Path, there: ModelConfig, here: ModelConfig, vocabulary: Vocabulary, vocabulary_sha256: str) -> None:
    if vocabulary.sha256 != vocabulary_sha256:
        raise ValueError(f"the model in {folder} has another vocabulary than the data: encode the data with its own")
    for name in _SHAPE:
        if getattr(there, name) != getattr(here, name):
            raise ValueError(
                f"the model in {folder} has {name} {getattr(there, name)}, model.{name} is {getattr(here, name)}: "
                "set it to the same"
            )


def _encoder(folder: Path, encoder: TextEncoder, model: ModelConfig) -> dict[str, Tensor]:
    """The embedding, and the encoder under the names of both."""
    layers = encoder.cfg.discriminator_layers
    for name in ("generator_layers", "discriminator_layers"):
        if getattr(model, name) > layers:
            raise ValueError(
                f"the model in {folder} has {layers} layers, model.{name} is {getattr(model, name)}: lower it"
            )
    state = encoder.state_dict()
    blocks = [state.pop(f"embedding_{n}") for n in range(encoder.cfg.vocabulary_blocks)]
    ours = torch.cat(blocks).split(block_sizes(model))
    values = {f"embedding_{n}": block for n, block in enumerate(ours)}
    for which in _HEADS:
        values |= {which + name.removeprefix("encoder"): value for name, value in state.items()}
    return values
