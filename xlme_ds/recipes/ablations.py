"""XLM-E Base under the name that comparisons give it, and with parts taken away, one after the other (Table 2)."""

from dataclasses import replace

from ..config import RunConfig
from .base import base_zero1


def xlme() -> RunConfig:
    """`base_zero1`."""
    return replace(base_zero1(), name="xlme")


def xlme_no_trtd() -> RunConfig:
    """Without translation replaced token detection: no translation pairs are read."""
    run = base_zero1()
    return replace(run, name="xlme_no_trtd", data=replace(run.data, para_rows=0))


def xlme_no_gate() -> RunConfig:
    """Without that, and without the gated relative position bias."""
    run = xlme_no_trtd()
    return replace(run, name="xlme_no_gate", model=replace(run.model, relative_bias="none"))
