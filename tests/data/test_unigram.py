"""The baseline of the masked-token loss against numbers counted by hand."""

from math import log
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.data.test_shards import plain_rows
from tests.rows import write_data, write_index
from xlme_ds.data.schema import BOS, EOS, PAD, UNK, Manifest, Shard, row_schema, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.data.unigram import unigram_nll_by_id, unigram_nll_by_language
from xlme_ds.io.files import file_sha256


def written(folder: Path, rows: list[list[int]], languages: tuple[int, ...] = ()) -> RowStore:
    """Rows of six ids out of ten as a task of a data folder, of the first of two languages if none are given."""
    folder.mkdir()
    columns = [pa.FixedSizeListArray.from_arrays(pa.array(np.array(rows, np.int32).ravel()), 6)]
    columns += [pa.array([[6 - row.count(PAD)] for row in rows], pa.list_(pa.int16()))]
    columns += [pa.array([[code] for code in languages or [0] * len(rows)], pa.list_(pa.int16()))]
    path, schema = folder / "00000.arrow", row_schema(6)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    write_index(path)
    shard = Shard(path.name, len(rows), path.stat().st_size, file_sha256(path))
    settings = {"row_tokens": 6, "layout": "xlme"}
    write_manifest(folder, Manifest("mix", settings, 10, "0" * 64, ("de", "en"), (shard,), {"by_language": {}}))
    return RowStore(folder)


def test_only_ordinary_tokens_count(tmp_path: Path) -> None:
    """Of the ten ids the rows have 4 three times, 5 twice and 6 once; each counts once more: sixteen in all."""
    train = written(
        tmp_path / "train", [[BOS, 4, 4, 4, 5, EOS], [BOS, 6, EOS, PAD, PAD, PAD], [BOS, UNK, 5, EOS, PAD, PAD]]
    )
    costs = [log(16 / seen) for seen in (1, 1, 1, 1, 4, 3, 2, 1, 1, 1)]
    assert unigram_nll_by_id(train) == pytest.approx(np.array(costs))
    assert unigram_nll_by_id(train, 1) == pytest.approx(
        np.array([log(14 / seen) for seen in (1, 1, 1, 1, 4, 2, 1, 1, 1, 1)])
    )
    other = written(tmp_path / "other", [[BOS, 7, 7, EOS, PAD, PAD]])
    seen = np.array([1, 1, 1, 1, 1 + 3 * 0.75, 1 + 2 * 0.75, 1.75, 1 + 2 * 0.25 * 3, 1, 1])  # as if of three rows each
    assert unigram_nll_by_id({train: 0.75, other: 0.25}) == pytest.approx(-np.log(seen / seen.sum()))
    heldout = written(
        tmp_path / "heldout", [[BOS, 4, 7, EOS, PAD, PAD], [BOS, 5, UNK, EOS, PAD, PAD], [BOS, 9, 9, 9, 9, EOS]]
    )
    two, three = (unigram_nll_by_language(train, heldout, 0, rows) for rows in (2, 100))
    assert two[:, 0] == pytest.approx([log(16 / 4) + log(16 / 1) + log(16 / 3), 3])
    assert three[:, 0] == pytest.approx([log(16 / 4) + 5 * log(16 / 1) + log(16 / 3), 7])


def test_rows_of_another_length_count_by_their_tokens(tmp_path: Path) -> None:
    """Two phases with equal shares of the steps: rows of 32 and of 64 positions, each full of one id, count equally."""
    stores = []
    for tokens, rows in ((32, 4), (64, 2)):
        folder = write_data(tmp_path / str(tokens), rows, row_tokens=tokens)
        stores.append(RowStore(folder / "mono"))
    both = np.exp(-unigram_nll_by_id(dict.fromkeys(stores, 0.5)))
    counts = []
    for store in stores:
        ids = store.read(np.arange(store.rows)).tokens
        counts.append(np.bincount(ids[ids > UNK], minlength=len(both)) * (128 / (store.rows * store.row_tokens)))
    expected = 1 + (counts[0] + counts[1]) / 2
    assert both == pytest.approx(expected / expected.sum())


def test_more_rows_than_are_read_at_once(tmp_path: Path) -> None:
    """4 in the first 1,024 rows, 5 in the 76 after these."""
    train = written(tmp_path / "train", [[BOS, 4, EOS, PAD, PAD, PAD]] * 1024 + [[BOS, 5, 5, EOS, PAD, PAD]] * 76)
    seen = np.array([1, 1, 1, 1, 1 + 1024, 1 + 152, 1, 1, 1, 1])
    assert unigram_nll_by_id(train) == pytest.approx(-np.log(seen / seen.sum()))


def test_tokens_of_pairs_count_for_the_language_of_their_side(tmp_path: Path) -> None:
    train, heldout = (RowStore(write_data(tmp_path / str(n), 20, seed=n) / "para") for n in (0, 1))
    costs, expected = unigram_nll_by_id(train), np.zeros((2, 3))
    for record in plain_rows(tmp_path / "1/para")[:12]:
        text = [token for token in record["tokens"] if token != BOS]
        for language in record["languages"]:  # each side ends in </s>
            for token in text[: text.index(EOS)]:
                expected[:, language] += costs[token], 1
            text = text[text.index(EOS) + 1 :]
    assert unigram_nll_by_language(train, heldout, 1, 12) == pytest.approx(expected)


def test_every_token_counts_for_its_language(tmp_path: Path) -> None:
    train = written(tmp_path / "train", [[BOS, 4, 4, 4, 5, EOS]])
    rows = [[BOS, 4, 4, EOS, PAD, PAD], [BOS, 5, 9, EOS, PAD, PAD], [BOS, 4, EOS, PAD, PAD, PAD]]
    heldout = written(tmp_path / "heldout", rows, (1, 0, 1))
    often, once, never = (log(14 / seen) for seen in (4, 2, 1))
    expected = [[once + never, 3 * often], [2, 3]]
    assert unigram_nll_by_language(train, heldout, 0, 3) == pytest.approx(np.array(expected))
