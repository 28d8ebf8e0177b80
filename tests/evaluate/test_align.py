"""Alignment by optimal transport against POT and a float64 reference, and words from subwords."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import ot
import pytest
import torch

from tests.rows import train_vocabulary
from tests.small import encoder_of, lively, model
from xlme_ds.data.schema import BOS, EOS
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.evaluate.alignment import (
    GoldPair,
    Subwords,
    _subword_vectors,
    align_words,
    error_rates,
    score_all_tests,
    score_test,
    sinkhorn,
    tokenize_words,
    truncate_pair,
)
from xlme_ds.evaluate.vectors import sentence_vectors
from xlme_ds.models.text_encoder import TextEncoder


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab")


@pytest.fixture(scope="module")
def encoder(vocabulary: Vocabulary) -> TextEncoder:
    return encoder_of(model(3, vocabulary=vocabulary.size))


def similarities(seed: int, positive: bool = True) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(7 + seed % 5, 9)) * 3
    return np.exp(values) if positive else values


def reference(similarity: np.ndarray, iterations: int) -> tuple[list[list[float]], list[list[float]]]:
    """The definition in loops: negative and zero entries become 1e-6; columns are normalised first, then rows."""
    rows = [[max(float(x), 0.0) or 1e-6 for x in row] for row in similarity]
    columns = rows
    for _ in range(iterations):
        sums = [sum(row[j] for row in rows) for j in range(len(rows[0]))]
        columns = [[x / sums[j] for j, x in enumerate(row)] for row in rows]
        rows = [[x / sum(row) for x in row] for row in columns]
    return rows, columns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("positive", [True, False])
def test_sinkhorn_is_its_definition(seed: int, positive: bool) -> None:
    similarity = similarities(seed, positive)
    assert positive or (similarity <= 0).any()
    for found, expected in zip(sinkhorn(similarity.astype(np.float32)), reference(similarity, 2), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)  # the input was rounded to float32


@pytest.mark.parametrize("iterations", [1, 2, 500])
def test_sinkhorn_is_pots_with_uniform_margins(iterations: int) -> None:
    similarity = similarities(1)
    s, t = similarity.shape
    plan = ot.sinkhorn(
        np.full(s, 1 / s), np.full(t, 1 / t), -np.log(similarity), reg=1, numItermax=iterations, stopThr=0, warn=False
    )
    rows, columns = sinkhorn(similarity, iterations)
    np.testing.assert_allclose(rows / s, plan, rtol=1e-7)
    if iterations == 500:  # converged: both normalisations hold at once
        np.testing.assert_allclose(columns / t, plan, rtol=1e-7)


def test_alignment_is_mutual_best_of_the_two_plans() -> None:
    differs = 0
    for seed in range(20):
        similarity = similarities(seed)
        rows, columns = (np.array(plan) for plan in reference(similarity, 2))
        expected = [(i, j) for i, j in np.ndindex(*rows.shape) if rows[i].argmax() == j and columns[:, j].argmax() == i]
        vectors, numbers = np.eye(similarity.shape[1]), [np.arange(size) for size in similarity.shape]
        assert align_words(similarity, vectors, *numbers) == set(expected)
        plain = [(i, j) for i, j in expected if similarity[i].argmax() == j and similarity[:, j].argmax() == i]
        differs += len(plain) != len(expected)
    assert differs  # the iterations matter: a column that is near everything does not win everywhere


def test_a_side_without_subwords_has_no_link() -> None:
    for source, target in (((3, 2), (0, 2)), ((0, 2), (2, 2))):
        assert align_words(np.empty(source), np.empty(target), np.arange(source[0]), np.arange(target[0])) == set()


def test_words_are_aligned_by_any_of_their_subwords() -> None:
    vectors = np.eye(4, dtype=np.float32) * 5
    source, target = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2])
    assert align_words(vectors, vectors, source, target) == {(0, 0), (0, 1), (1, 1), (2, 2)}


def test_words_are_encoded_one_by_one(vocabulary: Vocabulary) -> None:
    words = ["kalomi", "ter", "unvesador"]
    ids, numbers = tokenize_words(words, vocabulary)
    for number, word in enumerate(words):
        assert ids[numbers == number].tolist() == vocabulary.encode(word).tolist()


@pytest.mark.parametrize(
    ("first", "second", "kept"), [(3, 4, (3, 4)), (9, 3, (7, 3)), (3, 9, (3, 7)), (20, 30, (5, 5))]
)
def test_long_pairs_are_cut_to_their_room(first: int, second: int, kept: tuple[int, int]) -> None:
    sides = [Subwords(np.arange(n), np.arange(n) // 2) for n in (first, second)]
    cut = truncate_pair(sides[0], sides[1], room=10)
    assert tuple(len(side.ids) for side in cut) == tuple(len(side.words) for side in cut) == kept
    assert all((side.ids == np.arange(len(side.ids))).all() for side in cut)


GOLD = [
    GoldPair(["kalo", "miter"], ["unve", "sador", "inpe"], {(0, 0), (1, 2)}, {(0, 0), (1, 2), (0, 1)}),
    GoldPair(["vesa", "dorterka", "lo"], ["ka"], {(1, 0)}, {(1, 0)}),
    GoldPair(["pe"], ["saun", "mi"], {(0, 1)}, {(0, 1)}),
]


@pytest.mark.parametrize("apart", [False, True])
def test_a_test_is_scored_with_every_layers_vectors(encoder: TextEncoder, vocabulary: Vocabulary, apart: bool) -> None:
    found = score_test(encoder, vocabulary, GOLD, apart)
    assert found["cut"] == 0 and len(found["aer"]) == encoder.cfg.discriminator_layers + 1
    for layer in range(len(found["aer"])):
        predicted, by_cosine = [], []
        for pair in GOLD:
            sides = tokenize_words(pair.source, vocabulary), tokenize_words(pair.target, vocabulary)
            items = (
                [[BOS, *side.ids, EOS] for side in sides] if apart else [[BOS, *sides[0].ids, EOS, *sides[1].ids, EOS]]
            )
            states = []
            for item in items:
                tokens = torch.tensor([item])
                places = torch.arange(len(item))[None]
                with torch.no_grad():
                    states.append(encoder.hidden_states(tokens, places, torch.ones_like(tokens))[layer][0].numpy())
            s, t = len(sides[0].ids), len(sides[1].ids)
            source = states[0][1 : 1 + s]
            target = states[1][1 : 1 + t] if apart else states[0][2 + s : 2 + s + t]
            predicted.append(align_words(source, target, sides[0].words, sides[1].words))
            unit = [side / np.sqrt((side**2).sum(1))[:, None] for side in (source, target)]
            by_cosine.append(align_words(*unit, sides[0].words, sides[1].words))
        for measure, rate in error_rates(predicted, GOLD).items():
            assert found[measure][layer] == pytest.approx(rate)
        assert found["aer_cosine"][layer] == pytest.approx(error_rates(by_cosine, GOLD)["aer"])
    many = score_test(encoder, vocabulary, GOLD * 30, apart)  # more than are read at once
    assert many == {measure: pytest.approx(rates) for measure, rates in found.items()}


def test_pairs_and_languages_are_read_as_xlm_reads_them(encoder: TextEncoder, vocabulary: Vocabulary) -> None:
    cfg = replace(encoder.cfg, layout="xlm", language_embeddings=("fr", "en", "de"))
    xlm, test = lively(TextEncoder(cfg)).eval(), GOLD[:1]
    found = score_test(xlm, vocabulary, test, languages=("de", "en"))
    source, target = tokenize_words(test[0].source, vocabulary), tokenize_words(test[0].target, vocabulary)
    s, t = len(source.ids), len(target.ids)
    tokens = torch.tensor([[EOS, *source.ids, EOS, EOS, *target.ids, EOS]])
    places = torch.tensor([[*range(s + 2), *range(t + 2)]])
    languages = torch.tensor([[2] * (s + 2) + [1] * (t + 2)])
    with torch.no_grad():
        states = xlm.hidden_states(tokens, places, torch.ones_like(tokens), languages)
    for layer, state in enumerate(states):
        vectors = state[0].numpy()
        predicted = align_words(vectors[1 : 1 + s], vectors[3 + s : 3 + s + t], source.words, target.words)
        assert found["aer"][layer] == pytest.approx(error_rates([predicted], test)["aer"])
    for pair in ("de-en", "fr-en", "en-de"):  # a test's name has the source language first
        scored = score_all_tests(xlm, vocabulary, {pair: test}, False, "")["tests"][pair]
        assert scored | {"cut": 0} == score_test(xlm, vocabulary, test, languages=tuple(pair.split("-")))
    read_apart = score_test(xlm, vocabulary, test, apart=True, languages=("de", "en"))
    ours, theirs = sentence_vectors(xlm, [source.ids, target.ids], languages=["de", "en"])[0]
    alone = xlm.hidden_states(
        tokens[:, : s + 2], places[:, : s + 2], torch.ones(1, s + 2).long(), languages[:, : s + 2]
    )
    np.testing.assert_allclose(ours, alone[0][0].mean(0).detach().numpy(), atol=1e-6)
    assert read_apart["cut"] == 0 and not np.allclose(ours, theirs)
    sides = [(tokenize_words(pair.source, vocabulary), tokenize_words(pair.target, vocabulary)) for pair in GOLD]
    together = {(n, layer): vectors for n, layer, *vectors in _subword_vectors(xlm, sides, True, ("de", "en"))}
    np.testing.assert_allclose(together[0, 2][0], alone[2][0].detach()[1 : s + 1], atol=1e-5)
    for n, pair in enumerate(sides):  # several pairs at once are read as each by itself
        for _, layer, *vectors in _subword_vectors(xlm, [pair], True, ("de", "en")):
            for found_there, expected in zip(together[n, layer], vectors, strict=True):
                np.testing.assert_allclose(found_there, expected, atol=1e-5)


def test_identical_words_in_one_order_are_aligned_by_the_embeddings_read_apart(
    encoder: TextEncoder, vocabulary: Vocabulary
) -> None:
    words = ["kalo", "miter", "unve", "sador"]
    gold = [GoldPair(words, words, {(i, i) for i in range(4)}, {(i, i) for i in range(4)})]
    found = score_test(encoder, vocabulary, gold, apart=True)
    assert found["aer_cosine"][0] == 0  # by cosine a vector is nearest to its copy; position adds little to these


def test_pairs_that_do_not_fit_are_cut_and_counted(
    encoder: TextEncoder, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    words = ["kalo", "miter"] * 40
    long = GoldPair(words, words, {(i, i) for i in range(80)}, {(i, i) for i in range(80)})
    found = score_test(encoder, vocabulary, [GOLD[0], long])
    assert found["cut"] == 1 and max(found["recall"]) < 0.3
    assert score_test(encoder, vocabulary, [GOLD[0], long], apart=True)["cut"] == 1
    two_tests = {"de-en": [long, long], "en-ro": [GOLD[0], long]}
    assert score_all_tests(encoder, vocabulary, two_tests, False, "")["cut"] == 3
    pieces = [vocabulary.piece(token) for token in range(4, vocabulary.mask_id)]
    word = next(piece[1:] for piece in pieces if piece[0] == "▁" and len(vocabulary.encode(piece[1:])) == 1)
    for apart, sizes in ((False, (18, 19)), (True, (38, 38))):  # of 40 tokens three, or two, are special
        for more in (0, 1):
            fits = GoldPair([word] * sizes[0], [word] * (sizes[1] + more), {(0, 0)}, {(0, 0)})
            assert score_test(encoder, vocabulary, [fits], apart)["cut"] == more
