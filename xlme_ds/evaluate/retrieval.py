"""Cross-lingual sentence retrieval: nearest neighbour by cosine, accuracy@1 in both directions, at every layer.

A test is `Groups`: sentences in the pivot language and their translations, line by line, by language. Where they come
from is another file's matter.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..models.text_encoder import TextEncoder
from .encode import sentence_vectors
from .pairs import PIVOT, Pair

Group = tuple[list[np.ndarray], list[np.ndarray]]
Groups = Mapping[str, Group]

WAYS = ("en_xx", "xx_en")
CENTRED = "_centred"
"""Behind a way: the same with the mean vector of each side taken off, which the papers do not do."""


SMALLEST = 5
"""Pairs that a language must have for its accuracy to mean something."""


def by_language(pairs: Iterable[Pair], pivot: str = PIVOT, smallest: int = SMALLEST) -> dict[str, Group]:
    """Pairs with `pivot` on one side, as (pivot sentences, the other's) by language; languages with fewer than
    `smallest` pairs are left out, and so are repetitions of a sentence, which no ranking could tell apart."""
    groups: dict[str, dict[bytes, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    seen: dict[str, set[bytes]] = defaultdict(set)
    for pair in pairs:
        if pivot not in (pair.first_language, pair.second_language) or pair.first_language == pair.second_language:
            continue
        forward = pair.first_language == pivot
        ours, theirs = (pair.first, pair.second) if forward else (pair.second, pair.first)
        language = pair.second_language if forward else pair.first_language
        if ours.tobytes() not in groups[language] and theirs.tobytes() not in seen[language]:
            groups[language][ours.tobytes()] = (ours, theirs)
            seen[language].add(theirs.tobytes())
    return {
        language: ([a for a, _ in group.values()], [b for _, b in group.values()])
        for language, group in sorted(groups.items())
        if len(group) >= smallest
    }


def accuracies(ours: np.ndarray, theirs: np.ndarray, block: int = 1024) -> tuple[float, float]:
    """Share of rows of `ours` [N, D] whose nearest row of `theirs` [N, D] by cosine is their own, and the reverse.

    `block` rows of the N × N cosines exist at a time. Of equally near rows the first counts as the nearest.
    """
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (ours, theirs))
    own = np.arange(len(a))
    forward = np.empty(len(a), dtype=np.int64)
    backward, best = np.zeros(len(a), dtype=np.int64), np.full(len(a), -np.inf)
    for start in range(0, len(a), block):
        cosines = a[start : start + block] @ b.T
        forward[start : start + block] = cosines.argmax(1)
        rows = cosines.argmax(0)
        values = cosines[rows, own]
        backward[values > best] = (start + rows)[values > best]
        best = np.maximum(best, values)
    return float((forward == own).mean()), float((backward == own).mean())


def retrieve(model: TextEncoder, groups: Groups, centred: bool = False) -> dict[str, Any]:
    """Accuracies by layer, by language and averaged over the languages; `centred` adds those of centred vectors."""
    languages = {}
    for language, (ours, theirs) in groups.items():
        codes = [PIVOT] * len(ours) + [language] * len(theirs)
        vectors = sentence_vectors(model, [*ours, *theirs], languages=codes)
        halves = [(layer[: len(ours)], layer[len(ours) :]) for layer in vectors]
        columns = dict(zip(WAYS, zip(*(accuracies(a, b) for a, b in halves), strict=True), strict=True))
        if centred:
            moved = [accuracies(a - a.mean(0), b - b.mean(0)) for a, b in halves]
            columns |= {way + CENTRED: values for way, values in zip(WAYS, zip(*moved, strict=True), strict=True)}
        languages[language] = {way: list(values) for way, values in columns.items()}
    return {"overall": mean_over(languages, list(languages)), "languages": languages}


def mean_over(languages: Mapping[str, Mapping[str, Sequence[float]]], chosen: Sequence[str]) -> dict[str, list[float]]:
    """The scores of the `chosen` languages averaged, every language counting the same: by way, by layer."""
    ways = next(iter(languages.values()))
    return {way: np.mean([languages[language][way] for language in chosen], axis=0).tolist() for way in ways}
