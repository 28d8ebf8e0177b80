"""ERNIE-M's second stage: back-translation masked language modelling on monolingual rows (Ouyang et al., 2021, section
3.1).

L = L_BTMLM, a mean over the masked positions of the global batch: a token is predicted from the rest of its sentence
and from tokens of another language that the same weights wrote behind it. M masked positions.
"""

from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from ..config import ModelConfig, ObjectiveConfig
from ..data.batch import Batch
from ..models.back_translation import BackTranslationModel, OpenSide
from ..models.encoder import Part
from ..models.language_model import LanguageModel
from ..models.pipeline import BackTranslationStage
from ..operations import Work, masked_head_forward
from .mlm import MaskedLanguageModelling


class BackTranslation(MaskedLanguageModelling):
    """See `Pretraining`."""

    terms: tuple[str, ...] = ("btmlm",)
    accuracies = ("accuracy_mono",)
    statistics_shape: tuple[int, ...] = (1,)

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.masking = OpenSide(cfg.random_fraction, cfg.keep_fraction)
        self.fractions = cfg.pseudo_fractions

    def build(self, cfg: ModelConfig, part: Part | None = None) -> LanguageModel:
        """See `Pretraining`."""
        return (
            BackTranslationModel(cfg, self.masking) if part is None else BackTranslationStage(cfg, self.masking, part)
        )

    def work(self, cfg: ModelConfig, row_tokens: int) -> Work:
        """Of a full row 1 / (1 + fraction) is sentence, the rest places; the pass that fills these goes ahead."""
        one = super().work(cfg, row_tokens)
        sentence = fmean(1 / (1 + fraction) for fraction in self.fractions)
        return replace(
            one,
            softmax_last=masked_head_forward(cfg, self.mask_fraction * sentence),
            layer_ahead=one.layer,
            softmax_ahead=masked_head_forward(cfg, 1 - sentence),
        )

    def term_of_masked(self, batch: Batch) -> Tensor:
        """See `MaskedLanguageModelling`."""
        return torch.zeros_like(batch.masked_M)
