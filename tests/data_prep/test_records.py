"""JSON Lines and Parquet: written with json and pyarrow, read by us; damage in words; the same bytes every time."""

import gzip
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_prep.filters.clean import Counts
from data_prep.parallel import UserError, user_facing_error
from data_prep.readers import READERS, Input, documents, find_documents
from data_prep.readers.corpus import TextConfig, corpus_inputs, find_sources
from data_prep.readers.corpus_files import CorpusPath
from data_prep.readers.description import read_corpora
from tests.data_prep.conftest import pairs
from tests.rows import write_records
from xlme_ds.data.schema import read_manifest

FORMATS = ["jsonl", "parquet"]


def write(path: Path, texts: list[Any], column: str = "text", **options: Any) -> Path:
    """A file of records in the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pa.table({"id": list(range(len(texts))), column: pa.array(texts, pa.string())})
        parquet.write_table(table, path, **options)
        return path
    lines = "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()
    packed = {".gz": gzip.compress, ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}
    path.write_bytes(packed.get(path.suffix, bytes)(lines))
    return path


def source_of(path: Path, *columns: str) -> Input:
    kind = "parquet" if path.suffix == ".parquet" else "jsonl"
    return Input("de", ("de",), (CorpusPath(str(path.parent), path.name),), format=kind, columns=columns)


def read(path: Path, *columns: str) -> tuple[list[list[str]], Counts]:
    counts = Counts("documents")
    return list(documents(source_of(path, *columns), counts)), counts


def paragraphs_of(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]


TEXTS = ["Ein Satz.\nNoch einer.\n\n\nNach einer Lücke.\n", "尊厳 🙂", "", " \n\t\n", "a\r\n\r\nb\u2028c", "\n\nEnde"]


@pytest.mark.parametrize("name", ["de.jsonl", "de.jsonl.gz", "de.jsonl.zst", "de.parquet"])
def test_a_record_is_a_document(tmp_path: Path, name: str) -> None:
    """Whatever empty lines its text has."""
    write(tmp_path / name, TEXTS)
    (source,) = find_documents(tmp_path)
    counts = Counts("documents")
    assert list(documents(source, counts)) == [paragraphs_of(text) for text in TEXTS if paragraphs_of(text)]
    assert counts.units_in == 4 and counts.repaired == {"carriage_return": 2}


@pytest.mark.parametrize("codec", ["snappy", "zstd", "gzip", "none"])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_parquet_of_any_codec_row_group_and_string_type(tmp_path: Path, codec: str, rows: int) -> None:
    texts = [f"Text {i} {'wort ' * (i % 50)}".strip() for i in range(200)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        table = pa.table({"content": pa.array(texts, pa.string()).cast(kind), "text": [1] * 200})
        parquet.write_table(table, tmp_path / "de.parquet", compression=codec, row_group_size=rows)
        assert read(tmp_path / "de.parquet", "content")[0] == [[text] for text in texts]


LINES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
BLANKS = st.sampled_from(
    ["", " ", "\r", "\x00", "\ufeff", "\u2003\x0b", "\x85", "\ufeff\x00 ", " \ufeff", "\x00\ufeff"]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(LINES | BLANKS, max_size=8).map("\n".join), max_size=12), st.integers(1, 400))
def test_documents_round_trip_whatever_the_block_size(texts: list[str], size: int) -> None:
    """Against each text read alone as a file of a document a line: the same lines, and the same repairs."""
    with tempfile.TemporaryDirectory() as name:
        expected, lines = [], Counts("documents")
        for text in texts:
            Path(name, "one.txt").write_bytes(text.encode())
            found = documents(Input("de", ("de",), (CorpusPath(name, "one.txt"),), format="lines"), lines)
            expected.append([line for document in found for line in document])
        for ending in FORMATS:
            counts = Counts("documents")
            source = source_of(write(Path(name, f"de.{ending}"), texts))
            blocks = list(READERS[source.format].blocks(source, size))
            read = []
            for block in blocks:
                for paragraphs, lengths in READERS[source.format].paragraphs(source, block, counts):
                    ends = lengths.cumsum()
                    read += [paragraphs[end - n : end] for end, n in zip(ends, lengths, strict=True)]
            assert read == [document for document in expected if document]
            assert counts.repaired == lines.repaired
            assert all(len(block.sides[0]) >= size - 2 for block in blocks[:-1])


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_long_record_is_never_cut_and_the_others_take_no_more_memory(tmp_path: Path, ending: str) -> None:
    long = "Würde und Recht. " * 300_000  # 5.4 MB of UTF-8
    path = write(tmp_path / f"de.{ending}", ["davor", f"{long}\n\nTeil zwei", "danach"])
    source = source_of(path)
    blocks = [block.sides[0].decode() for block in READERS[source.format].blocks(source, 1000)]
    assert [len(block) for block in blocks] == [len(long) + len("davor\n\n" + "\nTeil zwei"), len("danach")]
    counts = Counts("documents")
    found = list(documents(source, counts))
    assert (found[0], found[-1]) == (["davor"], ["danach"])
    text = "".join(line for document in found[1:-1] for line in document)
    assert text.replace(" ", "") == (long + "Teil zwei").replace(" ", "")  # in documents of 1,000,000 characters
    assert counts.repaired["long_document"] == len(found) - 3 and counts.repaired["long_line"] == 1
    texts = [f"{i} " + "kurzer Text " * 80 for i in range(10_000)]  # 10 MB
    source = source_of(write(path, texts))
    tracemalloc.start()
    total = sum(len(line) for document in documents(source, Counts("documents")) for line in document)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == sum(len(text.strip()) for text in texts)
    assert peak < 5_000_000


GOOD = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD + b'\n{"text": "b"\n', r"line 3 is not JSON \(.* at column \d+\): .* truncated or damaged"),
        (GOOD + b'{"text": "b', "line 2 is not JSON"),
        (GOOD + b'{"text": "\xff"}\n', r"line 2 is not UTF-8 \(byte 11 of the line\)"),
        (GOOD.decode().encode("utf-16"), "line 1 is not UTF-8"),
        (b'["a"]\n', "line 1 is not a JSON object"),
        (GOOD + b'{"id": 1, "content": "a"}\n', r"line 2 has no field 'text', but id, content: name .* columns = \["),
        (GOOD + b'{"text": null}\n', "line 2: field 'text' is null, not a string"),
        (b'{"text": [1]}', r"line 1: field 'text' is \[1\], not a string"),
        (b"[" * 100_000 + b"\n", "line 1 is JSON that cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_sound_json_lines_is_an_error_with_its_line(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "de.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=rf"de\.jsonl, {message}") as error:
        read(tmp_path / "de.jsonl")
    assert isinstance(user_facing_error(error.value), UserError)  # else the command ends in a traceback


def test_odd_but_sound_json_lines_are_read(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, empty lines, no LF at the end; lone surrogates are repaired, as damaged bytes are."""
    lines = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\\nc \\ud83d", "text2": 1}'
    (tmp_path / "de.jsonl").write_bytes(lines)
    found, counts = read(tmp_path / "de.jsonl")
    assert found[0] == ["a"] and found[1][0] == "b" and found[1][1].startswith("c \ufffd")
    assert counts.repaired == {"invalid_utf8": 1}
    (tmp_path / "de.jsonl").write_bytes(b"")
    assert read(tmp_path / "de.jsonl")[0] == []


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.readers.record_files._MAX_JSON_LINE", 1_000_000)
    (tmp_path / "de.jsonl").write_bytes(GOOD + b"[" + GOOD.strip() * 1_000_000)
    with pytest.raises(ValueError, match=r"line 2 has over 1,000,000 bytes: is it JSON Lines"):
        read(tmp_path / "de.jsonl")


