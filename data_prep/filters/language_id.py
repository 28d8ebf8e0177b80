"""Identifies the language of each line, by py3langid's model or by a model file of fastText. The extra `langid`
installs the packages py3langid and fasttext-community."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.languages import language_of
from xlme_ds.io.files import file_sha256

# CC-100's code of a language -> codes of the language's varieties, which a model may give in place of that code.
_DIALECTS = {
    "ar": ("acm", "acq", "aeb", "afb", "ajp", "apc", "arq", "ars", "ary", "arz"),
    "ku": ("sdh",),
    "no": ("nn", "nno"),
    "uz": ("uzs",),
    "zh": ("wuu", "yue"),
}
_NO_LANGUAGE = ("und", "zxx")  # codes that models give for numbers, program code and the like


class Py3langid:
    """The model in the package py3langid, which gives the probability of each language for a line. `labels` are the
    model's names of the languages."""

    def __init__(self) -> None:
        """Load the model, which takes 1.6 s. Raises ValueError if the package is missing."""
        try:
            from py3langid import langid
        except ImportError:
            raise ValueError("filter language needs the package py3langid: pip install 'xlme-ds[langid]'") from None
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        self.labels: Sequence[str] = self._model.labels
        self.name = f"py3langid {version('py3langid')}"

    def probabilities(self, lines: Sequence[str], labels: Sequence[str], threshold: float) -> list[float]:
        """For each line, the sum of the probabilities of `labels`. `threshold` is unused here: see
        `FastText.probabilities`."""
        return [sum(share for label, share in self._model.rank(line) if label in labels) for line in lines]


class FastText:
    """A classifier in fastText's format, such as GlotLID or lid.176, with the interface of `Py3langid`."""

    def __init__(self, path: str) -> None:
        """Load the model file `path`. Raises ValueError if the package is missing or the file is not a complete
        model."""
        try:
            import fasttext
        except ImportError:
            raise ValueError(
                "filter language needs the package fasttext-community for a model file: pip install 'xlme-ds[langid]'"
            ) from None
        try:
            self._model: Any = fasttext.load_model(path)
            self.labels: Sequence[str] = self._model.get_labels()
            if not (self._model.is_quantized() or _ends_with(path, self._model.get_output_matrix())):
                raise ValueError("it is cut off")  # fastText itself loads such a file
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{path} is no model of fastText ({error}): fetch it again") from None
        self.name = f"fastText {file_sha256(Path(path))}"

    def probabilities(self, lines: Sequence[str], labels: Sequence[str], threshold: float) -> list[float]:
        """As `Py3langid.probabilities`, but a sum leaves out labels with a probability below `threshold` / 100: such a
        label hardly matters to the caller, who compares the sum with `threshold`."""
        labels_by_line, shares_by_line = self._model.predict(list(lines), k=-1, threshold=threshold / 100)
        return [
            sum(float(share) for label, share in zip(line_labels, line_shares, strict=True) if label in labels)
            for line_labels, line_shares in zip(labels_by_line, shares_by_line, strict=True)
        ]


def _ends_with(path: str, matrix: np.ndarray) -> bool:
    """Whether a file ends with the numbers of `matrix` in float32, as a complete model file ends with its output
    matrix. False for an empty matrix."""
    end = matrix.astype("<f4").tobytes()
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, 2) - len(end), 0))
        return end != b"" and file.read() == end


@cache
def load_identifier(path: str = "") -> Py3langid | FastText:
    """Load the model file `path`, or py3langid's model if `path` is empty; each is loaded once per process. Raises
    ValueError if the model cannot be loaded."""
    return FastText(path) if path else Py3langid()


def _code(label: str) -> str:
    """The language code in a label, without the script. A label that has no language code is returned without its
    prefix."""
    label = label.removeprefix("__label__")  # fastText's labels begin with it
    try:
        return language_of(label).partition("-")[0]
    except ValueError:
        return label


@cache
def labels_of(language: str, model: str = "") -> tuple[str, ...]:
    """The model's labels for `language`, a code of CC-100, and for its varieties; empty if the model does not know the
    language. `model`: as `path` of `load_identifier`."""
    code = language.partition("-")[0]
    return tuple(label for label in load_identifier(model).labels if _code(label) in (code, *_DIALECTS.get(code, ())))


def in_another_language(lines: Sequence[str], language: str, probability: float, model: str = "") -> np.ndarray:
    """bool [lines]: the probabilities of all languages other than `language` sum to more than `probability`.

    The probabilities are summed because a model divides them between similar languages: for a Bosnian line among
    English lines, the model may give some probability each to Bosnian, Croatian and Serbian. Labels of text in no
    language (numbers, program code) count as `language`. If the model does not know `language`, the result is False for
    all lines.
    """
    language_labels = labels_of(language, model)
    if not language_labels:
        return np.zeros(len(lines), bool)
    identifier = load_identifier(model)
    no_language = (label for label in identifier.labels if _code(label) in _NO_LANGUAGE)
    own_probabilities = identifier.probabilities(lines, (*language_labels, *no_language), 1 - probability)
    return np.array(own_probabilities) < 1 - probability
