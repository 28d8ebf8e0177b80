"""A lock that a killed process left on an extension is removed; one that somebody holds is not."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch import ROOT, environment

HOLD = "import sys; from torch.utils.file_baton import FileBaton; assert FileBaton(sys.argv[1]).try_acquire()"
LOAD = "from xlme_ds.engine.extensions import loading_extensions\nwith loading_extensions():\n    pass"
START = LOAD.replace("pass", "import sys; print('ready', file=sys.__stdout__, flush=True); sys.stdin.readline()")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """torch's own lock, of a process that ended without releasing it."""
    path = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", HOLD, str(path)], check=True)
    assert path.exists()
    return path


def load(root: Path) -> str:
    env = environment(TORCH_EXTENSIONS_DIR=root)
    done = subprocess.run([sys.executable, "-c", LOAD], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextmanager
def running(code: str, root: Path, *words: object) -> Iterator[None]:
    env = environment(TORCH_EXTENSIONS_DIR=root)
    command = [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield
    process.communicate("\n")


def test_what_nobody_holds_is_removed(lock: Path, tmp_path: Path) -> None:
    assert f"removed {lock}" in load(tmp_path)
    assert not lock.exists()
    assert load(tmp_path) == ""


def test_what_a_process_holds_open_stays_and_is_named(lock: Path, tmp_path: Path) -> None:
    lock.unlink()
    with running(HOLD + "; print('ready', flush=True); input()", tmp_path, lock):
        said = load(tmp_path)
        assert lock.exists() and said == f"{lock.parent} is being compiled; if no process does so, delete {lock}\n"


def test_nothing_is_removed_while_another_process_of_ours_is_loading(tmp_path: Path, lock: Path) -> None:
    """On another node its lock could not be seen to be open."""
    lock.unlink()
    with running(START, tmp_path):
        lock.touch()
        assert "is being compiled" in load(tmp_path) and lock.exists()
    assert "removed" in load(tmp_path)
