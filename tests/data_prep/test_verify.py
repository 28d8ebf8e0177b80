"""`verify` on what `encode` and `mix` write, and on the same with one fault each."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pyarrow as pa
import pytest

from data_prep.encode import encode
from data_prep.inspect.verify import VerifyConfig, run
from data_prep.mix import mix
from data_prep.store import Stage
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocab import run as train
from xlme_ds.data.schema import BOS, EOS, PAD, UNK, Manifest, read_manifest, write_manifest
from xlme_ds.data.shards import INDEX_SUFFIX, group_checksums, index_bytes
from xlme_ds.io.files import write_checksummed

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
    copytree(vocab, folder / "vocab")
    prepare(folder)
    return folder


def prepare(folder: Path, corpus: Path | None = None) -> None:
    """The two commands that write what is checked here."""
    text, encoded = (corpus or folder) / "corpus", folder / "encoded"
    sources = {"mono": text / "mono", "para": text / "para"}
    encode.run(encode.EncodeConfig(folder / "vocab", encoded, max_pair_tokens=ROW - 3, block_bytes=400, **sources))
    mix.run(mix.MixConfig(encoded, folder / "vocab", folder / "data", 50, 30, row_tokens=ROW, rows_per_shard=20))


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
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema), max_chunksize=6)
    data = sink.getvalue().to_pybytes()
    path.write_bytes(data)
    shards = list(manifest.shards)
    shards[shard] = replace(shards[shard], bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    assert len(arrays[0]) == rows
    write_manifest(folder, replace(manifest, shards=tuple(shards)))


def index_again(folder: Path) -> None:
    """Write the index of a folder's first shard for the rows that it has now."""
    shard = read_manifest(folder).shards[0]
    path = folder / shard.name
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        checks = [group_checksums(reader.get_batch(number)) for number in range(reader.num_record_batches)]
    path.with_suffix(INDEX_SUFFIX).write_bytes(index_bytes(path, shard.sha256, checks))


def test_what_the_stages_write_has_no_fault(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("encoded", "data"):
        run(VerifyConfig(prepared / name, processes=2))
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines] == [str(prepared / name / task) for task in ("mono", "para")]
        assert all("no fault" in line for line in lines)
    run(VerifyConfig(prepared / "data" / "mono"))
    assert "3 shards, 50 records" in capsys.readouterr().out


