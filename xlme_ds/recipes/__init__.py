"""Recipes: published runs by name. A recipe is the complete settings of a run."""

from ..config import RunConfig
from ..io.argument_types import check_argument_types
from ..io.errors import no_such
from . import ernie_m, modern, quickstart, translation, xlm, xlme, xlmr

__all__ = ["RECIPES", "SUMMARIES"]

# (summary, settings) of each recipe, in the order in which commands list the recipes
_ALL = [
    *(quickstart.RECIPES + xlme.RECIPES + xlmr.RECIPES + ernie_m.RECIPES),
    *(xlm.RECIPES + modern.RECIPES + translation.RECIPES),
]
RECIPES: dict[str, RunConfig] = {run.name: run for _, run in _ALL}
"""A dictionary of the settings of every recipe, by its name."""
SUMMARIES = {run.name: summary for summary, run in _ALL}
"""A dictionary of one line for every recipe, by its name: what it trains, and the GPUs whose memory it fits."""


@check_argument_types
def recipe(name: str) -> RunConfig:
    """The settings of the recipe `name`. Raises ValueError for an unknown name; the error suggests the nearest name or
    lists all."""
    if name not in RECIPES:
        raise no_such("recipe", name, RECIPES)
    return RECIPES[name]


def __dir__() -> list[str]:
    return __all__
