"""Files of ours: whole or absent, by their checksum; and files of others."""

import errno
import json
import os
import pwd
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.launch import python
from xlme_ds.data.schema import Manifest, Shard, write_manifest
from xlme_ds.io.arguments import parse_number
from xlme_ds.io.errors import in_words, no_such
from xlme_ds.io.files import (
    TEMPORARY,
    atomic_write,
    errors_naming,
    fsync,
    read_checksummed,
    read_versioned,
    refuse_carriage_returns,
    require_writable_file,
    visible_paths,
    write_checksummed,
    write_text,
    write_versioned,
)
from xlme_ds.io.folders import make_folder, use_private_caches


def test_a_file_that_fails_to_be_written_stays_as_it_was(tmp_path: Path) -> None:
    """No other file is left in the folder. While it is written, it has a temporary name, which readers skip."""
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_write(path) as file:
        file.write(b"new")
        (other,) = set(tmp_path.iterdir()) - {path}
        assert TEMPORARY.fullmatch(other.name) and path.read_text() == "old"
        raise KeyError
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"
    with atomic_write(path) as file:
        file.write(b"new")
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "new"
    folder = tmp_path / "folder"
    (folder / "in it").mkdir(parents=True)
    for place, name in ((folder, folder), (tmp_path / "none/a", tmp_path / "none/a")):
        with pytest.raises(OSError) as raised, atomic_write(place):
            pass
        assert name in (Path(raised.value.filename), Path(raised.value.filename2 or ""))
    assert sorted(tmp_path.iterdir()) == [path, folder]


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it may be lost; of folders the names in them, and of a manifest those of its shards."""
    done: list[str] = []
    os_fsync, os_replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(f".{os.getpid()}")[0])
        os_fsync(descriptor)

    def noted_replace(source: Path, to: Path) -> None:
        done.append(f"to {to.name}")
        os_replace(source, to)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)

    def calls(*do: Callable[[], object]) -> list[str]:
        done.clear()
        for each in do:
            each()
        return list(done)

    path, here = tmp_path / "a", tmp_path.name
    whole = [".a", "to a"]
    assert calls(lambda: write_versioned(path, {}), lambda: write_checksummed(path, {})) == 2 * whole
    unflushed = calls(lambda: write_checksummed(path, {}, flush=False), lambda: write_text(path, "", flush=False))
    assert unflushed == 2 * ["to a"]
    assert calls(lambda: make_folder(tmp_path / "b/c"), lambda: make_folder(tmp_path / "b/c")) == [here, "b"]
    shards = tuple(Shard(name, 1, 1, "0" * 64) for name in ("b/c/x", "b/y", "z", "b/z"))
    manifest = Manifest("encode", {}, 10, "0" * 64, (), shards, {})
    found = calls(lambda: write_manifest(tmp_path, manifest))
    assert found == [here, "b", "c", ".manifest.json", "to manifest.json"]
    for error in (errno.EINVAL, errno.EIO):  # a file system without fsync of folders, and a disk that fails

        def failing(descriptor: int, error: int = error) -> None:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(OSError) if error == errno.EIO else nullcontext():
            fsync(tmp_path)


def test_an_error_names_the_file_that_it_has_or_is_given(tmp_path: Path) -> None:
    for error, named in (
        (OSError(28, "full"), "given"),
        (OSError(28, "full", "own"), "own"),
        (OSError("without a number"), None),
    ):
        with pytest.raises(OSError) as raised, errors_naming(Path("given")):
            raise error
        assert raised.value.filename == named


def test_a_checksummed_file_is_for_its_context_and_format(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_checksummed(path, {"b": 1, "a": [2]}, "mine")
    assert read_checksummed(path, "mine") == {"a": [2], "b": 1}
    for context in ("", "other"):
        with pytest.raises(ValueError, match="does not match its checksum"):
            read_checksummed(path, context)
    content = json.loads(path.read_text())
    for change in ({"b": 2}, {"c": 0}, {"format": 2}, {"sha256": "0" * 64}):
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match="does not match its checksum"):
            read_checksummed(path, "mine")
    write_checksummed(path, {"format": 2}, "mine")
    with pytest.raises(ValueError, match="it has format 2, this version reads 1"):
        read_checksummed(path, "mine")
    write_versioned(path, {"a": 1})
    assert read_versioned(path) == {"a": 1} and json.loads(path.read_text()) == {"a": 1, "format": 1}


def test_text_of_other_systems() -> None:
    """Of two ends of lines one may be a lone carriage return; at the end of all it is none, nor before a line feed."""
    for data in (b"", b"a", b"a\r", b"a\r\nb\r\n", b"a\rb\n", b"a\rb\nc\rd\n"):
        refuse_carriage_returns(data, "file")
    for data in (b"a\rb", b"a\rb\rc\n", b"\r\r"):
        with pytest.raises(ValueError, match="file ends its lines by carriage returns alone"):
            refuse_carriage_returns(data, "file")


def test_files_that_are_read_and_written(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", ".hidden.txt", ".git/d.txt", "a/.e/f.txt", "a/g.md"):
        (tmp_path / ".top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".top" / name).touch()
    found = [path.relative_to(tmp_path / ".top").as_posix() for path in visible_paths(tmp_path / ".top", "*.txt")]
    assert found == ["a/c.txt", "b.txt"]
    for name, target in (("linked", ".top/a"), ("file.txt", ".top/b.txt"), (".top/a/up", "..")):  # `up` has no end
        (tmp_path / name).symlink_to(target)
    assert visible_paths(tmp_path, "*.txt") == [tmp_path / "file.txt", tmp_path / "linked/c.txt"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("pipe", "link"):
        with pytest.raises(ValueError, match=rf"--out .*{name} is no regular file: name another"):
            require_writable_file(tmp_path / name, "--out")
    for name in ("none", ".top/b.txt"):
        require_writable_file(tmp_path / name, "--out")
    for name, words in (("none/page", "is in no folder that exists: make"), (".top", "is a folder: name a file in it")):
        with pytest.raises(ValueError, match=rf"--out .*{name} {words}"):
            require_writable_file(tmp_path / name, "--out")


def test_errors_in_words() -> None:
    """With the file that they have and the advice that there is."""
    for error, words in (
        (ValueError("a fault"), "a fault"),
        (OSError("a fault"), "a fault"),
        (OSError(errno.ENAMETOOLONG, "too long", "f"), "f: too long: choose a shorter name"),
        (OSError(errno.EISDIR, "a folder"), "a folder: remove it, or name a file"),
        (OSError(errno.EDOM, "odd", "f"), "f: odd"),
        (
            OSError(errno.EACCES, "no", "from", None, "to"),
            "from: no: give this user the permission, or choose another place",
        ),
        (OSError(errno.EROFS, "full", "from", None, "to"), "to: full: choose another output folder"),
    ):
        assert in_words(error) == words
    assert str(no_such("setting", "widht", ("width", "heads"), "model.")) == (
        "there is no setting 'model.widht': did you mean model.width?"
    )
    assert str(no_such("task", "zz", iter(("a", "b")))) == "there is no task 'zz': choose one of a, b"


def test_numbers_in_texts() -> None:
    assert [parse_number(text, int) for text in ("7", "-7")] == [7, -7]
    assert [parse_number(text, float) for text in ("7", "1e6", "inf")] == [7.0, 1e6, float("inf")]
    for text, kind, words in (
        ("1e6", int, "1e6 is not a whole number: write 1000000"),
        ("2.0", int, "2.0 is not a whole number: write 2"),
        ("2.5", int, "2.5 is not a whole number"),
        ("inf", int, "inf is not a whole number"),
        ("x", int, "x is not a whole number"),
        ("1,5", float, "1,5 is not a number"),
    ):
        with pytest.raises(ValueError) as raised:
            parse_number(text, kind)  # type: ignore[arg-type]
        assert str(raised.value) == words


def test_an_empty_cache_variable_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLME_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_private_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "xlme_ds" / "inductor")
    assert "NUMBA_CACHE_DIR" not in os.environ and "TRITON_CACHE_DIR" not in os.environ


def test_a_user_without_a_home_gets_a_cache_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that its list of users lacks."""
    for name in ("HOME", "XDG_CACHE_HOME", "XLME_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # raises KeyError
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    use_private_caches()
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path / "tmp")


def test_a_loop_of_links_is_no_crash(tmp_path: Path) -> None:
    """`Path.resolve` raises RuntimeError for it before Python 3.13."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to(first)
    for words in (("data_prep", "minhash", "--mono", str(tmp_path), "--out"), ("xlme_ds.evaluate", "pairs", "--model")):
        data = ["--data", str(tmp_path)] if "pairs" in words else []
        done = python("-m", *words, str(first), *data)
        assert done.returncode == 2 and "Traceback" not in done.stderr and str(first) in done.stderr


def test_a_file_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out \S+/file/a/page is in \S+/file, which is a file: name a file in"):
        require_writable_file(tmp_path / "file/a/page", "--out")
