"""Which span is the answer, and when two answers are the same."""

import random
import string
import sys
import unicodedata
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from torchmetrics.functional.text import squad

from xlme_ds.finetune.features import Feature
from xlme_ds.finetune.predictions import answer_words, best_answer, score_answer
from xlme_ds.finetune.task_files import Question


def test_the_best_span_of_all_windows() -> None:
    context = "ab cd ef gh"
    places = np.array([[-1, -1], [0, 2], [3, 5], [-1, -1]]), np.array([[-1, -1], [6, 8], [9, 11], [-1, -1]])
    windows = [Feature(np.zeros(4), np.zeros(2), 0, offsets=place) for place in places]
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
        assert best_answer(question, [Feature(np.zeros(52), np.zeros(2), 0, offsets=places)], [scores]) == max(spans)[1]


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
    assert score_answer(given, [answer])[1] == same


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
        ("en", "$5 million", "5 million", True),  # ASCII's punctuation that Unicode calls a symbol
        ("en", "a+b=c <d> ^e` |f~", "ab=c d e f", True),
        ("en", "€5", "5", False),  # in neither
    ],
)
def test_mlqa(language: str, given: str, answer: str, same: bool) -> None:
    assert score_answer(given, [answer], language)[1] == same


ARTICLES = {
    "en": "a an the", "es": "un una unos unas el la los las", "vi": "của là cái chiếc những", "hi": "", "zh": "",
    "de": "ein eine einen einem eines einer der die das den dem des",
}  # fmt: skip


def mlqas_own(text: str, language: str) -> list[str]:
    """MLQA's rules as its paper and script have them, over again, a character at a time."""
    ascii_marks = {chr(code) for code in range(33, 127) if not chr(code).isalnum()}
    marks = ("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po")
    kept = [c for c in text.lower() if c not in ascii_marks and unicodedata.category(c) not in marks]
    if language == "ar":  # the article is part of the word, wherever the letters are
        plain = "".join(kept).replace("ال", " ")
    else:
        runs = [(inside, "".join(run)) for inside, run in groupby(kept, lambda c: c.isalnum() or c == "_")]
        plain = "".join(" " if inside and run in ARTICLES[language].split() else run for inside, run in runs)
    if language == "zh":
        plain = "".join(f" {c} " if 0x4E00 <= ord(c) <= 0x9FA5 else c for c in plain)
    return plain.split()


@pytest.mark.parametrize("language", ["ar", "de", "en", "es", "hi", "vi", "zh"])
def test_mlqas_rules_written_again(language: str) -> None:
    """Random strings of articles, words, and of every kind of character that Unicode has."""
    rng = random.Random(language)
    every: dict[str, list[str]] = {}
    for code in range(sys.maxunicode):
        every.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    words = [
        *" ".join(ARTICLES.values()).split(),
        "ال",
        "الكتاب",
        "بال",
        "Theatre",
        "北京",
        "市",
        "गंगा",
        "sông",
        "İ",
        "ß",
    ]
    marks = [*string.punctuation, *"«»“”‘’、。，・「」؟،।·…€¥°"]
    for _ in range(400):
        text = "".join(
            rng.choice([rng.choice(words), rng.choice(marks), " ", rng.choice(every[rng.choice(sorted(every))])])
            for _ in range(rng.randint(0, 12))
        )
        assert answer_words(text, language) == mlqas_own(text, language), ascii(text)


def test_f1_counts_words_and_in_chinese_characters() -> None:
    assert score_answer("red blue blue", ["blue blue green green"])[0] == pytest.approx(2 * 2 / 7)
    assert score_answer("北京市", ["北京"], "zh")[0] == pytest.approx(2 * 2 / 5)
    assert score_answer("北京市", ["北京"])[0] == 0
    assert answer_words("Cat—the—dog, an—") == ["cat—", "—dog", "—"], "a space in place of an article"
    assert score_answer("x", ["a b", "x y"])[0] == pytest.approx(2 / 3), "the best of the right answers"
    assert answer_words("2019年5月 abc", "zh") == ["2019", "年", "5", "月", "abc"]


def test_squads_scores_are_those_of_torchmetrics() -> None:
    """Random answers of articles, punctuation and several scripts, and right answers that differ a little from them."""
    rng = random.Random(1)
    words = ["a", "an", "the", "The", "der", "北京", "गंगा", "الكتاب", "МОСКВА", "Straße", "İ", "1,000", "U.S.", "can't"]
    marks = [*string.punctuation, *"«»。、؟", "\u00a0", "\u3000", "\t", " "]

    def text(longest: int) -> str:
        return "".join(rng.choice(words) + rng.choice(marks) + " " for _ in range(rng.randint(0, longest)))

    kinds: Counter[str] = Counter()
    for _ in range(1000):
        given = text(6)
        near = given.title(), given + text(2), text(2), text(5)
        answers = rng.sample(near, rng.randint(1, 3))
        f1, exact = score_answer(given, answers)
        of_right = {"answers": {"text": answers, "answer_start": [0] * len(answers)}, "id": "q"}
        theirs = squad({"prediction_text": given, "id": "q"}, of_right)
        kinds["exact" if exact else "part" if f1 else "none"] += 1
        assert 100 * exact == theirs["exact_match"], (given, answers)
        if answer_words(given):  # of nothing and nothing F1 is 1 there, as in SQuAD 2.0; in version 1.1 it is 0
            assert 100 * f1 == pytest.approx(float(theirs["f1"]), abs=1e-4), (given, answers)
    assert min(kinds.values()) > 100, kinds


@pytest.mark.parametrize("language", [None, "en"])
def test_nothing_is_nothing_exactly_and_has_no_overlap(language: str | None) -> None:
    """As in the published scripts of SQuAD 1.1 and MLQA, which count the words in common."""
    assert score_answer("the", ["?"], language) == (0.0, 1.0)
    assert score_answer("", ["", "x"], language) == (0.0, 1.0)
    assert score_answer("", ["x"], language) == (0.0, 0.0)


def test_of_equal_spans_the_first_is_the_answer() -> None:
    places = np.array([[-1, -1], [0, 4], [5, 8], [9, 12], [-1, -1]])
    window = Feature(np.arange(5), np.zeros(2), 0, offsets=places)
    question = Question("q", "?", "kalo ter dor", [])
    assert best_answer(question, [window, window], [np.zeros((5, 2))] * 2) == "kalo"
