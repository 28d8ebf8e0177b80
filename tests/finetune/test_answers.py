"""Which span is the answer, and when two answers are the same."""

import numpy as np
import pytest

from xlme_ds.finetune.answers import best_answer, compare, mlqa_words, squad_words
from xlme_ds.finetune.examples import Question
from xlme_ds.finetune.features import Feature


def test_the_best_span_of_all_windows() -> None:
    context = "ab cd ef gh"
    places = np.array([[-1, -1], [0, 2], [3, 5], [-1, -1]]), np.array([[-1, -1], [6, 8], [9, 11], [-1, -1]])
    windows = [Feature(np.zeros(4), np.zeros(2), 0, place) for place in places]
    logits = [np.array([[9.0, 9], [1, 0], [0, 3], [9, 9]]), np.array([[9.0, 9], [2, 0], [3, 2.5], [9, 9]])]
    question = Question("q", "?", context, [])
    assert best_answer(question, windows, logits) == "gh", "3 + 2.5 beats 1 + 3; what is no context never counts"
    assert best_answer(question, windows[:1], logits[:1]) == "ab cd"
    logits[1][1], logits[1][2] = (0, 9), (9, 0)
    assert best_answer(question, windows[1:], logits[1:]) in ("ef", "gh"), "an answer does not end before it begins"


def test_the_best_span_is_that_of_a_full_search() -> None:
    rng = np.random.default_rng(0)
    context = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    places = np.array([[i, i + 1] for i in range(len(context))])
    for _ in range(20):
        scores = rng.normal(size=(len(context), 2)) * 3
        spans = [
            (scores[i, 0] + scores[j, 1], context[i : j + 1]) for i in range(52) for j in range(i, min(i + 30, 52))
        ]
        question = Question("q", "?", context, [])
        assert best_answer(question, [Feature(np.zeros(52), np.zeros(2), 0, places)], [scores]) == max(spans)[1]


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("The Broncos!", "broncos", True),
        ("a cat and an owl", "cat and owl", True),
        ("theatre", "atre", False),
        ("1,000", "1000", True),
        ("«Broncos»", "Broncos", False),  # SQuAD knows ASCII's punctuation alone
    ],
)
def test_squad(given: str, answer: str, same: bool) -> None:
    assert compare(given, [answer], "de", squad_words)[1] == same


@pytest.mark.parametrize(
    ("language", "given", "answer", "same"),
    [
        ("en", "the «Broncos»", "Broncos", True),
        ("de", "der Rhein", "Rhein", True),
        ("de", "the Rhein", "Rhein", False),
        ("es", "¿El río?", "río", True),
        ("vi", "của sông", "sông", True),
        ("ar", "الكتاب", "كتاب", True),
        ("hi", "गंगा।", "गंगा", True),
        ("zh", "北京。", "北京", True),
        ("zh", "北 京", "北京", True),
        ("de", "Rhein fluss", "Rheinfluss", False),
    ],
)
def test_mlqa(language: str, given: str, answer: str, same: bool) -> None:
    assert compare(given, [answer], language, mlqa_words)[1] == same


def test_f1_counts_words_and_in_chinese_characters() -> None:
    assert compare("red blue blue", ["blue blue green green"], "en", squad_words)[0] == pytest.approx(2 * 2 / 7)
    assert compare("北京市", ["北京"], "zh", mlqa_words)[0] == pytest.approx(2 * 2 / 5)
    assert compare("北京市", ["北京"], "zh", squad_words)[0] == 0
    assert compare("x", ["a b", "x y"], "en", squad_words)[0] == pytest.approx(2 / 3), "the best of the right answers"
    assert mlqa_words("2019年5月 abc", "zh") == ["2019", "年", "5", "月", "abc"]
