"""Examples as token ids: words cut into subwords with the label on the first, pairs, windows over a long context."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..data.schema import LAYOUTS, UNK, Layout
from ..data.vocabulary import Vocabulary
from .examples import NO_LABEL, Example, Pair, Question, Sentence
from .tasks import Task

IGNORED = -100
"""The label of a token that none is predicted for."""


class Feature(NamedTuple):
    """What the model reads at once, and where it came from."""

    ids: np.ndarray
    """int32, `<s> … </s>`, for two texts `<s> a </s> b </s>`, or in the model's layout, as in pre-training."""
    labels: np.ndarray
    """int64: of every token (IGNORED but on first subwords), one of a pair, or first and last token of an answer."""
    example: int
    places: np.ndarray
    """int64: tokens: positions of the first subwords; span: [tokens, 2] first and last character + 1, −1 outside the
    context."""
    language: int = 0
    """Place in the model's `language_embeddings`."""


class Windows(NamedTuple):
    """Lengths in tokens, and the special tokens among them."""

    longest: int
    """Of a whole input."""
    stride: int
    """From the start of a window over a context to the start of the next."""
    question: int
    """Questions are cut to this many."""
    layout: Layout = LAYOUTS["xlme"]


def featurise(
    examples: Sequence[Example], task: Task, vocabulary: Vocabulary, windows: Windows, language: int = 0, first: int = 0
) -> list[Feature]:
    """The inputs of all examples (in one `language`), in order; a long sentence or context gives several.

    `first`: the number of the first example.
    """
    features: list[Feature] = []
    for number, example in enumerate(examples, start=first):
        if isinstance(example, Sentence):
            features += _sentence(example, number, task.labels, vocabulary, windows)
        elif isinstance(example, Pair):
            features.append(_pair(example, number, task.labels, vocabulary, windows))
        else:
            features += _question(example, number, vocabulary, windows)
    return [feature._replace(language=language) for feature in features]


def _sentence(
    sentence: Sentence, number: int, labels: Sequence[str], vocabulary: Vocabulary, windows: Windows
) -> list[Feature]:
    """Cut between words, so that every word is in one input and its first subword is predicted."""
    flat, sizes = vocabulary.encode_lines(sentence.words)
    subwords = np.split(flat, np.cumsum(sizes)[:-1])
    pieces: list[tuple[list[int], list[int], list[int]]] = [([], [IGNORED], [])]
    for ids, tag in zip(subwords, sentence.tags, strict=True):
        word = ids[: windows.longest - 2].tolist() or [UNK]  # of white space alone nothing is left
        if len(pieces[-1][0]) + len(word) + 2 > windows.longest:
            pieces.append(([], [IGNORED], []))
        tokens, tags, places = pieces[-1]
        places.append(1 + len(tokens))
        tags += [_label(labels, tag)] + [IGNORED] * (len(word) - 1)
        tokens += word
    return [
        Feature(windows.layout.item(np.array(tokens)), np.array([*tags, IGNORED]), number, np.array(places))
        for tokens, tags, places in pieces
    ]


def _pair(pair: Pair, number: int, labels: Sequence[str], vocabulary: Vocabulary, windows: Windows) -> Feature:
    """The longer side loses tokens from its end until both fit."""
    first, second = vocabulary.encode(pair.first), vocabulary.encode(pair.second)
    room = windows.longest - windows.layout.pair_specials
    if len(first) + len(second) > room:
        shorter = min(len(first), len(second), room // 2)
        first, second = (
            side[: max(room - shorter, shorter)] if len(side) > shorter else side for side in (first, second)
        )
        first = first[: room - len(second)]
    label = np.array([_label(labels, pair.label)])
    return Feature(windows.layout.item(first, second), label, number, np.zeros(0, np.int64))


def _label(labels: Sequence[str], label: str) -> int:
    return IGNORED if label == NO_LABEL else labels.index(label)


def _question(question: Question, number: int, vocabulary: Vocabulary, windows: Windows) -> list[Feature]:
    asked = vocabulary.encode(question.question)[: windows.question]
    context, characters = vocabulary.encode_with_places(question.context)
    room = windows.longest - len(asked) - windows.layout.pair_specials
    answer = None
    if question.answers:
        text, first = question.answers[0]
        inside = np.flatnonzero((characters[:, 1] > first) & (characters[:, 0] < first + len(text)))
        answer = (int(inside[0]), int(inside[-1])) if len(inside) else None
    features = []
    for start in range(0, max(len(context), 1), windows.stride):
        part = slice(start, start + room)
        ids = windows.layout.item(asked, context[part])
        before = 1 + len(asked) + len(windows.layout.between)
        labels = np.zeros(2, np.int64)  # the first token where the answer is not wholly in this window
        if answer is not None and start <= answer[0] and answer[1] < start + room:
            labels = np.array(answer) - start + before
        places = np.full((len(ids), 2), -1, np.int64)
        places[before:-1] = characters[part]
        features.append(Feature(ids, labels, number, places))
        if start + room >= len(context):
            break
    return features
