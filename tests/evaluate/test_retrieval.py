"""Retrieval against scikit-learn, pairs out of packed rows and text, and vectors that do not depend on their batch."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from tests.engine.worker import tiny
from tests.evaluate.folders import sentence, write_run
from tests.rows import LANGUAGES, random_row, train_vocabulary, write_data
from tests.small import encoder_of
from xlme_ds.data.schema import BOS, EOS
from xlme_ds.data.shards import RowStore
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.evaluate.report_data import _retrieval, _shown_records
from xlme_ds.evaluate.retrieval import (
    accuracies_of_vectors,
    accuracy_at_1,
    group_by_language,
    heldout_pairs,
    mean_over,
    retrieval_accuracies,
    retrieval_scores,
    stored_pairs,
)
from xlme_ds.evaluate.vectors import hidden_states, sentence_vectors
from xlme_ds.models.effective_rank import effective_rank
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.models.text_encoder import TextEncoder, take_encoder
from xlme_ds.trained.config_json import read_run_config
from xlme_ds.trained.runs import load_run


@pytest.fixture(scope="module")
def model() -> TextEncoder:
    model = Electra(tiny({"kind": "plain"}, 8).model)
    initialise(model, seed=1, std=0.1)
    return encoder_of(model)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab")


@pytest.mark.parametrize(("layout", "separators"), [("xlme", 1), ("xlm", 2)])
def test_pairs_are_those_of_the_rows(tmp_path: Path, layout: str, separators: int) -> None:
    store = RowStore(write_data(tmp_path / "data", rows=260, rows_per_shard=130, layout=layout) / "para")
    found = [(language, other.tolist(), english.tolist()) for language, other, english in stored_pairs(store)]
    rng = np.random.default_rng([0, True])
    expected = []
    for _ in range(260):
        tokens, lengths, languages = random_row(rng, "para", 32, 200, layout)
        for i, end in enumerate(np.cumsum(lengths)):
            item = tokens[end - lengths[i] : end]
            middle = item.index(EOS, 1)  # xlm's items begin with </s>
            first, second = (LANGUAGES[language] for language in languages[2 * i : 2 * i + 2])
            sides = item[1:middle], item[middle + separators : -1]
            expected.append((second, *sides[::-1]) if first == "en" else (first, *sides))
            assert (first == "en") != (second == "en")
    assert found == expected


@pytest.mark.parametrize("block", [7, 200, 1024])
def test_accuracies_are_scikit_learns(block: int) -> None:
    rng = np.random.default_rng(0)
    ours = rng.normal(size=(200, 16)) * rng.uniform(0.1, 10, size=(200, 1))  # lengths matter to the dot product alone
    theirs = ours + rng.normal(scale=1.5, size=ours.shape)

    def expected(queries: np.ndarray, candidates: np.ndarray) -> float:
        search = NearestNeighbors(n_neighbors=1, metric="cosine", algorithm="brute").fit(candidates)
        return float((search.kneighbors(queries, return_distance=False)[:, 0] == np.arange(200)).mean())

    ways = expected(ours, theirs), expected(theirs, ours)
    assert all(0.05 < way < 0.95 for way in ways) and ways[0] != ways[1]
    assert accuracy_at_1(ours, theirs, block) == pytest.approx(ways, abs=1e-12)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 1024])
def test_of_equally_near_rows_the_first_counts_in_whichever_block_it_is(block: int) -> None:
    """Rows along the axes, whose cosines are exactly 0 and 1: 1 and 3 of `ours` are alike, and 0 and 2 of `theirs`."""
    axes = np.eye(4)
    ours, theirs = axes[[0, 1, 2, 1]], axes[[0, 1, 0, 1]]
    # From ours to theirs, the first maximum: 0, 1, 0 (nothing is near), 1. Back: 0, 1, 0, 1.
    assert accuracy_at_1(ours, theirs, block) == (0.5, 0.5)
    ours, theirs = axes[[0, 0, 2, 3]], axes[[0, 0, 2, 3]]
    assert accuracy_at_1(ours, theirs, block) == (0.75, 0.75)
    ours, theirs = axes[[0, 1, 2, 0]], axes[[1, 0, 2, 0]]
    assert accuracy_at_1(ours, theirs, block) == (
        0.25,
        0.25,
    )  # the fourth is as near as the second and the first, which win


def test_vectors_do_not_depend_on_the_batch(model: TextEncoder) -> None:
    rng = np.random.default_rng(0)
    sentences = [rng.integers(4, 199, size=n).astype(np.int32) for n in (3, 30, 1, 12, 7, 25)]
    together = sentence_vectors(model, sentences, batch_size=4)
    alone = np.concatenate([sentence_vectors(model, [sentence]) for sentence in sentences], axis=1)
    assert together.shape == (model.cfg.discriminator_layers + 1, 6, 32)
    np.testing.assert_allclose(together, alone, atol=2e-6)  # float32 sums over another padding


def test_a_vector_is_the_mean_over_all_tokens_of_the_item(model: TextEncoder) -> None:
    ids = np.array([17, 4, 33], dtype=np.int32)
    ((_, _, layers),) = hidden_states(model, [np.concatenate([[BOS], ids, [EOS]])])
    expected = [state_BTD[0].double().mean(0).numpy() for state_BTD in layers]
    np.testing.assert_allclose(sentence_vectors(model, [ids])[:, 0], expected, atol=1e-6)


def test_a_sentence_finds_its_copy_at_every_layer(model: TextEncoder) -> None:
    rng = np.random.default_rng(1)
    sentences = [rng.integers(4, 199, size=10).astype(np.int32) for _ in range(20)]
    scores = retrieval_accuracies(model, {"fr": (sentences, sentences)})
    states = model.cfg.discriminator_layers + 1
    assert scores["overall"] == {"en_xx": [1.0] * states, "xx_en": [1.0] * states}


def test_every_side_is_read_in_its_language() -> None:
    """Each sentence alone, with its language's embedding, which tells the two sides apart."""
    model = Electra(replace(tiny({"kind": "plain"}, 8).model, language_embeddings=("de", "en", "fr")))
    initialise(model, seed=1, std=0.1)
    encoder, rng = encoder_of(model).eval(), np.random.default_rng(1)
    groups = {}
    for language in ("de", "fr"):
        ours = [rng.integers(4, 199, size=8).astype(np.int32) for _ in range(30)]
        groups[language] = ours, [np.append(line[:5], rng.integers(4, 199, size=3)).astype(np.int32) for line in ours]

    def mean(ids: np.ndarray, language: str) -> np.ndarray:
        tokens = torch.tensor([[BOS, *ids, EOS]])
        number = torch.full_like(tokens, encoder.cfg.language_embeddings.index(language))
        with torch.no_grad():
            states = encoder.hidden_states(tokens, torch.arange(10)[None], torch.ones_like(tokens), number)
        return np.stack([state.float().mean(1)[0].numpy() for state in states])

    def expected(first: str, second: str) -> dict[str, list[float]]:
        found = {}
        for language, (ours, theirs) in groups.items():
            codes = {"en": "en", "xx": language}
            a, b = (
                np.stack([mean(ids, codes[code]) for ids in side], 1)
                for side, code in ((ours, first), (theirs, second))
            )
            found[language] = [accuracy_at_1(*layers) for layers in zip(a, b, strict=True)]
        return found

    scores = retrieval_accuracies(encoder, groups)["languages"]
    there = {code: list(zip(found["en_xx"], found["xx_en"], strict=True)) for code, found in scores.items()}
    assert there == expected("en", "xx") != expected("xx", "en")


