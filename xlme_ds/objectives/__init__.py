"""Objectives: tensors in, (sum, count) out. Each one is a file here with the class that this table names."""

from ..config import ObjectiveConfig
from .btmlm import BackTranslation
from .clm import CausalLanguageModelling
from .electra import ElectraObjective
from .ernie_m import ErnieM
from .mlm import MaskedLanguageModelling
from .protocol import Pretraining

OBJECTIVES: dict[str, type[Pretraining]] = {
    "electra": ElectraObjective,
    "mlm": MaskedLanguageModelling,
    "ernie_m": ErnieM,
    "btmlm": BackTranslation,
    "clm": CausalLanguageModelling,
}


def objective_of(cfg: ObjectiveConfig) -> Pretraining:
    """The objective that `cfg` names, with its settings."""
    return OBJECTIVES[cfg.name](cfg)
