"""Word alignments made by hand, and the alignment error rate against them (Och and Ney 2003; XLM-E equation 10)."""

from pathlib import Path
from typing import NamedTuple

from .text import read_sentences, same_lines, split_lines

Links = set[tuple[int, int]]
"""(source word, target word), both from 0."""

_FILES = ("alignv2.txt", "align.txt")  # the first one tells sure links from possible ones


class GoldPair(NamedTuple):
    """A sentence pair as words, with its links; the possible ones include the sure ones."""

    source: list[str]
    target: list[str]
    sure: Links
    possible: Links


class Counts(NamedTuple):
    """What the rates are made of, summed over the pairs of a test."""

    predicted: int
    sure: int
    predicted_sure: int
    predicted_possible: int

    @property
    def error_rate(self) -> float:
        """AER."""
        return 1 - (self.predicted_sure + self.predicted_possible) / (self.predicted + self.sure)

    @property
    def precision(self) -> float:
        """Share of the predicted links that are possible; 0 where nothing was predicted."""
        return self.predicted_possible / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the sure links that were predicted."""
        return self.predicted_sure / self.sure


def count(predicted: list[Links], gold: list[GoldPair]) -> Counts:
    """The counts of a whole test."""
    pairs = list(zip(predicted, gold, strict=True))
    return Counts(
        sum(len(links) for links in predicted),
        sum(len(pair.sure) for pair in gold),
        sum(len(links & pair.sure) for links, pair in pairs),
        sum(len(links & pair.possible) for links, pair in pairs),
    )


def read_gold(folder: Path) -> dict[str, list[GoldPair]]:
    """The tests in `folder` (or the one that it is): folders a-b with test.a, test.b and alignv2.txt or align.txt.

    Raises ValueError, naming file and line, on damaged files, and on a folder that has no test.
    """
    candidates = [folder.resolve(), *sorted(folder.iterdir())] if folder.is_dir() else []
    tests = {path.name: _read_test(path) for path in candidates if _is_test(path)}
    if not tests:
        raise ValueError(
            f"{folder} holds no word alignments: it must have folders like de-en with test.de, test.en, align.txt"
        )
    return tests


def _is_test(folder: Path) -> bool:
    """Raises ValueError for a test without its alignments."""
    if any((folder / name).is_file() for name in _FILES):
        return True
    source, dash, target = folder.name.partition("-")
    if dash and any((folder / f"test.{code}").is_file() for code in (source, target)):
        raise ValueError(f"{folder} has sentences and no {' or '.join(_FILES)}: put it there, or take the folder away")
    return False


def _read_test(folder: Path) -> list[GoldPair]:
    source, dash, target = folder.name.partition("-")
    if not dash:
        raise ValueError(
            f"{folder} must be named after its languages, source first, as de-en: the links are read in that order"
        )
    paths = folder / f"test.{source}", folder / f"test.{target}"
    ours, theirs = (read_sentences(path) for path in paths)
    same_lines(ours, paths[0], theirs, paths[1])
    pairs = [GoldPair(a.split(), b.split(), set(), set()) for a, b in zip(ours, theirs, strict=True)]
    path = next(folder / name for name in _FILES if (folder / name).is_file())
    _read_links(path, pairs)
    if not any(pair.sure for pair in pairs):
        raise ValueError(f"{path} has no sure link: an error rate needs some, fetch the file again")
    return pairs


def _read_links(path: Path, pairs: list[GoldPair]) -> None:
    """Add the links of a file of lines `sentence source-word target-word [S|P]`, words from 1, to their pairs."""
    lines = []
    for number, line in enumerate(split_lines(path.read_bytes(), path), start=1):
        fields = line.split()
        if not fields:
            continue
        try:
            sentence, source, target = map(int, fields[:3])
            kind = fields[3] if len(fields) > 3 else "S"
            if kind not in ("S", "P") or len(fields) > 4:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{path} line {number} is {line.strip()!r}: it must be sentence, source word, target word, and S or P or nothing"
            ) from None
        lines.append((number, sentence, source, target, kind))
    first = 0 if any(sentence == 0 for _, sentence, *_ in lines) else 1  # the published files do both
    for number, sentence, source, target, kind in lines:
        if not first <= sentence < first + len(pairs):
            raise ValueError(
                f"{path} line {number} has sentence {sentence}, and there are {len(pairs)}, counted from {first}: "
                "the links belong to other files"
            )
        pair = pairs[sentence - first]
        for word, words, side in ((source, pair.source, "source"), (target, pair.target, "target")):
            if word == 0 or word > len(words):
                raise ValueError(
                    f"{path} line {number} has {side} word {word}, and sentence {sentence} has {len(words)} {side} words, "
                    "counted from 1: the folder's name must have the source language first"
                )
        if source > 0 and target > 0:  # a negative number stands for no word
            pair.possible.add((source - 1, target - 1))
            if kind == "S":
                pair.sure.add((source - 1, target - 1))
