"""Word alignment by optimal transport between the subwords of one layer (XLM-Align section 3.1; XLM-E section 4.6).

S source and T target subwords of a pair.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..data.schema import LAYOUTS
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import TextEncoder
from .encode import hidden_states
from .gold import GoldPair, Links, count

ITERATIONS = 2
_LEAST = 1e-6
"""What stands for a dot product that is not positive."""

MEASURES = ("aer", "precision", "recall", "aer_cosine")


class Words(NamedTuple):
    """The subwords of one side: their ids, and the number of each one's word."""

    ids: np.ndarray
    words: np.ndarray


def sinkhorn(similarity_ST: np.ndarray, iterations: int = ITERATIONS) -> tuple[np.ndarray, np.ndarray]:
    """The transport plan after the last division by row sums, and after the last one by column sums; float64 [S, T].

    The kernel is the similarity itself, as in XLM-Align's code, with a small number in place of what is not positive.
    """
    rows_ST = columns_ST = np.where(similarity_ST > 0, similarity_ST, _LEAST).astype(np.float64)
    for _ in range(iterations):
        columns_ST = rows_ST / rows_ST.sum(0, keepdims=True)
        rows_ST = columns_ST / columns_ST.sum(1, keepdims=True)
    return rows_ST, columns_ST


def align_subwords(similarity_ST: np.ndarray) -> list[tuple[int, int]]:
    """Subwords that are each other's most probable partner."""
    if not similarity_ST.size:
        return []
    rows_ST, columns_ST = sinkhorn(similarity_ST)
    forward, backward = rows_ST.argmax(1), columns_ST.argmax(0)
    return [(i, int(j)) for i, j in enumerate(forward) if backward[j] == i]


def align_words(source_SD: np.ndarray, target_TD: np.ndarray, source: np.ndarray, target: np.ndarray) -> Links:
    """Words (by the number of each subword's word) with a pair of aligned subwords, from the subwords' vectors."""
    return {(int(source[i]), int(target[j])) for i, j in align_subwords(source_SD @ target_TD.T)}


def subwords(words: list[str], vocabulary: Vocabulary) -> Words:
    """The subwords of words that are each encoded alone."""
    ids, sizes = vocabulary.encode_lines(words)
    return Words(ids, np.repeat(np.arange(len(words)), sizes))


def fit(source: Words, target: Words, room: int) -> tuple[Words, Words]:
    """Both sides cut to `room` subwords in all; a side that needs less than half leaves the rest to the other."""
    sizes = len(source.ids), len(target.ids)
    first = min(sizes[0], max(room // 2, room - sizes[1]))
    second = min(sizes[1], room - first)
    return Words(source.ids[:first], source.words[:first]), Words(target.ids[:second], target.words[:second])


def align_test(
    model: TextEncoder,
    vocabulary: Vocabulary,
    gold: list[GoldPair],
    apart: bool = False,
    languages: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Error rate, precision, recall, and the error rate with cosines, each by layer; `cut` pairs did not fit into the
    model.

    A pair is read as in training on pairs, `<s> source </s> target </s>` (or in the model's layout); or `apart`, as two
    items. `languages`: codes of source and target, for models with language embeddings.
    """
    whole = [(subwords(pair.source, vocabulary), subwords(pair.target, vocabulary)) for pair in gold]
    longest, none = model.cfg.max_positions, subwords([], vocabulary)
    if apart:
        kept = [(fit(a, none, longest - 2)[0], fit(b, none, longest - 2)[0]) for a, b in whole]
    else:
        kept = [fit(a, b, longest - LAYOUTS[model.cfg.layout].pair_specials) for a, b in whole]
    layers = model.cfg.discriminator_layers + 1
    plain: list[list[Links]] = [[set() for _ in gold] for _ in range(layers)]
    cosine: list[list[Links]] = [[set() for _ in gold] for _ in range(layers)]
    for number, layer, source_SD, target_TD in _vectors(model, kept, apart, languages):
        source, target = (side.words for side in kept[number])
        plain[layer][number] = align_words(source_SD, target_TD, source, target)
        cosine[layer][number] = align_words(_unit(source_SD), _unit(target_TD), source, target)
    out: dict[str, Any] = {measure: [] for measure in MEASURES}
    for layer in range(layers):
        counts = count(plain[layer], gold)
        values = counts.error_rate, counts.precision, counts.recall, count(cosine[layer], gold).error_rate
        for measure, value in zip(MEASURES, values, strict=True):
            out[measure].append(value)
    out["cut"] = sum(_size(pair) < _size(all_of) for pair, all_of in zip(kept, whole, strict=True))
    return out


def _vectors(
    model: TextEncoder, pairs: list[tuple[Words, Words]], apart: bool, languages: tuple[str, ...], batch: int = 64
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(pair, layer, source vectors [S, D], target vectors [T, D]), float32, of all pairs at every layer."""
    order = sorted(range(len(pairs)), key=lambda number: _size(pairs[number]))
    layout = LAYOUTS[model.cfg.layout]
    for start in range(0, len(order), batch):
        here = order[start : start + batch]
        if apart:  # all sources, then all targets
            items = [layout.item(pairs[n][side].ids) for side in (0, 1) for n in here]
            codes: list[tuple[str, ...]] = [(code,) for code in languages for _ in here]
        else:
            items = [layout.item(pairs[n][0].ids, pairs[n][1].ids) for n in here]
            codes = [languages] * len(here) if languages else []
        states: dict[int, list[np.ndarray]] = {}
        for numbers, _, layers in hidden_states(model, items, batch, codes):
            arrays = [state_BTD.cpu().numpy() for state_BTD in layers]
            states |= {item: [array[row] for array in arrays] for row, item in enumerate(numbers)}
        for place, number in enumerate(here):
            sizes = [len(side.ids) for side in pairs[number]]
            second = place + len(here) if apart else place
            at = 1 if apart else 1 + sizes[0] + len(layout.between)
            for layer, (ours_TD, theirs_TD) in enumerate(zip(states[place], states[second], strict=True)):
                yield number, layer, ours_TD[1 : 1 + sizes[0]], theirs_TD[at : at + sizes[1]]


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _size(pair: tuple[Words, Words]) -> int:
    return len(pair[0].ids) + len(pair[1].ids)
