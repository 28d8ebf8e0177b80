"""The language that a line is in, by py3langid's model or by a file of fastText's format (both: the extra `langid`)."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.languages import language_of
from xlme_ds.io.files import file_sha256

# Codes of a model's labels that are text of CC-100's language, too.
_DIALECTS = {
    "ar": ("acm", "acq", "aeb", "afb", "ajp", "apc", "arq", "ars", "ary", "arz"),
    "ku": ("sdh",),
    "no": ("nn", "nno"),
    "uz": ("uzs",),
    "zh": ("wuu", "yue"),
}
_NO_LANGUAGE = ("und", "zxx")  # numbers, code and the like
_LABEL = "__label__"  # of fastText
_MODEL_FILE = "filter language needs the package fasttext-community for a model file: pip install 'xlme-ds[langid]'"


class Identifier(Protocol):
    """A model that gives a line's probability of being in each language, by label."""

    name: str
    labels: Sequence[str]

    def own_shares(self, lines: Sequence[str], labels: Sequence[str], least: float) -> list[float]:
        """For each line the probability that it has one of `labels`; less than `least` may be any value below it."""


class Py3langid:
    """The model in the package py3langid."""

    def __init__(self) -> None:
        """Takes 1.6 s. Raises ValueError where the package is missing."""
        try:
            from py3langid import langid
        except ImportError:
            raise ValueError("filter language needs the package py3langid: pip install 'xlme-ds[langid]'") from None
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        self.labels: Sequence[str] = self._model.labels
        self.name = f"py3langid {version('py3langid')}"

    def own_shares(self, lines: Sequence[str], labels: Sequence[str], least: float) -> list[float]:
        """See Identifier."""
        return [sum(share for label, share in self._model.rank(line) if label in labels) for line in lines]


class FastText:
    """A classifier in fastText's format, such as GlotLID or lid.176."""

    def __init__(self, path: str) -> None:
        """Raises ValueError where the package is missing, or the file is no such model."""
        try:
            import fasttext
        except ImportError:
            raise ValueError(_MODEL_FILE) from None
        try:
            self._model: Any = fasttext.load_model(path)
            self.labels: Sequence[str] = self._model.get_labels()
            if not (self._model.is_quantized() or _ends_with(path, self._model.get_output_matrix())):
                raise ValueError("it is cut off")  # which fastText does not look for
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{path} is no model of fastText ({error}): fetch it again") from None
        self.name = f"fastText {file_sha256(Path(path))}"

    def own_shares(self, lines: Sequence[str], labels: Sequence[str], least: float) -> list[float]:
        """See Identifier. A label under a hundredth of `least` counts as nothing."""
        all_labels, all_shares = self._model.predict(list(lines), k=-1, threshold=least / 100)
        return [
            sum(float(share) for label, share in zip(*line, strict=True) if label in labels)
            for line in zip(all_labels, all_shares, strict=True)
        ]


def _ends_with(path: str, matrix: np.ndarray) -> bool:
    """Whether a file's last bytes are these numbers, some, as float32."""
    end = matrix.astype("<f4").tobytes()
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, 2) - len(end), 0))
        return file.read() == end != b""


@cache
def identifier(model: str = "") -> Identifier:
    """The model, read once a process: the file `model`, or py3langid's. Raises ValueError for one that is missing."""
    return FastText(model) if model else Py3langid()


def _code(label: str) -> str:
    """The language of a label, without its script; labels of unknown form stay as they are."""
    label = label.removeprefix(_LABEL)
    try:
        return language_of(label).partition("-")[0]
    except ValueError:
        return label


@cache
def labels_of(language: str, model: str = "") -> tuple[str, ...]:
    """The model's labels for a language (CC-100's code); empty where it does not know the language."""
    own = language.partition("-")[0]
    return tuple(label for label in identifier(model).labels if _code(label) in (own, *_DIALECTS.get(own, ())))


def in_another_language(lines: Sequence[str], language: str, probability: float, model: str = "") -> np.ndarray:
    """bool for each line: the probabilities of all other languages sum to more than `probability`.

    So Bosnian, which may as well be Croatian or Serbian, is none of English. False for all lines of a language that the
    model does not know.
    """
    own = labels_of(language, model)
    if not own:
        return np.zeros(len(lines), bool)
    no_language = (label for label in identifier(model).labels if _code(label) in _NO_LANGUAGE)
    shares = identifier(model).own_shares(lines, (*own, *no_language), 1 - probability)
    return np.fromiter((share < 1 - probability for share in shares), bool, len(lines))
