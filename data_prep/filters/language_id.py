"""The language that a line is in, by the model that the package py3langid holds (the extra `langid`)."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np

# The model's labels that are no other language than CC-100's; of all others it has none or the same code.
_LABELS = {
    "ar": ("ar", "ary", "arz"),
    "ku": ("ku", "sdh"),
    "no": ("no", "nn"),
    "uz": ("uz", "uzs"),
    "zh-Hans": ("zh", "wuu", "yue"),
    "zh-Hant": ("zh", "wuu", "yue"),
}
_NO_LANGUAGE = "zxx"  # numbers, code and the like


@cache
def _identifier() -> Any:
    """Read once a process, in 1.6 s. Raises ValueError where the package is missing."""
    try:
        from py3langid import langid
    except ImportError:
        raise ValueError("filter language needs the package py3langid: pip install 'xlme-ds[langid]'") from None
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def model_name() -> str:
    """Name and version of the model, for the settings of stages whose bytes depend on it."""
    _identifier()
    return f"py3langid {version('py3langid')}"


def labels_of(language: str) -> tuple[str, ...]:
    """The model's labels for a language (CC-100's code); empty where it does not know the language."""
    return tuple(label for label in _LABELS.get(language, (language,)) if label in _identifier().labels)


def in_another_language(lines: Sequence[str], language: str, probability: float) -> np.ndarray:
    """bool for each line: the probabilities of all other languages sum to more than `probability`.

    So Bosnian, which may as well be Croatian or Serbian, is none of English. False for all lines of a language that the
    model does not know.
    """
    own = labels_of(language)
    if not own:
        return np.zeros(len(lines), bool)
    own_labels = (*own, _NO_LANGUAGE)
    left = (sum(share for label, share in _identifier().rank(line) if label in own_labels) for line in lines)
    return np.fromiter((share < 1 - probability for share in left), bool, len(lines))
