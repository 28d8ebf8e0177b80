"""XLM-R in Hugging Face's form and our encoder and heads, in both directions: settings, names, positions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cli import note
from ..config import ModelConfig
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import TextEncoder
from .settings import CONFIG_FILE, SENTENCEPIECE_FILE, mismatch, read_config, read_vocabulary
from .weights import REPLACED_HEAD_FILE, WEIGHTS_FILE, read_weights, require_finite, shards_of

XLM_ROBERTA = "xlm-roberta"  # `model_type` in config.json
_PREFIX = "roberta."  # of the encoder's parameters, where a head is in the same file
_EMBEDDING = "embeddings.word_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_PICKLED = "pytorch_model.bin"
_FIRST_POSITION = 2  # XLM-R's positions start after the padding id
_MUST_BE = {"model_type": XLM_ROBERTA, "hidden_act": "gelu"}
_SETTINGS = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "feed_forward",
    "num_hidden_layers": "discriminator_layers",
    "initializer_range": "init_std",
    "layer_norm_eps": "norm_epsilon",
}
# The settings that XLM-R has no choice of.
XLM_ROBERTA_SHAPE: dict[str, Any] = {
    "relative_bias": "none",
    "norm": "post",
    "absolute_positions": True,
    "masked_head": "dense",
    "layout": "xlme",
    "language_embeddings": (),
}
_PARTS = "query", "key", "value"
_LAYER = {
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "feed_forward_norm",
}
# The names of a head in the class of the same ending: XLMRobertaForMaskedLM, …
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
_NOT_HEADS = "embeddings.", "encoder.", "pooler."  # the pooler is trained with no task of XLM-R's


def xlm_roberta_config(cfg: ModelConfig) -> dict[str, Any]:
    """The settings in XLM-R's config.json that give a model's shape."""
    sizes = {theirs: getattr(cfg, ours) for theirs, ours in _SETTINGS.items()}
    return sizes | _MUST_BE | {"max_position_embeddings": cfg.max_positions + _FIRST_POSITION, "type_vocab_size": 1}


def xlm_roberta_state(encoder: TextEncoder, ending: str, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that transformers saves for the class XLMRoberta + `ending` (`ForMaskedLM`, …, or `Model`).

    Token types add nothing, and the pooler, which `Model` has and nothing was trained on, is 0.
    """
    ours, width = encoder.state_dict(), encoder.cfg.width
    state = {
        _EMBEDDING: torch.cat(encoder.table).detach(),
        _POSITIONS: torch.cat([torch.zeros(_FIRST_POSITION, width), ours["encoder.positions"]]),
        _TOKEN_TYPES: torch.zeros(1, width),
    }
    for theirs, name, part in _layer_names(encoder.cfg):
        state[theirs] = ours[name] if part is None else ours[name].chunk(len(_PARTS))[part].clone()
    if ending == "Model":
        return state | {"pooler.dense.weight": torch.zeros(width, width), "pooler.dense.bias": torch.zeros(width)}
    of_head = {theirs: head[name] for theirs, name in _HEADS[ending].items()}
    return {_PREFIX + name: value for name, value in state.items()} | of_head


def read_xlm_roberta(folder: Path) -> tuple[TextEncoder, Vocabulary]:
    """The encoder in `folder`: config.json, model.safetensors or pytorch_model.bin (or their shards),
    sentencepiece.bpe.model.

    Raises ValueError in one sentence for another architecture, and where a file is missing or does not fit.
    """
    config = read_config(folder)
    for name, wanted in _MUST_BE.items():
        if config.get(name) != wanted:
            raise ValueError(
                f"{folder / CONFIG_FILE} has {name} {config.get(name)}: only {wanted}, as XLM-R's, is read"
            )
    path = folder / SENTENCEPIECE_FILE
    if not path.exists():
        raise ValueError(f"{folder} has no {SENTENCEPIECE_FILE}: put the file of the original model there")
    weights, state = _read_state(folder)
    try:
        encoder = TextEncoder(_model_config(config))
        encoder.load_state_dict(_our_state(state, encoder.cfg))
    except (KeyError, RuntimeError) as error:
        raise mismatch(weights, folder, error) from None
    ours = "vocabulary_sha256" in config
    return encoder.float().eval(), read_vocabulary(folder, path) if ours else Vocabulary(path)


