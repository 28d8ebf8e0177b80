"""The folders that stages write: full disks, lost and damaged files, two processes at once, and errors in words."""

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep import encode, mix, sample, stats, vocab
from data_prep.executor import SharedError
from data_prep.outcomes import in_words
from data_prep.progress import shown
from data_prep.vocap import stage as vocap
from xlme_ds.data.schema import file_sha256, read_manifest, write_signed

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
    (folder / "english" / "en.txt").write_text("\n\n".join(turned[:40] + ["New."] + turned[::-1]), encoding="utf-8")
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
def test_a_file_that_cannot_grow_is_told_and_the_same_command_goes_on(corpus: Corpus, tmp_path: Path, stage: str) -> None:
    run = getattr(corpus, stage)
    run(tmp_path / "expected")
    expected = tree(tmp_path / "expected")
    sizes = sorted({len(data) for data in expected.values()} - {0})
    for limit in sizes[:: max(1, len(sizes) // 12)]:  # a byte less than some file has
        out = tmp_path / str(limit)
        with largest_file(limit - 1), pytest.raises((OSError, SharedError)) as error:
            run(out)
        told = in_words(error.value)
        assert isinstance(told, SharedError)
        assert str(told).startswith(str(out)) and "File too large: raise the limit" in str(told)
        run(out)
        assert tree(out) == expected


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
    for room in range(1, pages, max(1, pages // 9)):
        disk = small_disk(room * page)
        with pytest.raises((OSError, SharedError)) as error:
            run(disk / "out")
        told = in_words(error.value)
        assert isinstance(told, SharedError)
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
    names = [name for name, data in expected.items() if data and not name.startswith("vocap.")]
    wanted = {name: data for name, data in expected.items() if "/tasks/" not in f"/{name}"}
    assert len(names) > 3
    slow = stage in ("train", "vocap")
    for name in names:
        for harm in (flip,) if slow else (remove, empty, flip):
            harm(out / name)
            run(out)
            assert {key: data for key, data in tree(out).items() if key in wanted} == wanted, (name, harm)
            for manifest in out.rglob("manifest.json"):
                manifest.unlink()
            if (out / name).exists():
                harm(out / name)
            run(out)
            assert tree(out) == expected, (name, harm)
    folder = out if (out / "tasks").exists() else out / "mono"
    for name in ("manifest.json", "settings.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "tasks")
    run(out)
    assert tree(out) == expected


@pytest.mark.parametrize("moment", [f"{i}" for i in range(3)])
def test_damage_in_a_folder_whose_duplicates_are_being_removed(corpus: Corpus, tmp_path: Path, moment: str) -> None:
    """What an interrupted run leaves, harmed file by file: staged shards and notes, some blocks without duplicates."""
    expected = tree(corpus.folder / "encoded")
    interrupted = tmp_path / "interrupted"
    _interrupt(corpus, interrupted, int(moment))
    names = [name for name, data in tree(interrupted).items() if data and "/tasks/" in name or "/staged/" in name]
    assert len(names) > 10
    for number, name in enumerate(names):
        out = tmp_path / "out"
        shutil.copytree(interrupted, out)
        (remove, empty, flip)[number % 3](out / name)
        corpus.encode(out)
        assert tree(out) == expected, name
        shutil.rmtree(out)


def _interrupt(corpus: Corpus, out: Path, moment: int) -> None:
    """Stop `encode` where the first marker of a moment is about to be written."""
    from data_prep.store import Stage

    endings = ("00002", ".encoded", "00002.final")
    finish_task = Stage.finish_task

    def stop(stage: Stage, name: str, result: dict) -> None:
        if name.startswith("en-") and name.endswith(endings[moment]):
            raise KeyboardInterrupt
        finish_task(stage, name, result)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stage, "finish_task", stop)
        corpus.encode(out)