def test_a_vocabulary_may_be_in_the_same_folder(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(VocabConfig(copied / "encoded", model=copied / "data/vocab"))
    run(VerifyConfig(copied / "encoded"))
    assert capsys.readouterr().out.count("no fault") == 2


def test_a_folder_without_shards(vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All text is in the other part."""
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono" / "en.txt").write_text("All human\n")
    encode.run(encode.EncodeConfig(vocab, tmp_path / "encoded", mono=tmp_path / "mono", split="heldout"))
    capsys.readouterr()
    run(VerifyConfig(tmp_path / "encoded"))
    assert capsys.readouterr().out == f"{tmp_path}/encoded/mono: no shards, because encode kept no text, no fault\n"


def test_ranks_check_together_and_one_tells(
    prepared: Path, data_prep: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    """So do those of `stats`."""
    done = data_prep("verify", "--data", prepared / "data", ranks=2)
    words = "{}/data/{}: {} shards, {} records, no fault"
    expected = [words.format(prepared, *counts) for counts in (("mono", 3, 50), ("para", 2, 30))]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
    flags = ["--encoded", prepared / "encoded", "--data", prepared / "data", "--out", tmp_path]
    done = data_prep("stats", *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Language pairs ") == done.stdout.count("\nopen ") == 1
    no_rows = ["--encoded", prepared / "encoded", "--data", tmp_path, "--out", tmp_path]
    for wrong, words in ((no_rows, "holds neither mono/"), ([*flags, "--processes", 0], "--processes is 0")):
        done = data_prep("stats", *wrong, ranks=2)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1, "not MPI's lines, which tell of an abort"


def test_languages_that_cc100_does_not_have(
    vocab: Path, sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named and go all the way; a filter that does not know their script leaves them."""
    for name, lines in (
        ("mono/qu.txt", sentences),
        ("para/X.en-kbd-Cyrl.en", sentences[0].split()),
        ("mono/ab.txt", ["ԥсуа"]),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n\n".join(lines * 3) if name[0] == "m" else "\n".join(lines))
    shutil.copy(tmp_path / "para/X.en-kbd-Cyrl.en", tmp_path / "para/X.en-kbd-Cyrl.kbd-Cyrl")
    text = f'name = "x"\nwhere = "{tmp_path}/mono"\nformat = "cc100"\nfiles = "{{lang}}.txt"\n'
    (tmp_path / "x.toml").write_text(f'{text}languages = ["qu", "ab"]\n[filters.script]\n')
    sources = {"corpus": (str(tmp_path / "x.toml"),), "para": tmp_path / "para"}
    encode.run(encode.EncodeConfig(vocab, tmp_path / "encoded", max_pair_tokens=ROW - 3, **sources))
    warned = capsys.readouterr().err
    assert "not among CC-100's languages: ab, qu. Text is" in warned
    assert "not among CC-100's languages: kbd-Cyrl. Text is" in warned
    assert "the filter `script` keeps all text in ab, qu" in warned
    counts = read_manifest(tmp_path / "encoded/mono").counts["by_language"]
    assert counts["ab"]["paragraphs"] == 3 and not counts["ab"]["removed"]
    mix.run(mix.MixConfig(tmp_path / "encoded", vocab, tmp_path / "data", 5, 5, row_tokens=ROW))
    assert read_manifest(tmp_path / "data/para").languages == ("ab", "en", "kbd-Cyrl", "qu")
    run(VerifyConfig(tmp_path / "encoded"))
    capsys.readouterr()
    run(VerifyConfig(tmp_path / "data"))
    assert capsys.readouterr().out.count(": 1 shard, 5 records, no fault\n") == 2


def test_a_flipped_byte(copied: Path) -> None:
    path = copied / "data" / "mono" / "00001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"00001\.arrow does not have the manifest's checksum"):
        run(VerifyConfig(copied / "data"))


@pytest.mark.parametrize("task", ["mono", "para"])
def test_a_folder_of_a_task_may_have_any_name(
    copied: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (copied / "data" / task, copied / "encoded" / task):
        monkeypatch.chdir(folder)
        run(VerifyConfig(Path(".")))
    run(VerifyConfig((copied / "encoded" / task).rename(copied / "another")))
    assert capsys.readouterr().out.count("no fault") == 3


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
    shard = next((copied / "encoded/mono/de").glob("*.arrow"))
    shutil.copy(shard, shard.with_name("009-00000.arrow"))
    with pytest.raises(ValueError, match=r"mono/de/009-00000\.arrow is not in the manifest"):
        run(VerifyConfig(copied / "encoded"))


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
    shutil.copytree(copied / "data" / "vocab", copied / "encoded" / "vocab")  # beside what encode wrote, none is needed
    run(VerifyConfig(copied / "encoded"))
    for folder in (copied / "data", copied / "encoded"):
        with open(folder / "vocab" / "sentencepiece.model", "ab") as file:
            file.write(b"\0")
        with pytest.raises(ValueError, match="is not the vocabulary that"):
            run(VerifyConfig(folder))
    (copied / "encoded" / "mono" / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r"manifest\.json does not exist: name the folder that `xlme prep encode` or `mix` "
    ):
        run(VerifyConfig(copied / "encoded"))
    with pytest.raises(ValueError, match="none does not exist: name a folder that encode or mix wrote"):
        run(VerifyConfig(copied / "none"))
    with pytest.raises(ValueError, match="holds neither mono/ nor para/"):
        run(VerifyConfig(copied))


def test_wrong_counts(copied: Path) -> None:
    folder = copied / "data" / "mono"
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, shards=manifest.shards[:-1]))
    (folder / manifest.shards[-1].name).unlink()
    with pytest.raises(ValueError, match="does not list 50 rows, 20 per shard"):
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


def both(first: Change, second: Change) -> Change:
    def change(columns: dict[str, list]) -> None:
        first(columns)
        second(columns)

    return change


def two_items(columns: dict[str, list]) -> None:
    (length,) = columns["lengths"][11]
    columns["lengths"][11] = [length - 8, 8]


def one_token_at_the_end(columns: dict[str, list]) -> None:
    tokens, languages = columns["tokens"][-1], columns["languages"][-1]
    tokens[:] = [token if token != PAD else UNK for token in tokens]
    columns["lengths"][-1][:], languages[:] = [ROW - 1, 1], 2 * languages[:2]


def no_text(side: str) -> Change:
    """Move the separator of a pair to where one side has no text."""

    def change(columns: dict[str, list]) -> None:
        for tokens, (length, *_) in zip(columns["tokens"], columns["lengths"], strict=True):
            at, to = tokens.index(EOS), 1 if side == "first" else length - 2
            if at != to:
                tokens[at], tokens[to] = tokens[to], tokens[at]
                return

    return change


FAULTS = [
    ("encoded/mono", set_id("tokens", 2, 0, 100_000), "row 2: an id outside"),
    ("encoded/mono", set_id("tokens", 2, 0, -1), "row 2: an id outside"),
    ("encoded/mono", set_id("tokens", 1, 1, BOS), "row 1: <s> or <pad> inside a document"),
    ("encoded/mono", set_id("tokens", 1, 1, PAD), "row 1: <s> or <pad> inside a document"),
    ("encoded/mono", set_id("tokens", 1, 1, EOS), "row 1: a document that does not have one </s>"),
    ("encoded/mono", set_id("tokens", 3, -1, UNK), "row 3: a document that does not have one </s>"),
    ("encoded/mono", empty("tokens", 4), "row 4: a document without text"),
    ("encoded/para", set_id("source", 5, 0, 100_000), "row 5: an id outside .* on the source side"),
    ("encoded/para", set_id("target", 5, 0, -1), "row 5: an id outside .* on the target side"),
    *(
        ("encoded/para", set_id(side, 6, 0, token), f"row 6: <s>, <pad> or </s> on the {side} side")
        for side, token in (("source", BOS), ("target", PAD), ("target", EOS))
    ),
    ("encoded/para", empty("source", 7), "row 7: an empty source side"),
    ("encoded/para", empty("target", 7), "row 7: an empty target side"),
    ("data/mono", set_id("tokens", 8, 3, 100_000), "row 8: an id outside"),
    ("data/mono", set_id("tokens", 8, 3, -1), "row 8: an id outside"),
    ("data/mono", both(set_id("tokens", 4, 3, 100_000), set_id("tokens", 3, 3, PAD)), "row 3: <pad> where text"),
    ("data/mono", set_id("tokens", 9, 0, UNK), "row 9: an item that does not start with <s>"),
    ("data/mono", set_id("tokens", 9, 3, BOS), "row 9: an item that does not start with <s>"),
    ("data/mono", set_id("tokens", 9, 3, PAD), "row 9: <pad> where text belongs"),
    ("data/mono", set_id("lengths", 10, 0, 2), "row 10: lengths that the row cannot have"),
    ("data/mono", set_id("lengths", 10, 0, ROW + 1), "row 10: lengths that the row cannot have"),
    ("data/mono", empty("lengths", 11), "row 11: an impossible number of items"),
    ("data/mono", two_items, "row 11: an impossible number of items"),
    ("data/para", one_token_at_the_end, "row 19: lengths that the row cannot have"),
    ("data/para", no_text("first"), "an item that does not start with <s>, end with </s>, or have the separators"),
    ("data/para", no_text("second"), "an item that does not start with <s>, end with </s>, or have the separators"),
    ("data/mono", set_id("languages", 12, 0, 2), r"row 12: a language index outside \[0, 2\)"),
    ("data/mono", set_id("languages", 12, 0, -1), r"row 12: a language index outside \[0, 2\)"),
    ("data/para", drop("lengths", 13), "row 13: <pad> where text belongs, or text after the last item"),
    ("data/para", drop("languages", 14), "row 14: not one language per side"),
]


@pytest.mark.parametrize(("folder", "change", "words"), FAULTS)
def test_one_wrong_value_with_the_right_checksum(copied: Path, folder: str, change: Change, words: str) -> None:
    rewrite(copied / folder, change)
    with pytest.raises(ValueError, match=words) as error:
        run(VerifyConfig(copied / folder))
    assert read_manifest(copied / folder).shards[0].name in str(error.value)


@pytest.mark.parametrize(
    ("folder", "column", "row"),
    [
        ("encoded/mono", "tokens", 2),
        ("encoded/para", "source", 5),
        ("encoded/para", "target", 5),
        ("data/mono", "tokens", 8),
        ("data/para", "tokens", 8),
    ],
)
def test_the_last_id_that_text_may_have(copied: Path, folder: str, column: str, row: int) -> None:
    """The last id of all, `<mask>`, is in no text; the one before is a piece."""
    size = read_manifest(copied / folder).vocabulary_size

    def to(value: int) -> Change:
        def change(columns: dict[str, list]) -> None:
            tokens = columns[column][row]
            tokens[next(i for i, token in enumerate(tokens) if token > UNK)] = value

        return change

    for path in (copied / folder / "tasks").iterdir():
        path.unlink()  # they have checksums of what is changed here
    before = {path: path.read_bytes() for path in (copied / folder).rglob("*") if path.is_file()}
    rewrite(copied / folder, to(size - 1))
    with pytest.raises(ValueError, match=rf"row {row}: an id outside \[0, {size - 1}\)"):
        run(VerifyConfig(copied / folder))
    for path, data in before.items():
        path.write_bytes(data)
    rewrite(copied / folder, to(size - 2))
    if folder.startswith("data"):
        index_again(copied / folder)
    run(VerifyConfig(copied / folder))


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


def of(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, **changes)


def setting(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, settings=manifest.settings | changes)


def swapped(manifest: Manifest) -> Manifest:
    first, second, *others = manifest.shards
    return replace(manifest, shards=(second, first, *others))


def counted(name: str, key: str, by: float = 1) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        counts = manifest.counts["by_language"][name] if name else manifest.counts
        counts[key] += by
        return manifest

    return change


def uncounted(name: str) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        del manifest.counts["by_language"][name]
        return manifest

    return change


def more_rows(manifest: Manifest) -> Manifest:
    first, *others = manifest.shards
    return replace(manifest, shards=(replace(first, rows=first.rows + 1), *others))


FORGED = [
    ("data/mono", of(stage="vocab"), "was written by stage vocab: verify reads what encode or mix wrote"),
    ("encoded/mono", more_rows, r"de/000-00000.arrow has \d+ rows, the manifest says \d+"),
    ("data/mono", of(languages=("en", "de")), "has the languages en de, not de en"),
    ("data/para", of(languages=("en", "de")), "has the languages en de, not de en"),
    ("data/mono", swapped, "lists the shards in another order"),
    ("data/mono", setting(alpha=0.5), "has other amounts than its alpha 0.5 samples"),
    ("data/mono", counted("", "sampled"), "has other amounts than its alpha .* samples"),
    ("data/mono", setting(seed=1), "settings.json is damaged, or has other settings than"),
    ("data/para", setting(seed=1), "settings.json is damaged, or has other settings than"),
    ("data/mono", of(vocabulary_size=999), "has a vocabulary of 999 ids, but"),
    ("data/mono", of(vocabulary_sha256="0" * 64), "is not the vocabulary that"),
    ("data/mono", counted("en", "used"), "counts other items of a language, or other tokens"),
    ("data/mono", counted("", "tokens"), "counts other items of a language, or other tokens"),
    ("data/para", counted("", "examples"), "counts other items of a language, or other tokens"),
    ("data/mono", counted("en", "available"), "the shares in .* do not follow"),
    ("data/mono", counted("en", "repeat", 0.1), "the shares in .* do not follow"),
    ("data/mono", counted("", "fill", 0.1), "the shares in .* do not follow"),
    ("encoded/mono", of(languages=("en", "de")), "has the languages en de, not de en"),
    ("encoded/mono", swapped, "lists the shards in another order"),
    ("encoded/mono", of(vocabulary_sha256="0" * 64), "names two vocabularies"),
    ("encoded/mono", counted("en", "tokens"), "the tokens of en counted in"),
    ("encoded/para", counted("en-de", "unknown"), "the unknown of en-de counted in"),
    (
        "encoded/mono",
        counted("en", "documents_in"),
        "the documents_in of en in .* are not the sum of those written and dropped",
    ),
    (
        "encoded/mono",
        counted("en", "paragraphs_in"),
        "the paragraphs_in of en in .* not the sum of those written and removed",
    ),
    ("encoded/mono", counted("de", "characters"), "and the markers in tasks disagree about the counts"),
    ("encoded/mono", counted("de", "files"), "files, paragraphs, characters or bytes of de that its text cannot have"),
    ("encoded/para", counted("en-de", "paragraphs", 2), "characters or bytes of en-de that its text cannot have"),
    ("encoded/mono", counted("de", "bytes", -10_000), "characters or bytes of de that its text cannot have"),
    ("encoded/mono", counted("de", "bytes", 10_000), "characters or bytes of de that its text cannot have"),
    ("data/para", counted("en-de", "too_long", -1), "counts text as too long, although this text is cut into rows"),
    ("data/mono", counted("en", "too_long"), "counts text as too long, although this text is cut into rows"),
    ("encoded/mono", uncounted("en"), "lists shards of en but no counts"),
    ("data/para", counted("", "sampled"), "and the markers in tasks disagree about the number of sampled examples"),
]


@pytest.mark.parametrize(("folder", "change", "words"), FORGED)
def test_a_manifest_that_says_something_else(
    copied: Path, folder: str, change: Callable[[Manifest], Manifest], words: str
) -> None:
    path = copied / folder / "manifest.json"
    before = path.read_bytes()
    changed = change(read_manifest(copied / folder))
    write_manifest(copied / folder, changed)
    with pytest.raises(ValueError, match=words):
        run(VerifyConfig(copied / folder))
    assert path.read_bytes() != before
    # without a new checksum nothing reads it at all
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": json.loads(before)["sha256"]}))
    with pytest.raises(ValueError, match=r"its content does not match its checksum.: delete it and give the command"):
        read_manifest(copied / folder)
    path.unlink()
    prepare(copied)
    assert path.read_bytes() == before
    run(VerifyConfig(copied / folder))


def test_pairs_sampled_by_another_alpha(prepared: Path, tmp_path: Path) -> None:
    """Two pairs of very different sizes, whose settings and manifest are changed alike."""
    words = [f"w{i}" for i in range(400)]
    for pair, number in (("de-en", 400), ("en-fr", 40)):
        for code in pair.split("-"):
            (tmp_path / f"X.{pair}.{code}").write_text("\n".join(words[:number]) + "\n")
    vocab = prepared / "data" / "vocab"
    encode.run(encode.EncodeConfig(vocab, tmp_path / "encoded", para=tmp_path))
    mix.run(mix.MixConfig(tmp_path / "encoded", vocab, tmp_path / "data", 0, 200, row_tokens=ROW))
    folder = tmp_path / "data" / "para"
    run(VerifyConfig(folder))
    settings = json.loads((folder / "settings.json").read_text())["settings"] | {"alpha": 0.3}
    write_checksummed(folder / "settings.json", {"stage": "mix", "settings": settings})
    write_manifest(folder, replace(read_manifest(folder), settings=settings))
    with pytest.raises(ValueError, match=r"has other amounts than its alpha 0\.3 samples"):
        run(VerifyConfig(folder))


def test_markers_and_settings_that_say_something_else(copied: Path) -> None:
    folder = copied / "data" / "mono"
    stage = Stage(folder, "mix", read_manifest(folder).settings)
    result = stage.read_marker("shard-00001")
    assert result is not None
    result["shard"]["sha256"] = "0" * 64
    stage.write_marker("shard-00001", result)
    with pytest.raises(ValueError, match=r"tasks/shard-00001\.json disagree about 00001\.arrow"):
        run(VerifyConfig(folder))
    (folder / "tasks" / "shard-00001.json").write_bytes(b"")
    with pytest.raises(ValueError, match=r"shard-00001\.json is damaged: delete it and the manifest"):
        run(VerifyConfig(folder))
    (folder / "settings.json").write_bytes(b"")
    with pytest.raises(ValueError, match=r"settings\.json is damaged, or has other settings"):
        run(VerifyConfig(folder))


def test_an_input_without_its_marker(copied: Path) -> None:
    """Where there are others; a folder may have none at all."""
    tasks = copied / "encoded" / "mono" / "tasks"
    (tasks / "de-000.json").unlink()
    with pytest.raises(ValueError, match=r"mono/tasks lacks de-000: delete it and give"):
        run(VerifyConfig(copied / "encoded"))
    shutil.rmtree(tasks)
    run(VerifyConfig(copied / "encoded"))


def test_files_without_a_checksum_fail_and_are_written_again(copied: Path) -> None:
    """`verify` names each; the commands that wrote the folder replace them and do no other work again."""
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    mono = copied / "data" / "mono"
    for name, words in (
        ("tasks/shard-00001.json", r"shard-00001\.json is damaged: delete it and the manifest"),
        ("settings.json", r"settings\.json is damaged, or has other settings"),
        ("manifest.json", r"is not a readable manifest \(its content does not match its checksum"),
    ):
        fields = json.loads((mono / name).read_text())
        del fields["sha256"]
        (mono / name).write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=words):
            run(VerifyConfig(mono))
    times = {path: path.stat().st_mtime_ns for path in copied.rglob("*.arrow")}
    prepare(copied)
    del times[mono / "00001.arrow"]
    assert {path: path.stat().st_mtime_ns for path in times} == times, "work was done again"
    assert {path: path.read_bytes() for path in before} == before


def test_rows_without_an_index_fail(copied: Path) -> None:
    index = copied / "data" / "mono" / "00001.index"
    before = index.read_bytes()
    index.unlink()
    with pytest.raises(ValueError, match=r"00001\.index is missing: give the command that wrote .* again"):
        run(VerifyConfig(copied / "data"))
    index.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"00001\.index (is not the index of 00001\.arrow|and .* disagree)"):
        run(VerifyConfig(copied / "data"))
    prepare(copied)
    assert index.read_bytes() == before
