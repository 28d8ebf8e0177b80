"""Stage encode: the ids are the text's, counts add up whatever the damage, and the bytes depend on the input alone."""

import itertools
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_prep.encode.encode import EncodeConfig, _plans, _run_plan, run
from data_prep.encode.encode_input import EncodeTask, discard_changed, encode_block
from data_prep.encode.shared_work import SharedWork
from data_prep.encode.token_ids import _batches
from data_prep.readers import READERS, find_documents
from data_prep.store import Stage
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocab import run as train
from tests.rows import train_vocabulary
from xlme_ds.data.schema import DOCUMENTS, EOS, PAIRS, read_manifest
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.io.files import file_sha256

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def records(folder: Path, language: str) -> list[list[list[int]]]:
    """Every record of a language or pair as its columns' ids, after checking shards against the manifest."""
    manifest = read_manifest(folder)
    schema = DOCUMENTS if folder.name == "mono" else PAIRS
    assert [shard.name for shard in manifest.shards] == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.arrow")
    )
    found = []
    for shard in manifest.shards:
        path = folder / shard.name
        assert (file_sha256(path), path.stat().st_size) == (shard.sha256, shard.bytes)
        table = pa.ipc.open_file(path).read_all()
        assert table.schema == schema
        assert table.num_rows == shard.rows > 0
        if shard.name.startswith(f"{language}/"):
            found += [list(row.values()) for row in table.to_pylist()]
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> tuple[Path, Path]:
    mono, para = tmp_path / "mono_in", tmp_path / "para_in"
    mono.mkdir()
    para.mkdir()
    (mono / "en.txt").write_text(f"\n{sentences[0]}\nTwo.\n\n\n{sentences[0]}\n\n\u200b\n")
    (mono / "de.txt.xz").write_bytes(lzma.compress("ᚠ ".encode() + sentences[1].encode("latin-1") + b"\r\n\x00\n"))
    (mono / "fr.txt").write_bytes(b"")
    (para / "X.de-en.de").write_text(f"{sentences[1]}\n\neins\n{sentences[1]}\n")
    (para / "X.de-en.en").write_text(f"{sentences[0]}\none\none\n{sentences[0] * 20}\n")
    return mono, para


def test_ids_are_those_of_the_text(
    corpus: tuple[Path, Path], vocab: Path, tmp_path: Path, sentences: list[str]
) -> None:
    run(EncodeConfig(vocab, tmp_path / "out", mono=corpus[0], para=corpus[1], max_pair_tokens=100))
    vocabulary = Vocabulary(vocab)
    ids = [vocabulary.encode(sentence).tolist() for sentence in sentences]
    mono = records(tmp_path / "out" / "mono", "en")
    assert mono == [[[*ids[0], *vocabulary.encode("Two.").tolist(), EOS]], [[*ids[0], EOS]]]
    para = records(tmp_path / "out" / "para", "en-de")
    assert para == [[ids[0], ids[1]], [vocabulary.encode("one").tolist(), vocabulary.encode("eins").tolist()]]


