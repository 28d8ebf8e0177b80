"""Trained models as folders for Hugging Face transformers: what `xlme export` does, as functions.

xlme.export.run("runs/base", "exports/base")
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch
    from ..models.text_encoder import Which


def run(folder: Path | str, to: Path | str, *, layer: int | None = None, which: "Which | None" = None) -> Path:
    """Write the model of a run (of one of its checkpoints: RUN@STEP) as the folder `to`, and return that; one encoder
    alone with `which`, cut after `layer` if it is given.

    Raises ValueError when the folder holds no model, and when `to` exists.
    """
    from .__main__ import export_run

    export_run(Path(folder), Path(to), layer, which)
    return Path(to)


def from_hf(folder: Path | str, to: Path | str, *, layer: int | None = None) -> Path:
    """Export an XLM-R model from its folder in Hugging Face's form."""
    from .__main__ import export_xlm_roberta

    export_xlm_roberta(Path(folder), Path(to), layer)
    return Path(to)
