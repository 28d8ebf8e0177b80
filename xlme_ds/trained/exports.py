"""Exported models, in Hugging Face's form: the names of their files and parameters, and functions that read them.

`xlme_ds.export` writes them.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..config import EncoderName, ModelConfig, ModelType
from ..data.vocabulary import Vocabulary
from ..io.files import file_sha256
from ..models.text_encoder import TextEncoder, encoder_from_state
from . import modernbert, xlm_roberta
from .config_json import (
    CONFIG_FILE,
    MODEL_TYPE,
    SENTENCEPIECE_FILE,
    explain_mismatch,
    read_config,
    read_vocabulary,
    without_prefix,
)
from .runs import TrainedEncoder
from .weights import (
    FETCH_EXPORTED,
    REPLACED_HEAD_FILE,
    WEIGHTS_FILE,
    read_metadata,
    read_model_weights,
    read_weights,
    require_same_settings,
)

GENERATOR_FOLDER = "generator"  # a folder in an export: the generator's own export
ENCODER_PREFIX = f"{MODEL_TYPE}."  # begins the encoder's parameter names; AutoModel.save_pretrained leaves it out
EMBEDDING = "embedding.weight"
# Endings of the token embedding's name, in our format and in the formats of transformers' own classes (`FORMATS`).
EMBEDDING_SUFFIXES = (EMBEDDING, "word_embeddings.weight", "tok_embeddings.weight")
# The difference between the discriminator's embedding and the generator's (GDES). The difference has a file of its own:
# it cannot be computed exactly from the two embeddings, because the discriminator's embedding is a rounded sum.
DIFFERENCE_FILE = "difference.safetensors"
DIFFERENCE = "difference.weight"
# The settings of ModelConfig that an export's config.json holds, and their names there.
EXPORTED_SETTINGS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "discriminator_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "norm": "norm",
    "norm_epsilon": "layer_norm_eps",
    "masked_head": "masked_head",
    "embedding_norm": "embedding_norm",
    "absolute_positions": "absolute_positions",
    "relative_bias": "relative_bias",
    "relative_buckets": "relative_buckets",
    "relative_max_distance": "relative_max_distance",
    "layout": "layout",
    "language_embeddings": "languages",
}
# A key in the metadata of an export's weights. Its value is JSON: the SHA-256 of other files, by name.
FILES_KEY = "files"
# A key in config.json: which encoder of a pre-training run this is; absent after fine-tuning and for XLM-R's weights.
WHICH_KEY = "which"


class NativeFormat(NamedTuple):
    """The format of a model that transformers has itself. The model has several classes, whose names end in `Model`,
    `ForMaskedLM`, …"""

    name: str  # the model's name
    class_prefix: str  # prefix of its classes' names
    shape: Mapping[str, Any]  # our settings that have one fixed value in this format
    config: Callable[[ModelConfig], dict[str, Any]]  # the settings in config.json that give the shape
    # (encoder, ending of a class's name, head's parameters) -> all parameters, by the names of that class
    state: Callable[[TextEncoder, str, Mapping[str, Tensor]], dict[str, Tensor]]
    read: Callable[[Path], tuple[TextEncoder, Vocabulary]]
    read_masked_head: Callable[[Path], dict[str, Tensor]]

    def unsupported_setting(self, cfg: ModelConfig) -> str:
        """The first setting of `cfg` that the format cannot hold, with its value; empty if it can hold the model."""
        differing = (name for name, value in self.shape.items() if getattr(cfg, name) != value)
        return next((f"{name} {getattr(cfg, name)}" for name in differing), "")


# The formats of transformers' own classes, by `model_type`.
FORMATS: dict[ModelType, NativeFormat] = {
    xlm_roberta.XLM_ROBERTA: NativeFormat(
        name="XLM-R",
        class_prefix="XLMRoberta",
        shape=xlm_roberta.XLM_ROBERTA_SHAPE,
        config=xlm_roberta.xlm_roberta_config,
        state=xlm_roberta.xlm_roberta_state,
        read=xlm_roberta.read_xlm_roberta,
        read_masked_head=xlm_roberta.read_xlm_roberta_masked_head,
    ),
    modernbert.MODERNBERT: NativeFormat(
        name="ModernBERT",
        class_prefix="ModernBert",
        shape=modernbert.MODERNBERT_SHAPE,
        config=modernbert.modernbert_config,
        state=modernbert.modernbert_state,
        read=modernbert.read_modernbert,
        read_masked_head=modernbert.read_modernbert_masked_head,
    ),
}


def native_format(config: Mapping[str, Any]) -> NativeFormat:
    """The format that `config`, a folder's config.json, names. For an unknown `model_type` it is XLM-R's format, whose
    reader then raises ValueError."""
    return FORMATS.get(config.get("model_type", ""), FORMATS[xlm_roberta.XLM_ROBERTA])


def embedding_name(state: Iterable[str]) -> str:
    """The name of the token embedding among the parameters of an export."""
    return next(name for name in state if name.endswith(EMBEDDING_SUFFIXES))


def read_heads(folder: Path, which: EncoderName | None = None) -> dict[str, Tensor]:
    """The parameters of an export's heads, by name (`masked_head.bias`, …)."""
    folder = folder_of_encoder(folder, which)
    if (config := read_config(folder)).get("model_type") != MODEL_TYPE:
        replaced = folder / REPLACED_HEAD_FILE
        return native_format(config).read_masked_head(folder) | (read_weights(replaced) if replaced.exists() else {})
    return {
        name: value
        for name, value in read_model_weights(folder / WEIGHTS_FILE).items()
        if not name.startswith(ENCODER_PREFIX)
    }