def test_a_line_may_be_as_long_as_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "de.jsonl").write_bytes(GOOD * 2)
    monkeypatch.setattr("data_prep.readers.record_files._MAX_JSON_LINE", len(GOOD) - 1)
    assert read(tmp_path / "de.jsonl")[0] == [["a"], ["a"]]
    monkeypatch.setattr("data_prep.readers.record_files._MAX_JSON_LINE", len(GOOD) - 2)
    with pytest.raises(ValueError, match="line 1 has over 12 bytes"):
        read(tmp_path / "de.jsonl")


def test_damaged_parquet_is_named_with_its_row_group(tmp_path: Path) -> None:
    texts = [f"Text {i * 7919 % 1_000_003} und mehr" for i in range(4000)]
    path = write(tmp_path / "de.parquet", texts, row_group_size=1000, compression="zstd", write_page_checksum=True)
    data = path.read_bytes()
    start = parquet.ParquetFile(path).metadata.row_group(2).column(1).dictionary_page_offset
    for damaged, message in (
        (data[:-1], "cannot be read"),
        (data[: len(data) // 2], "cannot be read"),
        (b"", "cannot be read"),
        (GOOD * 100, "cannot be read"),
        (data[: start + 40] + bytes([data[start + 40] ^ 1]) + data[start + 41 :], "row group 2.* cannot be read"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"de\.parquet.*{message} .*truncated or damaged. Fetch it again"):
            read(path)
    write(path, texts, row_group_size=1000, compression="none", write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"mehr", b"meer", 1))  # text too: only the checksum says that it changed
    with pytest.raises(ValueError, match=r"de\.parquet, row group 0.* cannot be read .*truncated or damaged"):
        read(path)


def test_columns_of_parquet_that_hold_no_text(tmp_path: Path) -> None:
    path = tmp_path / "de.parquet"
    write(path, ["a"])
    with pytest.raises(ValueError, match=r"has no column 'content', but id, text: name the column .* columns = \["):
        read(path, "content")
    with pytest.raises(ValueError, match="column 'id' has type int64, not string"):
        read(path, "id")
    write(path, ["a", "b", "c", None], row_group_size=2)
    with pytest.raises(ValueError, match=r"de\.parquet, row group 1, row 2: column 'text' is null"):
        read(path)
    raw = pa.Array.from_buffers(pa.string(), 2, [*pa.array(["a", "b"]).buffers()[:2], pa.py_buffer(b"a\xff")])
    parquet.write_table(pa.table({"text": raw}), path)
    with pytest.raises(ValueError, match="row group 0, row 2: column 'text' is not UTF-8"):
        read(path)
    parquet.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), path)
    with pytest.raises(ValueError, match=r"de\.parquet has several columns 'text': rename all but one"):
        read(path)
    inside = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(pa.table({"meta": inside}), path)
    with pytest.raises(ValueError, match=r"de\.parquet has several columns 'meta\.text': rename all but one"):
        read(path, "meta.text")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a named pipe, but a Parquet file is read from its end"):
        read(path)


