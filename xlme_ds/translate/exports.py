"""Exports of translation models: the settings of an export with a decoder, and the function that reads one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import ModelConfig, ObjectiveConfig
from ..data.rows import BOS, EOS, PAD, UNK
from ..trained.config_json import MODEL_TYPE, read_config
from ..trained.encoders import load_encoder
from ..trained.exports import read_heads
from ..trained.runs import TrainedRun
from .decoder import decoder_layers


def load_with_decoder(folder: Path) -> TrainedRun | None:
    """The whole model of an export with a decoder, in the form of a run; None for any other folder. Raises ValueError
    if a file is missing or damaged."""
    config = read_config(folder)
    if config.get("model_type") != MODEL_TYPE or not config.get("decoder_form"):
        return None
    encoder, vocabulary = load_encoder(folder)
    model = replace(encoder.cfg, decoder=config["decoder_form"], decoder_layers=config["decoder_layers"])
    state = encoder.state_dict() | read_heads(folder)
    return TrainedRun(folder, state, model, vocabulary, "", ObjectiveConfig("mt", mask_fraction=1.0))


def decoder_settings(cfg: ModelConfig) -> dict[str, Any]:
    """The settings in config.json that an export without a decoder lacks."""
    return {
        "is_encoder_decoder": True,
        "decoder_start_token_id": EOS,
        "decoder_form": cfg.decoder,
        "decoder_layers": decoder_layers(cfg),
    }


def generation_settings(cfg: ModelConfig) -> dict[str, Any]:
    """The content of generation_config.json, with which transformers' `generate` searches like `xlme translate`, if
    both have the same number of beams."""
    return {
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
        "max_new_tokens": cfg.max_positions,  # an upper bound: the model class limits the length by the source's, too
        "suppress_tokens": [BOS, PAD, UNK, cfg.vocabulary - 1],
        "renormalize_logits": True,
    }
