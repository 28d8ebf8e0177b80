"""Language identification of lines, by py3langid's model or a model file of fastText (both: the extra `langid`)."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.languages import language_of
from xlme_ds.io.files import file_sha256

# CC-100's language -> codes of its varieties, which models may give instead.
_DIALECTS = {
    "ar": ("acm", "acq", "aeb", "afb", "ajp", "apc", "arq", "ars", "ary", "arz"),
    "ku": ("sdh",),
    "no": ("nn", "nno"),
    "uz": ("uzs",),
    "zh": ("wuu", "yue"),
}
_NO_LANGUAGE = ("und", "zxx")  # numbers, program code and the like
_LABEL = "__label__"  # of fastText
_NO_FASTTEXT = "filter language needs the package fasttext-community for a model file: pip install 'xlme-ds[langid]'"


class Identifier(Protocol):
    """A model that gives a line's probability of being in each language, by label."""

    name: str
    labels: Sequence[str]

    def probabilities(self, lines: Sequence[str], labels: Sequence[str], least: float) -> list[float]:
        """For each line the probability that it has one of `labels`; if below `least`, any value below `least`."""


class Py3langid:
    """The model in the package py3langid."""

    def __init__(self) -> None:
        """Load the model, which takes 1.6 s. Raises ValueError where the package is missing."""
        try:
            from py3langid import langid
        except ImportError:
            raise ValueError("filter language needs the package py3langid: pip install 'xlme-ds[langid]'") from None
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        self.labels: Sequence[str] = self._model.labels
        self.name = f"py3langid {version('py3langid')}"

    def probabilities(self, lines: Sequence[str], labels: Sequence[str], least: float) -> list[float]:
        """See Identifier."""
        return [sum(share for label, share in self._model.rank(line) if label in labels) for line in lines]


class FastText:
    """A classifier in fastText's format, such as GlotLID or lid.176."""

    def __init__(self, path: str) -> None:
        """Load the model. Raises ValueError where the package is missing, or the file is no such model."""
        try:
            import fasttext
        except ImportError:
            raise ValueError(_NO_FASTTEXT) from None
        try:
            self._model: Any = fasttext.load_model(path)
            self.labels: Sequence[str] = self._model.get_labels()
            if not (self._model.is_quantized() or _ends_with(path, self._model.get_output_matrix())):
                raise ValueError("it is cut off")  # fastText does not notice
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{path} is no model of fastText ({error}): fetch it again") from None
        self.name = f"fastText {file_sha256(Path(path))}"

    def probabilities(self, lines: Sequence[str], labels: Sequence[str], least: float) -> list[float]:
        """See Identifier. A label with a probability below a hundredth of `least` counts as 0."""
        all_labels, all_shares = self._model.predict(list(lines), k=-1, threshold=least / 100)
        return [
            sum(float(share) for label, share in zip(*line, strict=True) if label in labels)
            for line in zip(all_labels, all_shares, strict=True)
        ]


def _ends_with(path: str, matrix: np.ndarray) -> bool:
    """Whether a file ends with the numbers of `matrix` as float32; False for an empty matrix."""
    end = matrix.astype("<f4").tobytes()
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, 2) - len(end), 0))
        return file.read() == end != b""


@cache
def identifier(model: str = "") -> Identifier:
    """Load the file `model`, or py3langid's model, once a process. Raises ValueError where it cannot be loaded."""
    return FastText(model) if model else Py3langid()


def _code(label: str) -> str:
    """Read a label's language, without its script; labels of another form stay as they are."""
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

    They are summed because a model divides its probability between similar languages: a Bosnian line among English ones
    may be Bosnian, Croatian or Serbian to it. False for all lines of a language that the model does not know.
    """
    own = labels_of(language, model)
    if not own:
        return np.zeros(len(lines), bool)
    no_language = (label for label in identifier(model).labels if _code(label) in _NO_LANGUAGE)
    shares = identifier(model).probabilities(lines, (*own, *no_language), 1 - probability)
    return np.fromiter((share < 1 - probability for share in shares), bool, len(lines))