def test_json_lines_through_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "de.jsonl")
    writer = threading.Thread(target=lambda: (tmp_path / "de.jsonl").write_bytes(GOOD * 2))
    writer.start()
    assert read(tmp_path / "de.jsonl")[0] == [["a"], ["a"]]
    writer.join()


def test_fineweb2_as_it_is_laid_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder a language and script, several files each; other languages and files are named."""
    for folder in ("deu_Latn", "hin_Deva", "cmn_Hani", "als_Latn", "hin_Latn", "gsw_Latn", "srp_Cyrl"):
        for number in range(2):
            write(tmp_path / "data" / folder / "train" / f"00{number}_00000.parquet", [folder, str(number)])
    write(tmp_path / "data" / "deu_Latn" / "test" / "000_00000.parquet", ["not for training"])
    (corpus,) = read_corpora(["fineweb2"], [f"fineweb2={tmp_path}"])
    found = corpus_inputs(corpus)
    assert sorted({source.name for source in found}) == ["de", "hi", "hi_rom", "sq", "sr", "zh-Hans"]
    german = [source for source in found if source.name == "de"]
    assert [list(documents(source, Counts("documents"))) for source in german] == [[["deu_Latn"], [n]] for n in "01"]
    warnings = capsys.readouterr().err
    assert "has 1 file that fineweb2 does not read: data/deu_Latn/test/000_00000.parquet" in warnings
    assert "has 1 language that fineweb2 does not read: gsw_Latn" in warnings
    assert find_sources(TextConfig(corpus=("fineweb2",), where=(f"fineweb2={tmp_path}",)))["mono"].settings


def test_culturax_madlad_and_hplt_as_they_are_laid_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files written in the shape that the releases document."""
    for number in (0, 1):
        write(tmp_path / f"culturax/de/de_part_0000{number}.parquet", [f"Teil {number}"])
        write(tmp_path / f"hplt2/deu_Latn/{number + 1}.jsonl.zst", [f"Teil {number}\n\nmehr"])
        for part in ("clean", "noisy"):
            write(tmp_path / f"madlad400/data/iw/iw_{part}_000{number}.jsonl.gz", [rf"Teil {number}\n{part}\n\nEnde"])
    write(tmp_path / "madlad400/data/ber_Latn/ber_Latn_clean_0000.jsonl.gz", ["x"])
    found = {}
    for name in ("culturax", "hplt2", "madlad400"):
        (corpus,) = read_corpora([name], [f"{name}={tmp_path / name}"])
        sources = corpus_inputs(corpus)
        found[name] = [(source.name, list(documents(source, Counts("documents")))) for source in sources]
    assert found == {
        "culturax": [("de", [["Teil 0"]]), ("de", [["Teil 1"]])],
        "hplt2": [("de", [["Teil 0", "mehr"]]), ("de", [["Teil 1", "mehr"]])],
        "madlad400": [("he", [["Teil 0", "clean", "Ende"]]), ("he", [["Teil 1", "clean", "Ende"]])],
    }
    assert "has 2 files that madlad400 does not read: data/iw/iw_noisy_0000" in capsys.readouterr().err
    assert "line_end" in str(
        find_sources(TextConfig(corpus=("madlad400",), where=(f"madlad400={tmp_path}/madlad400",)))
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_filters_of_columns_drop_documents(tmp_path: Path, kind: str) -> None:
    """By hand: the first that fails counts, a null fails, and a document without text is none."""
    values = [(0.9, "a"), (0.8, "b"), (0.5, "a"), (None, "a"), (0.9, "c"), (0.1, "c"), (0.1, "a")]
    rows = [{"text": f"t{i}\nu", "meta": {"score": p}, "kind": k} for i, (p, k) in enumerate(values)]
    rows[-1]["text"] = " \n "
    name = write_records(tmp_path / f"de.{kind}", rows)
    text = DESCRIPTION.format(tmp_path, f'"{name}"', '["de"]').replace('"jsonl"', f'"{kind}"')
    rules = '[filters.column."meta.score"]\nmin = 0.8\nmax = 1\n[filters.column.kind]\none_of = ["a", "b"]\n'
    (tmp_path / "x.toml").write_text(text + rules)
    (source,) = corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0])
    for size in (1, 1000):
        counts, found = Counts("documents"), []
        for block in READERS[kind].blocks(source, size):
            for paragraphs, _ in READERS[kind].paragraphs(source, block, counts):
                found += paragraphs
        assert found == ["t0", "u", "t1", "u"]
        assert dict(counts.dropped) == {"column meta.score": 3, "column kind": 1} and counts.units_in == 6
    (tmp_path / "x.toml").write_text(text + "[filters.column.score]\nmin = 1")
    (source,) = corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0])
    place = r"de\.jsonl, line 1" if kind == "jsonl" else rf"de\.{kind}"
    with pytest.raises(ValueError, match=rf"{place} has no (field|column) 'score', but text, meta, kind"):
        list(READERS[kind].blocks(source, 1))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_number_is_what_it_was_written_as(tmp_path: Path, kind: str) -> None:
    """Of any type, at the bounds and in a list: 0.1 as a short float is 0.10000000149."""
    numbers = ["0.1", "0.5", "0.9", "1", "1.50"]
    columns = {
        "half": pa.array(np.array(numbers, np.float16)),
        "single": pa.array(np.array(numbers, np.float32)),
        "double": pa.array(np.array(numbers, np.float64)),
        "decimal": pa.array(map(Decimal, numbers), pa.decimal128(9, 4)),
        "narrow": pa.array([Decimal(number) for number in numbers], pa.decimal64(6, 2)),
    }
    table = pa.table({"text": pa.array(numbers)} | columns)
    if kind == "parquet":
        parquet.write_table(table.drop_columns(["half"]), tmp_path / "de.parquet")
    else:
        with pa.ipc.new_file(str(tmp_path / "de.arrow"), table.schema) as writer:
            writer.write_table(table)
    text = DESCRIPTION.format(tmp_path, f'"de.{kind}"', '["de"]').replace('"jsonl"', f'"{kind}"')
    for name in columns.keys() - ({"half"} if kind == "parquet" else set()):
        for rules, expected in (
            ("min = 0.1\nmax = 0.9", numbers[:3]),
            ("one_of = [0.1, 1, 1.5]", ["0.1", "1", "1.50"]),
            ("one_of = [1.0]", ["1"]),
        ):
            (tmp_path / "x.toml").write_text(f"{text}[filters.column.{name}]\n{rules}\n")
            (source,) = corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0])
            (block,) = READERS[kind].blocks(source, 1000)
            assert block.sides[0].decode().split() == expected, (name, rules)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl_pairs"])
