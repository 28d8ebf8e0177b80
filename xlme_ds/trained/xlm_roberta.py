"""Conversion between Hugging Face's XLM-R and our encoder and heads, in both directions.

The tables below map XLM-R's names of settings and parameters to ours.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..cli import note
from ..config import ModelConfig
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import TextEncoder, encoder_from_state
from .config_json import CONFIG_FILE, SENTENCEPIECE_FILE, explain_mismatch, read_config, read_vocabulary
from .weights import WEIGHTS_FILE, read_weights, require_finite, shards_of

XLM_ROBERTA: Final = "xlm-roberta"  # `model_type` in config.json
_PREFIX = "roberta."  # begins the names of the encoder's parameters if the file also has a head
_EMBEDDING = "embeddings.word_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_PICKLED = "pytorch_model.bin"
_FIRST_POSITION = 2  # row of XLM-R's position table for the first token: the padding id plus 1
_FIXED = {"model_type": XLM_ROBERTA, "hidden_act": "gelu"}  # settings in config.json with one allowed value
_SETTINGS = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "feed_forward",
    "num_hidden_layers": "discriminator_layers",
    "initializer_range": "init_std",
    "layer_norm_eps": "norm_epsilon",
}
# Our settings that have one fixed value for XLM-R.
XLM_ROBERTA_SHAPE: dict[str, Any] = {
    "relative_bias": "none",
    "norm": "post",
    "absolute_positions": True,
    "masked_head": "dense",
    "layout": "xlme",
    "language_embeddings": (),
}
# Parameters of a layer, without `.weight` and `.bias`: our name -> the XLM-R parameters that ours stacks.
_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
# End of a class's name, after XLMRoberta -> the parameters of the class's head (XLM-R's name -> our name).
_HEADS = {
    "ForMaskedLM": {
        "lm_head.dense.weight": "masked_head.dense.weight",
        "lm_head.dense.bias": "masked_head.dense.bias",
        "lm_head.layer_norm.weight": "masked_head.norm.weight",
        "lm_head.layer_norm.bias": "masked_head.norm.bias",
        "lm_head.bias": "masked_head.bias",
    },
    "ForTokenClassification": {"classifier.weight": "head.output.weight", "classifier.bias": "head.output.bias"},
    "ForSequenceClassification": {
        "classifier.dense.weight": "head.dense.weight",
        "classifier.dense.bias": "head.dense.bias",
        "classifier.out_proj.weight": "head.output.weight",
        "classifier.out_proj.bias": "head.output.bias",
    },
    "ForQuestionAnswering": {"qa_outputs.weight": "head.output.weight", "qa_outputs.bias": "head.output.bias"},
}
_MASKED_HEAD = _HEADS["ForMaskedLM"]
# Prefixes of the parameters that belong to no head. The pooler does not count as a head, because no task of XLM-R
# trains it: it is dropped without a note.
_NOT_HEADS = "embeddings.", "encoder.", "pooler."


def xlm_roberta_config(cfg: ModelConfig) -> dict[str, Any]:
    """The settings in XLM-R's config.json that describe a model with the settings `cfg`."""
    settings = {theirs: getattr(cfg, ours) for theirs, ours in _SETTINGS.items()}
    return settings | _FIXED | {"max_position_embeddings": cfg.max_positions + _FIRST_POSITION, "type_vocab_size": 1}


