"""Evaluation without fine-tuning. Each test of `xlme evaluate` is a function here, which returns the JSON object that
the command writes.

A model is the folder of a run, RUN@STEP for one of its checkpoints, or the folder of an export; `models` is one model
or a list. Models run on the GPU if there is one. All functions raise ValueError for unsuitable models and data.

`tatoeba`, `pairs` and `align` score all layers. `layer` only names the one that tables show: 0 is the embeddings, and
the default is three quarters of the depth. In a run that has two encoders, `which` names the one to score. With
`random`, untrained models are scored, too, one for each shape, objective, seed and vocabulary among the models.

In the returned dictionary, `models` has a dictionary for each model. There, except in `words`, `overall` maps the name
of a score to its mean. In `tatoeba`, `pairs` and `align` this mean is a list of fractions: one for the embeddings, then
one for each layer. The accuracy from English is

model = xlme.evaluate.pairs("runs/base", "heldout")["models"][0]
model["overall"]["en_xx"][model["layer"]]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..io.errors import no_such

if TYPE_CHECKING:
    from .alignment import align
    from .heldout_text import losses, perplexity
    from .lookup_table import words
    from .retrieval import pairs, tatoeba

__all__ = ["align", "losses", "pairs", "perplexity", "tatoeba", "words"]

_MODULES = {
    "align": "alignment",
    "losses": "heldout_text",
    "pairs": "retrieval",
    "perplexity": "heldout_text",
    "tatoeba": "retrieval",
    "words": "lookup_table",
}


def __getattr__(name: str) -> Any:
    """A test's function. Its module is imported only now, because it loads torch."""
    if name not in _MODULES:
        raise AttributeError(str(no_such("name", name, __all__, "xlme.evaluate.")))
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
