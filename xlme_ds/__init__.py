"""XLM-E pre-training with DeepSpeed. Importing the package loads no torch.

import xlme_ds as xlme

xlme.pretrain(xlme.recipe("quickstart"), data="mixed", out="runs/mine")
model = xlme.load("runs/mine")
"""

from pathlib import Path
from typing import TYPE_CHECKING

from .recipes import recipe

if TYPE_CHECKING:
    from .api import Model

__version__ = "0.1.0"
__all__ = ["load", "recipe"]


def load(folder: Path | str) -> "Model":
    """The model in the folder of a finished run, or of an export. Raises ValueError when there is none."""
    from .api import Model

    return Model(folder)
