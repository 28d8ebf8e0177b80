"""Evaluation without fine-tuning: for every test of `xlme evaluate` a function that returns what the command writes as
JSON. A model is the folder of a run, RUN@STEP for one of its checkpoints, or an export; several are a list. All raise
ValueError for unsuitable models and data.

`layer`: the one that tables quote, 0 for the embeddings; by default three quarters of the depth. Every layer is scored.
`which`: the encoder of a run that has two. `random`: untrained models of the same shapes are scored, too.

xlme.evaluate.pairs("runs/base", "heldout")["models"][0]["overall"]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .alignment import align
    from .heldout_losses import losses
    from .lookup_table import words
    from .predicted_tokens import perplexity
    from .retrieval import pairs, tatoeba

__all__ = ["align", "losses", "pairs", "perplexity", "tatoeba", "words"]

_PLACES = {
    "align": "alignment",
    "losses": "heldout_losses",
    "pairs": "retrieval",
    "perplexity": "predicted_tokens",
    "tatoeba": "retrieval",
    "words": "lookup_table",
}


def __getattr__(name: str) -> Any:
    """A test's function, whose module loads torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
