"""Positions, segments, sides and languages of packed rows, written down by hand for both layouts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rows import write_data
from tests.small import rows_of
from xlme_ds.data.batch import Batch
from xlme_ds.data.collate import collate, languages_of_text
from xlme_ds.data.schema import LAYOUTS, Rows, read_manifest, write_manifest
from xlme_ds.data.shards import RowStore

ONE, TWO = np.array([51, 52]), np.array([61])


def packed(layout: str, task: int, languages: list[int]) -> Batch:
    """A row with one item, and for pairs a row with two beside it."""
    of = LAYOUTS[layout]
    texts = [[of.item(ONE).tolist()]]
    if task:
        texts = [[of.item(ONE, TWO).tolist(), of.item(TWO, ONE).tolist()], [of.item(TWO, TWO).tolist()]]
    rows = rows_of(texts, 16, task)
    return collate(
        [(task, Rows(rows.tokens, rows.item_counts, rows.lengths, np.array(languages)), np.arange(len(texts)))], 1, 0.15
    )


def test_xlme() -> None:
    batch = packed("xlme", 1, [2, 0, 1, 2, 0, 1])
    assert batch.tokens_BT[0].tolist() == [0, 51, 52, 2, 61, 2, 0, 61, 2, 51, 52, 2, 1, 1, 1, 1]
    assert batch.segments_BT[0].tolist() == [1] * 6 + [2] * 6 + [0] * 4
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert batch.sides_BT[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.languages_BT[0].tolist() == [2, 2, 2, 2, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]
    assert batch.tokens_BT[1].tolist()[:6] == [0, 61, 2, 61, 2, 1]
    assert batch.languages_BT[1].tolist() == [0, 0, 0, 1, 1] + [0] * 11
    assert batch.positions_BT[1].tolist() == [0, 1, 2, 3, 4] + [0] * 11


def test_xlm_counts_positions_anew_on_the_second_side() -> None:
    batch = packed("xlm", 1, [2, 0, 1, 2, 0, 1])
    assert batch.tokens_BT[0].tolist() == [2, 51, 52, 2, 2, 61, 2, 2, 61, 2, 2, 51, 52, 2, 1, 1]
    assert batch.segments_BT[0].tolist() == [1] * 7 + [2] * 7 + [0] * 2
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 0]
    assert batch.sides_BT[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert batch.languages_BT[0].tolist() == [2, 2, 2, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 0]
    assert batch.positions_BT[1].tolist() == [0, 1, 2, 0, 1, 2] + [0] * 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_monolingual_rows_have_one_side(layout: str) -> None:
    """Also where a document ends inside of the row."""
    batch = packed(layout, 0, [2])
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 3] + [0] * 12
    assert not batch.sides_BT.any()
    assert batch.languages_BT[0].tolist() == [2, 2, 2, 2] + [0] * 12
    rows = rows_of([[LAYOUTS[layout].item(np.array([51, 2, 2, 52])).tolist()]], 8)
    several = collate([(0, rows, np.arange(1))], 1, 0.15)
    assert several.positions_BT[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0] and not several.sides_BT.any()


def test_languages_of_text_are_those_that_rows_use(tmp_path: Path) -> None:
    """Of the model's list, which needs no other; all of the folder's where nothing was counted."""
    codes, shares = ("fr", "sv", "de", "en"), dict.fromkeys(("share_before", "share_after", "repeat"), 0.5)
    counted = {"de": {"used": 3} | shares, "en": {"used": 0} | shares}
    pairs = {"de-en": {"used": 3} | shares, "en-fr": {"used": 0} | shares}
    for task, counts, expected in (("mono", counted, (2,)), ("mono", {}, (2, 3, 0)), ("para", pairs, (2, 3))):
        folder = write_data(tmp_path / f"{task}{len(counts)}", 8) / task
        manifest = read_manifest(folder)
        write_manifest(folder, replace(manifest, counts=manifest.counts | {"by_language": counts}))
        assert languages_of_text(RowStore(folder, codes)) == expected
        with pytest.raises(ValueError, match=r"has text in de, which model\.language_embeddings does not name"):
            RowStore(folder, ("fr", "en"))
        if counts is pairs:  # zh is no language of the pair en-zh-Hans
            more = replace(manifest, languages=(*manifest.languages, "zh", "zh-Hans"))
            chinese = {"by_language": {"en-zh-Hans": {"used": 3} | shares}}
            write_manifest(folder, replace(more, counts=manifest.counts | chinese))
            assert RowStore(folder).languages_of_text() == ["en", "zh-Hans"]
        if counts is counted:
            assert languages_of_text(RowStore(folder, ("de",))) == (0,)


def test_items_longer_than_the_row_are_refused() -> None:
    rows = rows_of([[LAYOUTS["xlme"].item(ONE).tolist()] * 2], 8)
    with pytest.raises(ValueError, match="the items of a row are empty or longer than the row: mix the data again"):
        collate([(0, Rows(rows.tokens, rows.item_counts, rows.lengths + 1, rows.languages), np.arange(1))], 1, 0.15)
