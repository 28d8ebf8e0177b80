"""Word pairs: with a similarity judged by people (SemEval-2017 Task 2), and translations (MUSE's dictionaries).

Camacho-Collados et al., 2017; Conneau et al., 2018.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple, TypeVar

from .text import same_lines, split_lines

WordPair = tuple[str, str]
Test = TypeVar("Test")

_DATA, _GOLD = ".data.txt", ".gold.txt"
_KEYS = "keys"
_DICTIONARY = re.compile(r"[a-z]{2,3}-[a-z]{2,3}(\.\d+-\d+)?\.txt")


class Judged(NamedTuple):
    """Pairs of words or phrases, and how alike people found each."""

    pairs: list[WordPair]
    scores: list[float]


class WordTests(NamedTuple):
    """The tests of a folder, by name."""

    similarity: dict[str, Judged]
    dictionaries: dict[str, list[WordPair]]


def read_word_tests(folder: Path) -> WordTests:
    """All tests in and below `folder`: en-de.test.data.txt with en-de.test.gold.txt (in keys/), en-de.txt,
    en-de.5000-6500.txt.

    Raises ValueError, naming file and line, on damaged files, and on a folder that has no test.
    """
    tests = WordTests({}, {})
    keys: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.txt")):
        if path.name.endswith(_GOLD):
            keys[path.name.removesuffix(_GOLD)] = path
        if path.name.endswith(_DATA):
            name = path.name.removesuffix(_DATA)
            _add(tests.similarity, name, _read_judged(path), path)
        elif _DICTIONARY.fullmatch(path.name):
            _add(tests.dictionaries, path.stem, _read_pairs(path, None), path)
    for name in sorted(keys.keys() - tests.similarity.keys()):
        raise ValueError(f"{keys[name]} is the key of no words: put {name}{_DATA} next to it, or take it away")
    if not tests.similarity and not tests.dictionaries:
        raise ValueError(
            f"{folder} holds no word pairs: put SemEval's en-de.test.data.txt and en-de.test.gold.txt or a dictionary en-de.txt there"
        )
    return tests


def _add(tests: dict[str, Test], name: str, test: Test, path: Path) -> None:
    if name in tests:
        raise ValueError(f"{path} is the second test named {name}: name a folder that holds it once")
    tests[name] = test


def _read_judged(path: Path) -> Judged:
    """The pairs of `path` with the scores of its key, which stands beside it or, as published, in the folder keys
    beside its own."""
    name = path.name.removesuffix(_DATA) + _GOLD
    keys = [key for key in (path.with_name(name), path.parent.parent / _KEYS / name) if key.is_file()]
    if not keys:
        raise ValueError(f"{path} has no key: put {name} next to it, or into {path.parent.parent / _KEYS}")
    lines = split_lines(keys[0].read_bytes(), keys[0])
    pairs = _read_pairs(path, "\t")
    same_lines(pairs, path, lines, keys[0])
    scores = []
    for number, line in enumerate(lines, start=1):
        try:
            scores.append(float(line))
        except ValueError:
            scores.append(math.nan)
        if not math.isfinite(scores[-1]):
            raise ValueError(
                f"{keys[0]} line {number} is {line.strip()!r}: it must be one number, fetch the file again"
            )
    if len(set(scores)) < 2:
        raise ValueError(
            f"{keys[0]} has the same score on every line: a correlation needs several, fetch the file again"
        )
    return Judged(pairs, scores)


def _read_pairs(path: Path, separator: str | None) -> list[WordPair]:
    """The two fields of every line, with a tab between them or any white space (None)."""
    pairs = []
    for number, line in enumerate(split_lines(path.read_bytes(), path), start=1):
        words = [word.strip() for word in line.split(separator)]
        if len(words) != 2 or not all(words):
            between = "a tab" if separator else "a space or a tab"
            raise ValueError(
                f"{path} line {number} is {line.strip()!r}: it must be two words with {between} between them"
            )
        pairs.append((words[0], words[1]))
    return pairs
