"""Recipes: published runs by name. A recipe is the complete settings of a run."""

from ..config import RunConfig
from ..io.argument_types import checked
from ..io.errors import no_such
from . import ernie_m, modern, quickstart, translation, xlm, xlme, xlmr

__all__ = ["RECIPES", "SUMMARIES", "recipe"]

# In the order in which commands list the recipes.
_FUNCTIONS = (
    quickstart.quickstart,
    *(xlme.base, xlme.large, xlme.xl),
    *(xlme.base_zero1, xlme.large_zero2, xlme.large_pipe, xlme.xl_zero3, xlme.xl_pipe),
    *(xlme.xlme, xlme.xlme_no_trtd, xlme.xlme_no_gate, xlme.xlme_all_tokens),
    *(xlmr.xlmr, xlmr.xlmr_tlm, xlmr.continue_xlmr, xlmr.continue_xlmr_large),
    *(ernie_m.ernie_m, ernie_m.ernie_m_stage2, ernie_m.ernie_m_large, ernie_m.ernie_m_large_stage2),
    *(xlm.xlm, xlm.xlm_clm),
    *(modern.modern_base, modern.modern_base_mlm),
    *(translation.xlm_mt, translation.xlm_umt, translation.xlme_mt),
)
RECIPES: dict[str, RunConfig] = {run.name: run for run in (function() for function in _FUNCTIONS)}
"""A dictionary of the settings of every recipe, by its name."""
SUMMARIES = {function.__name__: (function.__doc__ or "").partition("\n")[0] for function in _FUNCTIONS}
"""A dictionary of one line for every recipe, by its name: what it trains, and the GPUs whose memory it fits."""


@checked
def recipe(name: str) -> RunConfig:
    """The settings of the recipe `name`. Raises ValueError for an unknown name; the error suggests the nearest name or
    lists all."""
    if name not in RECIPES:
        raise no_such("recipe", name, RECIPES)
    return RECIPES[name]


def __dir__() -> list[str]:
    return __all__
