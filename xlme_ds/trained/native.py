"""The models that transformers has a class for, by `model_type`: which of ours they can hold, and how they are written
and read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..config import ModelConfig
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import TextEncoder
from . import modernbert, xlm_roberta


class NativeFormat(NamedTuple):
    """A model of transformers. An ending is that of its class: `Model`, `ForMaskedLM`, …"""

    model: str  # its name in words
    classes: str  # the beginning of the names of its classes
    shape: Mapping[str, Any]  # the settings that it has no choice of
    config: Callable[[ModelConfig], dict[str, Any]]  # the settings that give the shape in config.json
    state: Callable[[TextEncoder, str, Mapping[str, Tensor]], dict[str, Tensor]]  # by ending, with the head
    read: Callable[[Path], tuple[TextEncoder, Vocabulary]]
    read_heads: Callable[[Path], dict[str, Tensor]]

    def differs(self, cfg: ModelConfig) -> str:
        """The first setting, with its value, that the format does not have; empty for a model of its shape."""
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
        xlm_roberta.read_xlm_roberta_heads,
    ),
    modernbert.MODERNBERT: NativeFormat(
        "ModernBERT",
        "ModernBert",
        modernbert.MODERNBERT_SHAPE,
        modernbert.modernbert_config,
        modernbert.modernbert_state,
        modernbert.read_modernbert,
        modernbert.read_modernbert_heads,
    ),
}


def native_format(config: Mapping[str, Any]) -> NativeFormat:
    """The format of the folder that has this config.json; XLM-R's, whose reader reports any other."""
    return FORMATS.get(config.get("model_type", ""), FORMATS[xlm_roberta.XLM_ROBERTA])
