"""Retrieval against scikit-learn, pairs out of packed rows, and vectors that do not depend on their batch."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from tests.engine.worker import tiny
from tests.rows import LANGUAGES, random_row, write_data
from xlme_ds.data.schema import EOS
from xlme_ds.data.shards import RowStore
from xlme_ds.evaluate.encode import sentence_vectors
from xlme_ds.evaluate.pairs import pairs
from xlme_ds.evaluate.retrieval import accuracy, by_language, retrieve
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.models.text_encoder import TextEncoder, encoder_of


@pytest.fixture(scope="module")
def model() -> TextEncoder:
    model = Electra(tiny({"kind": "plain"}, 8).model)
    initialise(model, seed=1, std=0.1)
    return encoder_of(model)


def test_pairs_are_those_of_the_rows(tmp_path: Path) -> None:
    store = RowStore(write_data(tmp_path / "data", rows=40, rows_per_shard=16) / "para")
    found = [(p.first.tolist(), p.second.tolist(), p.first_language, p.second_language) for p in pairs(store)]
    rng = np.random.default_rng([0, True])
    expected = []
    for _ in range(40):
        tokens, lengths, languages = random_row(rng, "para", 32, 200)
        for i, end in enumerate(np.cumsum(lengths)):
            item = tokens[end - lengths[i] : end]
            middle = item.index(EOS)
            codes = [LANGUAGES[language] for language in languages[2 * i : 2 * i + 2]]
            expected.append((item[1:middle], item[middle + 1 : -1], *codes))
    assert found == expected


def test_accuracy_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(200, 16))
    candidates = queries + rng.normal(scale=1.2, size=queries.shape)
    nearest = (
        NearestNeighbors(n_neighbors=1, metric="cosine").fit(candidates).kneighbors(queries, return_distance=False)
    )
    expected = (nearest[:, 0] == np.arange(200)).mean()
    assert 0.05 < expected < 0.95
    assert accuracy(queries, candidates) == pytest.approx(expected, abs=1e-12)


def test_vectors_do_not_depend_on_the_batch(model: TextEncoder) -> None:
    rng = np.random.default_rng(0)
    sentences = [rng.integers(4, 199, size=n).astype(np.int32) for n in (3, 30, 1, 12, 7, 25)]
    together = sentence_vectors(model, sentences, batch=4)
    alone = np.concatenate([sentence_vectors(model, [sentence]) for sentence in sentences], axis=1)
    assert together.shape == (model.cfg.discriminator_layers + 1, 6, 32)
    np.testing.assert_allclose(together, alone, atol=2e-6)  # float32 sums over another padding


def test_a_sentence_finds_its_copy_at_every_layer(model: TextEncoder) -> None:
    rng = np.random.default_rng(1)
    sentences = [rng.integers(4, 199, size=10).astype(np.int32) for _ in range(20)]
    scores = retrieve(model, {"fr": (sentences, sentences)})
    states = model.cfg.discriminator_layers + 1
    assert scores["overall"] == {"en_xx": [1.0] * states, "xx_en": [1.0] * states}


def test_groups_leave_out_repetitions_and_small_languages(tmp_path: Path) -> None:
    store = RowStore(write_data(tmp_path / "data", rows=40) / "para")
    groups = by_language([*pairs(store), *pairs(store)])
    assert set(groups) == {"de", "fr"}
    for ours, theirs in groups.values():
        assert len({a.tobytes() for a in ours}) == len(ours) == len(theirs)
    assert by_language(list(pairs(store))[:3]) == {}
