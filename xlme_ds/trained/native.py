"""The formats of transformers' own model classes, by `model_type`: for each, the settings of the models that it can
hold, and the functions that write and read it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..config import ModelConfig
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import TextEncoder
from . import modernbert, xlm_roberta


class NativeFormat(NamedTuple):
    """A model of transformers. It has several classes, whose names end in `Model`, `ForMaskedLM`, …"""

    model: str  # the model's name
    classes: str  # prefix of its classes' names
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


FORMATS = {
    xlm_roberta.XLM_ROBERTA: NativeFormat(
        "XLM-R",
        "XLMRoberta",
        xlm_roberta.XLM_ROBERTA_SHAPE,
        xlm_roberta.xlm_roberta_config,
        xlm_roberta.xlm_roberta_state,
        xlm_roberta.read_xlm_roberta,
        xlm_roberta.read_xlm_roberta_masked_head,
    ),
    modernbert.MODERNBERT: NativeFormat(
        "ModernBERT",
        "ModernBert",
        modernbert.MODERNBERT_SHAPE,
        modernbert.modernbert_config,
        modernbert.modernbert_state,
        modernbert.read_modernbert,
        modernbert.read_modernbert_masked_head,
    ),
}


def native_format(config: Mapping[str, Any]) -> NativeFormat:
    """The format that `config`, a folder's config.json, names. For an unknown `model_type` it is XLM-R's format, whose
    reader then raises ValueError."""
    return FORMATS.get(config.get("model_type", ""), FORMATS[xlm_roberta.XLM_ROBERTA])
