"""The model that an export writes: one encoder with its head, or a whole translation model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..config import EncoderName
from ..models.text_encoder import TextEncoder

Architecture = Literal[
    "XLMEModel",
    "XLMEForPreTraining",
    "XLMEForMaskedLM",
    "XLMEForTokenClassification",
    "XLMEForSequenceClassification",
    "XLMEForQuestionAnswering",
    "XLMEForConditionalGeneration",
]


@dataclass(frozen=True)
class ExportedModel:
    """One encoder with the head that was trained on it, or with the decoder and the head of a translation model.

    `architecture`: the class in `remote/` that loads the export. `state`: the head's parameters, under the names of
    that class (`head.weight`, …); other entries are ignored. `labels`: the labels that the head predicts.
    `separators`: number of `</s>` between two texts, 2 for XLM-R; 0: as in the model's layout. `which`: the encoder's
    name in the pre-trained model.
    """

    encoder: TextEncoder
    architecture: Architecture
    state: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Sequence[str] = ()
    separators: int = 0
    which: EncoderName | None = None

    @property
    def has_decoder(self) -> bool:
        """Whether this is a whole translation model, which has a decoder."""
        return self.architecture == "XLMEForConditionalGeneration"
