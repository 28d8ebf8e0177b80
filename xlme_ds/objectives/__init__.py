"""Objectives of pre-training. `OBJECTIVES` names the class of each objective; a class is imported only when it is
used."""

from collections.abc import Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from ..config import ObjectiveConfig
from ..data.rows import TASKS
from .protocol import Pretraining

OBJECTIVES: dict[str, str] = {
    "electra": "xlme_ds.objectives.electra:ElectraObjective",
    "mlm": "xlme_ds.objectives.mlm:MaskedLanguageModelling",
    "ernie_m": "xlme_ds.objectives.ernie_m:ErnieM",
    "btmlm": "xlme_ds.objectives.ernie_m:BackTranslation",
    "clm": "xlme_ds.objectives.clm:CausalLanguageModelling",
    "rts": "xlme_ds.objectives.rts:RandomTokenSubstitution",
    "corrective": "xlme_ds.objectives.token_head:CorrectiveObjective",
    "all_tokens": "xlme_ds.objectives.token_head:AllTokensObjective",
    "mt": "xlme_ds.translate.objective:MachineTranslation",
}


def objective_of(cfg: ObjectiveConfig) -> Pretraining:
    """The objective `cfg.name`, made with the settings `cfg`. Raises ValueError for an unknown name."""
    if cfg.name not in OBJECTIVES:
        nearest = "".join(f", for example {name}" for name in get_close_matches(cfg.name, OBJECTIVES, n=1, cutoff=0.0))
        raise ValueError(f"objective.name {cfg.name} is not known: choose one of {', '.join(OBJECTIVES)}{nearest}")
    objective: Pretraining = resolve_name(OBJECTIVES[cfg.name])(cfg)
    return objective


def describe(cfg: ObjectiveConfig, rows: Sequence[int] = (1, 1)) -> dict[str, Any]:
    """The objective's entry in a run's config.json: the description, the names of the terms, and the quantities by
    name. `rows` has a step's number of rows for each task. Tasks without rows are left out."""
    objective = objective_of(cfg)
    empty_tasks = [task for task, count in zip(TASKS, rows, strict=True) if count == 0]
    quantities = {
        name: quantity._asdict() for name, quantity in objective.quantities.items() if quantity.task not in empty_tasks
    }
    terms = [name for name in objective.terms if name in quantities]
    row_kinds = " and ".join(text for text, count in zip(("text", "translation pairs"), rows, strict=True) if count)
    return {"description": objective.description.replace("{rows}", row_kinds), "terms": terms, "quantities": quantities}