def read_xlm_roberta_heads(folder: Path) -> dict[str, Tensor]:
    """The masked head in `folder` and the discriminator's under our names, empty where the folder has neither.

    A head of masked language modelling that cannot be used is left out with a note.
    """
    path, state = _read_state(folder)
    there = {name: value for name, value in state.items() if not name.startswith(_NOT_HEADS)}
    # Of two names of one tensor safetensors keeps either.
    bias, table = there.pop("lm_head.decoder.bias", None), there.pop("lm_head.decoder.weight", None)
    if bias is not None:
        there.setdefault("lm_head.bias", bias)
    lacking = sorted(_MASKED_HEAD.keys() - there.keys())
    own_table = table is not None and not torch.equal(table, state[_EMBEDDING])
    others = sorted(name for name in there if name not in _MASKED_HEAD)
    if own_table or 0 < len(lacking) < len(_MASKED_HEAD):
        why = "reads another table than the embedding" if own_table else f"lacks {' and '.join(lacking)}"
        note(f"{path}: the head of masked language modelling {why}, so the encoder is taken without it")
    if others:
        note(f"{path}: {', '.join(others)} are of another head, which is not taken")
    replaced = folder / REPLACED_HEAD_FILE
    heads = read_weights(replaced) if replaced.exists() else {}
    return heads if own_table or lacking else heads | {ours: there[theirs] for theirs, ours in _MASKED_HEAD.items()}


def _model_config(config: Mapping[str, Any]) -> ModelConfig:
    config = {"initializer_range": 0.02, **config}
    sizes: dict[str, Any] = {ours: config[theirs] for theirs, ours in _SETTINGS.items()}
    return ModelConfig(**sizes, **XLM_ROBERTA_SHAPE, max_positions=config["max_position_embeddings"] - _FIRST_POSITION)


def _read_state(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    for name, read in ((WEIGHTS_FILE, read_weights), (_PICKLED, _unpickled)):
        shards = shards_of(folder / name)
        if shards:
            state = {name: value for shard in shards for name, value in read(shard).items()}
            return folder / name, {name.removeprefix(_PREFIX): value for name, value in state.items()}
    raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {_PICKLED}: download the whole model")


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a faulty pickle raises errors of many classes
        raise ValueError(f"{path} does not hold weights alone: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} does not hold weights alone, but a {type(state).__name__}")
    require_finite(state, path)
    return state


def _our_state(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """The encoder's parameters under our names; the one token type that XLM-R has is added to every position."""
    parts: dict[str, list[Tensor]] = {}
    for theirs, name, _ in _layer_names(cfg):
        parts.setdefault(name, []).append(state[theirs])
    return {
        "embedding_0": state[_EMBEDDING],
        "encoder.positions": state[_POSITIONS][_FIRST_POSITION:] + state[_TOKEN_TYPES][0],
        **{name: torch.cat(values) for name, values in parts.items()},
    }


def _layer_names(cfg: ModelConfig) -> Iterator[tuple[str, str, int | None]]:
    """XLM-R's name, ours, and the third of ours that it is, or None for the whole, of every parameter but tables."""
    for kind in ("weight", "bias"):
        yield f"embeddings.LayerNorm.{kind}", f"encoder.input_norm.{kind}", None
        for n in range(cfg.discriminator_layers):
            layer, theirs = f"encoder.layers.{n}.", f"encoder.layer.{n}."
            for third, part in enumerate(_PARTS):
                yield f"{theirs}attention.self.{part}.{kind}", f"{layer}attention.qkv.{kind}", third
            for old, name in _LAYER.items():
                yield f"{theirs}{old}.{kind}", f"{layer}{name}.{kind}", None