@pytest.mark.parametrize("size", [1, 40, 10_000])
def test_what_is_lost_counts_once_whatever_the_blocks(tmp_path: Path, kind: str, size: int) -> None:
    """Dropped and repaired records between ones that stay: each block counts its own."""
    kept = [number % 3 != 1 for number in range(20)]
    rows = [{"text": f"t{i}\x00\n\n\x01\nu", "a": f"a{i}\x00", "b": "b", "p": int(keep)} for i, keep in enumerate(kept)]
    name = write_records(tmp_path / "de.jsonl", rows)
    kind_of = 'languages = ["de"]' if kind == "jsonl" else 'pairs = ["en-de"]\ncolumns = {source = "a", target = "b"}'
    text = f'name = "x"\nwhere = "{tmp_path}"\nformat = "{kind}"\nfiles = "{name}"\n{kind_of}\n'
    (tmp_path / "x.toml").write_text(text + "[filters.column.p]\nmin = 1")
    (source,) = corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0])
    counts, found = Counter[str](), 0
    blocks = list(READERS[kind].blocks(source, size))
    assert all(len(block.sides[0]) >= size - 2 for block in blocks[:-1]) and (size > 40 or len(blocks) > 2)
    for number, block in enumerate(blocks[1:-1] if kind == "jsonl_pairs" and size == 40 else ()):
        assert len(block.sides[0]) < 2 * size, f"block {number + 1} is no single row, and no more than it must be"
    for block in blocks:
        of_block = Counts(kind)
        if kind == "jsonl":
            found += sum(len(ends) for _, ends in READERS[kind].paragraphs(source, block, of_block))
        else:
            found += len(list(READERS[kind].pairs(source, block, of_block)))
        counts += of_block.dropped + of_block.repaired + Counter(units=of_block.units_in)
    repaired = 2 * sum(kept) if kind == "jsonl" else sum(kept)
    assert found == sum(kept) == 13
    assert counts == {"column p": 7, "units": 20, "control_character": repaired}


