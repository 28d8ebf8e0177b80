"""Encoders from any folder that holds a model: a run, one of its checkpoints, or an export."""

from dataclasses import replace
from pathlib import Path

from ..config import ModelConfig, ObjectiveConfig
from ..models.init import initialise
from ..models.text_encoder import TextEncoder, Which, take_encoder
from ..objectives import objective_of
from .exports import DECODER_FORM, folder_of_encoder, load_export, read_heads
from .runs import TrainedEncoder, TrainedRun, load_run, main_encoder
from .settings import of_export, read_config


def load_encoder(folder: Path, which: Which | None = None) -> TrainedEncoder:
    """The encoder in `folder`, by default its main one, float32 on the CPU in evaluation mode.

    Raises ValueError in one sentence when the folder holds none.
    """
    return load_encoder_and_step(folder, which)[0]


def load_encoder_and_step(folder: Path, which: Which | None = None) -> tuple[TrainedEncoder, int | None]:
    """`load_encoder`, and the step of the checkpoint that was read (see `TrainedRun`)."""
    if of_export(folder):
        return load_export(folder_of_encoder(folder, which)), None
    run = load_run(folder)
    return TrainedEncoder(run.encoder(which), run.vocabulary), run.step


def initial_encoder(cfg: ModelConfig, objective: str, seed: int, which: Which | None = None) -> TextEncoder:
    """The randomly initialised encoder with which a run of these settings begins, float32 on the CPU;
    `cfg.discriminator_layers` is its depth, also of a generator."""
    built = objective_of(ObjectiveConfig(objective))
    cfg = replace(cfg, generator_layers=cfg.discriminator_layers)
    model = built.build(cfg)
    initialise(model, seed, cfg.init_std)
    there = which if which is not None and which in built.encoders else main_encoder(built.encoders)
    return take_encoder(model.state_dict(), cfg, there)


def load_translating_export(folder: Path) -> TrainedRun:
    """The whole model of an export that `translates`, like that of a run. Raises as `load_encoder` does."""
    config, (encoder, vocabulary) = read_config(folder), load_encoder(folder)
    model = replace(encoder.cfg, decoder=config[DECODER_FORM], decoder_layers=config["decoder_layers"])
    state = encoder.state_dict() | read_heads(folder)
    return TrainedRun(folder, state, model, vocabulary, "", ObjectiveConfig("mt", mask_fraction=1.0))
