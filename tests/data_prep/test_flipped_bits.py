"""A flipped bit anywhere in a file of Arrow, Parquet or zip is a sentence that names the file, or changes text alone;
it never ends the process. Bits are drawn from a fixed seed; half of them are near an end, where the metadata are."""

import random
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.encode.token_ids import list_array
from data_prep.filters.clean import Counts
from data_prep.inspect.stats_tables import length_histograms
from data_prep.mix.encoded import ExampleUnit, copy_words, scan_shard
from data_prep.readers import READERS, Input, documents
from data_prep.readers.corpus_files import CorpusPath
from data_prep.readers.plain_pairs import MosesZip
from data_prep.readers.record_files import RecordDocuments
from data_prep.store import write_arrow
from tests.data_prep.conftest import ROOT, TEXT, pairs
from xlme_ds.data.schema import DOCUMENTS, LAYOUTS, PAIRS, Manifest, Shard

FLIPS = 250  # of each kind
TABLE = pa.table(
    {
        "text": pa.array(TEXT, pa.string()),
        "large": pa.array(TEXT, pa.large_string()),
        "view": pa.array(TEXT, pa.string_view()),
        "few": pa.array([text[:1] for text in TEXT]).dictionary_encode(),
        "inside": pa.array([{"text": text, "scores": [0.5, 1.5]} for text in TEXT]),
    }
)


def write_file(path: Path, **options: str) -> None:
    with pa.ipc.new_file(path, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE, 4)


def write_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 4)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for code in ("de", "en"):
            archive.writestr(f"X.de-en.{code}", "".join(f"{line}\n" for line in TEXT))


def write_shard(path: Path, schema: pa.Schema) -> None:
    rng = np.random.default_rng(0)
    columns = []
    for _ in schema:
        lengths = rng.integers(1, 9, 40)
        columns.append(list_array((rng.integers(4, 99, lengths.sum()).astype(np.int32), lengths)))
    write_arrow(path, schema, [pa.record_batch(columns, schema=schema)] * 2, path.parent)


def read_records(path: Path) -> None:
    reader = READERS["parquet" if path.suffix == ".parquet" else "arrow"]
    assert isinstance(reader, RecordDocuments)
    for column in TABLE.column_names[:-1] if path.suffix == ".arrow" else ("text", "few"):
        list(reader.records(CorpusPath(str(path.parent), path.name), [column], []))
    source = Input(
        "en", ("en",), (CorpusPath(str(path.parent), path.name),), (), path.suffix[1:], columns=("inside.text",)
    )
    list(documents(source, Counts("documents")))


def read_zip(path: Path) -> None:
    place = CorpusPath(str(path.parent), path.name)
    members = MosesZip().members(place, ("de", "en"))
    list(pairs(Input("de-en", ("de", "en"), (place,), members, "moses_zip"), Counts("pairs")))


def read_shard(path: Path) -> None:
    """As `mix` does, and `stats`."""
    name = f"{path.parent.name}/{path.name}"
    unit: ExampleUnit = "pairs" if path.name.startswith("pairs") else "sentences"
    shard = scan_shard(path.parent.parent, 32, LAYOUTS["xlme"], None, unit, name)
    starts, lengths = shard.batch_index.id_ranges(shard.locate(np.arange(shard.examples))[0])
    for begin, size in zip(starts, lengths, strict=True):
        copy_words(path, begin, size, np.zeros(size.sum(), np.int32), np.cumsum(size) - size)
    listed = Manifest("encode", {}, 99, "", (), (Shard(name, 0, 1, ""),), {"by_language": {path.parent.name: {}}})
    length_histograms(path.parent.parent, listed, 1)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "file.arrow": (write_file, read_records),
    "packed.arrow": (lambda path: write_file(path, compression="lz4"), read_records),
    "stream.arrow": (write_stream, read_records),
    "table.parquet": (lambda path: parquet.write_table(TABLE.drop_columns(["view"]), path), read_records),
    "plain.parquet": (
        lambda path: parquet.write_table(TABLE.drop_columns(["view"]), path, compression="none", use_dictionary=False),
        read_records,
    ),
    "de-en.zip": (write_zip, read_zip),
    "documents.arrow": (lambda path: write_shard(path, DOCUMENTS), read_shard),
    "pairs.arrow": (lambda path: write_shard(path, PAIRS), read_shard),
}


def flip(folder: Path) -> None:
    """All kinds, in a process of its own; its last line says which bit ended it."""
    for kind, (write, read) in KINDS.items():
        path, rng, ends = folder / kind, random.Random(kind), Counter[str]()
        write(path)
        read(path)
        sound = path.read_bytes()
        for number in range(FLIPS):
            bit = rng.randrange(8 * len(sound))
            if number % 2:
                bit = 8 * rng.choice([rng.randrange(600), len(sound) - 1 - rng.randrange(600)]) + bit % 8
            data = bytearray(sound)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            print(f"\r{kind}, bit {bit}: ", end="", flush=True)
            try:
                read(path)
                ends["read"] += 1
            except ValueError as error:
                assert type(error) is ValueError and str(path) in str(error), error
                ends["sentence"] += 1
        assert min(ends["read"], ends["sentence"]) > 2, ends
        path.unlink()
    print("done")


def test_a_flipped_bit_is_a_sentence(tmp_path: Path) -> None:
    script = "from pathlib import Path; from tests.data_prep.test_flipped_bits import flip; import sys\n"
    command = [sys.executable, "-c", f"{script}flip(Path(sys.argv[1]))", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.rpartition("\r")[2]
    assert done.returncode == 0 and last.endswith("done\n"), f"{last}exit code {done.returncode}: {done.stderr}"


@pytest.mark.parametrize("kind", ["file.arrow", "stream.arrow"])
def test_a_changed_offset_names_its_record_batch(kind: str, tmp_path: Path) -> None:
    """The second text of the first record batch would begin a gigabyte after the others."""
    write, read = KINDS[kind]
    write(tmp_path / kind)
    data = (tmp_path / kind).read_bytes()
    offsets = np.array([0, *np.cumsum([len(text.encode()) for text in TEXT[:4]])], np.int32).tobytes()
    at = data.index(offsets) + 4
    (tmp_path / kind).write_bytes(data[:at] + np.int32(1 << 30).tobytes() + data[at + 4 :])
    with pytest.raises(ValueError, match=rf"{kind}, record batch 0 cannot be read .*: it is truncated or damaged"):
        read(tmp_path / kind)