def test_everything_is_counted(
    corpus: tuple[Path, Path],
    vocab: Path,
    tmp_path: Path,
    sentences: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The longest pair that stays has just as many tokens as a pair may have."""
    longest = sum(len(Vocabulary(vocab).encode(sentence)) for sentence in sentences[:2])
    run(EncodeConfig(vocab, tmp_path / "out", mono=corpus[0], para=corpus[1], max_pair_tokens=longest))
    printed = capsys.readouterr()
    manifest = read_manifest(tmp_path / "out" / "mono")
    tokens = sum(len(row[0]) for code in ("de", "en") for row in records(tmp_path / "out" / "mono", code))
    assert f"{tmp_path}/out/mono: 3 inputs, {tokens:,} tokens\n" in printed.out
    assert [line for line in printed.err.splitlines() if "gave no text" in line] == [
        f"warning: {corpus[0]}/fr.txt gave no text: see its counts in the manifest"
    ]
    assert manifest.languages == ("de", "en", "fr")
    assert manifest.vocabulary_sha256 == file_sha256(vocab / "sentencepiece.model")
    english, german, french = (manifest.counts["by_language"][code] for code in ("en", "de", "fr"))
    written = [sentences[0], "Two.", sentences[0]]
    assert english["dropped"] == {"no_token": 1}  # a zero-width space alone
    assert (english["documents_in"], english["documents"], english["paragraphs"]) == (3, 2, 3)
    assert english["characters"] == english["bytes"] == sum(map(len, written))
    assert english["tokens"] == sum(len(row[0]) for row in records(tmp_path / "out" / "mono", "en"))
    assert german["repaired"] == {"carriage_return": 1, "control_character": 1, "invalid_utf8": 1}
    assert german["unknown"] == 1  # the rune
    text = f"ᚠ {sentences[1]}".replace("ü", "\ufffd")
    assert (german["characters"], german["bytes"]) == (len(text), len(text.encode()))
    assert (french["files"], french["documents_in"], french["documents"]) == (1, 0, 0)
    pairs = read_manifest(tmp_path / "out" / "para").counts["by_language"]["en-de"]
    assert pairs["dropped"] == {"empty_side": 1, "too_long": 1}
    assert (pairs["pairs_in"], pairs["pairs"], pairs["paragraphs"]) == (4, 2, 4)


def test_shards_end_after_their_bytes(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    mono = tmp_path / "in"
    mono.mkdir()
    (mono / "en.txt").write_text(f"{sentences[0]}\n\n" * 10_000)
    run(EncodeConfig(vocab, tmp_path / "one", mono=mono))
    run(EncodeConfig(vocab, tmp_path / "many", mono=mono, block_bytes=200_000))
    one, many = (read_manifest(tmp_path / name / "mono") for name in ("one", "many"))
    assert (len(one.shards), one.rows) == (1, 10_000)
    assert len(many.shards) > 2
    assert records(tmp_path / "one" / "mono", "en") == records(tmp_path / "many" / "mono", "en")
    assert one.counts == many.counts


def test_two_files_of_one_language_are_joined(
    vocab: Path, tmp_path: Path, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("zh_CN.txt", "zh-Hans.txt"):
        (tmp_path / name).write_text(sentences[4])
    run(EncodeConfig(vocab, tmp_path / "out", mono=tmp_path))
    assert "mono: 2 inputs, " in capsys.readouterr().out
    counts = read_manifest(tmp_path / "out" / "mono").counts["by_language"]
    assert (list(counts), counts["zh-Hans"]["files"], counts["zh-Hans"]["documents"]) == (["zh-Hans"], 2, 2)
    assert len(records(tmp_path / "out" / "mono", "zh-Hans")) == 2


def test_changed_settings_are_refused(corpus: tuple[Path, Path], vocab: Path, tmp_path: Path) -> None:
    config = EncodeConfig(vocab, tmp_path / "out", mono=corpus[0], para=corpus[1])
    run(config)
    before = tree(config.out)
    with pytest.raises(ValueError, match=r"max_pair_tokens was 509, now 60\): choose another output folder, or delete"):
        run(replace(config, max_pair_tokens=60))
    text = (corpus[0] / "en.txt").read_text()
    for changed in ("changed", f"{text}One line more.\n"):
        (corpus[0] / "en.txt").write_text(changed)
        told = rf"en\.txt had \d+ bytes when it was encoded into .*, now it has {len(changed.encode())}: restore it"
        with pytest.raises(ValueError, match=told):
            run(config)
    (corpus[0] / "en.txt").write_text(text)
    for code in ("de", "en"):
        path = corpus[1] / f"X.de-en.{code}"
        text = path.read_text()
        path.write_text(text[1:])
        with pytest.raises(ValueError, match=rf"X\.de-en\.{code} had \d+ bytes when it was encoded into"):
            run(config)
        path.write_text(text)
    assert tree(config.out) == before


def test_a_relaunch_does_only_what_is_missing(corpus: tuple[Path, Path], vocab: Path, tmp_path: Path) -> None:
    config = EncodeConfig(vocab, tmp_path / "out", mono=corpus[0], para=corpus[1])
    run(config)
    before = tree(config.out)
    folder = config.out / "mono"
    (folder / "manifest.json").unlink()
    (folder / "tasks" / "de-000.json").unlink()
    (folder / "de" / ".00000.arrow.1.tmp").write_text("left by a killed run")
    untouched = (folder / "en" / "000-00000.arrow").stat().st_mtime_ns
    run(config)
    assert tree(config.out) == before
    assert (folder / "en" / "000-00000.arrow").stat().st_mtime_ns == untouched
    (folder / "manifest.json").unlink()
    (folder / "en" / "000-00000.arrow").write_bytes(b"short")  # lost in a crash of the file system
    run(config)
    assert tree(config.out) == before


def test_a_pair_needs_tokens_on_both_sides(vocab: Path, tmp_path: Path) -> None:
    """A zero-width space is text that has none."""
    for code, lines in (("de", "\u200b\nalle\nalle\n\u200b\n"), ("en", "all\n\u200b\nall\n\u200b\n")):
        (tmp_path / f"X.de-en.{code}").write_text(lines)
    run(EncodeConfig(vocab, tmp_path / "out", para=tmp_path))
    counts = read_manifest(tmp_path / "out/para").counts["by_language"]["en-de"]
    assert (counts["pairs"], counts["dropped"]) == (1, {"no_token": 3})


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> tuple[Path, Path]:
    mono, para = tmp_path_factory.mktemp("mono"), tmp_path_factory.mktemp("para")
    for number, language in enumerate(("en", "de", "fr", "ru", "ja", "ur", "af", "sv")):
        sentence = sentences[number % 6]
        text = "".join(f"{sentence} {i}\n" + "\n" * (i % 7 == 0) for i in range(2_000 + 1_000 * number))
        (mono / f"{language}.txt.xz").write_bytes(lzma.compress(text.encode()))
    for language, sentence in zip(("de", "fr", "ru"), sentences[1:4], strict=True):
        (para / f"X.en-{language}.en").write_text(f"{sentences[0]}\n" * 500)
        (para / f"X.en-{language}.{language}").write_text(f"{sentence}\n" * 500)
    return mono, para


def test_bytes_do_not_depend_on_processes_ranks_or_a_kill(
    larger: tuple[Path, Path],
    vocab: Path,
    tmp_path: Path,
    data_prep: Run,
    start_data_prep: Callable[..., "subprocess.Popen[str]"],
) -> None:
    flags = ["encode", "--mono", larger[0], "--para", larger[1], "--vocab", vocab, "--block-bytes", 100_000, "--out"]
    run(EncodeConfig(vocab, tmp_path / "one", mono=larger[0], para=larger[1], block_bytes=100_000))
    expected = tree(tmp_path / "one")
    assert len(expected) > 20

    done = data_prep(*flags, tmp_path / "two", "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "two") == expected

    killed = start_data_prep(*flags, tmp_path / "killed", "--processes", 2)
    while not list((tmp_path / "killed").glob("mono/tasks/*.json")):
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "killed" / "mono" / "manifest.json").exists()
    done = data_prep(*flags, tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "killed") == expected

    done = data_prep(*flags, tmp_path / "ranks", ranks=2)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "ranks") == expected


@pytest.mark.parametrize("how", ["process", "processes", "ranks"])
def test_a_truncated_file_ends_all_with_one_line(
    larger: tuple[Path, Path], vocab: Path, tmp_path: Path, data_prep: Run, how: str
) -> None:
    for path in larger[0].iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[: len(data) // 2] if path.name == "ja.txt.xz" else data)
    out = tmp_path / "out"
    flags = ["encode", "--mono", tmp_path, "--vocab", vocab, "--out", out, "--block-bytes", 20_000]
    flags += ["--processes", 2] if how == "processes" else []
    done = data_prep(*flags, ranks=2 if how == "ranks" else 0)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2
    assert len(errors) == 1
    assert errors[0].startswith(f"xlme prep encode: error: {tmp_path / 'ja.txt.xz'} cannot be read after line ")
    assert "Traceback" not in done.stderr
    assert not list(out.rglob("ja/*"))
    assert not (out / "mono" / "manifest.json").exists()


def test_a_bad_name_ends_before_any_work(tmp_path: Path, vocab: Path, data_prep: Run) -> None:
    (tmp_path / "de.txt").write_text("a")
    (tmp_path / "de_rom.txt").write_text("a")
    done = data_prep("encode", "--mono", tmp_path, "--vocab", vocab, "--out", tmp_path / "out", ranks=2)
    assert done.returncode == 2
    assert done.stderr.count("xlme prep encode: error:") == 1
    assert f"{tmp_path / 'de_rom.txt'}: unknown language code 'de_rom': did you mean 'de'?" in done.stderr
    assert not (tmp_path / "out").exists()


def test_no_file_is_removed_that_encode_did_not_write(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    """An output folder with others' files in it keeps them; one that has the input is refused."""
    mine = [tmp_path / "out/mono" / name for name in ("en/000-part.txt", "work-notes/a.txt", "b/.notes.tmp")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sentences[0])
    (tmp_path / "in").mkdir()
    (tmp_path / "in/en.txt").write_text(sentences[0])
    for _ in range(2):
        run(EncodeConfig(vocab, tmp_path / "out", mono=tmp_path / "in"))
        assert all(path.read_text() == sentences[0] for path in mine)
        (tmp_path / "out/mono/manifest.json").unlink()
        next((tmp_path / "out/mono/en").glob("*.arrow")).unlink()
    (tmp_path / "c.toml").write_text(
        f'name = "c"\nwhere = "{tmp_path}/out/mono"\nformat = "lines"\nfiles = "{{lang}}/*.txt"\nlanguages = "any"\n'
    )
    (tmp_path / "link").symlink_to(tmp_path / "out", target_is_directory=True)
    for out in ("out", "link"):
        with pytest.raises(ValueError, match=rf"out/mono/en/000-part\.txt is in .*/{out}/mono, where the shards would"):
            run(EncodeConfig(vocab, tmp_path / out, corpus=(str(tmp_path / "c.toml"),)))
    with pytest.raises(ValueError, match=r"in/en\.txt is in .*/in: choose another --out"):
        run(EncodeConfig(vocab, tmp_path / "in", mono=tmp_path / "in"))
    assert not (tmp_path / "in/mono").exists()


def test_inputs_without_text_are_refused(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    text = tmp_path / "in/en.txt"
    text.parent.mkdir()
    text.touch()
    config = EncodeConfig(vocab, tmp_path / "out", mono=text.parent)
    with pytest.raises(ValueError, match=r"^all inputs are empty, such as .*/in/en\.txt: name files that have text$"):
        run(config)
    assert not (tmp_path / "out").exists()
    text.write_text(sentences[0])
    run(config)
    assert read_manifest(tmp_path / "out/mono").rows == 1
    text.unlink()
    os.mkfifo(text)  # whose size is 0, whatever it holds
    writer = Thread(target=text.write_text, args=(sentences[0],))
    writer.start()
    run(replace(config, out=tmp_path / "of a pipe"))
    writer.join()
    assert read_manifest(tmp_path / "of a pipe/mono").rows == 1


def test_another_vocabulary_in_the_same_place_is_read(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    """Also by a process that has read the one before, under the same path."""
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono/en.txt").write_text(sentences[0])
    place = tmp_path / "vocab"
    place.mkdir()
    train_vocabulary(tmp_path / "other")
    for name, source in (("first", vocab), ("second", tmp_path / "other")):
        shutil.copy(source / "sentencepiece.model", place)
        run(EncodeConfig(place, tmp_path / name, mono=tmp_path / "mono"))
        ids = Vocabulary(source).encode(sentences[0]).tolist()
        assert records(tmp_path / name / "mono", "en") == [[[*ids, EOS]]], name


@pytest.mark.parametrize(
    ("name", "more"), [("sentencepiece.model", b"\n\4\n\2zq"), ("test.txt", b"\nsecond line")], ids=["piece", "line"]
)
def test_files_that_change_after_the_command_began_are_an_error(
    corpus: tuple[Path, Path], vocab: Path, tmp_path: Path, name: str, more: bytes
) -> None:
    """Else the ids would be another vocabulary's than the manifest says, or test lines would be encoded."""
    shutil.copy(vocab / "sentencepiece.model", tmp_path)
    (tmp_path / "test.txt").write_text("one line")
    config = EncodeConfig(tmp_path, tmp_path / "out", mono=corpus[0], without=(tmp_path / "test.txt",))
    size, plans = _plans(config)
    stage, tasks = plans["mono"]
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + more)
    with stage.open(), pytest.raises(ValueError, match="changed since the command began: give the command again"):
        _run_plan(config, "mono", stage, tasks, size)
    assert not (stage.folder / "manifest.json").exists()


def test_text_to_leave_out_is_no_pipe(vocab: Path, tmp_path: Path) -> None:
    """As `<(cut -f1 test.tsv)` is: what is read once would be empty for every process but the first."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/en.txt").write_text("a")
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(b"a\n")
    try:
        with pytest.raises(ValueError, match=rf"/dev/fd/{reading} is a pipe, which can be read once: store its lines"):
            run(EncodeConfig(vocab, tmp_path / "out", mono=tmp_path / "in", without=(Path(f"/dev/fd/{reading}"),)))
    finally:
        os.close(reading)


def test_the_command_line_names_its_stages(data_prep: Run) -> None:
    done = data_prep("encod")
    assert (done.returncode, done.stderr) == (2, "xlme prep: error: there is no stage 'encod': did you mean encode?\n")
    done = data_prep("encode", "--help")
    assert done.returncode == 0
    assert "Worker processes on this machine; the output is the same for any number" in " ".join(
        done.stdout.replace("│", " ").split()
    )


LINES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"", b"\r", b"\xef\xbb\xbf", b"\x00", b" ", "\u200b".encode(), b"</s> <s> <unk>", b"a" * 300]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mono=st.lists(LINES, max_size=30), para=st.lists(st.tuples(LINES, LINES), max_size=15))
def test_any_bytes_are_encoded_and_accounted_for(
    vocab: Path, mono: list[bytes], para: list[tuple[bytes, bytes]]
) -> None:
    assume(b"\n".join(mono) or para)  # empty files alone are refused
    size = Vocabulary(vocab).size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("mono", "para"):
            (folder / kind).mkdir()
        (folder / "mono" / "en.txt").write_bytes(b"\n".join(mono))
        for side in (0, 1):
            text = b"".join(pair[side].replace(b"\n", b"") + b"\n" for pair in para)
            (folder / "para" / f"X.de-en.{('de', 'en')[side]}").write_bytes(text)
        run(EncodeConfig(vocab, folder / "out", mono=folder / "mono", para=folder / "para", max_pair_tokens=50))
        documents, pairs = records(folder / "out" / "mono", "en"), records(folder / "out" / "para", "en-de")
        counts = json.loads((folder / "out" / "mono" / "manifest.json").read_text())["counts"]["by_language"]["en"]
        pair_counts = json.loads((folder / "out" / "para" / "manifest.json").read_text())["counts"]["by_language"][
            "en-de"
        ]
    assert counts["documents_in"] == counts["documents"] + sum(counts["dropped"].values())
    assert counts["documents"] == len(documents)
    assert pair_counts["pairs_in"] == len(para) == len(pairs) + sum(pair_counts["dropped"].values())
    for (document,) in documents:
        assert len(document) > 1
        assert document.index(EOS) == len(document) - 1
    sides = [side for pair in pairs for side in pair]
    assert all(1 <= len(a) + len(b) <= 50 and EOS not in a + b for a, b in pairs)
    ids = np.array(list(itertools.chain(*sides, *(document for (document,) in documents))), np.int64)
    assert ((ids >= EOS) & (ids < size - 1)).all()


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    """One file, many blocks."""
    folder = tmp_path_factory.mktemp("huge")
    text = "".join(f"{sentences[i % 6]} {i}\n" + "\n" * (i % 9 == 0) for i in range(40_000))
    (folder / "en.txt.xz").write_bytes(lzma.compress(text.encode(), preset=1))
    return folder


def test_one_file_is_shared_by_all_processes_and_ranks(
    huge: Path, vocab: Path, tmp_path: Path, data_prep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(EncodeConfig(vocab, tmp_path / "one", mono=huge, block_bytes=50_000))
    expected = tree(tmp_path / "one")
    assert len(expected) > 60
    helped: list[int] = []
    monkeypatch.setattr(
        SharedWork, "offer", lambda shared, *_: helped.append(shared.worker)
    )  # nobody waits where one is alone
    run(EncodeConfig(vocab, tmp_path / "alone", mono=huge, block_bytes=50_000))
    assert set(helped) == {0}
    for name, ranks in (("processes", 0), ("ranks", 2)):
        flags = ["encode", "--mono", huge, "--vocab", vocab, "--block-bytes", 50_000, "--out", tmp_path / name]
        done = data_prep(*flags, "--processes", 3, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert tree(tmp_path / name) == expected


def test_every_rank_encodes_and_begins_with_the_largest_input(
    vocab: Path, tmp_path: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the workers that the ranks are; and, of a process alone, by the order of the inputs' markers, whose files may
    have the same time."""
    (tmp_path / "in").mkdir()
    for code, times in (("de", 1), ("en", 90), ("fr", 10)):
        (tmp_path / "in" / f"{code}.txt").write_text(f"{sentences[0]}\n" * times)
    markers: list[str] = []
    write_marker = Stage.write_marker

    def noted(stage: Stage, name: str, result: dict, flush: bool = False) -> None:
        markers.append(name)
        write_marker(stage, name, result, flush)

    monkeypatch.setattr(Stage, "write_marker", noted)
    run(EncodeConfig(vocab, tmp_path / "alone", mono=tmp_path / "in"))
    assert [name for name in markers if "." not in name] == ["en-000", "fr-000", "de-000"]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("the environment has no mpiexec: install the mpich wheel")
    program = (
        "import os, sys; from data_prep.__main__ import main; from data_prep.encode import encode\n"
        "encode_inputs = encode.encode_inputs\n"
        "def noted(*arguments):\n"
        "    os.write(1, f'{arguments[-1]} '.encode()); encode_inputs(*arguments)\n"
        "encode.encode_inputs = noted; sys.exit(main(['encode', *sys.argv[1:]]))\n"
    )
    flags = ["--mono", tmp_path / "in", "--vocab", vocab, "--out", tmp_path / "ranks"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [mpiexec, "-n", "2", sys.executable, "-c", program, *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and {"0", "1"} < {*done.stdout.split()}, done.stderr
    assert tree(tmp_path / "ranks") == tree(tmp_path / "alone")


def test_a_reader_gives_blocks_to_those_who_wait(tmp_path: Path) -> None:
    folder = SharedWork.begin(tmp_path)
    reader, helper = SharedWork(folder, 0), SharedWork(folder, 1)
    assert (reader.claim("a"), helper.claim("a"), helper.claim("b")) == (True, False, True)
    assert not reader.offer("a", 0, "block")  # nobody waits
    (folder / "waiting" / "1").touch()
    assert [reader.offer("a", number, f"block {number}") for number in range(3)] == [True, True, False]
    done: list[tuple[str, int, str]] = []
    assert helper.take(lambda *block: done.append(block))
    assert reader.drain("a", lambda *block: done.append(block))
    assert done == [("a", 0, "block 0"), ("a", 1, "block 1")]
    reader.finish("a")
    helper.take_until_all_finished(1, lambda *block: done.append(block))  # all inputs are finished
    with pytest.raises(KeyError), helper.abort_on_error():
        raise KeyError("a mistake")
    assert reader.failed
    assert not reader.drain("a", lambda *block: done.append(block))


def test_a_reader_waits_for_the_blocks_that_others_encode(tmp_path: Path) -> None:
    folder = SharedWork.begin(tmp_path)
    reader, helper = SharedWork(folder, 0), SharedWork(folder, 1)
    (folder / "waiting" / "1").touch()
    assert reader.offer("a", 0, "block")
    back = Thread(target=reader.drain, args=("a", lambda *_: None))

    def encode(*_: object) -> None:
        back.start()
        back.join(0.2)
        assert back.is_alive()

    assert helper.take(encode)
    back.join()


def test_a_block_that_fails_is_not_taken_for_encoded(tmp_path: Path) -> None:
    """Else its reader would miss the block's result, and hide the error by one of its own."""
    folder = SharedWork.begin(tmp_path)
    reader, helper = SharedWork(folder, 0), SharedWork(folder, 1)
    (folder / "waiting" / "1").touch()
    assert reader.offer("a", 0, "block")
    drained: list[bool] = []
    back = Thread(target=lambda: drained.append(reader.drain("a", lambda *_: None)))

    def encode(*_: object) -> None:
        raise KeyError("a mistake")

    with pytest.raises(KeyError), helper.abort_on_error():
        try:
            helper.take(encode)
        finally:
            back.start()
            back.join(0.2)
            assert back.is_alive()
    back.join()
    assert drained == [False]


def test_finished_blocks_of_a_killed_run_are_kept(
    huge: Path, vocab: Path, tmp_path: Path, start_data_prep: Callable[..., "subprocess.Popen[str]"]
) -> None:
    run(EncodeConfig(vocab, tmp_path / "one", mono=huge, block_bytes=50_000))
    out = tmp_path / "killed"
    flags = ["encode", "--mono", huge, "--vocab", vocab, "--block-bytes", 50_000, "--processes", 2, "--out", out]
    killed = start_data_prep(*flags)
    while not all((out / "mono" / "tasks" / f"en-000.0000{number}.json").exists() for number in (0, 7)):
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    assert not (out / "mono" / "manifest.json").exists()
    first = out / "mono" / "en" / "000-00000.arrow"
    before = first.stat().st_mtime_ns
    run(EncodeConfig(vocab, out, mono=huge, block_bytes=50_000))
    assert sorted(tree(out)) == sorted(tree(tmp_path / "one"))
    assert tree(out) == tree(tmp_path / "one")
    assert first.stat().st_mtime_ns == before


def test_an_input_that_changed_behind_a_kill_is_read_anew(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    for name, last in (("in", "one"), ("changed", "another")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "en.txt").write_text(f"{sentences[0]}\n\n" * 50 + last)
    config = EncodeConfig(vocab, tmp_path / "out", mono=tmp_path / "in", block_bytes=500)
    stage = _plans(config)[1]["mono"][0]
    task = EncodeTask(find_documents(tmp_path / "in")[0], 0)
    (config.out / "mono" / "tasks").mkdir(parents=True)
    stage.write_marker(f"{task.name}.begun", {"inputs": task.source.files})
    encode_block(stage, task, Vocabulary(vocab), 0, next(READERS[task.source.format].blocks(task.source, 500)))
    assert stage.read_marker(task.block_name(0))
    discard_changed(stage, [task])
    assert stage.read_marker(task.block_name(0))  # the same input
    run(replace(config, mono=tmp_path / "changed"))
    run(replace(config, mono=tmp_path / "changed", out=tmp_path / "expected"))
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_a_small_input_costs_little_however_many_there_are(
    vocab: Path, tmp_path: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are listed as often, else time grows with the square; an input waits for the disk once, for its shard."""
    listed: list[str] = []
    synced: list[int] = []
    scandir, fsync = os.scandir, os.fsync

    def counted(path: str = ".") -> object:
        listed.append(str(path))
        return scandir(path)

    def waited(descriptor: int) -> None:
        synced.append(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "scandir", counted)
    monkeypatch.setattr(os, "fsync", waited)
    often, waits = [], []
    for inputs in (2, 12):
        source, out = tmp_path / f"in{inputs}", tmp_path / f"out{inputs}"
        source.mkdir()
        for number in range(inputs):
            for code, sentence in zip(("de", "en"), sentences, strict=False):
                (source / f"C{number}.de-en.{code}").write_text(f"{sentence}\n{number}\n")
        listed.clear()
        synced.clear()
        run(EncodeConfig(vocab, out, para=source))
        assert len(read_manifest(out / "para").shards) == inputs
        often.append(sum(path in (f"{out}/para/tasks", f"{out}/para/en-de") for path in listed))
        waits.append(len(synced))
    assert often[0] == often[1] > 0 and waits[1] - waits[0] == 10


def test_filters_are_counted_by_name_and_nothing_is_lost(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    english, german, russian = sentences[0], sentences[1], sentences[3]
    (tmp_path / "en.txt").write_text(
        f"{english}\nMenu\n\n{russian}\n\nMenu\n\n{english}\nNew and {english}\n\nMenu\n{english}\n"
    )
    (tmp_path / "X.de-en.de").write_text(f"{german}\n{german}\n{german}\nOK\n{german}\n{russian}\n\n")
    (tmp_path / "X.de-en.en").write_text(f"{english}\n{english}\nno\nok\n{german}\n{english}\nb\n")
    shared = f'where = "{tmp_path}"\n'
    (tmp_path / "m.toml").write_text(
        f'name = "m"\n{shared}format = "cc100"\nfiles = "{{lang}}.txt"\nlanguages = ["en"]\n[filters.script]\n'
        "[filters.boilerplate_length]\n[filters.exact_duplicates]\n"
    )
    (tmp_path / "p.toml").write_text(
        f'name = "p"\n{shared}format = "moses"\nfiles = "X.{{src}}-{{tgt}}.{{side}}"\npairs = ["de-en"]\n'
        "[filters.identical_sides]\n[filters.script]\n[filters.length_ratio]\n[filters.exact_duplicates]\n"
    )
    run(EncodeConfig(vocab, tmp_path / "out", corpus=(str(tmp_path / "m.toml"), str(tmp_path / "p.toml"))))
    mono = read_manifest(tmp_path / "out" / "mono").counts["by_language"]["en"]
    assert (mono["documents_in"], mono["documents"]) == (5, 2)
    # of the last document the last paragraph's reason counts
    assert mono["dropped"] == {"boilerplate_length": 1, "exact_duplicates": 1, "script": 1}
    assert mono["removed"] == {"boilerplate_length": 3, "exact_duplicates": 2, "script": 1}
    assert (mono["paragraphs_in"], mono["paragraphs"]) == (8, 2)
    para = read_manifest(tmp_path / "out" / "para")
    counts = para.counts["by_language"]["en-de"]
    expected = {"empty_side": 1, "exact_duplicates": 1, "identical_sides": 2, "length_ratio": 1, "script": 1}
    assert (counts["pairs_in"], counts["pairs"], counts["dropped"]) == (7, 1, expected)
    assert para.settings["p.filters"] == ["identical_sides", "script", "length_ratio", "exact_duplicates"]
    assert str(tmp_path) not in json.dumps(para.settings)
    changed = (tmp_path / "p.toml").read_text() + "[filters.length]\nmax_tokens = 5\n"
    (tmp_path / "p.toml").write_text(changed)
    with pytest.raises(ValueError, match=r"p\.filters was .* now .*; p\.length was null, now .*max_tokens"):
        run(EncodeConfig(vocab, tmp_path / "out", corpus=(str(tmp_path / "p.toml"),)))


def test_lines_that_a_filter_drops_count_where_text_is_doubted(
    vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line in twenty has a control character, which is little; of the four that stay it would be much."""
    (tmp_path / "en.txt").write_text("All hu\x01man beings\n" + "All human beings are equal\n" * 3 + "All\n" * 16)
    text = f'name = "x"\nwhere = "{tmp_path}"\nformat = "cc100"\nfiles = "{{lang}}.txt"\nlanguages = ["en"]\n'
    (tmp_path / "x.toml").write_text(text + "[filters.length]\nmin_characters = 10\n")
    run(EncodeConfig(vocab, tmp_path / "out", corpus=(str(tmp_path / "x.toml"),)))
    counts = read_manifest(tmp_path / "out" / "mono").counts["by_language"]["en"]
    assert (counts["paragraphs_in"], counts["paragraphs"], counts["repaired"]) == (20, 4, {"control_character": 1})
    assert "control characters" not in capsys.readouterr().err


def test_text_that_is_hardly_what_it_should_be_is_named(
    vocab: Path, tmp_path: Path, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Other encodings, compressed data and a script that the vocabulary lacks; by encode and by vocab. Not so real
    text."""
    mono, para = tmp_path / "mono", tmp_path / "para"
    mono.mkdir()
    para.mkdir()
    lines = ["\n".join(f"{sentence} {i}" for i in range(400)) for sentence in sentences]
    (mono / "de.txt").write_text(lines[1], encoding="latin-1")
    (mono / "ru.txt").write_text(lines[3], encoding="utf-16")
    (mono / "fr.txt").write_bytes(lzma.compress("".join(f"{i * 7919 % 10_007} " for i in range(50_000)).encode()))
    (mono / "el.txt").write_text("Όλοι οι άνθρωποι γεννιούνται ελεύθεροι\n" * 40)
    (mono / "en.txt").write_bytes(lines[0].encode() + b"\nna\xefve\x01\r\n")  # one line in 400
    (mono / "ur.txt").write_text(lines[5].replace("\n", "\r\n"))
    (mono / "ar.txt").write_text(lines[5].replace("\n", "\r"))
    (para / "X.de-en.de").write_text(lines[1], encoding="latin-1")
    (para / "X.de-en.en").write_text(lines[0])
    (para / "X.en-ru.en").write_text(lines[0])
    (para / "X.en-ru.ru").write_text(lines[3])
    (para / "X.en-fr.en").write_text(lines[0])
    few = [sentences[2].encode() + b"\xff" * (i < 12) for i in range(400)]  # in 3% of the pairs, so 1.5% of the lines
    (para / "X.en-fr.fr").write_bytes(b"\n".join(few))
    run(EncodeConfig(vocab, tmp_path / "out", mono=mono, para=para))
    told = capsys.readouterr().err
    encoding, pair = "of its lines have bytes that are no UTF-8", f"{para / 'X.de-en.de'} and {para / 'X.de-en.en'}"
    for words in (
        f"warning: {mono / 'de.txt'}: 100% {encoding}: is it in another encoding, or compressed?",
        f"warning: {mono / 'ru.txt'}: 100% of its lines have control characters: is it UTF-16, or no text?",
        f"warning: {mono / 'ar.txt'}: 100% of its lines have carriage returns inside: should these end lines",
        f"% {encoding}",
        f"warning: {pair}: 50% {encoding}",
    ):
        assert words in told
    assert re.search(rf"{mono}/fr\.txt: (9\d|100)% {encoding}", told)
    unknown = re.search(rf"{mono}/el\.txt: (\d+)% of its tokens are <unk>: does the vocabulary have its script", told)
    counts = read_manifest(tmp_path / "out" / "mono").counts["by_language"]["el"]
    assert unknown and int(unknown[1]) == round(100 * counts["unknown"] / counts["tokens"]) > 30
    assert not any(name in told for name in ("en.txt", "ur.txt", "X.en-ru", "X.en-fr"))
    train(VocabConfig(tmp_path / "vocab", mono=mono, para=para, size=500, sentences=3000))
    told = capsys.readouterr().err
    assert all(
        f"warning: {name}" in told
        for name in (mono / "de.txt", mono / "ru.txt", mono / "fr.txt", mono / "ar.txt", pair)
    )
    assert not any(name in told for name in ("en.txt", "ur.txt", "el.txt", "X.en-ru", "X.en-fr"))


def test_a_row_of_a_table_is_one_line(vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 40 rows 16 have a control character, so 40%. Where a column filter leaves ten records unread of which none or
    all have one, the share is that of the others: 16 of 30."""
    rows = [f"All{chr(1) * (i < 16)} human beings {i}\tAlle Menschen {i}" for i in range(40)]
    (tmp_path / "de-en.tsv").write_text("".join(f"{row}\n" for row in rows))
    records = [dict(zip(("en", "de"), row.split("\t"), strict=True)) | {"p": i} for i, row in enumerate(rows)]
    (tmp_path / "de-en.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    text = f'name = "x"\nwhere = "{tmp_path}"\npairs = ["de-en"]\n'
    table = text + 'format = "tsv"\nfiles = "{src}-{tgt}.tsv"\ncolumns = {source = 2, target = 1}\n'
    pairs = text + 'format = "jsonl_pairs"\nfiles = "{src}-{tgt}.jsonl"\ncolumns = {source = "de", target = "en"}\n'
    pairs += "[filters.column.p]\nmax = 29\n"
    for description, share in ((table, "40%"), (pairs, "53%")):
        (tmp_path / "x.toml").write_text(description)
        told = rf"de-en\.\w+: {share} of its lines have control characters"
        run(EncodeConfig(vocab, tmp_path / f"out of {share}", corpus=(str(tmp_path / "x.toml"),)))
        assert re.search(told, capsys.readouterr().err)
        train(VocabConfig(tmp_path / f"vocab of {share}", corpus=(str(tmp_path / "x.toml"),), size=60))
        assert re.search(told, capsys.readouterr().err)


def test_pairs_are_encoded_as_many_at_once_as_are_allowed() -> None:
    """Four thousand, or as many as have a million characters on both sides together."""
    short, long = ("a", "b", None), ("a" * 300_000, "b" * 200_000, None)
    assert list(map(len, _batches([short] * 9_001))) == [4_000, 4_000, 1_001]
    assert list(map(len, _batches([long] * 5))) == [2, 2, 1]
    assert list(map(len, _batches([long, short, long, short]))) == [3, 1]
    assert list(_batches([])) == []
