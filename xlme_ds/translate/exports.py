"""Exports of translation models, which hold the decoder too: recognised by their config.json, and read."""

from dataclasses import replace
from pathlib import Path

from ..config import ObjectiveConfig
from ..trained.encoders import load_encoder
from ..trained.exports import read_heads
from ..trained.runs import TrainedRun
from ..trained.settings import MODEL_TYPE, read_config

DECODER_FORM = "decoder_form"  # the key of `model.decoder` in config.json


def load_with_decoder(folder: Path) -> TrainedRun | None:
    """The whole model of an export with a decoder, like that of a run; None for any other folder. Raises ValueError
    if a file lacks or is damaged."""
    config = read_config(folder)
    if config.get("model_type") != MODEL_TYPE or not config.get(DECODER_FORM):
        return None
    encoder, vocabulary = load_encoder(folder)
    model = replace(encoder.cfg, decoder=config[DECODER_FORM], decoder_layers=config["decoder_layers"])
    state = encoder.state_dict() | read_heads(folder)
    return TrainedRun(folder, state, model, vocabulary, "", ObjectiveConfig("mt", mask_fraction=1.0))
