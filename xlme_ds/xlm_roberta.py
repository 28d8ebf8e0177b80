"""XLM-R's weights, as Hugging Face stores them, in our encoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cli import note
from .config import ModelConfig
from .data.vocabulary import Vocabulary
from .models.text_encoder import TextEncoder
from .trained.exports import SENTENCEPIECE_FILE
from .trained.settings import CONFIG_FILE, mismatch, read_config
from .trained.weights import WEIGHTS_FILE, read_weights, shards_of

_PICKLED = "pytorch_model.bin"
_FIRST_POSITION = 2  # XLM-R's positions start after the padding id
_MUST_BE = {"model_type": "xlm-roberta", "hidden_act": "gelu"}
_LAYER = {
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "feed_forward_norm",
}
_HEAD = {
    "lm_head.dense.weight": "masked_head.dense.weight",
    "lm_head.dense.bias": "masked_head.dense.bias",
    "lm_head.layer_norm.weight": "masked_head.norm.weight",
    "lm_head.layer_norm.bias": "masked_head.norm.bias",
    "lm_head.bias": "masked_head.bias",
}
_NOT_HEADS = "embeddings.", "encoder.", "pooler."  # the pooler is trained with no task of XLM-R's


def read_xlm_roberta(folder: Path) -> tuple[TextEncoder, dict[str, Tensor], Vocabulary]:
    """The model of `folder`: config.json, model.safetensors or pytorch_model.bin (or their shards),
    sentencepiece.bpe.model.

    With it comes the head of masked language modelling, under our names, empty where the folder has none. Raises
    ValueError in one sentence for another architecture, and where a file is missing or does not fit.
    """
    config = read_config(folder)
    for name, wanted in _MUST_BE.items():
        if config.get(name) != wanted:
            raise ValueError(
                f"{folder / CONFIG_FILE} has {name} {config.get(name)}: only {wanted}, as XLM-R's, is read"
            )
    if not (folder / SENTENCEPIECE_FILE).exists():
        raise ValueError(f"{folder} has no {SENTENCEPIECE_FILE}: put the file of the original model there")
    path, state = _read_state(folder)
    state = {name.removeprefix("roberta."): value for name, value in state.items()}
    try:
        cfg = _settings(config)
        encoder = TextEncoder(cfg)
        encoder.load_state_dict(_translate(state, cfg))
    except (KeyError, RuntimeError) as error:
        raise mismatch(path, folder, error) from None
    return encoder.float().eval(), _head(path, state), Vocabulary(folder / SENTENCEPIECE_FILE)


def _head(path: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head of masked language modelling, or a note if the folder has one that cannot be used."""
    there = {name: value for name, value in state.items() if not name.startswith(_NOT_HEADS)}
    # Of two names of one tensor safetensors keeps either.
    bias, table = there.pop("lm_head.decoder.bias", None), there.pop("lm_head.decoder.weight", None)
    if bias is not None:
        there.setdefault("lm_head.bias", bias)
    lacking = sorted(_HEAD.keys() - there.keys())
    own_table = table is not None and not torch.equal(table, state["embeddings.word_embeddings.weight"])
    others = sorted(name for name in there if name not in _HEAD)
    if own_table or 0 < len(lacking) < len(_HEAD):
        why = "reads another table than the embedding" if own_table else f"lacks {' and '.join(lacking)}"
        note(f"{path}: the head of masked language modelling {why}, so the encoder is taken without it")
    if others:
        note(f"{path}: {', '.join(others)} are of another head, which is not taken")
    return {} if own_table or lacking else {ours: there[theirs] for theirs, ours in _HEAD.items()}


def _settings(config: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        feed_forward=config["intermediate_size"],
        discriminator_layers=config["num_hidden_layers"],
        max_positions=config["max_position_embeddings"] - _FIRST_POSITION,
        init_std=config.get("initializer_range", 0.02),
        norm="post",
        norm_epsilon=config["layer_norm_eps"],
        relative_bias="none",
    )


def _read_state(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    for name, read in ((WEIGHTS_FILE, read_weights), (_PICKLED, _unpickled)):
        shards = shards_of(folder / name)
        if shards:
            return folder / name, {name: value for shard in shards for name, value in read(shard).items()}
    raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {_PICKLED}: download the whole model")


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a faulty pickle raises errors of many classes
        raise ValueError(f"{path} does not hold weights alone: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} does not hold weights alone, but a {type(state).__name__}")
    return state


def _translate(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Under our names; the one token type that XLM-R has is added to every position."""
    positions = state["embeddings.position_embeddings.weight"][_FIRST_POSITION:]
    ours = {
        "embedding_0": state["embeddings.word_embeddings.weight"],
        "encoder.positions": positions + state["embeddings.token_type_embeddings.weight"][0],
    }
    for kind in ("weight", "bias"):
        ours[f"encoder.input_norm.{kind}"] = state[f"embeddings.LayerNorm.{kind}"]
        for n in range(cfg.discriminator_layers):
            layer, theirs = f"encoder.layers.{n}.", f"encoder.layer.{n}."
            qkv = [state[f"{theirs}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            ours[f"{layer}attention.qkv.{kind}"] = torch.cat(qkv)
            ours |= {f"{layer}{name}.{kind}": state[f"{theirs}{old}.{kind}"] for old, name in _LAYER.items()}
    return ours
