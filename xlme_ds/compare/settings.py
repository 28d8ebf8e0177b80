"""The arguments of `xlme compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class CompareSettings:
    """Arguments of the command."""

    recipes: tuple[str, ...]
    """Recipes; the first is compared with each of the others. `a+b` trains `a`, then `b` from the weights of `a`."""
    budgets: tuple[float, ...]
    """Floating-point operations of a training, forward and backward, by the planner's count. Every system is trained
    once for each budget, with a learning rate schedule that ends when the budget is spent."""
    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `xlme prep mix` wrote."""
    heldout: Path
    """Folder that `xlme prep mix` wrote from text kept out of training. Losses are measured on it, and its pairs test
    retrieval."""
    out: Path
    """Folder for runs, scores, tables and plot; give it again to continue."""
    rows: int = 4096
    """Number of rows in a step; each recipe divides them between text and pairs in its own proportion."""
    seeds: tuple[int, ...] = (1,)
    """Number of seeds (1, 2, …) with which each system is trained: one number for all budgets, or one for each budget.
    Several seeds show how much scores vary by chance."""
    own: tuple[str, ...] = ()
    """Settings that apply to one recipe only, such as "xlme: --optimizer.learning-rate 1e-3"."""
    processes: int = 1
    """Training processes on this machine."""
    pairs: Path | None = None
    """Folder of held-out pairs as text, in place of the pairs of --heldout."""
    tatoeba: Path | None = None
    """Folder of Tatoeba's test, as `xlme evaluate tatoeba` reads it; without the folder this test is left out."""
    align: Path | None = None
    """Folder of word alignment tests, as `xlme evaluate align` reads it; without the folder these tests are left
    out."""
    pos: Path | None = None
    """Folder of parts of speech, as `xlme finetune --task pos` reads it; without the folder this test is left out."""
    ner: Path | None = None
    """Folder of PAN-X, as `xlme finetune --task ner` reads it; without the folder this test is left out."""
    tuning: str = ""
    """Settings of fine-tuning in one string, such as `--tuning="--tuning.epochs 1 --tuning.batch 32"`."""
    tuning_seeds: int = 1
    """Number of seeds (1, 2, …) with which each model is fine-tuned; the scores are averaged."""
    also: tuple[Path, ...] = ()
    """compare.json files of other comparisons, whose runs are shown too."""
