"""Causal language modelling on monolingual rows, and on translation pairs, whose second side sees the first (XLM,
section 3.2).

L = L_CLM + L_CLM on pairs, each a mean over the tokens of its task: the ordinary ones, and every `</s>` after an item's
first token but the last of monolingual text, where the row was cut.
"""

from ..config import ObjectiveConfig
from ..models.causal import Causal
from .mlm import MaskedLanguageModelling


class CausalLanguageModelling(MaskedLanguageModelling):
    """See `Pretraining`. With `mask_fraction` 1, these tokens are what a batch calls masked positions."""

    terms: tuple[str, ...] = ("clm", "clm_pairs")

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.masking = Causal()
