"""Published runs: one function a run, each returning one frozen configuration."""

from collections.abc import Callable

from ..config import RunConfig
from .ernie_m import ernie_m, ernie_m_large, ernie_m_large_stage2, ernie_m_stage2
from .xlm import xlm, xlm_clm
from .xlme import (
    base_zero1,
    large_pipe,
    large_zero2,
    quickstart,
    xl_pipe,
    xl_zero3,
    xlme,
    xlme_no_gate,
    xlme_no_trtd,
)
from .xlmr import xlmr, xlmr_tlm

RECIPES: dict[str, Callable[[], RunConfig]] = {
    function.__name__: function
    for function in (
        quickstart,
        base_zero1,
        large_zero2,
        large_pipe,
        xl_zero3,
        xl_pipe,
        xlme,
        xlme_no_trtd,
        xlme_no_gate,
        xlmr,
        xlmr_tlm,
        ernie_m,
        ernie_m_stage2,
        ernie_m_large,
        ernie_m_large_stage2,
        xlm,
        xlm_clm,
    )
}


def recipe(name: str) -> RunConfig:
    """The configuration of a recipe. Raises ValueError, naming the known ones, for another name."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name} is not known: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]()