def folder_of_encoder(folder: Path, which: EncoderName | None) -> Path:
    """The folder of an encoder in an export. Raises ValueError if the export lacks the encoder."""
    has_generator = (folder / GENERATOR_FOLDER).is_dir()
    if which == "generator" and has_generator:
        return folder / GENERATOR_FOLDER
    exported = read_config(folder).get(WHICH_KEY)
    has_encoder = exported == which or (exported is None and which != "generator")
    if which is not None and not has_encoder:
        advice = f"set --which or start.take to {exported}{' or generator' if has_generator else ''}"
        raise ValueError(f"{folder} has no {which}: {advice if exported else 'name the run that it was exported from'}")
    return folder


def load_export(folder: Path) -> TrainedEncoder:
    """The encoder and the vocabulary in the folder of one encoder, in our format or in one of transformers' own.

    Raises ValueError if a file is missing or damaged.
    """
    config = read_config(folder)
    if (weights := folder / WEIGHTS_FILE).exists():
        require_same_settings(weights, config, folder / CONFIG_FILE)
    read = _read_ours if config.get("model_type") == MODEL_TYPE else native_format(config).read
    encoder, vocabulary = read(folder)
    if encoder.cfg.vocabulary != vocabulary.size:
        raise ValueError(
            f"{folder} has embeddings of {encoder.cfg.vocabulary} tokens, its vocabulary {vocabulary.size}: call "
            f"resize_token_embeddings({vocabulary.size}) and save the model"
        )
    return TrainedEncoder(encoder, vocabulary)


def require_exported_files(folder: Path) -> None:
    """Raise ValueError if a file of an export has changed since the weights were written, OSError if it is missing."""
    require_same_settings(folder / WEIGHTS_FILE, read_config(folder), folder / CONFIG_FILE)
    for name, checksum in json.loads(read_metadata(folder / WEIGHTS_FILE).get(FILES_KEY, "{}")).items():
        if file_sha256(folder / name) != checksum:
            raise ValueError(f"{folder / name} has changed since the export (checksum): restore the file")


def _read_ours(folder: Path) -> tuple[TextEncoder, Vocabulary]:
    config = read_config(folder)
    state = read_model_weights(folder / WEIGHTS_FILE)
    if not (folder / SENTENCEPIECE_FILE).exists():
        raise ValueError(f"{folder} has no {SENTENCEPIECE_FILE}: {FETCH_EXPORTED}")
    state = without_prefix(state, ENCODER_PREFIX) if ENCODER_PREFIX + EMBEDDING in state else state
    with explain_mismatch(folder / WEIGHTS_FILE, folder):
        state["embedding_0"] = state.pop(EMBEDDING)
        cfg = ModelConfig(**{ours: config[theirs] for ours, theirs in EXPORTED_SETTINGS.items()})
        encoder = encoder_from_state(state, replace(cfg, language_embeddings=tuple(cfg.language_embeddings)))
    return encoder, read_vocabulary(folder, folder / SENTENCEPIECE_FILE)
