"""ERNIE-M's first stage: MMLM on text, TLM and CAMLM on translation pairs (Ouyang et al., 2021).

L = L_MMLM + L_TLM + L_CAMLM, each a mean over its masked positions of the global batch. A pair is read once a pass, for
one of the two. M masked positions.
"""

from torch import Tensor

from ..config import ObjectiveConfig
from ..data.batch import Batch
from ..models.cross_masking import CrossMasking
from .mlm import MaskedLanguageModelling
from .tasks import task_of_masked


class ErnieM(MaskedLanguageModelling):
    """See `Pretraining`."""

    terms: tuple[str, ...] = ("mlm", "tlm", "camlm")
    accuracies = ("accuracy_mono", "accuracy_para", "accuracy_crossed")
    statistics_shape: tuple[int, ...] = (3,)
    masking: CrossMasking

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.masking = CrossMasking(cfg.random_fraction, cfg.keep_fraction)

    def term_of_masked(self, batch: Batch) -> Tensor:
        """See `MaskedLanguageModelling`."""
        return task_of_masked(batch) + self.masking.crossed(batch).flatten()[batch.masked_M].long()
