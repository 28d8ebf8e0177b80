"""Repairs every line of text, filters paragraphs and pairs, and counts all text that a stage reads, drops and writes.

No text is lost silently: damage is repaired and counted by reason, and useless text is dropped and counted.

    invalid_utf8            bytes that are not UTF-8 become U+FFFD
    carriage_return         CR at the end of a line is removed
    carriage_return_inside  CR elsewhere becomes a space (it ends no line)
    control_character       NUL, DEL and all other C0 and C1 controls except tab and U+0085 are removed
    byte_order_mark         U+FEFF at the start of a line, also after white space, is removed

U+2028 and U+0085 end no line: only LF does. White space at both ends is removed without being counted.

A corpus description names its filters and their settings in tables `[filters.NAME]`. `column` runs first, in the
reader. Then the filters of texts run in the order of the tables, then `exact_duplicates` (in dedup.py, because it needs
all text of a language), then the filters of token counts.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.filters.columns import COLUMN, is_number
from data_prep.filters.language_id import in_another_language
from data_prep.languages import CC100_LANGUAGES, count_letters, scripts_of
from xlme_ds.io.errors import no_such

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
# The same characters as bytes of UTF-8, and CR, which needs a repair too. `clean_lines` looks for these bytes in many
# lines at once.
_C0 = bytes(code for code in range(32) if code not in (9, 10)) + b"\x7f"
_C1 = re.compile(b"\xc2[\x80-\x84\x86-\x9f]")
_BOM = "\ufeff".encode()
# A byte order mark and all white space: `clean_line` removes any mixture of them from the start of a line.
_MARK_OR_SPACE = "\ufeff" + "".join(character for character in map(chr, range(0x3001)) if character.isspace())
# (repair, largest plausible share of lines that need the repair, end of the warning about a larger share). Text in
# UTF-8 stays far below these shares.
_SUSPICIOUS_REPAIRS = (
    ("invalid_utf8", 0.02, "of its lines have bytes that are no UTF-8: is it in another encoding, or compressed?"),
    ("control_character", 0.1, "of its lines have control characters: is it UTF-16, or no text?"),
    ("carriage_return_inside", 0.1, "of its lines have carriage returns inside: should these end lines, as LF does?"),
)
_MAX_UNKNOWN_SHARE = 0.05  # largest plausible share of unknown tokens
_HALVED_BYTES = 4_000  # text over this size that needs a repair is halved, because often only one half needs it


@dataclass
class Counts:
    """Counts of text that was read, repaired, dropped and written. `unit` is "documents", "pairs" or, in `vocab`,
    "lines".

    `units_in` counts the documents or pairs that were read, `units` those that were written. `paragraphs`,
    `characters`, `bytes` (of UTF-8), `tokens` and `unknown` (tokens) count the content of the written units; `tokens`
    includes each document's `</s>`. A pair has two paragraphs. For documents only, `removed` counts the paragraphs that
    were read and not written, by reason. A document without any written paragraph is dropped for the reason of its last
    paragraph.
    """

    unit: str
    units_in: int = 0
    units: int = 0
    paragraphs: int = 0
    characters: int = 0
    bytes: int = 0
    tokens: int = 0
    unknown: int = 0
    files: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    paragraphs_in: int = 0
    removed: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object for the manifest. Asserts that all text that was read was written, dropped or
        removed."""
        assert self.units_in == self.units + self.dropped.total(), f"{self.unit} were lost: {self}"
        removed: dict[str, Any] = {}
        if self.unit == "documents":
            assert self.paragraphs_in == self.paragraphs + self.removed.total(), f"paragraphs were lost: {self}"
            removed = {"paragraphs_in": self.paragraphs_in, "removed": dict(sorted(self.removed.items()))}
        return removed | {
            f"{self.unit}_in": self.units_in,
            self.unit: self.units,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
            "files": self.files,
            "paragraphs": self.paragraphs,
            "characters": self.characters,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "unknown": self.unknown,
        }


