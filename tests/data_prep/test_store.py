"""The folders that stages write: full disks, lost and damaged files, two processes at once, and errors in words."""

import errno
import fcntl
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.encode import encode
from data_prep.encode.shared_work import SharedWork
from data_prep.inspect import stats
from data_prep.mix import mix
from data_prep.mix.encoded import index_batches
from data_prep.parallel import MachineError, RetryError, UserError, user_facing_error
from data_prep.readers import find_pairs
from data_prep.readers.corpus_files import CorpusPath, list_folder, read_decompressed
from data_prep.readers.reader import TextBlock
from data_prep.store import Stage, new_file, write_file
from data_prep.vocab import vocab, vocap
from xlme_ds.data.schema import Manifest, write_manifest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Corpus:
    """Text in a folder: English with duplicates that are to be removed, German and a pair without."""

    folder: Path
    vocab: Path

    @property
    def description(self) -> str:
        return str(self.folder / "english.toml")

    def encode(self, out: Path) -> None:
        text = {"mono": self.folder / "mono", "para": self.folder / "para", "corpus": (self.description,)}
        encode.run(encode.EncodeConfig(self.vocab, out, max_pair_tokens=21, block_bytes=1_500, **text))

    def mix(self, out: Path) -> None:
        mix.run(mix.MixConfig(self.folder / "encoded", self.vocab, out, 90, 40, row_tokens=24, rows_per_shard=30))

    def stats(self, out: Path) -> None:
        stats.run(stats.StatsConfig(self.folder / "encoded", self.folder / "mixed", out))

    def train(self, out: Path) -> None:
        vocab.run(vocab.VocabConfig(out, mono=self.folder / "mono", size=50, sentences=200, character_coverage=1.0))

    def vocap(self, out: Path) -> None:
        sizes = {"size": 40, "step": 5, "largest": 40, "shrink": 0.7, "character_coverage": 1.0}
        vocap.run(vocap.VocapConfig(out=out, mono=self.folder / "mono", **sizes))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, sentences: list[str], vocab: Path) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("mono", "para", "english"):
        (folder / name).mkdir()
    words = " ".join(sentences[:2]).split()
    turned = [" ".join(words[i % len(words) :][:7]) for i in range(60)]
    (folder / "mono" / "de.txt").write_text("\n\n".join(turned), encoding="utf-8")
    (folder / "english" / "en.txt").write_text("\n\n".join([*turned[:40], "New.", *turned[::-1]]), encoding="utf-8")
    for code, side in (("en", words * 3), ("de", words[::-1] * 3)):
        (folder / "para" / f"X.de-en.{code}").write_text("\n".join(side) + "\n", encoding="utf-8")
    (folder / "english.toml").write_text(
        f'name = "e"\nwhere = "{folder / "english"}"\nformat = "cc100"\nfiles = "{{lang}}.txt"\nlanguages = ["en"]\n'
        "[filters.exact_duplicates]\n"
    )
    made = Corpus(folder, vocab)
    made.encode(folder / "encoded")
    made.mix(folder / "mixed")
    return made


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may become larger: a write over the end is short, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("stage", ["train", "vocap", "encode", "mix"])
def test_a_file_that_cannot_grow_is_told_and_the_same_command_goes_on(
    corpus: Corpus, tmp_path: Path, stage: str
) -> None:
    run = getattr(corpus, stage)
    run(tmp_path / "expected")
    expected = tree(tmp_path / "expected")
    sizes = sorted({len(data) for data in expected.values()} - {0})
    for limit in sizes[:: max(1, len(sizes) // (3 if stage == "vocap" else 9))]:  # a byte less than some file has
        out = tmp_path / str(limit)
        with (
            redirect_stdout(io.StringIO()),  # what pytest captures goes to a file, which cannot grow either
            redirect_stderr(io.StringIO()),
            largest_file(limit - 1),
            pytest.raises((OSError, UserError)) as error,
        ):
            run(out)
        told = user_facing_error(error.value)
        assert isinstance(told, UserError)
        assert str(told).startswith(str(out)) and "File too large: raise the limit" in str(told)
        run(out)
        assert tree(out) == expected


@pytest.mark.parametrize("stage", ["train", "encode", "mix"])
def test_what_a_manifest_vouches_for_is_on_the_disk_before_it(
    corpus: Corpus, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of every file that stays before it is renamed, and before the manifest's rename the names in the
    folders above. A marker that a crash damages, or one of whose files, costs its task."""
    synced: dict[int, int] = {}  # by inode, how many of its bytes are on the disk; a folder's names are
    fsync, rename = os.fsync, os.replace
    renamed: dict[Path, int] = {}  # folders in which names have changed since, and how many files

    def synced_too(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
        for folder in [folder for folder in renamed if folder.stat().st_ino == os.fstat(descriptor).st_ino]:
            del renamed[folder]

    def checked(source: Path, target: Path) -> None:
        if tmp_path not in Path(target).parents:  # numba's cache
            return rename(source, target)
        passing = target.suffix == ".npy" or {"tasks", ".sample"} & {*target.parts}
        on_disk, size = synced.get(source.stat().st_ino), source.stat().st_size
        assert passing or on_disk == size, f"{target} is renamed before its bytes are on the disk"
        if target.name == "manifest.json":
            assert not renamed, f"{target} vouches for files whose names may be lost: {list(renamed)}"
        rename(source, target)
        if target.suffix != ".json" and not passing and "staged" not in target.parts:
            renamed[target.parent] = renamed.get(target.parent, 0) + 1

    monkeypatch.setattr(os, "fsync", synced_too)
    monkeypatch.setattr(os, "replace", checked)
    getattr(corpus, stage)(tmp_path / "out")
    for folder in [path for path in (tmp_path / "out").rglob("*") if path.is_dir() and any(path.glob("*.arrow"))]:
        assert {folder.stat().st_ino, folder.parent.stat().st_ino} <= synced.keys()


def test_markers_of_blocks_go_after_that_of_their_input_is_on_the_disk(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash may take what is not on the disk, in any order."""
    synced, removed = set[int](), dict[str, int]()  # shards of the inputs whose blocks' markers went
    fsync, unlink = os.fsync, os.unlink

    def synced_too(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checked(path: Path, **where: int) -> None:
        task, *block = Path(path).stem.split(".")
        if Path(path).parent.name == "tasks" and block and block[0].isdecimal():
            marker = Path(path).with_name(f"{task}.json")
            shards = json.loads(marker.read_text())["shards"]
            assert len(shards) < 2 or marker.stat().st_ino in synced, path
            removed[task] = len(shards)
        unlink(path, **where)

    monkeypatch.setattr(os, "fsync", synced_too)
    monkeypatch.setattr(os, "unlink", checked)
    corpus.encode(tmp_path / "out")
    assert set(removed) == {"de-000", "en-000", "en-de-000"} and max(removed.values()) > 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Gives a folder on an empty file system of so many bytes; with a second call it grows."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def disk(size: int) -> Path:
        nonlocal mounted
        options = f"remount,size={size}" if mounted else f"size={size}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        mounted = True
        return folder

    yield disk
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("stage", ["train", "vocap", "encode", "mix"])
def test_a_full_disk_is_told_and_the_same_command_goes_on(
    corpus: Corpus, tmp_path: Path, stage: str, small_disk: Callable[[int], Path]
) -> None:
    run = getattr(corpus, stage)
    run(tmp_path / "expected")
    expected = tree(tmp_path / "expected")
    page = 4096
    pages = sum(-(-len(data) // page) for data in expected.values())
    for room in range(1, pages, max(1, pages // (3 if stage == "vocap" else 8))):
        disk = small_disk(room * page)
        with pytest.raises((OSError, UserError)) as error:
            run(disk / "out")
        told = user_facing_error(error.value)
        assert isinstance(told, UserError)
        assert str(told).startswith(str(disk / "out")) and "No space left on device: make room" in str(told)
        small_disk(10_000 * page)
        run(disk / "out")
        assert tree(disk / "out") == expected
        shutil.rmtree(disk / "out")


def test_the_page_of_stats_is_whole_or_not_there(corpus: Corpus, tmp_path: Path) -> None:
    with largest_file(50_000), pytest.raises(OSError, match="File too large") as error:
        corpus.stats(tmp_path)
    assert error.value.filename == str(tmp_path / "stats.html")
    assert not tree(tmp_path)
    corpus.stats(tmp_path)
    assert (tmp_path / "stats.html").stat().st_size > 50_000


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("stage", ["train", "vocap", "encode", "mix"])
def test_whatever_is_lost_or_damaged_is_made_again(corpus: Corpus, tmp_path: Path, stage: str) -> None:
    """A file of a finished folder, and one together with the manifest, so that only the markers are left."""
    run, out = getattr(corpus, stage), tmp_path / "out"
    run(out)
    expected = tree(out)
    names = [name for name, data in expected.items() if data and name != "vocap.svg"]
    assert len(names) >= 3
    slow = stage in ("train", "vocap")
    for name in names:
        for harm in (flip,) if slow else (remove, empty, flip):
            harm(out / name)
            run(out)
            if (
                harm is remove and "/tasks/" in f"/{name}"
            ):  # a finished folder needs no marker, but a damaged one is made again
                assert tree(out) == {key: data for key, data in expected.items() if key != name}, name
            else:
                assert tree(out) == expected, (name, harm)
            for manifest in out.rglob("manifest.json"):
                manifest.unlink()
            if (out / name).exists():
                harm(out / name)
            run(out)
            assert tree(out) == expected, (name, harm)
    (out / "vocap.svg").unlink(missing_ok=True)  # drawn from vocap.json
    run(out)
    assert tree(out) == expected
    folder = out if (out / "tasks").exists() else out / "mono"
    for name in ("manifest.json", "settings.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "tasks")
    if stage in ("train", "vocap"):  # the model may be a user's
        with pytest.raises(ValueError, match=r"model is a file that voca[bp] did not write: move it away, or choose"):
            run(out)
        (out / "sentencepiece.model").unlink()
    run(out)
    assert tree(out) == expected


@pytest.mark.parametrize("moment", range(4))
def test_damage_in_a_folder_whose_duplicates_are_being_removed(corpus: Corpus, tmp_path: Path, moment: int) -> None:
    """What an interrupted run leaves, harmed file by file: staged shards and notes, some blocks without duplicates."""
    expected = tree(corpus.folder / "encoded")
    interrupted = tmp_path / "interrupted"
    _interrupt(corpus, interrupted, moment)
    names = [name for name, data in tree(interrupted).items() if data and "mono/" in name]
    assert len(names) > 10
    if moment == 2:  # the block has its place and no marker yet
        shutil.copytree(interrupted, tmp_path / "whole")
        moved = tmp_path / "whole" / "mono" / "en" / "000-00000.arrow"
        times = moved.stat().st_mtime_ns
        corpus.encode(tmp_path / "whole")
        assert moved.stat().st_mtime_ns == times, "work was done again"
    for number, name in enumerate(names[:: 1 if moment == 3 else 3]):
        out = tmp_path / "out"
        shutil.copytree(interrupted, out)
        (remove, empty, flip)[number % 3](out / name)
        corpus.encode(out)
        assert tree(out) == expected, name
        shutil.rmtree(out)


def test_text_that_changes_before_its_duplicates_are_removed(corpus: Corpus, tmp_path: Path) -> None:
    _interrupt(corpus, tmp_path, 2)
    path = corpus.folder / "english" / "en.txt"
    text = path.read_text()
    path.write_text(f"{text}\n\nMore.\n")
    try:
        with pytest.raises(ValueError, match=r"en\.txt had \d+ bytes when it was encoded into .*: restore it"):
            corpus.encode(tmp_path)
    finally:
        path.write_text(text)


def _interrupt(corpus: Corpus, out: Path, moment: int) -> None:
    """Stop `encode` where the first marker of a moment is about to be written."""
    endings = ("00002", ".encoded", "00000.final", "00001.final")
    write_marker = Stage.write_marker

    def stop(stage: Stage, name: str, result: dict, flush: bool = False) -> None:
        if name.startswith("en-") and name.endswith(endings[moment]):
            raise KeyboardInterrupt
        write_marker(stage, name, result, flush)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stage, "write_marker", stop)
        corpus.encode(out)


def test_one_process_a_folder(corpus: Corpus, tmp_path: Path, data_prep: Run) -> None:
    out = tmp_path / "out"
    (tmp_path / "link").symlink_to(out, target_is_directory=True)
    out.mkdir()
    half_written = out / "mono" / ".000.arrow.1.tmp"
    with Stage(out / "mono", "encode").open():
        half_written.write_text("of the first")
        for name in ("out", "link"):
            with pytest.raises(
                ValueError,
                match=rf"another process is still working in {tmp_path / name / 'mono'} \(process \d+ ",
            ):
                corpus.encode(tmp_path / name)
        flags = ["encode", "--mono", corpus.folder / "mono", "--vocab", corpus.vocab, "--out", tmp_path / "link"]
        done = data_prep(*flags, ranks=2)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "error: another process is still working in" in done.stderr
        with Stage(tmp_path, "vocab").open():  # a stage whose folder contains the other's
            assert half_written.exists()
    (out / "mono" / "settings.json").unlink()
    corpus.encode(tmp_path / "link")
    assert not half_written.exists()
    assert tree(out) == tree(corpus.folder / "encoded")


@pytest.mark.parametrize("lost", [1, 8, 9])
def test_files_that_are_lost_are_counted_and_the_first_eight_named(
    tmp_path: Path, lost: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, "vocab", {"size": 1})
    with stage.open():
        written = [write_file(tmp_path / f"{number}.txt", b"text", tmp_path) for number in range(10)]
        for number, file in enumerate(written):
            stage.write_marker(f"task-{number}", {"files": [vars(file)]})
        for number in range(lost):
            empty(tmp_path / f"{number}.txt")
        if lost == 1:  # a finished folder, whose manifest lists the files too
            write_manifest(tmp_path, Manifest("vocab", {"size": 1}, 0, "", (), tuple(written), {}))
        capsys.readouterr()
        assert not stage.check_finished(1)
        assert not (tmp_path / "manifest.json").exists()
    named = ", ".join(f"{number}.txt" for number in range(min(lost, 8))) + " …" * (lost > 8)
    files = "file is" if lost == 1 else "files are"
    words = f"warning: {lost} {files} missing or damaged in {tmp_path}; made again: {named}\n"
    assert capsys.readouterr().err == words
    assert [stage.read_marker(f"task-{number}") is None for number in range(10)] == [n < lost for n in range(10)]


def test_long_settings_are_cut_in_the_message(tmp_path: Path) -> None:
    """At 120 characters, the quotes of a text included."""
    with Stage(tmp_path, "mix", {"a": "x" * 118, "b": "y" * 119, "c": 1}).open():
        pass
    told = rf'a was "{"x" * 118}", now 1; b was "{"y" * 118}…, now null; d was null, now 2\): choose'
    with pytest.raises(ValueError, match=told), Stage(tmp_path, "mix", {"a": 1, "c": 1, "d": 2}).open():
        pass
    with pytest.raises(ValueError, match="was written by stage mix, not encode"), Stage(tmp_path, "encode").open():
        pass


def test_only_an_unfinished_minhash_keeps_its_folder_from_readers(tmp_path: Path) -> None:
    for stage in ("encode", "minhash"):
        with Stage(tmp_path / stage, stage).open():
            (tmp_path / stage / "mono").mkdir()
    assert list_folder(str(tmp_path / "encode" / "mono")) == []
    (tmp_path / "minhash" / "raw").mkdir()
    assert list_folder(str(tmp_path / "minhash" / "raw")) == []  # `minhash` writes only into mono
    assert list_folder(str(tmp_path / "minhash"))
    for folder, recursive in (("minhash/mono", False), ("minhash/raw/../mono", False), ("minhash", True)):
        with pytest.raises(ValueError, match="lacks documents, because minhash did not finish"):
            list_folder(str(tmp_path / folder), recursive)


def test_errors_that_a_user_can_act_on() -> None:
    """A sentence for these, with its exit code; a mistake of ours keeps its traceback, whatever it derives from."""
    assert type(user_facing_error(ValueError("a"))) is UserError
    assert type(user_facing_error(OSError(errno.ENOSPC, "full", "a"))) is MachineError
    assert (
        type(user_facing_error(OSError(errno.EIO, "broken", "a")))
        is type(user_facing_error(RetryError("a")))
        is RetryError
    )
    assert str(user_facing_error(OSError())).startswith("OSError: give the same command again")
    ours = (UnicodeDecodeError("utf-8", b"a", 0, 1, "b"), io.UnsupportedOperation("a"), KeyError("a"), TypeError("a"))
    assert [user_facing_error(error) for error in ours] == [None] * 4


def test_a_lock_that_is_none(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted link's target is left as it is; a file system without locks is named."""
    (tmp_path / "diary").write_text("mine")
    (tmp_path / "out" / "mono").mkdir(parents=True)
    (tmp_path / "out" / "mono" / ".lock").symlink_to(tmp_path / "diary")
    with pytest.raises(ValueError, match=r"out/mono/\.lock is no lock of this package"):
        corpus.encode(tmp_path / "out")
    assert (tmp_path / "diary").read_text() == "mine"

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        ValueError, match=r"\.lock cannot be locked \(No locks available\), and a second run .* mounted with it"
    ):
        corpus.encode(tmp_path / "other")


def test_changed_settings_are_refused_without_settings_json_too(corpus: Corpus, tmp_path: Path) -> None:
    corpus.mix(tmp_path)
    before = tree(tmp_path)
    other = mix.MixConfig(
        corpus.folder / "encoded", corpus.vocab, tmp_path, 90, 40, row_tokens=24, rows_per_shard=30, seed=1
    )
    for content in (None, "", "{}", '{"stage": "mix"}'):
        path = tmp_path / "mono" / "settings.json"
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ValueError, match=r"begun with other settings \(seed was 0, now 1\)"):
            mix.run(other)
        corpus.mix(tmp_path)
        assert tree(tmp_path) == before


def test_the_manifest_of_other_settings_is_none_of_a_folder(corpus: Corpus, tmp_path: Path) -> None:
    """Copied from one with the same rows: it is written again."""
    asked = mix.MixConfig(corpus.folder / "encoded", corpus.vocab, tmp_path / "100", 90, row_tokens=24)
    for rows in (100, 200):
        mix.run(replace(asked, out=tmp_path / str(rows), rows_per_shard=rows))
    expected = tree(tmp_path / "100")
    shutil.copy(tmp_path / "200/mono/manifest.json", tmp_path / "100/mono/manifest.json")
    assert tree(tmp_path / "100") != expected
    mix.run(replace(asked, rows_per_shard=100))
    assert tree(tmp_path / "100") == expected


def words_of(error: BaseException, kind: type[Exception] = UserError) -> str:
    """The sentence that a user reads, one of those that a retry does not help by default."""
    told = user_facing_error(error)
    assert isinstance(told, kind)
    return str(told)


@contextmanager
def without_rights() -> Iterator[None]:
    """As another user, if this one may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "000.arrow"
    path.write_bytes(b"x")
    path.chmod(0)
    with without_rights():
        for read in (
            lambda: list(read_decompressed(CorpusPath(str(tmp_path), path.name))),
            lambda: index_batches(path),
        ):
            with pytest.raises(OSError) as error:
                read()
            words = words_of(error.value)
            assert str(path) in words and "ermission denied" in words and "give this user the permission" in words
            assert "damaged" not in words
    with pytest.raises(OSError) as error:  # a disk that fails: the memory of this process cannot be read at 0
        monkeypatch.setattr(CorpusPath, "size", 1)
        list(read_decompressed(CorpusPath("/proc/self", "mem")))
    assert words_of(error.value, RetryError).startswith(
        "/proc/self/mem: Input/output error: give the same command again"
    )


def test_records_that_are_nested_too_deeply_are_written_again(corpus: Corpus, tmp_path: Path) -> None:
    corpus.encode(tmp_path)
    expected = tree(tmp_path)
    for name in ("settings.json", "manifest.json", "tasks/en-de-000.json"):
        (tmp_path / "para" / name).write_text("[" * 200_000)
        corpus.encode(tmp_path)
        assert tree(tmp_path) == expected, name


def test_a_file_that_the_file_system_did_not_keep_whole(tmp_path: Path) -> None:
    """Its size is looked at before it gets its name."""
    with (
        pytest.raises(OSError, match="the file system did not keep all of 9 bytes"),
        new_file(tmp_path / "000.arrow") as file,
    ):
        file.write(b"nine byte")
        file.file.flush()
        os.ftruncate(file.file.fileno(), 8)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "00000.arrow").mkdir()
    with pytest.raises(OSError) as error:
        write_file(tmp_path / "00000.arrow", b"x", tmp_path)
    assert words_of(error.value) == f"{tmp_path / '00000.arrow'}: Is a directory: remove it, or name a file"
    assert [path.name for path in tmp_path.iterdir()] == ["00000.arrow"]


def test_an_output_that_cannot_be_written(corpus: Corpus, tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    (tmp_path / "file").write_text("mine")
    for out, words in (
        (tmp_path / "file", f"{tmp_path / 'file'} is a file, not a folder: choose another output folder"),
        (tmp_path / "file" / "out", f"{tmp_path / 'file'} is a file, not a folder: choose another output folder"),
    ):
        for stage in (corpus.encode, corpus.mix, corpus.train):
            with pytest.raises(OSError) as error:
                stage(out)
            assert words in words_of(error.value)
    assert (tmp_path / "file").read_text() == "mine"
    disk = small_disk(1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(OSError) as error:
        corpus.mix(disk / "out")
    assert words_of(error.value) == f"{disk / 'out'}: Read-only file system: choose another output folder"


@pytest.mark.parametrize(
    ("at", "value", "words"), [(6, 1, "is encrypted"), (8, 9, "compression method is not supported")]
)
def test_zips_that_python_cannot_read(tmp_path: Path, at: int, value: int, words: str) -> None:
    """One whose entries say that they have a password, and one that they are packed by deflate64."""
    path = tmp_path / "de-en.txt.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for code in ("de", "en"):
            archive.writestr(f"X.de-en.{code}", "a\n" * 100)
    data = bytearray(path.read_bytes())
    for header, offset in ((b"PK\3\4", at), (b"PK\1\2", at + 2)):
        start = data.find(header)
        while start >= 0:
            data[start + offset] = value
            start = data.find(header, start + 1)
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=rf"de-en\.txt\.zip cannot be read \(.*{words}.*\): unpack it and pack it with deflate"
    ):
        find_pairs(tmp_path)


def test_errors_of_the_command_line(corpus: Corpus, tmp_path: Path, data_prep: Run) -> None:
    """One line each, whatever is in the names, and the exit code says whether somebody must act."""
    folder = tmp_path / "a\x1b[31m\nb"
    folder.mkdir()
    (folder / "\x1b[2J.txt.rar").write_text("")
    (folder / "xx\r.txt").write_text("")
    done = data_prep("encode", "--mono", folder, "--vocab", corpus.vocab, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    warning, error = done.stderr.splitlines()
    assert warning.startswith(f"warning: {tmp_path}/a\\x1b[31m\\nb/\\x1b[2J.txt.rar is ignored")
    assert error.startswith(f"xlme prep encode: error: {tmp_path}/a\\x1b[31m\\nb/xx\\r.txt: unknown language code")

    done = data_prep("encode", "--mono", "in\udcff", "--vocab", corpus.vocab, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (
        2,
        "xlme prep encode: error: in\\udcff is not a name in UTF-8: rename it\n",
    )

    flags = [
        "encode",
        "--mono",
        corpus.folder / "mono",
        "--vocab",
        corpus.vocab,
        "--processes",
        2,
        "--out",
        tmp_path / "out",
    ]
    with largest_file(3_000):
        done = data_prep(*flags, "--block-bytes", 1_500)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "File too large: raise the limit" in done.stderr and str(tmp_path / "out") in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: .*No space left on device: make room"),
        (OSError(errno.EIO, "Input/output error"), 1, "error: .*Input/output error: give the same command again"),
        (KeyboardInterrupt(), 130, "interrupted: the same command continues where this one stopped$"),
        (TypeError("ours"), 1, "Traceback.*\nTypeError: ours$"),
    ],
)
def test_the_exit_code_is_2_where_the_user_has_to_change_something(
    corpus: Corpus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def fsync(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    model = str(corpus.vocab / "sentencepiece.model")
    assert main(["vocab", "--model", model, "--out", str(tmp_path / "out")]) == code
    said = capsys.readouterr().err.strip()
    assert re.fullmatch(f"(xlme prep vocab: )?{words}.*", said, re.DOTALL) and ("Traceback" in said) == ("ours" in said)


@pytest.mark.parametrize("flag", ["--mono", "--para"])
def test_a_folder_flag_that_is_given_twice(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["encode", "--vocab", "nowhere", "--out", "nowhere", flag, "one", f"{flag}=two"])
    said = f"{flag} is given twice: put the files into one folder, or describe them with --corpus"
    assert capsys.readouterr().err == f"xlme prep encode: error: {said}\n"


def test_a_launcher_without_mpi4py(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")\n")
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nexport PYTHONPATH={tmp_path}:$PYTHONPATH\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("the environment has no mpiexec: install the mpich wheel")
    command = [mpiexec, "-n", "2", tmp_path / "python", "-m", "data_prep", "verify", "--data", corpus.folder / "mixed"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert (
        "several processes, but mpi4py cannot be imported (No module named 'mpi4py'): install the extra `mpi`"
        in errors[0]
    )
    assert "Traceback" not in done.stderr


def test_blocks_are_offered_to_those_who_wait(tmp_path: Path) -> None:
    """Two for each of them at most; each is taken once, in the order of names, or only those of one input."""
    (tmp_path / "work-notes").mkdir()
    SharedWork.begin(tmp_path)
    folder = SharedWork.begin(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, "work-notes"]), "the last one"
    workers = [SharedWork(folder, number) for number in range(3)]
    reader, *waiting = workers
    assert [workers[n].claim("de-000") for n in (0, 1)] == [True, False]
    assert not reader.offer("de-000", 0, TextBlock((b"a",)))
    taken: list[tuple[str, int, bytes]] = []

    def encode(name: str, number: int, block: TextBlock) -> None:
        taken.append((name, number, block.sides[0]))
        assert [path.name for path in (reader.folder / "taken").iterdir()] == [f"{name}.{number:06d}"]

    for worker in waiting:
        (reader.folder / "waiting" / str(worker.worker)).touch()
    offers = [(name, number) for number in (10, 2) for name in ("en-000", "de-000")] + [("de-000", 3)]
    assert [reader.offer(*offer, TextBlock((b"b",))) for offer in offers] == [True] * 4 + [False]
    assert waiting[0].take(encode, "en-000") and waiting[1].take(encode)
    assert reader.drain("de-000", encode) and not waiting[0].take(encode, "de-000")
    assert waiting[0].take(encode) and not waiting[0].take(encode)
    assert taken == [(name, number, b"b") for name, number in (
        ("en-000", 2), ("de-000", 2), ("de-000", 10), ("en-000", 10),
    )]  # fmt: skip
    with pytest.raises(KeyError), waiting[1].abort_on_error():
        raise KeyError
    assert all(worker.failed for worker in workers) and not reader.drain("de-000", encode)


def test_idle_workers_look_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: for how long a worker sleeps between two looks; work that comes is taken soon."""
    waiting = SharedWork(SharedWork.begin(tmp_path), 1)
    reader = SharedWork(waiting.folder, 0)
    slept: list[float] = []
    done: list[float] = []

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            before, self.now = self.now, self.now + seconds
            if before < 10 <= self.now:
                assert reader.offer("a", 0, b"")
            if before < 20 <= self.now:
                reader.finish("a")

    clock = Clock()
    monkeypatch.setattr("data_prep.encode.shared_work.time", clock)
    waiting.take_until_all_finished(1, lambda *_: done.append(clock.now))
    ends = list(accumulate(slept))
    assert len(done) == 1 and 10 <= done[0] < 11 and 20 <= clock.now < 21
    looks = [sum(second <= end < second + 1 for end in ends) for second in range(10)]
    assert 20 < looks[0] < 40 and looks[1] < 8 and looks[8] == 1, "192 a second before"
    after = [pause for end, pause in zip(ends, slept, strict=True) if end > done[0]]
    assert after[0] == slept[0] < 0.02 and after[-1] == max(slept) == 1
