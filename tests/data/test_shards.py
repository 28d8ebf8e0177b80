"""Random access to mixed shards, and one clear error for each kind of damage."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.rows import LANGUAGES, write_data, write_index
from xlme_ds.data.schema import Manifest, read_manifest, row_schema, write_manifest
from xlme_ds.data.shards import Rows, RowStore
from xlme_ds.io.files import file_sha256, write_checksummed

ROWS = 53  # three shards of 16 rows in batches of 8, and a last one of 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", ROWS)


def plain_rows(folder: Path) -> list[dict[str, list[int]]]:
    """All records, read by Arrow alone."""
    return [
        record
        for shard in read_manifest(folder).shards
        for record in pa.ipc.open_file(pa.memory_map(str(folder / shard.name))).read_all().to_pylist()
    ]


def unpacked(rows: Rows) -> list[dict[str, list[int]]]:
    """Records of `rows`; of languages a row has one an item (mono) or two (para)."""
    out, item, language = [], 0, 0
    sides = len(rows.languages) // max(len(rows.lengths), 1)
    for tokens, items in zip(rows.tokens, rows.item_counts, strict=True):
        out.append(
            {
                "tokens": tokens.tolist(),
                "lengths": rows.lengths[item : item + items].tolist(),
                "languages": rows.languages[language : language + sides * items].tolist(),
            }
        )
        item, language = item + items, language + sides * items
    assert item == len(rows.lengths) and language == len(rows.languages)
    return out


@pytest.mark.parametrize("task", ["mono", "para"])
@pytest.mark.parametrize(
    "records",
    [
        range(ROWS),
        range(7, 9),
        range(15, 18),
        range(5, 50),
        [16],
        [52],
        [0, 52, 0, 17],
        [8, 7, 6],
        [15, 16, 15, 16],
        [30, 31, 33, 34, 48],
    ],
)
def test_any_records_in_any_order(data: Path, task: str, records: list[int]) -> None:
    store = RowStore(data / task)
    expected = plain_rows(data / task)
    rows = store.read(np.array(records))
    assert unpacked(rows) == [expected[n] for n in records]
    assert (
        rows.tokens.dtype == np.int32
        and rows.item_counts.dtype == rows.lengths.dtype == rows.languages.dtype == np.int64
    )


def test_random_reads_equal_sequential_ones(data: Path) -> None:
    store, expected = RowStore(data / "para"), plain_rows(data / "para")
    rng = np.random.default_rng(0)
    for _ in range(40):
        records = rng.integers(0, ROWS, int(rng.integers(1, 30)))
        assert unpacked(store.read(records)) == [expected[n] for n in records]


def test_more_shards_than_are_held_open(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "many", 84, rows_per_shard=4, rows_per_batch=2) / "mono"
    store, expected = RowStore(folder), plain_rows(folder)
    records = np.random.default_rng(0).permutation(84)
    assert unpacked(store.read(records)) == [expected[n] for n in records]
    assert unpacked(store.read(np.arange(84))) == expected
    gc.collect()  # what `plain_rows` mapped
    opened = [
        link for path in Path("/proc/self/fd").iterdir() if (link := path.readlink() if path.is_symlink() else None)
    ]
    assert len([path for path in opened if path.suffix == ".arrow" and path.parent == folder]) == 16 < 84 // 4


def test_sizes(data: Path) -> None:
    store = RowStore(data / "mono")
    assert (store.rows, store.row_tokens, store.manifest.languages) == (ROWS, 32, LANGUAGES)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("not Arrow\n" * 500)


def other_schema(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.schema([("tokens", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch([pa.array([1, 2])], names=["tokens"]))


def fewer_rows(path: Path) -> None:
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().slice(0, 8).combine_chunks()
    with pa.OSFile(str(path) + ".new", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    Path(str(path) + ".new").replace(path)


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 16  # of the ids
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "listed"),
    [(damage, False) for damage in (truncate, empty, text, other_schema, fewer_rows, one_bit, Path.unlink)]
    + [(damage, True) for damage in (truncate, empty, text, other_schema, fewer_rows)],
)
def test_a_damaged_shard_is_one_clear_error(tmp_path: Path, damage, listed: bool) -> None:  # type: ignore[no-untyped-def]
    """Also where the manifest lists the damaged file, as one from elsewhere may."""
    folder = write_data(tmp_path / "mixed", 40) / "mono"
    damage(folder / "00001.arrow")
    if listed:
        list_again(folder, 1)
    store = RowStore(folder)
    store.read(np.arange(16))  # the whole shard before it is untouched
    with pytest.raises(
        ValueError, match=r"00001\.arrow cannot be read \(.*\): check the folder with `xlme prep verify`"
    ):
        store.read(np.array([3, *range(16, 32)]))


def test_a_shard_without_an_index_is_one_clear_error(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "mixed", 40) / "mono"
    (folder / "00001.index").unlink()
    store = RowStore(folder)
    store.prefetch(16, 18)
    with pytest.raises(
        ValueError, match=r"00001\.arrow cannot be read \(its index 00001\.index does not exist\): check the folder"
    ):
        store.read(np.array([3, 20]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": 3}, "stage 3, not a string"),
        ({"settings": []}, "settings [], not an object"),
        ({"settings": {}}, "row_tokens None, not a whole number"),
        ({"settings": {"row_tokens": "32"}}, "row_tokens '32', not a whole number"),
        ({"settings": {"row_tokens": 32.0}}, "row_tokens 32.0, not"),
        ({"settings": {"row_tokens": 1 << 40, "layout": "xlme"}}, "2³¹ or more"),
        ({"settings": {"row_tokens": 32, "layout": ["xlme"]}}, "layout ['xlme'], not a string"),
        ({"settings": {"row_tokens": 32, "layout": "x"}}, "no layout is called x"),
        ({"vocabulary_size": None}, "vocabulary_size None, not a whole number"),
        ({"vocabulary_size": True}, "vocabulary_size True, not a whole number"),
        ({"vocabulary_sha256": 0}, "vocabulary_sha256 0, not a string"),
        ({"languages": "de"}, "languages 'de', not a list"),
        ({"languages": [1, 2, 3]}, "not a list of distinct codes"),
        ({"languages": ["de", "de", "en"]}, "not a list of distinct codes"),
        ({"shards": {}}, "shards {}, not a list"),
        ({"shards": ["00000.arrow"]}, "shard 0 is not a JSON object"),
        ({"shards": [{"name": "a", "rows": -1, "bytes": 1, "sha256": ""}]}, "rows -1, not a whole number"),
        ({"shards": [{"name": "a", "rows": 1e3, "bytes": 1, "sha256": ""}]}, "rows 1000.0, not"),
        ({"shards": [{"name": "../a", "rows": 1, "bytes": 1, "sha256": ""}]}, "'../a', outside of the folder"),
        ({"shards": [{"name": "/a", "rows": 1, "bytes": 1, "sha256": ""}]}, "'/a', outside of the folder"),
        ({"shards": [{"name": "a", "rows": 1, "bytes": 1, "sha256": "", "more": 1}]}, "more"),
        ({"counts": None}, "counts None, not an object"),
        ({"counts": {}}, "counts has by_language None, not an object"),
        ({"counts": {"by_language": {"de": 3}}}, "counts by language are not JSON objects"),
        ({"counts": {"by_language": {"de": {"repeat": "once"}}}}, "lack share_before, share_after, repeat"),
        ({"format": 2}, "it has format 2, this version reads 1"),
        ({"more": 1}, "more"),
        (None, "no object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_manifest_of_other_types_is_one_sentence(tmp_path: Path, changes: dict | str | None, words: str) -> None:
    folder = write_data(tmp_path / "mixed", 16) / "mono"
    fields = json.loads((folder / "manifest.json").read_text())
    del fields["sha256"]
    if isinstance(changes, dict):
        write_checksummed(folder / "manifest.json", fields | changes)
    else:
        (folder / "manifest.json").write_text(changes or "null")
    with pytest.raises(ValueError, match=r"mono/manifest\.json is not a readable manifest \(.*" + re.escape(words)):
        RowStore(folder)


def list_again(folder: Path, number: int) -> None:
    """Have the manifest list shard `number` as it is."""
    manifest = read_manifest(folder)
    shards = list(manifest.shards)
    path = folder / shards[number].name
    shards[number] = replace(shards[number], bytes=path.stat().st_size, sha256=file_sha256(path))
    write_manifest(folder, replace(manifest, shards=tuple(shards)))


def test_a_file_cut_short_after_it_was_opened_is_one_clear_error(tmp_path: Path) -> None:
    """Under a memory map the process would end here."""
    folder = write_data(tmp_path / "mixed", 16) / "mono"
    store, expected = RowStore(folder), plain_rows(folder)
    assert unpacked(store.read(np.arange(2))) == expected[:2]
    content = (folder / "00000.arrow").read_bytes()
    (folder / "00000.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"00000\.arrow cannot be read \(it became shorter while it was read\)"):
        store.read(np.arange(16))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", [200]),
        ("tokens", [-1]),
        ("tokens", [1]),  # <pad>
        ("lengths", [33]),
        ("lengths", [0]),
        ("lengths", [-5, 37]),
        ("lengths", [32767] * 9),
        ("lengths", []),
        ("lengths", [1]),
        ("languages", [3]),
        ("languages", [-1]),
    ],
)
def test_rows_that_no_model_can_read(tmp_path: Path, column: str, value: list[int]) -> None:
    folder = write_data(tmp_path / "mixed", 16) / "mono"
    table = pa.ipc.open_file(str(folder / "00000.arrow")).read_all().to_pylist()
    table[3][column] = [*value, *table[3][column][1:]] if column == "tokens" else value
    with pa.OSFile(str(folder / "00000.arrow"), "wb") as file, pa.ipc.new_file(file, row_schema(32)) as writer:
        for start in (0, 8):
            writer.write_batch(pa.RecordBatch.from_pylist(table[start : start + 8], schema=row_schema(32)))
    list_again(folder, 0)
    write_index(folder / "00000.arrow")
    store = RowStore(folder)
    assert len(store.read(np.array([0, 1, 2, 4])).tokens) == 4
    with pytest.raises(ValueError, match=r"00000\.arrow has ids or lengths that no row can have, near row 2"):
        store.read(np.array([2, 3]))


def test_a_folder_of_another_stage_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json does not exist: name the folder that `xlme prep mix` wrote"):
        RowStore(tmp_path)
    (tmp_path / "file").touch()
    for name, fault in (("none", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(ValueError, match=f"/{name} {fault}: name the folder that `xlme prep mix` wrote"):
            RowStore(tmp_path / name / "mono")
    write_manifest(tmp_path, Manifest("encode", {}, 10, "0" * 64, (), (), {}))
    with pytest.raises(ValueError, match=r"written by the stage encode: name the folder that `xlme prep mix` wrote"):
        RowStore(tmp_path)
    folder = write_data(tmp_path / "mixed", 16) / "mono"
    manifest = read_manifest(folder)
    empty = (*manifest.shards, replace(manifest.shards[0], rows=0))
    for changed in (replace(manifest, shards=()), replace(manifest, shards=empty)):
        write_manifest(folder, changed)
        with pytest.raises(ValueError, match=r"mono/manifest\.json lists a shard without rows: mix the folder again"):
            RowStore(folder)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is not a readable manifest"):
        RowStore(tmp_path)


def test_a_manifest_without_a_checksum_is_damaged(tmp_path: Path) -> None:
    path = write_data(tmp_path / "mixed", 16) / "mono" / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    path.write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match=r"manifest\.json is not a readable manifest \(its content does not match its checksum"
    ):
        read_manifest(path.parent)