def add_counts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The sum of two values of `Counts.as_json`, key by key."""
    total = dict(a)
    for key, value in b.items():
        total[key] = add_counts(total.get(key, {}), value) if isinstance(value, dict) else total.get(key, 0) + value
    return total


def text_warnings(lines: int, repaired: Mapping[str, int], tokens: int = 0, unknown: int = 0) -> Iterator[str]:
    """Yield a warning for each of `_SUSPICIOUS_REPAIRS` that too large a share of a file's `lines` needed, and one if
    too large a share of its `tokens` are `unknown`."""
    for repair, threshold, warning_end in _SUSPICIOUS_REPAIRS:
        share = repaired.get(repair, 0) / max(lines, 1)
        if share > threshold:
            yield f"{100 * min(share, 1):.0f}% {warning_end}"
    if unknown > _MAX_UNKNOWN_SHARE * tokens:
        yield f"{100 * unknown / tokens:.0f}% of its tokens are <unk>: does the vocabulary have its script?"


def clean_line(raw: bytes, repaired: Counter[str]) -> str:
    """Repair one line, given without its LF, and count the repairs in `repaired`. Returns its text, which may be
    empty."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        repaired["invalid_utf8"] += 1
    if "\r" in text:
        text = text.rstrip("\r")
        repaired["carriage_return_inside" if "\r" in text else "carriage_return"] += 1
        text = text.replace("\r", " ")
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
        repaired["control_character"] += 1
    text = text.strip()
    if text.startswith("\ufeff"):
        text = text.lstrip(_MARK_OR_SPACE)
        repaired["byte_order_mark"] += 1
    return text


def clean_lines(data: bytes, repaired: Counter[str]) -> list[str]:
    """Apply `clean_line` to every line of `data`. This is fast where many consecutive lines need no repair."""
    if not data:
        return []
    if len(data.translate(None, _C0)) == len(data) and not _C1.search(data) and _BOM not in data:
        try:
            return [line.strip() for line in data.decode().removesuffix("\n").split("\n")]
        except UnicodeDecodeError:
            pass
    middle = data.find(b"\n", len(data) // 2) + 1 if len(data) > _HALVED_BYTES else 0  # 0: do not halve
    if 0 < middle < len(data):
        return clean_lines(data[:middle], repaired) + clean_lines(data[middle:], repaired)
    return [clean_line(line, repaired) for line in data.removesuffix(b"\n").split(b"\n")]


EXACT_DUPLICATES, LANGUAGE, SCRIPT = "exact_duplicates", "language", "script"
MODEL = "model"  # the setting of filter `language` that names a model file


@dataclass(frozen=True)
class Sides:
    """Many paragraphs (one side) or pairs (two sides). `texts[side]` are the texts of a side, in the language
    `languages[side]`. `scores` are the scores of pairs, NaN where a score is missing."""

    texts: tuple[Sequence[str], ...]
    languages: tuple[str, ...]
    scores: np.ndarray | None = None


# A filter returns a bool for each paragraph or pair: True drops it. Its keyword arguments are its settings, and its
# docstring states when a paragraph or pair is dropped.


def _length(sides: Sides, *, min_characters: float = 0, max_characters: float = 0) -> np.ndarray:
    """A paragraph, or either side of a pair, has too few or too many characters; 0 sets no bound."""
    lengths = [np.fromiter(map(len, side), np.int64, len(side)) for side in sides.texts]
    return _length_tokens(lengths, min_tokens=min_characters, max_tokens=max_characters)


def _length_tokens(lengths: Sequence[np.ndarray], *, min_tokens: float = 0, max_tokens: float = 0) -> np.ndarray:
    """A paragraph, or either side of a pair, has too few or too many tokens; 0 sets no bound."""
    longest: np.ndarray = np.maximum.reduce(lengths)
    return (np.minimum.reduce(lengths) < min_tokens) | (longest > (max_tokens or np.inf))


def _length_ratio(lengths: Sequence[np.ndarray], *, largest: float = 3.0, above: float = 10) -> np.ndarray:
    """One side of a pair has more than `above` tokens, and more than `largest` times the tokens of the other side."""
    longer, shorter = np.maximum(*lengths), np.minimum(*lengths)
    return (longer > above) & (longer > largest * shorter)


def _identical_sides(sides: Sides) -> np.ndarray:
    """Both sides of a pair are the same text, apart from case, white space and Unicode form."""
    same = (a == b or _folded(a) == _folded(b) for a, b in zip(*sides.texts, strict=True))
    return np.fromiter(same, bool, len(sides.texts[0]))


def _folded(text: str) -> str:
    caseless = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", caseless).split())


def _script(sides: Sides, *, share: float = 0.5) -> np.ndarray:
    """Less than `share` of the letters of a paragraph or side belong to the scripts of its language. Text without
    letters, or in a language that CC-100 does not have, is not dropped."""
    dropped = np.zeros(len(sides.texts[0]), bool)
    for side, language in zip(sides.texts, sides.languages, strict=True):
        if language in CC100_LANGUAGES:
            in_scripts, all_letters = count_letters(side, scripts_of(language))
            dropped |= in_scripts < share * all_letters
    return dropped


def _boilerplate_length(sides: Sides, *, min_bytes: float = 20) -> np.ndarray:
    """A paragraph has fewer than `min_bytes` bytes, like a menu entry or a button. Bytes count, not characters, because
    a Chinese character says more than a letter."""
    (texts,) = sides.texts
    return np.fromiter((len(text) < min_bytes and len(text.encode()) < min_bytes for text in texts), bool, len(texts))


def _score(sides: Sides, *, least: float = 1.04) -> np.ndarray:
    """The score that the corpus gives the pair is less than `least`, or missing."""
    assert sides.scores is not None
    return ~(sides.scores >= least)  # NaN is not >= anything, so a missing score is dropped


def _language(sides: Sides, *, probability: float = 0.99, model: str = "") -> np.ndarray:
    """The languages other than that of the paragraph or side have a total probability of more than `probability`, by
    the model file `model` or, if none is named, py3langid's model. A text whose language the model does not know is
    not dropped."""
    by_side = zip(sides.texts, sides.languages, strict=True)
    return np.logical_or.reduce([in_another_language(side, language, probability, model) for side, language in by_side])


# Filter name -> its function of texts, its function of token counts, and the tasks that it is for.
_FILTERS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "length": (_length, _length_tokens, ("mono", "para")),
    "length_ratio": (None, _length_ratio, ("para",)),
    "identical_sides": (_identical_sides, None, ("para",)),
    SCRIPT: (_script, None, ("mono", "para")),
    LANGUAGE: (_language, None, ("mono", "para")),
    "boilerplate_length": (_boilerplate_length, None, ("mono",)),
    "score": (_score, None, ("para",)),
    EXACT_DUPLICATES: (None, None, ("mono", "para")),
}


