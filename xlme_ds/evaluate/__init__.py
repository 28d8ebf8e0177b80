"""Evaluation without fine-tuning: a function for every test of `xlme evaluate`, which returns the JSON that the command
writes. A model is the folder of a run, RUN@STEP for one of its checkpoints, or the folder of an export; `models` is one
model or a list. All functions raise ValueError for unsuitable models and data.

`layer`: the layer that tables quote, 0 for the embeddings; by default three quarters of the depth. All layers are
scored. `which`: the encoder of a run that has two. `random`: also score untrained models of the same shapes.

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

_MODULES = {
    "align": "alignment",
    "losses": "heldout_losses",
    "pairs": "retrieval",
    "perplexity": "predicted_tokens",
    "tatoeba": "retrieval",
    "words": "lookup_table",
}


def __getattr__(name: str) -> Any:
    """A test's function. Its module is imported only now, because it loads torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}: choose one of {', '.join(__all__)}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
