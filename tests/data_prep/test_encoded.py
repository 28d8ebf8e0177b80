"""Reading ids out of encoded shards, and shards that were changed after `encode` wrote them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_prep.mix.encoded import copy_words, group_languages, index_batches, scan_shard
from data_prep.store import read_arrow, write_arrow
from xlme_ds.data.schema import DOCUMENTS, EOS, LAYOUTS, PAIRS

TEXTS = [[5, 6, EOS], [7, EOS], [8, 9, 10, EOS], [11, EOS], [12, EOS]]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Five documents in record batches of three, none and two."""
    parts = (TEXTS[:3], [], TEXTS[3:])
    batches = [pa.record_batch([pa.array(texts, pa.list_(pa.int32()))], schema=DOCUMENTS) for texts in parts]
    write_arrow(tmp_path / "en" / "0.arrow", DOCUMENTS, batches, tmp_path)
    return tmp_path / "en" / "0.arrow"


def set_offset(path: Path, record: int, value: int) -> None:
    """Change where the ids of a record of the first batch begin, which is also where those of the one before end."""
    position = 4 * (int(index_batches(path).offset_positions[0, 0]) + record)
    data = bytearray(path.read_bytes())
    data[position : position + 4] = np.int32(value).tobytes()
    path.write_bytes(data)


def test_records_are_found_in_any_order(shard: Path) -> None:
    index = index_batches(shard)
    starts, sizes = index.id_ranges(np.array([4, 0, 2, 3]))
    ids = np.zeros(sizes.sum(), np.int32)
    copy_words(shard, starts[0], sizes[0], ids, np.cumsum(sizes[0]) - sizes[0])
    assert ids.tolist() == [*TEXTS[4], *TEXTS[0], *TEXTS[2], *TEXTS[3]]
    assert index.all_lengths().tolist() == [[3, 2, 4, 2, 2]]
    first = int(index.id_ranges(np.array([0]))[0][0, 0])
    nested = np.zeros(9, np.int32)  # a long piece, and two that are in it
    copy_words(shard, first + np.array([1, 0, 2]), np.array([2, 5, 2]), nested, np.array([0, 2, 7]))
    assert nested.tolist() == [6, EOS, 5, 6, EOS, 7, EOS, EOS, 7]


@pytest.mark.parametrize(
    ("record", "offset", "value"),
    [
        (1, 1, -1),  # begins before the first id
        (1, 1, 6),  # ends before it begins
        (1, 2, 10),  # ends after the last of nine ids
    ],
)
def test_a_record_outside_of_the_ids(shard: Path, record: int, offset: int, value: int) -> None:
    set_offset(shard, offset, value)
    with pytest.raises(
        ValueError, match=r"0\.arrow has a record outside of its ids: the file was changed after encode wrote it"
    ):
        index_batches(shard).id_ranges(np.array([record]))


def test_a_record_of_negative_length(shard: Path) -> None:
    set_offset(shard, 1, 6)
    with pytest.raises(ValueError, match=r"0\.arrow cannot be read \(.*\): check the folder with `xlme prep verify`"):
        list(read_arrow(shard))
    with pytest.raises(ValueError, match=r"0\.arrow has a record of negative length: the file was changed after"):
        scan_shard(shard.parents[1], 16, LAYOUTS["xlme"], None, "documents", "en/0.arrow")


def test_a_shard_that_is_cut_after_it_was_surveyed(shard: Path) -> None:
    index = index_batches(shard)
    starts, _ = index.id_ranges(np.array([2]))
    end = 4 * (int(starts[0, 0]) + 4)
    shard.write_bytes(shard.read_bytes()[: end - 4])
    with pytest.raises(ValueError, match=rf"0\.arrow ends before byte {end}: the file was changed"):
        copy_words(shard, starts[0], np.array([4]), np.zeros(4, np.int32), np.zeros(1, np.int64))