def xlm_roberta_state(encoder: TextEncoder, ending: str, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that transformers saves for the class XLMRoberta + `ending` (`ForMaskedLM`, …, or `Model`).

    `head`: the head's parameters, by our names. The embedding of the token type and the pooler of `Model` are 0,
    because our encoders have neither.
    """
    ours, width = encoder.state_dict(), encoder.cfg.width
    state = {
        _EMBEDDING: torch.cat(encoder.embedding_blocks).detach(),
        _POSITIONS: torch.cat([torch.zeros(_FIRST_POSITION, width), ours["encoder.positions"]]),
        _TOKEN_TYPES: torch.zeros(1, width),
    }
    for name, theirs in _parameter_names(encoder.cfg).items():
        parts = ours[name].chunk(len(theirs))
        if len(parts) > 1:  # safetensors refuses tensors that share memory, as the thirds of `qkv` do
            parts = tuple(part.clone() for part in parts)
        state |= zip(theirs, parts, strict=True)
    if ending == "Model":
        return state | {"pooler.dense.weight": torch.zeros(width, width), "pooler.dense.bias": torch.zeros(width)}
    head_state = {their_name: head[name] for their_name, name in _HEADS[ending].items()}
    return {_PREFIX + name: value for name, value in state.items()} | head_state


def read_xlm_roberta(folder: Path) -> tuple[TextEncoder, Vocabulary]:
    """The encoder in `folder` and its vocabulary. The folder must have config.json, sentencepiece.bpe.model, and the
    parameters in model.safetensors or in pytorch_model.bin; each of these two may be split into shards.

    Raises ValueError for another architecture, and if a file is missing or does not fit.
    """
    config = read_config(folder)
    if "config" in config:
        raise ValueError(f"{folder} is a run, not a model in Hugging Face's form: name it by --run")
    for name, wanted in _FIXED.items():
        if config.get(name) != wanted:
            raise ValueError(f"{folder / CONFIG_FILE} has {name} {config.get(name)}: only {name} {wanted} can be read")
    path = folder / SENTENCEPIECE_FILE
    if not path.exists():
        raise ValueError(f"{folder} has no {SENTENCEPIECE_FILE}: put the file of the original model there")
    weights, state = _read_state(folder)
    config = {"initializer_range": 0.02, **config}  # transformers' default
    with explain_mismatch(weights, folder):
        settings: dict[str, Any] = {ours: config[theirs] for theirs, ours in _SETTINGS.items()}
        max_positions = config["max_position_embeddings"] - _FIRST_POSITION
        cfg = ModelConfig(**settings, **XLM_ROBERTA_SHAPE, max_positions=max_positions)
        parameters = {
            name: torch.cat([state[their_name] for their_name in theirs])
            for name, theirs in _parameter_names(cfg).items()
        }
        # Every token has XLM-R's only token type, so the type's embedding is added to the positions' embeddings.
        parameters["encoder.positions"] = state[_POSITIONS][_FIRST_POSITION:] + state[_TOKEN_TYPES][0]
        encoder = encoder_from_state({"embedding_0": state[_EMBEDDING], **parameters}, cfg)
    exported_by_us = "vocabulary_sha256" in config
    return encoder, read_vocabulary(folder, path) if exported_by_us else Vocabulary(path)


def read_xlm_roberta_masked_head(folder: Path) -> dict[str, Tensor]:
    """The parameters of the masked head, by our names; empty if `folder` has no masked head that can be used. Notes
    tell the user why a masked head cannot be used, and which other heads are left out."""
    path, state = _read_state(folder)
    head_state = {name: value for name, value in state.items() if not name.startswith(_NOT_HEADS)}
    # The output bias has two names, and a file may have either or both. `lm_head.decoder.weight` is a second name of
    # the embedding, unless the head has a table of its own.
    bias, table = head_state.pop("lm_head.decoder.bias", None), head_state.pop("lm_head.decoder.weight", None)
    if bias is not None:
        head_state.setdefault("lm_head.bias", bias)
    missing = sorted(_MASKED_HEAD.keys() - head_state.keys())
    own_table = table is not None and not torch.equal(table, state[_EMBEDDING])
    other_heads = sorted(name for name in head_state if name not in _MASKED_HEAD)
    if own_table or 0 < len(missing) < len(_MASKED_HEAD):
        why = "has a table of its own instead of the embedding" if own_table else f"lacks {' and '.join(missing)}"
        note(f"{path}: the head of masked language modelling {why}, so the encoder is read without it")
    if other_heads:
        note(f"{path}: another head is left out, which has {', '.join(other_heads)}")
    usable = not (own_table or missing)
    return {ours: head_state[theirs] for theirs, ours in _MASKED_HEAD.items()} if usable else {}


def _read_state(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Returns (path of the weights file, even if only its shards exist; the parameters in float32, by names without
    `_PREFIX`)."""
    for file, read in ((WEIGHTS_FILE, read_weights), (_PICKLED, _read_pickled)):
        if shards := shards_of(folder / file):
            return folder / file, {
                name.removeprefix(_PREFIX): value.float() for shard in shards for name, value in read(shard).items()
            }
    raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {_PICKLED}: download the whole model")


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a faulty pickle raises errors of many classes
        raise ValueError(f"{path} cannot be loaded as a dict of tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} does not hold a dict of tensors, but a {type(state).__name__}")
    require_finite(state, path)
    return state


def _parameter_names(cfg: ModelConfig) -> dict[str, list[str]]:
    """Our name of every parameter of the encoder except the embedding tables -> the XLM-R parameters that it stacks."""
    names = {}
    for kind in ("weight", "bias"):
        names[f"encoder.input_norm.{kind}"] = [f"embeddings.LayerNorm.{kind}"]
        for n in range(cfg.discriminator_layers):
            for ours, theirs in _LAYER.items():
                names[f"encoder.layers.{n}.{ours}.{kind}"] = [f"encoder.layer.{n}.{name}.{kind}" for name in theirs]
    return names