def test_a_record_may_lack_the_field_of_a_filter(tmp_path: Path) -> None:
    (tmp_path / "de.jsonl").write_text('{"text": "a", "score": 1}\n{"text": "b"}\n{"text": "c", "score": 2}\n')
    (source,) = corpus_inputs(_corpus(tmp_path, "[filters.column.score]\nmin = 1"))
    counts, found = Counts("documents"), []
    for block in READERS["jsonl"].blocks(source, 1000):
        for paragraphs, _ in READERS["jsonl"].paragraphs(source, block, counts):
            found += paragraphs
    assert found == ["a", "c"] and dict(counts.dropped) == {"column score": 1}


def _corpus(folder: Path, rules: str) -> Any:
    (folder / "x.toml").write_text(DESCRIPTION.format(folder, '"de.jsonl"', '["de"]') + rules)
    return read_corpora([str(folder / "x.toml")], [])[0]


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """Hugging Face's own writer, several files with several record batches."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"id": list(range(2500)), "text": [f"Text {i}\nmehr" for i in range(2500)]})
    made.save_to_disk(tmp_path / "de", num_shards=2)
    text = DESCRIPTION.format(tmp_path, '"{lang}/*.arrow"', '"any"').replace('"jsonl"', '"arrow"')
    (tmp_path / "x.toml").write_text(text)
    found = corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0])
    assert [source.paths[0].name for source in found] == [f"de/data-0000{i}-of-00002.arrow" for i in (0, 1)]
    texts = [document for source in found for document in documents(source, Counts("documents"))]
    assert texts == [[f"Text {i}", "mehr"] for i in range(2500)]
    datasets.load_from_disk(str(tmp_path / "de")).map(lambda row: {"text": row["text"].upper()})
    with pytest.raises(ValueError, match=r"de/cache-.*\.arrow is a cache of Hugging Face's datasets.* data-\*\.arrow"):
        corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0])
    (tmp_path / "x.toml").write_text(text.replace("*.arrow", "data-*.arrow"))
    assert corpus_inputs(read_corpora([str(tmp_path / "x.toml")], [])[0]) == found


def test_arrow_files_and_damaged_streams(tmp_path: Path) -> None:
    """Both formats of Arrow; a stream that ends after a whole record batch is as damaged as one that ends inside."""
    path, table = tmp_path / "de.arrow", pa.table({"text": [f"Text {i}" for i in range(100)]})

    def read_arrow() -> list[list[str]]:
        source = Input("de", ("de",), (CorpusPath(str(tmp_path), path.name),), format="arrow")
        return list(documents(source, Counts("documents")))

    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    as_file = read_arrow()
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=30)
    assert read_arrow() == as_file == [[f"Text {i}"] for i in range(100)]
    data = path.read_bytes()
    with pa.ipc.open_stream(path) as reader:
        schema, first = reader.schema.serialize().size, reader.read_next_batch().serialize().size
    for damaged in (
        b"",
        data[:-1],
        data[: len(data) // 2],
        data[: schema + first],
        GOOD * 9,
        data[:schema] + data[-8:-4],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"de\.arrow.* cannot be read .*truncated or damaged. Fetch it again"):
            read_arrow()
    write_records(path, [{"text": "a"}, {"text": "b"}, {"text": "c"}, {"text": None}])
    with pytest.raises(ValueError, match=r"de\.arrow, record batch 1, row 2: column 'text' is null"):
        read_arrow()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a named pipe, but an Arrow file is read from its end: store it"):
        read_arrow()


DESCRIPTION = 'name = "x"\nwhere = "{}"\nformat = "jsonl"\nfiles = {}\nlanguages = {}\n'


def test_files_by_a_star(tmp_path: Path) -> None:
    """CulturaX's and MADLAD-400's names; all patterns count; the column has another name."""
    for name in ("de/de_part_0.jsonl.gz", "de/de_part_1.jsonl.gz", "de/de_part_2.jsonl", "fr/fr_part_0.jsonl"):
        write(tmp_path / "data" / name, [name], "raw")
    path = tmp_path / "x.toml"
    files = '["{lang}/*.jsonl.gz", "{lang}/*.jsonl"]'
    path.write_text(DESCRIPTION.format(tmp_path / "data", files, '["de", "fr"]') + 'columns = ["raw"]\n')
    found = corpus_inputs(read_corpora([str(path)], [])[0])
    texts = [list(documents(source, Counts("documents"))) for source in found]
    names = ["de/de_part_0.jsonl.gz", "de/de_part_1.jsonl.gz", "de/de_part_2.jsonl", "fr/fr_part_0.jsonl"]
    assert texts == [[[name]] for name in names]


@pytest.mark.parametrize("languages", ['["bn", "zh", "zh_TW", "de"]', '"any"'])
def test_a_star_takes_no_file_of_another_language(languages: str, tmp_path: Path) -> None:
    """Codes that begin alike; `new` is no language, so that those files are German."""
    for name in ("bn_0", "bn_rom_0", "zh_0", "zh_TW_0", "zh_TW_1", *(["de_new_0"] if languages != '"any"' else [])):
        write(tmp_path / "data" / f"{name}.jsonl", [name])
    path = tmp_path / "x.toml"
    path.write_text(DESCRIPTION.format(tmp_path / "data", '"{lang}_*.jsonl"', languages))
    found = [(source.name, source.paths[0].name) for source in corpus_inputs(read_corpora([str(path)], [])[0])]
    files = {"bn": ["bn_0"], "zh-Hans": ["zh_0"], "zh-Hant": ["zh_TW_0", "zh_TW_1"]}
    files |= {"bn_rom": ["bn_rom_0"]} if languages == '"any"' else {"de": ["de_new_0"]}
    assert sorted(found) == sorted((code, f"{name}.jsonl") for code, names in files.items() for name in names)


@pytest.mark.parametrize(
    ("files", "languages", "more", "message"),
    [
        ('"*.jsonl"', '"any"', "", r'files are .*but languages = "any" needs \{lang\} in the name'),
        *(
            ('"{lang}.jsonl"', '["de"]', f"columns = {columns}", "name the one column that has the text")
            for columns in ('["a", "b"]', "[]", '"a"', "[1]", '{ a = "b" }')
        ),
        ('"{lang}.jsonl"', '["de"]', "line_end = 5", "line_end is 5: it must be a string"),
        ('"{lang}.jsonl"', '"all"', "", r'set languages = \["en", …\] or languages = "any"'),
    ],
)
def test_mistakes_in_a_description_of_records(
    tmp_path: Path, files: str, languages: str, more: str, message: str
) -> None:
    (tmp_path / "x.toml").write_text(DESCRIPTION.format(tmp_path, files, languages) + more)
    with pytest.raises(ValueError, match=message):
        read_corpora([str(tmp_path / "x.toml")], [])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_the_same_shards_for_any_number_of_processes_and_after_a_kill(
    vocab: Path,
    tmp_path: Path,
    sentences: list[str],
    ending: str,
    data_prep: Callable[..., "subprocess.CompletedProcess[str]"],
    start_data_prep: Callable[..., "subprocess.Popen[str]"],
) -> None:
    texts = [f"{sentences[i % 6]} {i}\n\n" * (1 + i % 3) for i in range(12_000)]
    write(tmp_path / "in" / f"de.{ending}", texts)
    write(tmp_path / "in" / f"en.{ending}", texts[:500])
    flags = ["encode", "--mono", tmp_path / "in", "--vocab", vocab, "--block-bytes", 50_000, "--out"]
    done = data_prep(*flags, tmp_path / "one")
    assert done.returncode == 0, done.stderr
    expected = tree(tmp_path / "one")
    counts = read_manifest(tmp_path / "one" / "mono").counts["by_language"]
    assert (counts["de"]["documents"], counts["en"]["documents"]) == (12_000, 500)
    assert counts["de"]["paragraphs"] == sum(1 + i % 3 for i in range(12_000))
    assert len(expected) > 30
    done = data_prep(*flags, tmp_path / "two", "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "two") == expected
    killed = start_data_prep(*flags, tmp_path / "killed", "--processes", 2)
    while not (tmp_path / "killed" / "mono" / "tasks" / "de-000.00003.json").exists():
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    first = tmp_path / "killed" / "mono" / "de" / "000-00000.arrow"
    before = first.stat().st_mtime_ns
    done = data_prep(*flags, tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "killed") == expected
    assert first.stat().st_mtime_ns == before


GUIDE = (Path(__file__).parents[2] / "docs" / "howto" / "corpus.md").read_text(encoding="utf-8")


def described(folder: Path, name: str) -> list[Input]:
    """The inputs of the description `name` in the guide, whose places are in `folder`."""
    (text,) = (block for block in re.findall(r"```toml\n(.*?)```", GUIDE, re.S) if f'name = "{name}"' in block)
    (folder / "guide.toml").write_text(text)
    return corpus_inputs(read_corpora([str(folder / "guide.toml")], [f"{name}={folder / name}"])[0])


def test_files_that_datatrove_wrote(tmp_path: Path) -> None:
    """In the shape of its JsonlWriter: a file a task, and metadata in an object of their own."""
    (tmp_path / "corpus.toml").write_text(
        'name = "deduplicated"\nformat = "jsonl"\nfiles = "{lang}/*.jsonl.gz"\nlanguages = "any"\n'
    )
    place = f"deduplicated={tmp_path / 'deduplicated'}"
    for code in ("de", "sw"):
        (tmp_path / "deduplicated" / code).mkdir(parents=True)
        for task in range(2):
            rows = [
                {
                    "text": f"{code} {task}\nline {i}",
                    "id": f"{task}-{i}",
                    "metadata": {"file_path": "/text/00000.jsonl.gz"},
                }
                for i in range(3)
            ]
            lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
            (tmp_path / "deduplicated" / code / f"{task:05d}.jsonl.gz").write_bytes(gzip.compress(lines))
    sources = corpus_inputs(read_corpora([str(tmp_path / "corpus.toml")], [place])[0])
    found = [(source.name, list(documents(source, Counts("documents")))) for source in sources]
    assert found == [
        (code, [[f"{code} {task}", f"line {i}"] for i in range(3)]) for code in ("de", "sw") for task in range(2)
    ]


def test_pairs_that_datasets_saved_through_the_description_of_the_guide(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for a, b in (("en", "sw"), ("de", "en")):
        rows = [{a: f"{a} {i}", b: f"{b} {i}"} for i in range(5)]
        datasets.Dataset.from_dict({"id": list(range(5)), "translation": rows}).save_to_disk(
            tmp_path / "books" / f"{a}-{b}"
        )
    found = {source.name: list(pairs(source, Counts("pairs"))) for source in described(tmp_path, "books")}
    assert found == {f"en-{b}": [(f"en {i}", f"{b} {i}") for i in range(5)] for b in ("sw", "de")}


def test_the_commands_of_the_guide(
    tmp_path: Path, sentences: list[str], data_prep: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    """docs/howto/corpus.md: a vocabulary and ids from FineWeb-2's files; an error is one line with exit code 2."""
    texts = [f"{sentence} {i}" for i in range(300) for sentence in sentences]
    path = write(tmp_path / "fineweb2" / "data" / "deu_Latn" / "train" / "000_00000.parquet", texts)
    for flags in (
        "vocab --corpus fineweb2 --where fineweb2=FOLDER",
        "encode --corpus fineweb2 --where fineweb2=FOLDER",
    ):
        assert flags in GUIDE
    corpus = ["--corpus", "fineweb2", "--where", f"fineweb2={tmp_path / 'fineweb2'}"]
    done = data_prep("vocab", *corpus, "--size", 90, "--sentences", 1000, "--out", tmp_path / "vocab")
    assert done.returncode == 0, done.stderr
    encode = ["encode", *corpus, "--vocab", tmp_path / "vocab", "--out"]
    done = data_prep(*encode, tmp_path / "encoded")
    assert done.returncode == 0, done.stderr
    path.write_bytes(path.read_bytes()[:-9])
    done = data_prep(*encode, tmp_path / "damaged")
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert line.startswith(f"xlme prep encode: error: {path} cannot be read (")
