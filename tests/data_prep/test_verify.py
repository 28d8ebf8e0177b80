"""`verify` on what `encode` and `mix` write, and on the same with one fault each."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pyarrow as pa
import pytest

from data_prep import encode, mix
from data_prep.verify import VerifyConfig, run
from xlme_ds.data.schema import BOS, EOS, PAD, UNK, read_manifest, write_manifest

ROW = 24
Change = Callable[[dict[str, list]], None]  # edits the columns of a shard in place


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, sentences: list[str], vocab: Path) -> Path:
    """encoded/ and data/ as the stages write them."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, documents in (("mono/en.txt", sentences * 3), ("mono/de.txt", sentences)):
        (folder / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "corpus" / name).write_text("\n\n".join(documents), encoding="utf-8")
    (folder / "corpus" / "para").mkdir()
    words = [word for sentence in sentences[:4] for word in sentence.split()]
    for code, side in (("en", words), ("de", words[::-1])):
        (folder / "corpus" / "para" / f"X.de-en.{code}").write_text("\n".join(side) + "\n", encoding="utf-8")
    corpus, encoded = folder / "corpus", folder / "encoded"
    encode.run(encode.EncodeConfig(vocab, encoded, mono=corpus / "mono", para=corpus / "para", max_pair_tokens=ROW - 3))
    mix.run(mix.MixConfig(encoded, vocab, folder / "data", 50, 30, row_tokens=ROW, rows_per_shard=20))
    return folder


