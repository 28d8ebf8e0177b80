"""Words, pairs and contexts as token ids, with labels and places that lead back to the text."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.rows import train_vocabulary
from xlme_ds.data.schema import BOS, EOS, LAYOUTS
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.finetune.downstream_tasks import DOWNSTREAM_TASKS as TASKS
from xlme_ds.finetune.features import IGNORED, Feature, featurise
from xlme_ds.finetune.predictions import best_answer
from xlme_ds.finetune.settings import TuningConfig
from xlme_ds.finetune.task_files import Question, Sentence, TextPair


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train_vocabulary(tmp_path_factory.mktemp("features") / "vocab")


WINDOWS = TuningConfig(max_tokens=16, stride=6, question_tokens=4)


LONG = TuningConfig(max_tokens=64, stride=32, question_tokens=4)


def test_a_tag_stands_on_the_first_subword(vocabulary: Vocabulary) -> None:
    words, tags = ["xyz", "kalomi", "\u200b", "ter"], ["O", "B-PER", "I-PER", "B-LOC"]
    (feature,) = featurise([Sentence(words, tags)], TASKS["ner"], vocabulary, WINDOWS)
    labels = TASKS["ner"].labels
    assert [labels[feature.labels[place]] for place in feature.word_starts] == tags
    assert (np.delete(feature.labels, feature.word_starts) == IGNORED).all()
    starts = [*feature.word_starts, len(feature.ids) - 1]
    for word, start, end in zip(words, starts, starts[1:], strict=False):
        expected = vocabulary.encode(word).tolist()
        assert feature.ids[start:end].tolist() == (expected or [3]), word
    assert feature.ids[0] == BOS and feature.ids[-1] == EOS


def test_a_long_sentence_is_cut_between_words_and_loses_none(vocabulary: Vocabulary) -> None:
    sentence = Sentence(["kalomi", "x" * 40, *["ter"] * 30], ["B-PER", "B-LOC", *["O"] * 30])
    features = featurise([Sentence(["ter"], ["O"]), sentence], TASKS["ner"], vocabulary, WINDOWS)[1:]
    assert all(len(feature.ids) <= 16 and feature.example == 1 for feature in features)
    found = [TASKS["ner"].labels[feature.labels[place]] for feature in features for place in feature.word_starts]
    assert found == sentence.tags
    for feature, following in pairwise(features):
        first, *others = [*following.word_starts, len(following.ids) - 1]
        assert len(feature.ids) + others[0] - first > 16, "the next word would not fit"


@pytest.mark.parametrize("sizes", [(2, 3), (40, 3), (3, 40), (40, 40), (7, 30)])
def test_a_pair_keeps_its_shorter_side(vocabulary: Vocabulary, sizes: tuple[int, int]) -> None:
    first, second = (" ".join([word] * size) for word, size in zip(("ter", "dor"), sizes, strict=True))
    (feature,) = featurise([TextPair(first, second, "1")], TASKS["pawsx"], vocabulary, WINDOWS)
    a, b = vocabulary.encode(first), vocabulary.encode(second)
    ends = np.flatnonzero(feature.ids == EOS)
    kept = ends[0] - 1, ends[1] - ends[0] - 1
    assert len(ends) == 2 and len(feature.ids) == min(16, len(a) + len(b) + 3) and feature.labels.tolist() == [1]
    assert feature.ids[1 : ends[0]].tolist() == a[: kept[0]].tolist()
    assert feature.ids[ends[0] + 1 : ends[1]].tolist() == b[: kept[1]].tolist()
    assert min(kept) == min(len(a), len(b), 6), "the shorter side is whole, or both have the same share"


def test_the_layout_of_xlm(vocabulary: Vocabulary) -> None:
    layout = LAYOUTS["xlm"]
    a, b = (vocabulary.encode(text).tolist() for text in ("ter dor", "kalo"))
    (pair,) = featurise([TextPair("ter dor", "kalo", "1")], TASKS["pawsx"], vocabulary, WINDOWS, layout, language=2)
    assert pair.ids.tolist() == [EOS, *a, EOS, EOS, *b, EOS] and pair.language == 2
    (sentence,) = featurise([Sentence(["ter"], ["O"])], TASKS["ner"], vocabulary, WINDOWS, layout, first_index=7)
    assert sentence.ids.tolist() == [EOS, *vocabulary.encode("ter"), EOS] and sentence.example == 7
    answered = Question("1", "kalo", "ter dor", [("dor", 4)])
    (question,) = featurise([answered], TASKS["xquad"], vocabulary, replace(WINDOWS, max_tokens=32), layout)
    assert question.ids.tolist() == [EOS, *b, EOS, EOS, *a, EOS]
    first, last = question.labels
    assert vocabulary.decode(question.ids[first : last + 1]) == "dor"


def test_windows_cover_the_context_and_lead_back_to_it(vocabulary: Vocabulary) -> None:
    words = [
        f"{word}{mark}"
        for word, mark in zip(["kalo", "miter", "unve", "Ter"] * 8, ["", ",", " ", "…"] * 8, strict=True)
    ]
    context = "  " + " ".join(words)
    answer = "miter, unve"
    start = context.index(answer, 60)
    features = featurise(
        [Question("q", "ter dor in pe ka", context, [(answer, start)])], TASKS["xquad"], vocabulary, WINDOWS
    )
    ids, places = vocabulary.encode_with_offsets(context)
    covered = set()
    labelled = 0
    for number, feature in enumerate(features):
        assert len(feature.ids) <= 16
        inside = np.flatnonzero(feature.offsets[:, 0] >= 0)
        assert feature.ids[1:5].tolist() == vocabulary.encode("ter dor in pe ka")[:4].tolist()
        window = slice(6 * number, 6 * number + len(inside))
        assert feature.ids[inside].tolist() == ids[window].tolist()
        assert feature.offsets[inside].tolist() == places[window].tolist()
        covered |= set(range(window.start, window.stop))
        if feature.labels.any():
            labelled += 1
            first, last = feature.labels
            assert answer in context[feature.offsets[first, 0] : feature.offsets[last, 1]]
    assert covered == set(range(len(ids)))
    assert 0 < labelled < len(features)


def test_a_window_more_is_there_where_the_context_needs_it(vocabulary: Vocabulary) -> None:
    """They begin every 6 tokens; the last one is the first that reaches the end."""
    question, words = "ter dor", ["kalo"] * 40
    room = int((_windows(vocabulary, question, words)[0].offsets[:, 0] >= 0).sum())
    sizes = [len(vocabulary.encode(" ".join(words[:number]))) for number in range(1, 40)]
    assert room < max(sizes) and any((size - room) % 6 == 0 for size in sizes if size > room) and room in sizes
    for number, size in enumerate(sizes, 1):
        expected = 1 + max(0, -(-(size - room) // 6))
        assert len(_windows(vocabulary, question, words[:number])) == expected, size


def _windows(vocabulary: Vocabulary, question: str, context: list[str]) -> list[Feature]:
    return featurise([Question("q", question, " ".join(context), [])], TASKS["xquad"], vocabulary, WINDOWS)


def test_an_answer_in_text_without_spaces_ends_where_it_ends(vocabulary: Vocabulary) -> None:
    """Tokens touch there: every run of them is an answer once, and its labels are that run, not a token more."""
    context = "kalomiterunvedorsadorpeka"
    ids, places = vocabulary.encode_with_offsets(context)
    drawn = [(first, last) for first, last in places if last > first]  # the first may be a space alone
    assert len(drawn) > 8 and all(a[1] == b[0] for a, b in pairwise(drawn))
    shift = 2 + len(vocabulary.encode("ter")) + len(ids) - len(drawn)
    for first in range(len(drawn)):
        for last in range(first, len(drawn)):
            start, end = int(drawn[first][0]), int(drawn[last][1])
            question = Question("q", "ter", context, [(context[start:end], start)])
            (feature,) = featurise([question], TASKS["xquad"], vocabulary, LONG)
            assert feature.labels.tolist() == [shift + first, shift + last], context[start:end]


def test_an_answer_is_labelled_in_the_windows_that_hold_all_of_it(vocabulary: Vocabulary) -> None:
    """Every run of tokens as the answer, so also those that end or begin a token outside a window."""
    context = "ter kalo, miter unve dor sador peka lomi inpe, dor kalo ter unve lomi peka"
    of_text = vocabulary.encode_with_offsets(context)[1]
    drawn = [(int(start), int(end)) for start, end in of_text if end > start]
    borders = 0
    for first in range(len(drawn)):
        for last in range(first, len(drawn)):
            start, end = drawn[first][0], drawn[last][1]
            question = Question("q", "ter dor", context, [(context[start:end], start)])
            features = featurise([question], TASKS["xquad"], vocabulary, WINDOWS)
            assert len(features) > 2
            for feature in features:
                begins = np.flatnonzero((feature.offsets[:, 0] == start) & (feature.offsets[:, 1] > start))
                ends = np.flatnonzero((feature.offsets[:, 1] == end) & (feature.offsets[:, 0] < end))
                whole = len(begins) == len(ends) == 1
                borders += not whole and len(begins) == 1 and last - first + 1 < len(feature.ids)
                expected = [begins[0], ends[0]] if whole else [0, 0]
                assert feature.labels.tolist() == expected, context[start:end]
    assert borders > 10


def test_an_answer_does_not_begin_with_a_space_that_only_the_vocabulary_takes_for_one(vocabulary: Vocabulary) -> None:
    """U+200B follows the marks of footnotes in Wikipedia, U+200F Latin words in Arabic text."""
    context = "ter.[3]\u200bkalo, \u200f\ufeffmiter"
    for answer in ("kalo", "miter"):
        question = Question("q", "ter", context, [(answer, context.index(answer))])
        (feature,) = featurise([question], TASKS["xquad"], vocabulary, LONG)
        logits = np.zeros((len(feature.ids), 2))
        logits[feature.labels, [0, 1]] = 1
        assert best_answer(question, [feature], [logits]) == answer


def test_places_are_characters_of_the_text(vocabulary: Vocabulary) -> None:
    """White space runs, letters outside the vocabulary, one that the normaliser makes two of, four-byte ones."""
    text = "  kalo\u3000 miter ﬁ 中国 ter𝄞dor "
    ids, places = vocabulary.encode_with_offsets(text)
    assert ids.tolist() == vocabulary.encode(text).tolist()
    assert (places[1:, 0] >= places[:-1, 1]).all(), "in order, without overlap"
    shown = [text[first:last] for first, last in places]
    assert "".join(shown) == "".join(text.split()) and not any(one[:1].isspace() for one in shown)
