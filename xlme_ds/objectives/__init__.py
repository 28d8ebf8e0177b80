"""Objectives of pre-training: tensors in, sums and counts out. Each one is a file here with the class that this table
names."""

from difflib import get_close_matches
from typing import Any

from ..config import ObjectiveConfig
from .all_tokens import AllTokensObjective
from .btmlm import BackTranslation
from .clm import CausalLanguageModelling
from .electra import ElectraObjective
from .ernie_m import ErnieM
from .mlm import MaskedLanguageModelling
from .mt import MachineTranslation
from .protocol import Pretraining
from .rts import RandomTokenSubstitution

OBJECTIVES: dict[str, type[Pretraining]] = {
    "electra": ElectraObjective,
    "mlm": MaskedLanguageModelling,
    "ernie_m": ErnieM,
    "btmlm": BackTranslation,
    "clm": CausalLanguageModelling,
    "rts": RandomTokenSubstitution,
    "all_tokens": AllTokensObjective,
    "mt": MachineTranslation,
}


def objective_of(cfg: ObjectiveConfig) -> Pretraining:
    """The objective that `cfg` names, with its settings. Raises ValueError, naming the known ones, for another name."""
    if cfg.name not in OBJECTIVES:
        nearest = "".join(f", for example {name}" for name in get_close_matches(cfg.name, OBJECTIVES, n=1, cutoff=0.0))
        raise ValueError(f"objective.name {cfg.name} is not known: choose one of {', '.join(OBJECTIVES)}{nearest}")
    return OBJECTIVES[cfg.name](cfg)


def has_decoder(cfg: ObjectiveConfig) -> bool:
    """Whether the model that the objective trains has a decoder next to its encoder."""
    return isinstance(objective_of(cfg), MachineTranslation)


def reads_both_sides(cfg: ObjectiveConfig) -> bool:
    """Whether the heads that the objective trains are on encoders that see the tokens on both sides: not on a decoder,
    nor on a causal encoder."""
    return not isinstance(objective_of(cfg), MachineTranslation | CausalLanguageModelling)


def described(cfg: ObjectiveConfig) -> dict[str, Any]:
    """The objective in words, as a run records it: description, names of the terms, and what it reports by name."""
    objective = objective_of(cfg)
    quantities = {name: quantity._asdict() for name, quantity in objective.quantities.items()}
    return {"description": objective.description, "terms": list(objective.terms), "quantities": quantities}
