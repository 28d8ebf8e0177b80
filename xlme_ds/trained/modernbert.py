"""Conversion between Hugging Face's ModernBERT and our encoder of `model.body modern`, in both directions.

The tables below map ModernBERT's names of settings and parameters to ours.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..config import ModelConfig
from ..data.schema import BOS, EOS
from ..data.vocabulary import Vocabulary
from ..models.modern import FIXED_SETTINGS
from ..models.text_encoder import TextEncoder, encoder_from_state
from .config_json import SENTENCEPIECE_FILE, explain_mismatch, read_config, read_vocabulary, without_prefix
from .weights import WEIGHTS_FILE, read_model_weights

MODERNBERT: Final = "modernbert"  # `model_type` in config.json
# Our settings that have one fixed value for ModernBERT.
MODERNBERT_SHAPE: dict[str, Any] = {"body": "modern", **FIXED_SETTINGS}
_PREFIX = "model."  # begins the names of the encoder's parameters if the file also has a head
_EMBEDDING = "embeddings.tok_embeddings.weight"
_SETTINGS = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "feed_forward",
    "num_hidden_layers": "discriminator_layers",
    "max_position_embeddings": "max_positions",
    "initializer_range": "init_std",
    "norm_eps": "norm_epsilon",
    "local_attention": "local_window",
    "global_attn_every_n_layers": "global_every",
    "global_rope_theta": "rotary_base",
    "local_rope_theta": "local_rotary_base",
}
# Setting of a rotary base -> the kind of layers that it is for. transformers writes the bases only in
# `rope_parameters`, under the kind of layers.
_ROTARY_BASES = {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"}
_LAYER = {  # parameters of a layer, without `.weight`
    "attn_norm": "attention_norm",
    "attn.Wqkv": "attention.qkv",
    "attn.Wo": "attention.output",
    "mlp_norm": "feed_forward_norm",
    "mlp.Wi": "up",
    "mlp.Wo": "down",
}
_CLASSIFIER = {
    "head.dense.weight": "head.dense.weight",
    "head.norm.weight": "head.norm.weight",
    "classifier.weight": "head.output.weight",
    "classifier.bias": "head.output.bias",
}
# What follows ModernBert in the name of a class -> the parameters of that class's head: ModernBERT's name -> our name.
_HEADS = {
    "ForMaskedLM": {
        "head.dense.weight": "masked_head.dense.weight",
        "head.norm.weight": "masked_head.norm.weight",
        "decoder.bias": "masked_head.bias",
    },
    **{f"For{task}": _CLASSIFIER for task in ("TokenClassification", "SequenceClassification", "QuestionAnswering")},
}


def modernbert_config(cfg: ModelConfig) -> dict[str, Any]:
    """The settings in ModernBERT's config.json that give a model's shape."""
    layers = range(cfg.discriminator_layers)
    settings = {theirs: getattr(cfg, ours) for theirs, ours in _SETTINGS.items()}
    return settings | {
        "model_type": MODERNBERT,
        "hidden_activation": "gelu",
        "layer_types": ["sliding_attention" if n % cfg.global_every else "full_attention" for n in layers],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": settings[name]} for name, kind in _ROTARY_BASES.items()
        },
        "cls_token_id": BOS,
        "sep_token_id": EOS,
    }


def modernbert_state(encoder: TextEncoder, ending: str, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that transformers saves for the class ModernBert + `ending` (`ForMaskedLM`, …, or `Model`)."""
    ours = encoder.state_dict()
    state = {_EMBEDDING: torch.cat(encoder.embedding_blocks).detach()}
    state |= {theirs: ours[name] for theirs, name in _parameter_names(encoder.cfg)}
    if ending == "Model":
        return state
    head_state = {theirs: head[name] for theirs, name in _HEADS[ending].items()}
    return {_PREFIX + name: value for name, value in state.items()} | head_state


def read_modernbert(folder: Path) -> tuple[TextEncoder, Vocabulary]:
    """The encoder and the vocabulary of the export in `folder`. Raises ValueError if a file is missing or damaged."""
    config, state = read_config(folder), read_model_weights(folder / WEIGHTS_FILE)
    state = without_prefix(state, _PREFIX) if _PREFIX + _EMBEDDING in state else state
    with explain_mismatch(folder / WEIGHTS_FILE, folder):
        config |= {name: config["rope_parameters"][kind]["rope_theta"] for name, kind in _ROTARY_BASES.items()}
        settings: dict[str, Any] = {ours: config[theirs] for theirs, ours in _SETTINGS.items()}
        cfg = ModelConfig(**MODERNBERT_SHAPE, **settings)
        parameters = {ours: state[theirs] for theirs, ours in _parameter_names(cfg)}
        encoder = encoder_from_state({"embedding_0": state[_EMBEDDING], **parameters}, cfg)
    return encoder, read_vocabulary(folder, folder / SENTENCEPIECE_FILE)


def read_modernbert_masked_head(folder: Path) -> dict[str, Tensor]:
    """The parameters of the masked head, by our names; empty if `folder` has none."""
    state, masked_head = read_model_weights(folder / WEIGHTS_FILE), _HEADS["ForMaskedLM"]
    has_head = masked_head.keys() <= state.keys()
    return {ours: state[theirs] for theirs, ours in masked_head.items()} if has_head else {}


def _parameter_names(cfg: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (ModernBERT's name, our name) for every parameter except the embedding."""
    yield "embeddings.norm.weight", "encoder.input_norm.weight"
    yield "final_norm.weight", "encoder.output_norm.weight"
    for n in range(cfg.discriminator_layers):
        for theirs, ours in _LAYER.items():
            if n or theirs != "attn_norm":  # layer 0 has none: the embedding has just been normalised
                yield f"layers.{n}.{theirs}.weight", f"encoder.layers.{n}.{ours}.weight"
