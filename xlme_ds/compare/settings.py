"""The arguments of `xlme compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class CompareSettings:
    """Arguments of the command."""

    recipes: str
    """Recipes with commas between them; the others are compared with the first. `a+b`: `a`, then `b` from its
    weights."""
    budgets: tuple[float, ...]
    """Floating-point operations of a run, forward and backward, by the planner's count; every system has a run for
    each, with a learning rate that ends with it."""
    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `xlme prep mix` wrote."""
    heldout: Path
    """Folder that `xlme prep mix` wrote of text kept out of training, for losses; its pairs test retrieval."""
    out: Path
    """Folder for runs, scores, tables and plot; give it again to continue."""
    rows: int = 4096
    """Rows of a step, divided between text and pairs as each recipe divides them."""
    seeds: tuple[int, ...] = (1,)
    """With how many seeds (1, 2, …) each system is trained: one number for all budgets, or one for each. Several seeds
    show how much scores vary by chance."""
    own: tuple[str, ...] = ()
    """Settings of single recipes, such as "xlme: --optimizer.learning-rate 1e-3"."""
    processes: int = 1
    """Training processes on this machine."""
    pairs: Path | None = None
    """Folder of held-out pairs as text, in place of the pairs of --heldout."""
    tatoeba: Path | None = None
    """Folder of Tatoeba's test, as `xlme evaluate tatoeba` reads it; without it that test is left out."""
    align: Path | None = None
    """Folder of word alignment tests, as `xlme evaluate align` reads it; without it that test is left out."""
    pos: Path | None = None
    """Folder of parts of speech, as `xlme finetune --task pos` reads it; without it that test is left out."""
    ner: Path | None = None
    """Folder of PAN-X, as `xlme finetune --task ner` reads it; without it that test is left out."""
    tuning: str = ""
    """Settings of fine-tuning in one string, such as `--tuning="--tuning.epochs 1 --tuning.batch 32"`."""
    tuning_seeds: int = 1
    """How often each model is fine-tuned, with seeds 1, 2, …; the scores are averaged."""
    also: tuple[Path, ...] = ()
    """Files compare.json of other folders: show their runs too."""
