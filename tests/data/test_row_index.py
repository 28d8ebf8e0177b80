"""Shards that are read by their index: the rows that Arrow reads, damage of every kind found, and no byte more than is
needed."""

import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.data.test_shards import plain_rows, unpacked
from tests.rows import write_data, write_index
from xlme_ds.config import DataConfig
from xlme_ds.data.order import plan_step
from xlme_ds.data.schema import Manifest, Shard, row_schema, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.io.files import file_sha256

ROWS = 53  # three shards of 16 rows in batches of 6, 6 and 4, and a last one of 5: groups of 4, 2, 4, 2, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", ROWS, rows_per_batch=6)


@pytest.mark.parametrize("task", ["mono", "para"])
def test_any_records_in_any_order(data: Path, task: str) -> None:
    store, expected = RowStore(data / task), plain_rows(data / task)
    rng = np.random.default_rng(0)
    for records in ([*range(ROWS)], [16], [52], [0, 52, 0, 17], *(rng.integers(0, ROWS, 9) for _ in range(40))):
        rows = store.read(np.array(records))
        assert unpacked(rows) == [expected[n] for n in records]
        assert rows.tokens.dtype == np.int32
        assert rows.item_counts.dtype == rows.lengths.dtype == rows.languages.dtype == np.int64


def test_the_system_is_told_what_is_read_next(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = RowStore(data / "mono"), []

    def listed(file: int, at: int, size: int, what: int) -> None:
        if what == os.POSIX_FADV_WILLNEED:
            told.append((at, size))

    monkeypatch.setattr(os, "posix_fadvise", listed)
    store.prefetch(19, 21)  # rows 3 to 5 of the second shard
    store.prefetch(14, 18)  # of two shards
    content = (data / "mono" / "00001.arrow").read_bytes()
    ((at, size),) = told
    assert (
        np.frombuffer(content[at : at + size], "<i4").tolist() == store.read(np.arange(19, 22)).tokens.ravel().tolist()
    )


@pytest.mark.parametrize("task", ["mono", "para"])
def test_every_byte_of_the_rows_is_checked(data: Path, task: str, tmp_path: Path) -> None:
    """A bit of each byte of a shard in turn: either all rows are as before, for it is none of theirs, or it is told."""
    folder = tmp_path / task
    shutil.copytree(data / task, folder)
    expected, path = plain_rows(folder), folder / "00000.arrow"
    content, told = path.read_bytes(), 0
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        try:
            assert unpacked(RowStore(folder).read(np.arange(16))) == expected[:16]
        except ValueError as error:
            assert "00000.arrow cannot be read" in str(error)
            told += 1
    of_rows = sum(4 * len(row["tokens"]) + 2 * len(row["lengths"] + row["languages"]) for row in expected[:16])
    assert told >= of_rows / 7


def test_a_damaged_or_foreign_index_is_told(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mono"
    shutil.copytree(data / "mono", folder)
    index = folder / "00000.index"
    content = index.read_bytes()
    for at in range(len(content)):
        index.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        with pytest.raises(ValueError, match=r"00000\.arrow cannot be read .*verify"):
            RowStore(folder).read(np.arange(16))
    for other in (content[:-4], content[:40], b"", (folder / "00001.index").read_bytes()):
        index.write_bytes(other)
        with pytest.raises(ValueError, match=r"00000\.arrow cannot be read"):
            RowStore(folder).read(np.arange(16))
    foreign = write_data(tmp_path / "other", ROWS, rows_per_batch=6, seed=1) / "mono" / "00000.index"
    many_batches = content[:31] + bytes([content[31] ^ 128]) + content[32:]  # whose offsets would not fit into memory
    for other in (foreign.read_bytes(), many_batches):
        index.write_bytes(other)
        with pytest.raises(ValueError, match="its index belongs to another file than the manifest lists"):
            RowStore(folder).read(np.arange(16))
    index.write_bytes(content)
    (folder / "00000.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match=r"00000\.arrow cannot be read \(it is not the file that the manifest lists"):
        RowStore(folder).read(np.arange(16))
    (folder / "00000.arrow").unlink()
    with pytest.raises(ValueError, match=r"00000\.arrow cannot be read \(No such file or directory\)"):
        RowStore(folder).read(np.arange(16))


@pytest.mark.parametrize(
    ("at", "kind", "value"),
    [(20, "<I", 0), (24, "<I", 0), (24, "<I", 1), (28, "<I", 1), (64, "<q", -1), (64, "<q", 2**63 - 1)],
)
def test_an_index_from_elsewhere_with_a_right_checksum(
    data: Path, tmp_path: Path, at: int, kind: str, value: int
) -> None:
    """Rows of a group, rows of a record batch, record batches, or a place that no index of the shard has."""
    folder = tmp_path / "mono"
    shutil.copytree(data / "mono", folder)
    content = bytearray((folder / "00000.index").read_bytes())
    (batches,) = struct.unpack_from("<I", content, 28)
    end = 64 + 40 * batches
    struct.pack_into(kind, content, at, value)
    head = bytes(content[: 64 + 40] if (at, value) == (28, 1) else content[:end])
    (folder / "00000.index").write_bytes(head + struct.pack("<I", zlib.crc32(head)) + content[end + 4 :])
    store = RowStore(folder)
    store.prefetch(13, 15)
    with pytest.raises(ValueError, match=r"00000\.arrow cannot be read \(its index (does not have|has offsets)"):
        store.read(np.array([0, 13]))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_shard_is_no_error_before_its_rows_are_read(data: Path, tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "mono"
    shutil.copytree(data / "mono", folder)
    damage(folder / "00001.arrow")
    store, expected = RowStore(folder), plain_rows(data / "mono")
    store.prefetch(16, 19)
    assert unpacked(store.read(np.arange(16))) == expected[:16]
    with pytest.raises(ValueError, match=r"00001\.arrow cannot be read"):
        store.read(np.array([16]))


def test_one_of_several_ranks_has_nothing_read_around_its_rows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, at, size, what: told.append(what))
    RowStore(data / "mono").read(np.arange(3))
    assert told == []
    RowStore(data / "mono", scattered=True).read(np.arange(3))
    assert told == [os.POSIX_FADV_RANDOM] * 2  # the shard and its index


def written(folder: Path, rows: int, row_tokens: int, items: int) -> Path:
    """A task of `rows` rows of so many items in two shards, as `mix` writes them."""
    folder.mkdir()
    rng, shards, sides = np.random.default_rng(0), [], 1 if items == 1 else 2
    half = rows // 2
    for number in range(2):
        path = folder / f"{number:05d}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, row_schema(row_tokens)) as writer:
            for _ in range(half // 1024):
                tokens = pa.array(rng.integers(4, 200, 1024 * row_tokens).astype(np.int32))
                lengths = np.full((1024, items), row_tokens // items, dtype=np.int16)
                languages = np.zeros((1024, items * sides), dtype=np.int16)
                columns = [
                    pa.FixedSizeListArray.from_arrays(tokens, row_tokens),
                    *(pa.array(list(values), pa.list_(pa.int16())) for values in (lengths, languages)),
                ]
                writer.write_batch(pa.record_batch(columns, schema=row_schema(row_tokens)))
        shards.append(Shard(path.name, half, path.stat().st_size, file_sha256(path)))
        write_index(path)
    settings = {"row_tokens": row_tokens, "layout": "xlme", "rows": rows}
    language = {name: 1.0 for name in ("share_before", "share_after", "repeat")}
    counts = {"by_language": {"en": language}}
    write_manifest(folder, Manifest("mix", settings, 200, "0" * 64, ("en",), tuple(shards), counts))
    return folder


@pytest.mark.parametrize("items", [1, 8])
def test_64_ranks_read_little_more_than_they_use(tmp_path: Path, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, row_tokens, world = 8192, 512, 64
    folder = written(tmp_path / "mono", rows, row_tokens, items)
    plan = plan_step(DataConfig(mono_rows=2048, para_rows=0, micro_batch=16), world)
    read = [0]

    def counted(file: int, count: int, at: int) -> bytes:
        content = pread(file, count, at)
        read[0] += len(content)
        return content

    pread = os.pread
    monkeypatch.setattr(os, "pread", counted)
    headers = sum(64 + 40 * (rows // 2 // 1024) + 4 for _ in range(2))
    used = rows * (4 * row_tokens + 2 * items + 2 * items * (1 if items == 1 else 2)) / world
    seen = []
    for rank in range(world):
        read[0], store = headers, RowStore(folder)
        for step in range(rows // 2048):
            for micro_batch in range(plan.accumulation):
                numbers = plan.row_numbers(step, rank, micro_batch, 0)
                store.read(numbers)
                seen.append(numbers)
        assert used <= read[0] <= 1.2 * used
    assert sorted(np.concatenate(seen).tolist()) == [*range(rows)]