def of_list(values: pa.Array, offsets: list[int | None]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


@pytest.mark.parametrize(
    ("column", "compression", "words"),
    [
        (pa.array([1, 2], pa.int32()), None, "it has the columns of neither documents nor pairs"),
        (
            of_list(pa.array([5, 6, 7, 8] * 99, pa.int32()), [0, 3, 396]),
            "lz4",
            "its ids are not stored as plain int32",
        ),
        (
            of_list(pa.array([5, 6, None, 8], pa.int32()), [0, 3, 4]),
            None,
            "its ids are not stored as plain int32",
        ),
        (
            of_list(pa.array([5, 6, 7, 8], pa.int32()), [0, None, 4]),
            None,
            "its ids are not stored as plain int32",
        ),
    ],
)
def test_a_shard_that_encode_did_not_write(
    tmp_path: Path, column: pa.Array, compression: str | None, words: str
) -> None:
    """Of other columns, compressed, with a missing id, with a missing record."""
    fields = DOCUMENTS if pa.types.is_list(column.type) else pa.schema([("tokens", column.type)])
    path, options = tmp_path / "0.arrow", pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), fields, options=options) as writer:
        writer.write_batch(pa.record_batch([column], schema=fields))
    with pytest.raises(ValueError, match=rf"0\.arrow is not a readable Arrow file \({words}\): delete it and give"):
        index_batches(path)


@pytest.mark.parametrize(
    ("unit", "tokens", "examples", "pieces"),
    [
        ("slices", 13, 2, []),  # of 13 ids eleven, then two
        ("slices", 14, 1, []),  # twelve; the last one is `</s>` and no example
        ("documents", 4, 6, [2]),  # two each, the third document in two pieces
        ("documents", 5, 5, []),
        ("sentences", 4, 4, [0]),  # the third one is too long
        ("sentences", 5, 5, []),
    ],
)
def test_examples_by_hand(shard: Path, unit: str, tokens: int, examples: int, pieces: list[int]) -> None:
    found = scan_shard(shard.parents[1], tokens, LAYOUTS["xlme"], None, unit, "en/0.arrow")  # type: ignore[arg-type]
    assert (found.examples, found.pieces.tolist(), found.too_long) == (examples, pieces, pieces.count(0))
    room = tokens - 2
    lengths = [len(text) - 1 for text in TEXTS if unit == "documents" or len(text) - 1 <= room]
    assert found.tokens == (13 if unit == "slices" else sum(lengths) + 2 * examples)


@pytest.mark.parametrize(("most", "row_tokens", "read"), [(5, 8, False), (6, 8, True), (5, 7, True), (None, 99, True)])
@pytest.mark.parametrize("layout", ["xlme", "xlm"])
def test_lengths_of_pairs_are_read_only_where_one_may_be_too_long(
    tmp_path: Path, most: int | None, row_tokens: int, read: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the limit of `encode`, the special tokens of a pair added: three, or four in the layout of XLM."""
    sides = [pa.array([[5], [6, 7]], pa.list_(pa.int32())), pa.array([[8, 9], [10]], pa.list_(pa.int32()))]
    write_arrow(tmp_path / "en-de" / "0.arrow", PAIRS, [pa.record_batch(sides, schema=PAIRS)], tmp_path)
    row_tokens += layout == "xlm"
    lengths_read: list[Path] = []
    all_lengths: Callable[..., np.ndarray] = type(index_batches(tmp_path / "en-de" / "0.arrow")).all_lengths

    def counted(index: object) -> np.ndarray:
        lengths_read.append(tmp_path)
        return all_lengths(index)

    monkeypatch.setattr("data_prep.mix.encoded.BatchIndex.all_lengths", counted)
    found = scan_shard(tmp_path, row_tokens, LAYOUTS[layout], most, "pairs", "en-de/0.arrow")
    assert (found.examples, found.tokens) == (2, 6 + 2 * (3 if layout == "xlme" else 4))
    assert bool(lengths_read) == read


def test_languages_of_a_group() -> None:
    codes = ("de", "en", "zh-Hans")
    assert [group_languages(name, codes) for name in ("en", "zh-Hans", "en-de", "en-zh-Hans")] == [
        (1,), (2,), (1, 0), (1, 2),
    ]  # fmt: skip
    for name in ("fr", "en-fr", "fr-en", "en-de-zh-Hans"):
        with pytest.raises(ValueError, match=f"'{name}' is neither one of the encoded languages nor a pair of two of"):
            group_languages(name, codes)