@dataclass(frozen=True)
class Filters:
    """The filters of one input. `text` has (name, function) for each filter of texts, `tokens` for each filter of token
    counts; dropped text is counted under the name. A function in `tokens` takes, for each side, the number of tokens of
    each text."""

    text: tuple[tuple[str, Callable[[Sides], np.ndarray]], ...] = ()
    tokens: tuple[tuple[str, Callable[[Sequence[np.ndarray]], np.ndarray]], ...] = ()
    exact_duplicates: bool = False


def make_filters(settings: dict[str, dict[str, Any]], task: str, where: str) -> Filters:
    """Make the filters, except `column`, that a corpus description's tables set for text of `task` (mono or para).

    Raises ValueError for a wrong name or setting; the message begins with `where`.
    """
    text_filters: list[tuple[str, Any]] = []
    token_filters: list[tuple[str, Any]] = []
    usage = f"{where}: filters must be a table for each filter, as [filters.length]"
    if not isinstance(settings, dict):
        raise ValueError(f"{usage}, not {settings!r}")
    for name, values in settings.items():
        if name == COLUMN:
            continue
        if name not in _FILTERS:
            raise ValueError(f"{where}: {no_such('filter', name, [*_FILTERS, COLUMN])}")
        if not isinstance(values, dict):
            raise ValueError(f"{usage}, but {name} is {values!r}: write [filters.{name}]")
        *functions, tasks = _FILTERS[name]
        keys = [key for function in functions if function for key in function.__kwdefaults__ or ()]
        for key, value in values.items():
            if key not in keys:
                raise ValueError(f"{where}: filter {name} has no setting {key!r}: it has {', '.join(keys) or 'none'}")
            if (name, key) == (LANGUAGE, MODEL):
                if not (isinstance(value, str) and Path(value).is_file()):
                    raise ValueError(f"{where}: {key} of filter {name} is {value!r}: it must name a file")
            elif not is_number(value):
                raise ValueError(f"{where}: {key} of filter {name} is {str(value)[:40]!r}: it must be a number")
            elif (key == "probability" and not 0 < value < 1) or (key == "share" and not 0 <= value <= 1):
                raise ValueError(f"{where}: {key} of filter {name} is {value}: it must be between 0 and 1")
            elif key == "largest" and value < 1:
                raise ValueError(f"{where}: {key} of filter {name} is {value}: it must be at least 1")
        for unit in ("characters", "tokens"):
            least, most = values.get(f"min_{unit}", 0), values.get(f"max_{unit}", 0)
            if most and most < max(least, 1):
                raise ValueError(
                    f"{where}: filter {name} keeps {least} to {most} {unit}, which is nothing: set max_{unit} to at "
                    f"least min_{unit}, or to 0 for no bound"
                )
        if task not in tasks:
            raise ValueError(f"{where}: filter {name} is not for task {task}: take it out")
        for filters, function in zip((text_filters, token_filters), functions, strict=True):
            if function:
                keywords = {key: value for key, value in values.items() if key in (function.__kwdefaults__ or ())}
                filters.append((name, partial(function, **keywords)))
    return Filters(tuple(text_filters), tuple(token_filters), EXACT_DUPLICATES in settings)
