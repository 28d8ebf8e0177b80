"""Cross-lingual word embeddings from a model's lookup table (XLM; Conneau and Lample, 2019).

A word's vector is the mean of its pieces' token embeddings, without positions or norms. N words, D width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data.schema import UNK
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import TextEncoder
from .tables import Table, percent
from .word_tests import Judged, WordPair, WordTests

_LEAST = 1e-12


class Lookup:
    """Words to vectors, by the embedding of `encoder` and the vocabulary that it reads."""

    def __init__(self, encoder: TextEncoder, vocabulary: Vocabulary):
        self.encoder = encoder
        self.vocabulary = vocabulary

    def vectors(self, words: Sequence[str]) -> tuple[np.ndarray, int]:
        """float64 [N, D], and how many of the words have a piece that the vocabulary lacks (they keep the vector of
        `<unk>`).

        Raises ValueError for a word that leaves no piece at all.
        """
        ids, sizes = self.vocabulary.encode_lines(list(words))
        if not sizes.all():
            raise ValueError(
                f"{words[int(sizes.argmin())]!r} has no piece in {self.vocabulary.path}: take its pair out of the test"
            )
        used, place = np.unique(ids, return_inverse=True)
        with torch.no_grad():
            device = next(self.encoder.parameters()).device
            table = self.encoder.embed(torch.from_numpy(used).long().to(device)).double().cpu().numpy()
        starts = np.cumsum(sizes) - sizes
        unknown = np.maximum.reduceat(ids == UNK, starts).sum()
        return np.add.reduceat(table[place], starts) / sizes[:, None], int(unknown)

    def pairs(self, pairs: Sequence[WordPair]) -> tuple[np.ndarray, np.ndarray, int]:
        """The vectors of both sides, [N, D] each, and how many words have an unknown piece."""
        (ours, a), (theirs, b) = (self.vectors(side) for side in zip(*pairs, strict=True))
        return ours, theirs, a + b


def word_scores(lookup: Lookup, tests: WordTests) -> dict[str, dict[str, dict[str, Any]]]:
    """The scores of every test, by name."""
    return {
        "similarity": {name: similarity(lookup, test) for name, test in tests.similarity.items()},
        "dictionaries": {name: translations(lookup, test) for name, test in tests.dictionaries.items()},
    }


def similarity(lookup: Lookup, test: Judged) -> dict[str, Any]:
    """Correlation of the cosines with what people said: Pearson, Spearman, and the task's score, their harmonic mean.

    The harmonic mean is 0 unless both are positive.
    """
    ours, theirs, unknown = lookup.pairs(test.pairs)
    found = (_unit(ours) * _unit(theirs)).sum(1)
    said = np.array(test.scores)
    pearson, spearman = correlation(found, said), correlation(ranks(found), ranks(said))
    score = 2 * pearson * spearman / (pearson + spearman) if min(pearson, spearman) > 0 else 0.0
    return {
        "pearson": pearson,
        "spearman": spearman,
        "score": score,
        "pairs": len(test.pairs),
        "unknown": unknown,
    }


def translations(lookup: Lookup, pairs: Sequence[WordPair]) -> dict[str, Any]:
    """Mean cosine and mean Euclidean distance between a word and its translation, and precision@1.

    The latter is the share of source words whose nearest target word of the dictionary, by cosine, is one of their
    translations.
    """
    ours, theirs, unknown = lookup.pairs(pairs)
    meant: dict[str, set[str]] = {}
    for word, translation in pairs:
        meant.setdefault(word, set()).add(translation)
    targets = sorted({translation for _, translation in pairs})
    nearest = _nearest(lookup.vectors(list(meant))[0], lookup.vectors(targets)[0])
    right = [targets[place] in found for place, found in zip(nearest, meant.values(), strict=True)]
    return {
        "cosine": float((_unit(ours) * _unit(theirs)).sum(1).mean()),
        "distance": float(np.linalg.norm(ours - theirs, axis=1).mean()),
        "precision": float(np.mean(right)),
        "words": len(meant),
        "candidates": len(targets),
        "pairs": len(pairs),
        "identical": sum(a == b for a, b in pairs),
        "unknown": unknown,
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, of two series [N]; 0 where one does not vary."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > _LEAST else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each of N values, from 1; equal ones share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _unit(vectors_ND: np.ndarray) -> np.ndarray:
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), _LEAST)


def _nearest(ours_ND: np.ndarray, theirs_ND: np.ndarray, block: int = 1024) -> np.ndarray:
    """For every row of `ours` the nearest of `theirs` by cosine, the first of equal ones; `block` rows of cosines at a
    time."""
    a, b = _unit(ours_ND), _unit(theirs_ND)
    found = [(a[start : start + block] @ b.T).argmax(1) for start in range(0, len(a), block)]
    return np.concatenate(found)


def word_tables(results: Mapping[str, Any]) -> list[Table]:
    """A table of the similarity tests and one of the dictionaries, where there are some: a row for each model and
    test."""
    unknown = "unknown: words with a piece that the vocabulary lacks"
    judged = Table(
        "Word similarity: cosines against people's scores",
        ["test", "model", "pairs", "Pearson", "Spearman", "harmonic mean", "unknown"],
        notes=[unknown],
    )
    translated = Table(
        "Translations in the lookup table",
        ["dictionary", "model", "pairs", "identical", "cosine", "L2 distance", "P@1 (%)", "candidates", "unknown"],
        notes=[
            "P@1: among the target words of the dictionary; identical: pairs of one spelling, whose cosine is 1",
            unknown,
        ],
    )
    for name, model, found in _rows(results, "similarity"):
        values = [f"{found[key]:.3f}" for key in ("pearson", "spearman", "score")]
        judged.rows.append([name, model, str(found["pairs"]), *values, str(found["unknown"])])
    for name, model, found in _rows(results, "dictionaries"):
        values = [f"{found['cosine']:.3f}", f"{found['distance']:.3f}", percent(found["precision"])]
        counts = [str(found[key]) for key in ("pairs", "identical", "candidates", "unknown")]
        translated.rows.append([name, model, *counts[:2], *values, *counts[2:]])
    return [table for table in (judged, translated) if table.rows]


def _rows(results: Mapping[str, Any], kind: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    models = results["models"]
    return [(name, model["model"], model[kind][name]) for name in models[0][kind] for model in models]
