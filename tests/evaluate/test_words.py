"""Words in the lookup table: vectors, correlations against SciPy, translations by hand, and the published files'
layouts."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from tests.evaluate.folders import WORDS, write_run
from tests.small import encoder_of, model
from xlme_ds.evaluate.__main__ import main
from xlme_ds.evaluate.lookup_table import (
    correlation,
    ranks,
    read_word_tests,
    similarity_scores,
    translation_scores,
    word_vectors,
)
from xlme_ds.export.export_run import export_run
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.runs import TrainedEncoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", embedding_sharing="gdes", vocabulary_blocks=2)


@pytest.fixture(scope="module")
def lookup(run: Path) -> TrainedEncoder:
    return load_encoder(run)


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def table_of(lookup: TrainedEncoder) -> np.ndarray:
    return torch.cat([block.detach() for block in lookup.encoder.embedding_blocks]).double().numpy()


def test_a_words_vector_is_the_mean_of_its_pieces(lookup: TrainedEncoder) -> None:
    words = [*WORDS, "kalomiter unve", "кирил"]
    found, unknown = word_vectors(lookup, words)
    ids = [lookup.vocabulary.encode(word) for word in words]
    assert len({len(one) for one in ids}) > 1
    np.testing.assert_allclose(found, [table_of(lookup)[one].mean(0) for one in ids], rtol=1e-12)
    assert unknown == 1


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_scipys(ties: bool) -> None:
    rng = np.random.default_rng(int(ties))
    a, b = (rng.integers(0, 6, 40).astype(float) if ties else rng.normal(size=40) for _ in range(2))
    assert correlation(a, b) == pytest.approx(scipy.stats.pearsonr(a, b).statistic)
    assert correlation(ranks(a), ranks(b)) == pytest.approx(scipy.stats.spearmanr(a, b).statistic)
    assert correlation(a, np.full(40, 0.1)) == 0


def test_similarity_correlates_cosines_with_what_people_said(lookup: TrainedEncoder) -> None:
    pairs = [(WORDS[i], WORDS[(3 * i + 1) % 10]) for i in range(9)]
    sides = [table_of(lookup)[lookup.vocabulary.encode(word)].mean(0) for pair in pairs for word in pair]
    cosines = [1 - scipy.spatial.distance.cosine(a, b) for a, b in zip(sides[::2], sides[1::2], strict=True)]
    scores = [cosine**3 + 0.1 * (i % 2) for i, cosine in enumerate(cosines)]
    found = similarity_scores(lookup, pairs, scores)
    pearson, spearman = scipy.stats.pearsonr(cosines, scores)[0], scipy.stats.spearmanr(cosines, scores)[0]
    assert 0 < spearman < 1 and (found["pairs"], found["unknown"]) == (9, 0)
    assert found["pearson"] == pytest.approx(pearson) and found["spearman"] == pytest.approx(spearman)
    assert found["score"] == pytest.approx(scipy.stats.hmean([pearson, spearman]))
    strange = [("кирил", WORDS[0]), (WORDS[1], "кирил"), *pairs[:3]]
    assert similarity_scores(lookup, strange, scores[:5])["unknown"] == 2
    assert translation_scores(lookup, strange)["unknown"] == 2, "of both sides"
    assert similarity_scores(lookup, pairs, [-score for score in scores])["score"] == 0
    outlier = [100.0 if cosine == max(cosines) else -cosine for cosine in cosines]  # the signs of the two differ
    found = similarity_scores(lookup, pairs, outlier)
    assert found["spearman"] < 0 < found["pearson"] and found["score"] == 0


def test_translations_by_hand(run: Path) -> None:
    vocabulary = load_encoder(run).vocabulary
    whole = [vocabulary.piece(token)[1:] for token in range(4, vocabulary.mask_id) if vocabulary.piece(token)[0] == "▁"]
    a, b, x, y, z = [word for word in whole if word and len(vocabulary.encode(word)) == 1][:5]
    encoder = encoder_of(model(vocabulary=vocabulary.size))
    lookup = TrainedEncoder(encoder, vocabulary)
    with torch.no_grad():
        for word, plane in ((a, (3, 4)), (b, (0, 2)), (x, (6, 8)), (y, (4, 3)), (z, (3, 0))):
            vector = encoder.embedding_blocks[0][int(vocabulary.encode(word)[0])].zero_()
            vector[:2] = torch.tensor(plane, dtype=torch.float32)
    found = translation_scores(lookup, [(a, x), (a, y), (b, z), (b, b)])
    # Of a, x points its way (distance 5) and y has 24/25 (√2); of b, z is at a right angle (√13) and the same word is
    # itself.
    assert found["cosine"] == pytest.approx((1 + 0.96 + 0 + 1) / 4)
    assert found["distance"] == pytest.approx((5 + 2**0.5 + 13**0.5 + 0) / 4)
    assert (found["pairs"], found["words"], found["candidates"], found["identical"]) == (4, 2, 4, 1)
    assert found["precision"] == 1
    assert translation_scores(lookup, [(a, x), (b, x), (b, z)])["candidates"] == 2, "a translation of two words is one"
    assert translation_scores(lookup, [(a, y), (b, x), (x, a)])["precision"] == pytest.approx(
        1 / 3
    )  # a is nearest to itself: y of 3


def test_more_words_than_are_compared_at_once(lookup: TrainedEncoder) -> None:
    """1,030, of which every second translates itself, and the others a word that is no target of theirs."""
    words = [f"{a}{b}{c}{d}" for a in WORDS for b in WORDS for c in WORDS for d in WORDS[:2]][:1030]
    pairs = [(word, words[n if n % 2 else n + 1]) for n, word in enumerate(words)]
    vectors, targets = word_vectors(lookup, words)[0], sorted({target for _, target in pairs})
    sides = [side / np.linalg.norm(side, axis=1)[:, None] for side in (vectors, word_vectors(lookup, targets)[0])]
    right = [
        targets[index] == target for index, (_, target) in zip((sides[0] @ sides[1].T).argmax(1), pairs, strict=True)
    ]
    found = translation_scores(lookup, pairs)
    assert (found["words"], found["candidates"]) == (1030, 515)
    assert 0.3 < np.mean(right) < 0.9 and found["precision"] == pytest.approx(np.mean(right), abs=0.02)


def test_a_word_that_leaves_no_piece_is_named(lookup: TrainedEncoder) -> None:
    with pytest.raises(ValueError, match=r"'\\u200b' has no piece in .*sentencepiece.model: take its pair out"):
        word_vectors(lookup, ["kalo", "\u200b"])


def test_published_layouts_are_read(tmp_path: Path) -> None:
    write(tmp_path / "test/subtask2-crosslingual/data/en-de.test.data.txt", "Big Bang\tkalo", "miter\tUrknall \r")
    write(tmp_path / "test/subtask2-crosslingual/keys/en-de.test.gold.txt", "0.25", "4")
    write(tmp_path / "trial/de.trial.data.txt", "a\tb", "c\td")
    write(tmp_path / "trial/de.trial.gold.txt", "1", "2")
    write(tmp_path / "dictionaries/en-fr.txt", "the le", "the\tla", "cat  chat")
    write(tmp_path / "dictionaries/en-fr.5000-6500.txt", "dog chien")
    write(tmp_path / "readme.txt", "words")
    similarity, dictionaries = read_word_tests(tmp_path)
    assert similarity == {
        "en-de.test": ([("Big Bang", "kalo"), ("miter", "Urknall")], [0.25, 4.0]),
        "de.trial": ([("a", "b"), ("c", "d")], [1.0, 2.0]),
    }
    assert dictionaries == {
        "en-fr": [("the", "le"), ("the", "la"), ("cat", "chat")],
        "en-fr.5000-6500": [("dog", "chien")],
    }


def test_faults_are_named(tmp_path: Path) -> None:
    def fault() -> str:
        with pytest.raises(ValueError) as caught:
            read_word_tests(tmp_path)
        return str(caught.value)

    assert "holds no word pairs" in fault()
    data = write(tmp_path / "data/en-de.test.data.txt", "a\tb", "c d")
    assert (
        f"data/en-de.test.data.txt has no key: put en-de.test.gold.txt next to it, or into {tmp_path / 'keys'}"
        in fault()
    )
    key = write(tmp_path / "keys/en-de.test.gold.txt", "1", "nan", "3")
    assert "en-de.test.data.txt line 2 is 'c d': it must be two words with a tab" in fault()
    write(data, "a\tb", "c\td")
    assert "en-de.test.data.txt has 2 lines but" in fault() and "en-de.test.gold.txt has 3" in fault()
    write(key, "1", "nan")
    assert "en-de.test.gold.txt line 2 is 'nan' instead of a number" in fault()
    write(key, "1", "1 2")
    assert "en-de.test.gold.txt line 2 is '1 2' instead of a number" in fault()
    write(key, "1", "1.0")
    assert "en-de.test.gold.txt has the same score on every line" in fault()
    write(key, "1", "2")
    lone = write(tmp_path / "keys/en-sw.test.gold.txt", "1", "2")
    assert "keys/en-sw.test.gold.txt has scores for no words: put en-sw.test.data.txt next to it" in fault()
    lone.unlink()
    write(tmp_path / "en-fr.txt", "the le", "the le la")
    assert "en-fr.txt line 2 is 'the le la': it must be two words with a space or a tab" in fault()
    write(tmp_path / "en-fr.txt", "the le")
    (tmp_path / "latest").symlink_to(tmp_path)  # the same file once more
    write(tmp_path / "more/en-fr.txt", "the le")
    assert "more/en-fr.txt is the second test named en-fr" in fault()


def test_runs_exports_and_untrained_models_side_by_side(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    write(data / "en-de.test.data.txt", *(f"{WORDS[i]}\t{WORDS[i - 4]}" for i in range(8)))
    write(data / "en-de.test.gold.txt", *"12341324")
    write(data / "en-de.txt", *(f"{WORDS[i]} {WORDS[i // 2]}" for i in range(8)))
    export_run(run, tmp_path / "export")
    models = ["--model", str(run), "--model", str(tmp_path / "export")]
    main(["words", *models, "--random", "--data", str(data), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "out/words.json").read_text())
    ours, theirs, start = found["models"][:3]
    assert [model["model"] for model in found["models"][:2]] == ["first", "export"] and "untrained" in start["model"]
    for kind, name in (("similarity", "en-de.test"), ("dictionaries", "en-de")):
        assert ours[kind][name] == pytest.approx(theirs[kind][name]) != start[kind][name]
    assert (
        f"{ours['similarity']['en-de.test']['pearson']:.3f}" in shown
        and f"{ours['dictionaries']['en-de']['distance']:.3f}" in shown
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "words.json",
        "words.md",
    ]  # no layers, no plot
    main(["words", "--model", str(run), "--which", "generator", "--data", str(data), "--json"])
    (other,) = json.loads(capsys.readouterr().out)["models"]  # whose table is not the discriminator's here
    assert other["similarity"]["en-de.test"]["pearson"] != pytest.approx(ours["similarity"]["en-de.test"]["pearson"])