@pytest.fixture
def copied(prepared: Path, tmp_path: Path) -> Path:
    copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def rewrite(folder: Path, change: Change, shard: int = 0) -> None:
    """Change the values of a shard, and its size and checksum in the manifest with it."""
    manifest = read_manifest(folder)
    path = folder / manifest.shards[shard].name
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    columns = table.to_pydict()
    schema, rows = table.schema, table.num_rows
    del table
    change(columns)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    data = sink.getvalue().to_pybytes()
    path.write_bytes(data)
    shards = list(manifest.shards)
    shards[shard] = replace(shards[shard], bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    assert len(arrays[0]) == rows
    write_manifest(folder, replace(manifest, shards=tuple(shards)))


def test_what_the_stages_write_has_no_fault(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("encoded", "data"):
        run(VerifyConfig(prepared / name, processes=2))
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines] == [str(prepared / name / task) for task in ("mono", "para")]
        assert all("no fault" in line for line in lines)
    run(VerifyConfig(prepared / "data" / "mono"))
    assert "3 shards, 50 records" in capsys.readouterr().out


def test_a_flipped_byte(copied: Path) -> None:
    path = copied / "data" / "mono" / "00001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"00001\.arrow does not have the manifest's checksum"):
        run(VerifyConfig(copied / "data"))


def test_a_truncated_a_missing_and_a_stray_file(copied: Path) -> None:
    path = copied / "data" / "para" / "00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=rf"00001\.arrow has {len(data) - 100} bytes, the manifest says {len(data)}"):
        run(VerifyConfig(copied / "data"))
    path.rename(path.with_name("00007.arrow"))
    with pytest.raises(ValueError, match=r"00007\.arrow is not in the manifest"):
        run(VerifyConfig(copied / "data"))
    path.with_name("00007.arrow").unlink()
    with pytest.raises(ValueError, match=r"00001\.arrow is missing"):
        run(VerifyConfig(copied / "data"))


def test_a_file_that_is_no_arrow_file_although_its_checksum_is_right(copied: Path) -> None:
    folder = copied / "data" / "mono"
    data = b"x" * 1000
    (folder / "00000.arrow").write_bytes(data)
    manifest = read_manifest(folder)
    shard = replace(manifest.shards[0], bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    write_manifest(folder, replace(manifest, shards=(shard, *manifest.shards[1:])))
    with pytest.raises(ValueError, match=r"00000\.arrow is not readable from row 0 on"):
        run(VerifyConfig(copied / "data"))


def test_another_vocabulary_and_an_unfinished_folder(copied: Path) -> None:
    with open(copied / "data" / "vocab" / "sentencepiece.model", "ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match="is not the vocabulary that"):
        run(VerifyConfig(copied / "data"))
    (copied / "encoded" / "mono" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest\.json does not exist"):
        run(VerifyConfig(copied / "encoded"))
    with pytest.raises(ValueError, match="holds neither mono/ nor para/"):
        run(VerifyConfig(copied))


def test_wrong_counts(copied: Path) -> None:
    folder = copied / "data" / "mono"
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, shards=manifest.shards[:-1]))
    (folder / manifest.shards[-1].name).unlink()
    with pytest.raises(ValueError, match="does not list 50 rows, 20 a shard"):
        run(VerifyConfig(copied / "data"))
    folder = copied / "encoded" / "mono"
    manifest = read_manifest(folder)
    manifest.counts["by_language"]["en"]["documents"] += 1
    write_manifest(folder, manifest)
    with pytest.raises(ValueError, match="the documents of en counted in"):
        run(VerifyConfig(copied / "encoded"))


def set_id(column: str, row: int, position: int, value: int) -> Change:
    def change(columns: dict[str, list]) -> None:
        assert columns[column][row][position] != value
        columns[column][row][position] = value

    return change


def drop(column: str, row: int) -> Change:
    return lambda columns: columns[column][row].pop()


def empty(column: str, row: int) -> Change:
    return lambda columns: columns[column][row].clear()


FAULTS = [
    ("encoded/mono", set_id("tokens", 2, 0, 100_000), "row 2: an id outside"),
    ("encoded/mono", set_id("tokens", 2, 0, -1), "row 2: an id outside"),
    ("encoded/mono", set_id("tokens", 1, 1, BOS), "row 1: <s> or <pad> inside a document"),
    ("encoded/mono", set_id("tokens", 1, 1, EOS), "row 1: a document that does not have one </s>"),
    ("encoded/mono", set_id("tokens", 3, -1, UNK), "row 3: a document that does not have one </s>"),
    ("encoded/mono", empty("tokens", 4), "row 4: a document without text"),
    ("encoded/para", set_id("source", 5, 0, 100_000), "row 5: an id outside .* on the source side"),
    ("encoded/para", set_id("target", 6, 0, EOS), "row 6: <s>, <pad> or </s> on the target side"),
    ("encoded/para", empty("target", 7), "row 7: an empty target side"),
    ("data/mono", set_id("tokens", 8, 3, 100_000), "row 8: an id outside"),
    ("data/mono", set_id("tokens", 9, 0, UNK), "row 9: an item that does not start with <s>"),
    ("data/mono", set_id("tokens", 9, 3, BOS), "row 9: an item that does not start with <s>"),
    ("data/mono", set_id("tokens", 9, 3, PAD), "row 9: <pad> where text belongs"),
    ("data/mono", set_id("lengths", 10, 0, 2), "row 10: lengths that the row cannot have"),
    ("data/mono", set_id("lengths", 10, 0, ROW + 1), "row 10: lengths that the row cannot have"),
    ("data/mono", empty("lengths", 11), "row 11: an impossible number of items"),
    ("data/mono", set_id("languages", 12, 0, 2), r"row 12: a language index outside \[0, 2\)"),
    ("data/mono", set_id("languages", 12, 0, -1), r"row 12: a language index outside \[0, 2\)"),
    ("data/para", drop("lengths", 13), "row 13: <pad> where text belongs, or text behind the last item"),
    ("data/para", drop("languages", 14), "row 14: not one language a side"),
]


@pytest.mark.parametrize(("folder", "change", "words"), FAULTS)
def test_one_wrong_value_with_the_right_checksum(copied: Path, folder: str, change: Change, words: str) -> None:
    rewrite(copied / folder, change)
    with pytest.raises(ValueError, match=words) as error:
        run(VerifyConfig(copied / folder))
    assert read_manifest(copied / folder).shards[0].name in str(error.value)


def test_a_pair_with_a_separator_too_many_or_moved_lengths(copied: Path) -> None:
    def separator(columns: dict[str, list]) -> None:
        tokens = columns["tokens"][3]
        position = next(i for i in range(2, ROW) if EOS not in tokens[i - 1 : i + 2])
        tokens[position] = EOS

    def moved(columns: dict[str, list]) -> None:
        row = next(row for row in columns["lengths"] if len(row) > 1 and row[1] > 5)
        row[0], row[1] = row[0] + 1, row[1] - 1

    for change in (separator, moved):
        before = {path: path.read_bytes() for path in (copied / "data" / "para").glob("*") if path.is_file()}
        rewrite(copied / "data" / "para", change)
        with pytest.raises(ValueError, match="an item that does not start with <s>, end with </s>"):
            run(VerifyConfig(copied / "data" / "para"))
        for path, data in before.items():
            path.write_bytes(data)
    run(VerifyConfig(copied / "data" / "para"))


def test_pairs_in_the_layout_of_xlm(prepared: Path, tmp_path: Path) -> None:
    encoded, vocab = prepared / "encoded", prepared / "data" / "vocab"
    mix.run(mix.MixConfig(encoded, vocab, tmp_path, 50, 30, row_tokens=ROW, rows_per_shard=20, layout="xlm"))
    run(VerifyConfig(tmp_path))

    def middle(columns: dict[str, list]) -> tuple[list[int], int]:
        tokens = columns["tokens"][3]
        return tokens, next(i for i in range(1, ROW) if tokens[i] == tokens[i + 1] == EOS)

    def apart(columns: dict[str, list]) -> None:
        tokens, i = middle(columns)
        tokens[i + 1], tokens[i + 2] = tokens[i + 2], tokens[i + 1]

    def one(columns: dict[str, list]) -> None:
        tokens, i = middle(columns)
        tokens[i] = UNK

    def opening(columns: dict[str, list]) -> None:
        columns["tokens"][3][0] = BOS

    kept = {path: path.read_bytes() for path in (tmp_path / "para").glob("*") if path.is_file()}
    for change in (apart, one, opening):
        rewrite(tmp_path / "para", change)
        with pytest.raises(ValueError, match="row 3: an item that does not start with </s>, end with </s>"):
            run(VerifyConfig(tmp_path / "para"))
        for path, data in kept.items():
            path.write_bytes(data)


def test_another_schema(copied: Path) -> None:
    folder = copied / "data" / "mono"
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, settings=manifest.settings | {"row_tokens": ROW + 1}))
    with pytest.raises(ValueError, match="has columns"):
        run(VerifyConfig(folder))
