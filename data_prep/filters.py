"""Named filters of paragraphs and pairs. Each says for many at once which ones to drop; blocks.py counts them by name.

A corpus description names the filters that it wants, with their settings: `[filters.NAME]`. They run in its order,
those that need token counts behind the others. `exact_duplicates` is dedup.py's: it needs the whole language.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from data_prep.languages import letters, scripts_of

EXACT_DUPLICATES = "exact_duplicates"


@dataclass(frozen=True)
class Sides:
    """Many paragraphs (one side) or pairs (two): texts and languages by side; `scores` are NaN where there is none."""

    texts: tuple[Sequence[str], ...]
    languages: tuple[str, ...]
    scores: np.ndarray | None = None


class TextFilter:
    """A filter that reads the text."""

    tasks: ClassVar[tuple[str, ...]] = ("mono", "para")

    def drops(self, sides: Sides) -> np.ndarray:
        """bool for each paragraph or pair."""
        raise NotImplementedError


class TokenFilter:
    """A filter that reads the number of tokens."""

    tasks: ClassVar[tuple[str, ...]] = ("mono", "para")

    def drops(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """bool for each paragraph or pair, from its tokens by side."""
        raise NotImplementedError


@dataclass(frozen=True)
class Length(TextFilter):
    """Characters of a paragraph, or of either side of a pair, out of bounds; 0 is no bound."""

    min_characters: int = 0
    max_characters: int = 0

    def drops(self, sides: Sides) -> np.ndarray:
        """True for those to drop."""
        return _out_of_bounds([_lengths(side) for side in sides.texts], self.min_characters, self.max_characters)


@dataclass(frozen=True)
class LengthTokens(TokenFilter):
    """Tokens of a paragraph, or of either side of a pair, out of bounds; 0 is no bound."""

    min_tokens: int = 0
    max_tokens: int = 0

    def drops(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """True for those to drop."""
        return _out_of_bounds(lengths, self.min_tokens, self.max_tokens)


@dataclass(frozen=True)
class LengthRatio(TokenFilter):
    """One side of a pair has over `largest` times the tokens of the other, and more than `above` tokens."""

    largest: float = 3.0
    above: int = 10
    tasks = ("para",)

    def drops(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """True for those to drop."""
        longer, shorter = np.maximum(*lengths), np.minimum(*lengths)
        return (longer > self.above) & (longer > self.largest * shorter)


@dataclass(frozen=True)
class IdenticalSides(TextFilter):
    """Both sides of a pair are the same text, but for case."""

    tasks = ("para",)

    def drops(self, sides: Sides) -> np.ndarray:
        """True for those to drop."""
        same = (a == b or a.casefold() == b.casefold() for a, b in zip(*sides.texts, strict=True))
        return np.fromiter(same, bool, len(sides.texts[0]))


@dataclass(frozen=True)
class Script(TextFilter):
    """Less than `share` of the letters of a paragraph or side are of its language's scripts; without letters it
    stays."""

    share: float = 0.5

    def drops(self, sides: Sides) -> np.ndarray:
        """True for those to drop."""
        dropped = np.zeros(len(sides.texts[0]), bool)
        for side, language in zip(sides.texts, sides.languages, strict=True):
            right, all_letters = letters(side, scripts_of(language))
            dropped |= right < self.share * all_letters
        return dropped


@dataclass(frozen=True)
class BoilerplateLength(TextFilter):
    """A paragraph as short as a menu entry or a button. In bytes of UTF-8, for a Chinese character says more."""

    min_bytes: int = 20
    tasks = ("mono",)

    def drops(self, sides: Sides) -> np.ndarray:
        """True for those to drop."""
        (texts,) = sides.texts
        return np.fromiter(
            (len(t) < self.min_bytes and len(t.encode()) < self.min_bytes for t in texts), bool, len(texts)
        )


@dataclass(frozen=True)
class Score(TextFilter):
    """The score that came with the pair is less than `least`."""

    least: float = 1.04
    tasks = ("para",)

    def drops(self, sides: Sides) -> np.ndarray:
        """True for those to drop."""
        assert sides.scores is not None
        return ~(sides.scores >= self.least)  # NaN too


_FILTERS: dict[str, tuple[Any, ...]] = {
    "length": (Length, LengthTokens),
    "length_ratio": (LengthRatio,),
    "identical_sides": (IdenticalSides,),
    "script": (Script,),
    "boilerplate_length": (BoilerplateLength,),
    "score": (Score,),
    EXACT_DUPLICATES: (),
}


@dataclass(frozen=True)
class Filters:
    """The filters of one input, ready to run: each with the name that it counts under."""

    text: tuple[tuple[str, TextFilter], ...] = ()
    tokens: tuple[tuple[str, TokenFilter], ...] = ()
    exact_duplicates: bool = False


def make_filters(settings: dict[str, dict[str, Any]], task: str, where: str) -> Filters:
    """Filters from a description's tables. Raises ValueError, which names `where`, for a wrong name or setting."""
    text: list[tuple[str, TextFilter]] = []
    tokens: list[tuple[str, TokenFilter]] = []
    for name, values in settings.items():
        if name not in _FILTERS:
            near = difflib.get_close_matches(name, list(_FILTERS), n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_FILTERS)}"
            raise ValueError(f"{where}: there is no filter {name!r}: {meant}")
        known = {field.name: field.type for kind in _FILTERS[name] for field in fields(kind)}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{where}: filter {name} has no setting {key!r}: it has {', '.join(known) or 'none'}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: {key} of filter {name} is {value!r}: it must be a number")
        for kind in _FILTERS[name]:
            if task not in kind.tasks:
                raise ValueError(f"{where}: filter {name} is not for task {task}: take it out")
            made = kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
            (text if isinstance(made, TextFilter) else tokens).append((name, made))
    return Filters(tuple(text), tuple(tokens), EXACT_DUPLICATES in settings)


def _lengths(side: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(len, side), np.int64, len(side))


def _out_of_bounds(lengths: Sequence[np.ndarray], least: int, most: int) -> np.ndarray:
    shorter, longer = np.minimum.reduce(lengths), np.maximum.reduce(lengths)
    return (shorter < least) | (longer > most if most else np.zeros(len(longer), bool))
