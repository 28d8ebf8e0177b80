"""Answers as text: the n best spans of all windows of a question, and how SQuAD and MLQA compare answers.

The comparison of SQuAD v1.1 lowers, drops English articles and ASCII punctuation. MLQA's (Lewis et al., 2020) drops
Unicode's punctuation, too, and each language's own articles, and cuts Chinese into characters.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from .examples import Question
from .features import Feature

N_BEST, LONGEST_ANSWER = 20, 30  # tokens; as in SQuAD's usual baselines and XTREME

_ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
}


def best_answer(question: Question, windows: Sequence[Feature], logits: Sequence[np.ndarray]) -> str:
    """Text of the span with the largest sum of logits ([tokens, 2] for each window) among all windows of `question`."""
    best, answer = -np.inf, ""
    for window, scores in zip(windows, logits, strict=True):
        inside = np.flatnonzero(window.places[:, 0] >= 0)
        firsts, lasts = (inside[np.argsort(-scores[inside, end], kind="stable")[:N_BEST]] for end in (0, 1))
        for first in firsts:
            for last in lasts:
                score = scores[first, 0] + scores[last, 1]
                if first <= last < first + LONGEST_ANSWER and score > best:
                    best = score
                    answer = question.context[window.places[first, 0] : window.places[last, 1]].strip()
    return answer


def squad_words(text: str, language: str = "en") -> list[str]:
    """What SQuAD compares, whatever the language."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(_ARTICLES["en"], " ", kept).split()


def mlqa_words(text: str, language: str) -> list[str]:
    """What MLQA compares."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    if language in _ARTICLES:
        kept = re.sub(_ARTICLES[language], " ", kept)
    return _mixed_words(kept) if language == "zh" else kept.split()


def _mixed_words(text: str) -> list[str]:
    """Chinese characters one by one, what stands between them by white space."""
    return re.findall(r"[\u4e00-\u9fa5]|[^\s\u4e00-\u9fa5]+", text)


Words = Callable[[str, str], list[str]]


def compare(given: str, answers: Sequence[str], language: str, words: Words) -> tuple[float, float]:
    """(F1 over words, exact match), the best over the right `answers`, each 0 to 1."""
    ours = words(given, language)
    f1 = max((_overlap(ours, words(answer, language)) for answer in answers), default=0.0)
    return f1, float(any(ours == words(answer, language) for answer in answers))


def _overlap(ours: list[str], theirs: list[str]) -> float:
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0
