"""Cross-lingual sentence retrieval: nearest neighbour by cosine, accuracy@1 in both directions, at every layer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..models.text_encoder import TextEncoder
from .encode import sentence_vectors
from .pairs import Pair

PIVOT = "en"


def by_language(
    pairs: Iterable[Pair], pivot: str = PIVOT, smallest: int = 5
) -> dict[str, tuple[list[np.ndarray], list[np.ndarray]]]:
    """Pairs with `pivot` on one side, as (pivot sentences, the other's) by language; languages with fewer than
    `smallest` pairs are left out, and so are repetitions of a sentence, which no ranking could tell apart."""
    groups: dict[str, dict[bytes, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    for pair in pairs:
        if pivot not in (pair.first_language, pair.second_language) or pair.first_language == pair.second_language:
            continue
        forward = pair.first_language == pivot
        ours, theirs = (pair.first, pair.second) if forward else (pair.second, pair.first)
        language = pair.second_language if forward else pair.first_language
        groups[language].setdefault(ours.tobytes(), (ours, theirs))
    return {
        language: ([a for a, _ in group.values()], [b for _, b in group.values()])
        for language, group in sorted(groups.items())
        if len(group) >= smallest
    }


def accuracy(vectors: np.ndarray, candidates: np.ndarray) -> float:
    """Share of rows of `vectors` [N, D] whose nearest row of `candidates` [N, D] by cosine is their own."""
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (vectors, candidates))
    return float(((a @ b.T).argmax(1) == np.arange(len(a))).mean())


def retrieve(model: TextEncoder, groups: dict[str, tuple[list[np.ndarray], list[np.ndarray]]]) -> dict[str, Any]:
    """Accuracies by layer, by language and averaged over the languages."""
    languages = {}
    for language, (ours, theirs) in groups.items():
        vectors = sentence_vectors(model, [*ours, *theirs])
        halves = [(layer[: len(ours)], layer[len(ours) :]) for layer in vectors]
        languages[language] = {
            "en_xx": [accuracy(a, b) for a, b in halves],
            "xx_en": [accuracy(b, a) for a, b in halves],
        }
    overall = {
        way: np.mean([scores[way] for scores in languages.values()], axis=0).tolist() for way in ("en_xx", "xx_en")
    }
    return {"overall": overall, "languages": languages}
