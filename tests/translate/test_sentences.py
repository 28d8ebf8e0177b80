"""Noised sentences and the languages to write in: shares and moves by counting; a function of row and seed alone."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rows import write_data
from tests.small import SMALL, item, rows_of
from xlme_ds.config import DataConfig, ObjectiveConfig, weight_at
from xlme_ds.data.batch import Batch
from xlme_ds.data.loader import Loader
from xlme_ds.data.rows import EOS, PAD, Rows
from xlme_ds.data.schema import read_manifest, write_manifest
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.protocol import Pretraining
from xlme_ds.translate.sentences import SentenceInputs

MASK = SMALL.vocabulary - 1
BOTH = SentenceInputs(("0:1",), ("0:1",), (0, 1, 2), MASK)


def translation(denoising: tuple[str, ...] = (), back: tuple[str, ...] = ()) -> Pretraining:
    return objective_of(ObjectiveConfig("mt", 1.0, denoising=denoising, back_translation=back))


def noised(rows: Rows, first: int = 0, seed: int = 3, step: int = 0, by: SentenceInputs = BOTH) -> Batch:
    parts = [(0, rows, np.arange(len(rows.tokens)) + first)]
    return by(parts, seed, 1.0, step)


def test_shares_and_moves() -> None:
    """4,000 sentences of 20 different tokens: of each some are dropped, no one passes one that is 3 away."""
    text = [0, *range(10, 30), EOS]
    batch = noised(rows_of([[text]] * 4000, 24))
    kept, blank = 0, 0
    for row in batch.added["noised_BT"].tolist():
        end = row.index(EOS)
        assert row[0] == 0 and set(row[end + 1 :]) <= {PAD}
        inside = row[1:end]
        kept, blank = kept + len(inside), blank + inside.count(MASK)
        places = [token for token in inside if token != MASK]
        assert len(set(places)) == len(places) and set(places) <= set(text)
        assert all(a < b + 3 for n, a in enumerate(places) for b in places[n + 1 :])
    assert kept / 80_000 == pytest.approx(0.9, abs=0.005) and blank / kept == pytest.approx(0.1, abs=0.005)
    # A neighbour comes first where its u is smaller by more than 1: (2/3)² / 2 of all; many sentences show it.
    swapped = sum(row.index(11) < row.index(10) for row in batch.added["noised_BT"].tolist() if {10, 11} <= set(row))
    both = sum({10, 11} <= set(row) for row in batch.added["noised_BT"].tolist())
    assert swapped / both == pytest.approx(2 / 9, abs=0.03)


def test_one_token_stays() -> None:
    assert all(row[2] == EOS for row in noised(rows_of([[[0, 50, EOS]]] * 300, 4)).added["noised_BT"].tolist())


def test_any_other_language() -> None:
    rows = rows_of([[[0, 50, EOS], [0, 51, 52, EOS]]] * 3000, 8)
    batch = noised(rows)
    inside = batch.segments_BT > 0
    assert not (batch.added["target_languages_BT"] == batch.languages_BT)[inside].any()
    for number in (1, 2):  # one draw for an item
        pairs = zip(batch.added["target_languages_BT"], batch.segments_BT == number, strict=True)
        assert all(len(set(row[of].tolist())) == 1 for row, of in pairs)
    found = Counter(
        zip(batch.languages_BT[:, 0].tolist(), batch.added["target_languages_BT"][:, 0].tolist(), strict=True)
    )
    assert len(found) == 6 and min(found.values()) > 0.85 * 500
    two = noised(rows_of([[[0, 50, EOS]]] * 3, 4), by=SentenceInputs((), ("0:1",), (0, 2), MASK))
    assert two.added["target_languages_BT"][[0, 2], 0].tolist() == [2, 0]


def test_neither_company_nor_order_matters() -> None:
    rng = np.random.default_rng(0)
    lists = [[item(rng, 5), item(rng, 9)], [item(rng, 17)]]
    whole = noised(rows_of(lists, 24), first=4)
    alone = noised(rows_of(lists[1:], 24)._replace(languages=np.array([2])), first=5)
    torch.testing.assert_close(whole.added["noised_BT"][1:], alone.added["noised_BT"])
    torch.testing.assert_close(whole.added["target_languages_BT"][1:], alone.added["target_languages_BT"])
    assert not torch.equal(noised(rows_of(lists, 24), first=4, seed=4).added["noised_BT"], whole.added["noised_BT"])


def test_only_what_has_a_weight_is_made() -> None:
    by = SentenceInputs(("0:1", "10:0"), ("0:0", "10:0", "20:1"), (0, 1), MASK)
    rows = rows_of([[[0, 50, EOS]]], 4)
    made = [list(noised(rows, step=step, by=by).added) for step in (0, 9, 10, 11)]
    assert made == [["noised_BT"], ["noised_BT"], [], ["target_languages_BT"]]


def test_weights_by_step() -> None:
    xlm = ("0:1", "100000:0.1", "300000:0")
    assert [weight_at(xlm, step) for step in (0, 50_000, 100_000, 200_000, 300_000, 10**7)] == pytest.approx(
        [1, 0.55, 0.1, 0.05, 0, 0]
    )
    assert weight_at((), 5) == 0 and weight_at(("0:2",), 5) == 2


def test_what_the_loader_adds(tmp_path: Path) -> None:
    """Languages by the model's list, which has one that the data have not; and another seed, another noise."""
    data, rows = write_data(tmp_path / "data", rows=32), DataConfig(16, 0, 16)
    known = Loader(data, rows, 0, 1.0).stores[0].languages
    asked = ("xx", *reversed(known))
    both = translation(("0:1",), ("0:1",))
    batches = [Loader(data, rows, seed, 1.0, 0, 1, asked, both).micro_batches(0)[0] for seed in (0, 1)]
    into = batches[0].added["target_languages_BT"][batches[0].segments_BT > 0]
    assert into.min() > 0 and (into != batches[0].languages_BT[batches[0].segments_BT > 0]).all()
    assert not torch.equal(batches[0].added["noised_BT"], batches[1].added["noised_BT"])
    store, record = Loader(data, rows, 0, 1.0).stores[0], np.arange(1)
    for of, shown in ((both, {"noised_BT"}), (translation((), ("0:1",)), {"target_languages_BT"})):
        assert {*of.collate_for(store, "show")([(0, store.read(record), record)], 0, 1.0, 0).added} == shown, (
            "in one way"
        )


