"""The model that an export writes: one encoder with its head, or a whole model that has extra parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..config import EncoderName
from ..models.text_encoder import TextEncoder
from ..trained.exports import WholeModel
from ..translate.exports import TRANSLATION_MODEL

Architecture = Literal[
    "XLMEModel",
    "XLMEForPreTraining",
    "XLMEForMaskedLM",
    "XLMEForTokenClassification",
    "XLMEForSequenceClassification",
    "XLMEForQuestionAnswering",
    "XLMEForConditionalGeneration",
]
_WHOLE_MODELS: dict[Architecture, WholeModel] = {"XLMEForConditionalGeneration": TRANSLATION_MODEL}


@dataclass(frozen=True)
class Exported:
    """One encoder with the head that was trained on it, or with the extra parts of a whole model.

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
    def whole(self) -> WholeModel | None:
        """The extra parts, files and settings of a whole model; None for an encoder with a head."""
        return _WHOLE_MODELS.get(self.architecture)
