"""Named filters of paragraphs and pairs. Each says for many at once which ones to drop; blocks.py counts them by name.

A corpus description names the filters that it wants, with their settings: `[filters.NAME]`. They run in its order,
those that need token counts after the others. `exact_duplicates` is dedup.py's: it needs the whole language.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from data_prep.languages import letters, scripts_of

EXACT_DUPLICATES = "exact_duplicates"


@dataclass(frozen=True)
class Sides:
    """Many paragraphs (one side) or pairs (two): texts and languages by side; `scores` are NaN where there is none."""

    texts: tuple[Sequence[str], ...]
    languages: tuple[str, ...]
    scores: np.ndarray | None = None


# A filter gives a bool for each paragraph or pair: True to drop it. Its keyword arguments are its settings.
TextFilter = Callable[[Sides], np.ndarray]
TokenFilter = Callable[[Sequence[np.ndarray]], np.ndarray]  # from the numbers of tokens by side


def _length(sides: Sides, *, min_characters: float = 0, max_characters: float = 0) -> np.ndarray:
    """Characters of a paragraph, or of either side of a pair, out of bounds; 0 is no bound."""
    lengths = [np.fromiter(map(len, side), np.int64, len(side)) for side in sides.texts]
    return _length_tokens(lengths, min_tokens=min_characters, max_tokens=max_characters)


def _length_tokens(lengths: Sequence[np.ndarray], *, min_tokens: float = 0, max_tokens: float = 0) -> np.ndarray:
    """Tokens of a paragraph, or of either side of a pair, out of bounds; 0 is no bound."""
    longest: np.ndarray = np.maximum.reduce(lengths)
    return (np.minimum.reduce(lengths) < min_tokens) | (longest > (max_tokens or np.inf))


def _length_ratio(lengths: Sequence[np.ndarray], *, largest: float = 3.0, above: float = 10) -> np.ndarray:
    """One side of a pair has over `largest` times the tokens of the other, and more than `above` tokens."""
    longer, shorter = np.maximum(*lengths), np.minimum(*lengths)
    return (longer > above) & (longer > largest * shorter)


def _identical_sides(sides: Sides) -> np.ndarray:
    """Both sides of a pair are the same text, but for case."""
    same = (a == b or a.casefold() == b.casefold() for a, b in zip(*sides.texts, strict=True))
    return np.fromiter(same, bool, len(sides.texts[0]))


def _script(sides: Sides, *, share: float = 0.5) -> np.ndarray:
    """Less than `share` of the letters of a paragraph or side are of its language's scripts; none without letters."""
    dropped = np.zeros(len(sides.texts[0]), bool)
    for side, language in zip(sides.texts, sides.languages, strict=True):
        right, all_letters = letters(side, scripts_of(language))
        dropped |= right < share * all_letters
    return dropped


def _boilerplate_length(sides: Sides, *, min_bytes: float = 20) -> np.ndarray:
    """A paragraph as short as a menu entry or a button. In bytes of UTF-8, for a Chinese character says more."""
    (texts,) = sides.texts
    return np.fromiter((len(t) < min_bytes and len(t.encode()) < min_bytes for t in texts), bool, len(texts))


def _score(sides: Sides, *, least: float = 1.04) -> np.ndarray:
    """The score that came with the pair is less than `least`, or there is none."""
    assert sides.scores is not None
    return ~(sides.scores >= least)


_TEXT_FILTERS: dict[str, Any] = {
    "length": _length,
    "identical_sides": _identical_sides,
    "script": _script,
    "boilerplate_length": _boilerplate_length,
    "score": _score,
}
_TOKEN_FILTERS: dict[str, Any] = {"length": _length_tokens, "length_ratio": _length_ratio}
_TASKS = {
    "length": ("mono", "para"),
    "length_ratio": ("para",),
    "identical_sides": ("para",),
    "script": ("mono", "para"),
    "boilerplate_length": ("mono",),
    "score": ("para",),
    EXACT_DUPLICATES: ("mono", "para"),
}


@dataclass(frozen=True)
class Filters:
    """The filters of one input, ready to run: each with the name that it counts under."""

    text: tuple[tuple[str, TextFilter], ...] = ()
    tokens: tuple[tuple[str, TokenFilter], ...] = ()
    exact_duplicates: bool = False


def make_filters(settings: dict[str, dict[str, Any]], task: str, where: str) -> Filters:
    """Filters from a description's tables. Raises ValueError, which names `where`, for a wrong name or setting."""
    made: list[list[tuple[str, Any]]] = [[], []]
    for name, values in settings.items():
        if name not in _TASKS:
            near = difflib.get_close_matches(name, list(_TASKS), n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_TASKS)}"
            raise ValueError(f"{where}: there is no filter {name!r}: {meant}")
        functions = [table.get(name) for table in (_TEXT_FILTERS, _TOKEN_FILTERS)]
        known = [key for function in functions if function for key in function.__kwdefaults__ or ()]
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{where}: filter {name} has no setting {key!r}: it has {', '.join(known) or 'none'}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: {key} of filter {name} is {value!r}: it must be a number")
        if task not in _TASKS[name]:
            raise ValueError(f"{where}: filter {name} is not for task {task}: take it out")
        for function, filters in zip(functions, made, strict=True):
            if function:
                own = {key: values[key] for key in function.__kwdefaults__ or () if key in values}
                filters.append((name, partial(function, **own)))
    return Filters(tuple(made[0]), tuple(made[1]), EXACT_DUPLICATES in settings)