def test_languages_without_rows_are_not_written_in(tmp_path: Path) -> None:
    """The manifest lists three languages, of which some have no text; the probe is not translated next to others."""
    folder, back = write_data(tmp_path / "data", 16), translation(back=("0:1",))
    manifest, read = read_manifest(folder / "mono"), (DataConfig(16, 0, 16), 3, 1.0, 0, 1, ())
    for used, known in ((dict(de=9, en=0, fr=7), {0, 2}), (dict(de=9, fr=7), {0, 2}), (dict(de=16, en=0, fr=0), set())):
        shares = dict(share_before=0.0, share_after=0.0, repeat=0.0)
        counts = {"by_language": {code: {"used": count, **shares} for code, count in used.items()}}
        write_manifest(folder / "mono", replace(manifest, counts=counts))
        if known:
            batch = Loader(folder, *read, back).micro_batches(0)[0]
            assert set(batch.added["target_languages_BT"][batch.segments_BT > 0].tolist()) == known
        else:
            with pytest.raises(ValueError, match=r"needs text of two languages, and .*/data/mono has 1: add text"):
                Loader(folder, *read, back)
    Loader(folder, *read, translation(("0:1",)))


def test_the_probe_is_no_translation_where_it_is_anything_else(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data", 16)

    def added(rows: DataConfig, *points: tuple[str, ...]) -> list[str]:
        objective = translation(*points)
        return list(objective.as_probe(Loader(folder, rows, 3, 1.0, 0, 1, (), objective).probe()).added)

    assert added(DataConfig(8, 0, 8), ("0:1",), ("0:1",)) == ["noised_BT"]
    assert not added(DataConfig(8, 8, 8), (), ("0:1",))
    assert added(DataConfig(8, 0, 8), (), ("0:1",)) == ["target_languages_BT"]
