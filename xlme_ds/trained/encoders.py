"""Loads encoders from any folder that holds a model: a run, one of its checkpoints, or an export; and whole exports
that have a decoder."""

from dataclasses import replace
from pathlib import Path

from ..config import EncoderName, ModelConfig, ObjectiveConfig
from ..models.init import initialise
from ..models.text_encoder import TextEncoder, take_encoder
from ..objectives import objective_of
from .config_json import MODEL_TYPE, is_export, read_config
from .exports import folder_of_encoder, load_export, read_heads
from .runs import TrainedEncoder, TrainedRun, load_run, main_encoder


def load_encoder(folder: Path, which: EncoderName | None = None) -> TrainedEncoder:
    """An encoder of the model in `folder`, by default the main one, float32 on the CPU in evaluation mode.

    Raises ValueError if the folder holds no such encoder.
    """
    return load_encoder_and_step(folder, which)[0]


def load_encoder_and_step(folder: Path, which: EncoderName | None = None) -> tuple[TrainedEncoder, int | None]:
    """Returns (the encoder that `load_encoder` returns, the step of the checkpoint that was read). The step is None for
    a finished model and for an export."""
    if is_export(folder):
        return load_export(folder_of_encoder(folder, which)), None
    run = load_run(folder)
    return TrainedEncoder(run.encoder(which), run.vocabulary), run.step


def initial_encoder(cfg: ModelConfig, objective: str, seed: int, which: EncoderName | None = None) -> TextEncoder:
    """The randomly initialised encoder that a run of these settings starts with, float32 on the CPU. `cfg` is that of
    a loaded encoder, whose `discriminator_layers` is the number of layers even for a generator. If the objective has no
    encoder `which`, the main one is returned."""
    pretraining = objective_of(ObjectiveConfig(objective))
    if which == "generator":
        cfg = replace(cfg, generator_layers=cfg.discriminator_layers)
    model = pretraining.build(cfg)
    initialise(model, seed, cfg.init_std)
    encoders = pretraining.encoders
    chosen = which if which is not None and which in encoders else main_encoder(encoders)
    return take_encoder(model.state_dict(), cfg, chosen)


def load_whole_export(folder: Path) -> TrainedRun | None:
    """The whole model of an export that has a decoder, as a `TrainedRun`; None for any other folder.

    Raises ValueError if the files of such an export cannot be read.
    """
    config = read_config(folder)
    if config.get("model_type") != MODEL_TYPE or not config.get("decoder_form"):
        return None
    encoder, vocabulary = load_encoder(folder)
    model = replace(encoder.cfg, decoder=config["decoder_form"], decoder_layers=config["decoder_layers"])
    state = encoder.state_dict() | read_heads(folder)
    return TrainedRun(folder, state, model, vocabulary, "", ObjectiveConfig("mt", mask_fraction=1.0))