def test_centred_vectors_have_lost_each_sides_own_mean() -> None:
    rng = np.random.default_rng(2)
    plain = rng.normal(size=(1, 30, 8))
    shift = np.zeros(8)
    shift[0] = 50
    vectors = np.concatenate([plain, np.roll(plain, 0, axis=1) + shift], axis=1)
    scores = accuracies_of_vectors([("de", vectors)], centred=True)["overall"]
    assert scores["en_xx_centred"] == scores["xx_en_centred"] == [1.0]
    assert scores["en_xx"][0] < 0.8


def test_effective_rank_counts_the_dimensions_in_which_vectors_vary() -> None:
    assert effective_rank(np.diag([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)
    assert effective_rank(np.diag([9.0, 3.0])) == pytest.approx(4 / 3**0.75)  # shares 3/4 and 1/4
    assert effective_rank(np.outer([1, 2, 3], [1, 2, 3])) == pytest.approx(1)
    on_a_line = np.linspace(-1, 1, 40)[None, :, None] * np.array([3.0, 4.0]) + np.array([7.0, 9.0])
    in_the_plane = np.random.default_rng(3).normal(size=(1, 40, 2)) + 5
    vectors = np.concatenate([on_a_line, in_the_plane])
    both = np.concatenate([side - side.mean(0) for side in (in_the_plane[0, :20], in_the_plane[0, 20:])])
    p, q = np.linalg.svd(both, compute_uv=False) ** 2 / (both**2).sum()
    assert accuracies_of_vectors([("de", vectors), ("fr", vectors)], centred=True)["dimensions"] == pytest.approx(
        [1, p**-p * q**-q]
    )


def test_every_language_counts_the_same() -> None:
    scores = {"de": {"en_xx": [0.2, 0.4]}, "fr": {"en_xx": [0.6, 1.0]}, "sw": {"en_xx": [0.0, 0.0]}}
    assert mean_over(scores, ["de", "fr"]) == {"en_xx": pytest.approx([0.4, 0.7])}


def test_groups_leave_out_repetitions_and_small_languages(tmp_path: Path) -> None:
    store = RowStore(write_data(tmp_path / "data", rows=40) / "para")
    pairs = list(stored_pairs(store))
    one_side = [(language, other, english[:-1]) for language, other, english in pairs]  # their other side repeats
    groups = group_by_language([*pairs, *pairs, *one_side])
    assert set(groups) == {"de", "fr"}
    english = {pair[2].tobytes() for pair in [*pairs, *one_side]}
    for ours, theirs in groups.values():
        assert {ids.tobytes() for ids in ours} <= english
        for side in (ours, theirs):
            assert len({ids.tobytes() for ids in side}) == len(ours) == len(theirs)
    assert group_by_language(pairs[:3]) == {}
    for codes, others in ((("de", "sw", "fr"), set()), (("en", "en", "fr"), {"fr"})):  # one side has to be English
        store.languages = codes
        assert {language for language, _, _ in stored_pairs(store)} == others
    lines = [np.array([number]) for number in range(4, 10)]
    for count in (4, 5):
        alone = [("sw", ids, ids) for ids in lines[:count]]
        assert {code: len(ours) for code, (ours, _) in group_by_language(alone).items()} == (
            {"sw": 5} if count == 5 else {}
        )


def write_sides(folder: Path, name: str, ours: list[str], theirs: list[str], language: str) -> None:
    for code, lines in (("en", ours), (language, theirs)):
        (folder / f"{name}.{code}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def test_pairs_of_text_are_found_by_name_in_either_order_and_in_archives(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    lines = [sentence(number) for number in range(9)]
    write_sides(tmp_path, "X.en-de", lines[:3], lines[3:6], "de")
    write_sides(tmp_path, "zh-Hans-en", ["", "\u200b", *lines[:2]], lines[5:9], "zh-Hans")
    write_sides(tmp_path, "X.de-fr", lines[:1], lines[:1], "fr")  # no English: not read
    with zipfile.ZipFile(tmp_path / "en-sw.txt.zip", "w") as archive:
        archive.writestr("Some.en-sw.sw", lines[4] + "\n")
        archive.writestr("Some.en-sw.en", lines[5] + "\n")
    found = list(heldout_pairs(tmp_path, vocabulary))
    codes = sorted(language for language, _, _ in found)
    assert codes == ["de"] * 3 + ["sw"] + ["zh-Hans"] * 2  # a side that is empty or a zero-width space is no pair
    by_code = {language: sides for language, *sides in found}
    assert by_code["sw"][1].tolist() == vocabulary.encode(lines[5]).tolist()
    assert by_code["zh-Hans"][0].tolist() == vocabulary.encode(lines[8]).tolist()


def test_pairs_of_a_data_folder_need_the_models_vocabulary(tmp_path: Path, vocabulary: Vocabulary) -> None:
    data = write_data(tmp_path / "data", rows=8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    assert len(list(heldout_pairs(data, vocabulary))) == len(list(stored_pairs(RowStore(data / "para"))))
    other = write_data(tmp_path / "other", rows=8, vocabulary=vocabulary.size)
    with pytest.raises(ValueError, match="another vocabulary"):
        list(heldout_pairs(other, vocabulary))


def test_faults_in_pairs_are_named(tmp_path: Path, vocabulary: Vocabulary) -> None:
    def fault() -> str:
        with pytest.raises(ValueError) as caught:
            list(heldout_pairs(tmp_path, vocabulary))
        return str(caught.value)

    assert "holds no pairs with en" in fault()
    (tmp_path / "X.en-de.de").write_text("kalo\n")
    assert "X.en-de.de has no other side" in fault()
    (tmp_path / "X.en-de.en").write_text("kalo\nmiter\n")
    assert "X.en-de.en has 2 lines but" in fault() and "X.en-de.de has 1" in fault()
    (tmp_path / "X.en-de.de").write_bytes(b"kalo\n\xff\n")
    assert "X.en-de.de line 2 is not UTF-8" in fault()
    for side in ("en", "de"):  # as macOS leaves them next to copied files
        (tmp_path / f"._A.en-de.{side}").write_bytes(b"\xff")
    assert "X.en-de.de line 2 is not UTF-8" in fault()
    (tmp_path / "X.en-de.de").unlink()
    assert "X.en-de.en has no other side: put X.en-de.de" in fault()
    (tmp_path / "X.en-de.en").unlink()
    (tmp_path / "en-de.txt.zip").write_bytes(b"PK")
    assert "en-de.txt.zip cannot be read" in fault()
    with zipfile.ZipFile(tmp_path / "en-de.txt.zip", "w") as archive:
        archive.writestr("Some.en-de.en", "kalo\n")
    assert "no file that ends in .de" in fault()
    with zipfile.ZipFile(tmp_path / "en-de.txt.zip", "w") as archive:
        for name in ("One.en-de.en", "Two.en-de.en", "One.en-de.de"):
            archive.writestr(name, "kalo\n")
    assert "en-de.txt.zip holds One.en-de.en, Two.en-de.en: put each corpus into an archive of its own" in fault()
    with zipfile.ZipFile(tmp_path / "en-de.txt.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("One.en-de.en", "One.en-de.de", "__MACOSX/._One.en-de.en", "__MACOSX/._One.en-de.de"):
            archive.writestr(name, "kalo\n" * 99)
    assert len(list(heldout_pairs(tmp_path, vocabulary))) == 99
    sound = (tmp_path / "en-de.txt.zip").read_bytes()
    first = sound.index(b"PK\1\2")
    for place, byte in ((45, 0xFF), (first + 10, 99), (first + 8, 1)):  # of the text, its packing, a password
        (tmp_path / "en-de.txt.zip").write_bytes(sound[:place] + bytes([byte]) + sound[place + 1 :])
        assert "en-de.txt.zip cannot be read" in fault()
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "en-de.txt.zip", "w", compression) as archive:
            for name in ("One.en-de.en", "One.en-de.de"):
                archive.writestr(name, " ".join(map(str, range(999))))
        sound = (tmp_path / "en-de.txt.zip").read_bytes()
        (tmp_path / "en-de.txt.zip").write_bytes(sound[:60] + bytes(30) + sound[90:])
        assert "en-de.txt.zip cannot be read" in fault()


def test_a_sentence_of_just_the_longest_is_not_cut(model: TextEncoder) -> None:
    longest = model.cfg.max_positions - 2
    sides = [
        [np.arange(4, 4 + size) % 50 + 4 for size in sizes] for sizes in ((3, longest), (longest + 1, longest + 9))
    ]
    assert retrieval_scores(model, {"de": (sides[0], sides[1])}, "")["cut"] == 2
    longer = sides[1][1]
    cuts = [sentence_vectors(model, [longer[:size]])[:, 0] for size in (len(longer), longest, longest - 1)]
    np.testing.assert_array_equal(cuts[0], cuts[1])
    assert not np.allclose(cuts[1], cuts[2])


def test_shown_are_the_first_rows_of_english_german_and_the_others(tmp_path: Path) -> None:
    """Of pairs with English, German comes first. The rows have them in the opposite order."""
    data = write_data(tmp_path / "data", rows=40, seed=5)
    for task, sides, order in (("mono", 1, ["en", "de", "fr"]), ("para", 2, ["de en", "en fr"])):
        store = RowStore(data / task)
        rows = [store.read(np.array([record])).languages[:sides] for record in range(40)]
        languages = [" ".join(sorted(store.languages[index] for index in row)) for row in rows]
        assert list(dict.fromkeys(languages)) == order[::-1]
        assert _shown_records(store, sides) == [languages.index(code) for code in order]


def test_retrieval_before_training_is_that_of_the_pairs(tmp_path: Path) -> None:
    """Taken over where a run shows itself again, computed where the pairs are others."""
    run, heldout = write_run(tmp_path / "run"), tmp_path / "heldout"
    trained, settings = load_run(run), read_run_config(run)
    write_data(heldout, rows=60, vocabulary=trained.vocabulary.size, sha256=trained.vocabulary.sha256)

    def shown(earlier: dict[str, Any]) -> dict[str, Any]:
        return _retrieval(settings, trained.state, heldout, 8, earlier)["retrieval.json"]

    first = shown({})
    groups = group_by_language(stored_pairs(RowStore(heldout / "para")))
    start = Electra(settings.model)
    initialise(start, settings.seed, settings.model.init_std)
    for when, state in (("before", start.state_dict()), ("after", trained.state)):
        assert first[when] == retrieval_accuracies(take_encoder(state, settings.model, "discriminator"), groups)
    sizes = {code: len(ours) for code, (ours, _) in groups.items()}
    assert (first["step"], first["layers"], first["pairs"]) == (8, [0, 1, 2], sizes)
    assert first["candidates"] == sum(sizes.values()) / 2 and first["before"] != first["after"]
    assert shown(first | {"before": "as it was"}) == first | {"before": "as it was"}
    others = {code: number + 1 for code, number in first["pairs"].items()}
    assert shown(first | {"before": "of other pairs", "pairs": others}) == first
