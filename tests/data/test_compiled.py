"""The cache of machine code: constants and functions of other files are part of it, and a run works without it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment
from xlme_ds.data.compiled import constants_hash

PROGRAM = """
import numpy as np
from xlme_ds.data import masking
from xlme_ds.data.schema import Rows
assert {folder!r} in masking.__file__
one = np.ones(1, dtype=np.int64)
where, _ = masking.draw_masks([(0, Rows(np.full((1, 42), {token}, dtype=np.int32), one, 42 * one, one), one)], 1, 0.15)
print(where.tolist())
"""


def masked(folder: Path, token: int = 50, **variables: object) -> subprocess.CompletedProcess[str]:
    """The positions that the package in `folder` masks in a row of one `token`, in a process of its own."""
    program = PROGRAM.format(folder=str(folder), token=token)
    env = environment(PYTHONPATH=folder, **variables)
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, env=env)


def test_a_run_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "xlme_ds", tmp_path / "xlme_ds", ignore=shutil.ignore_patterns("__pycache__"))
    written = masked(tmp_path)
    cached = tmp_path / "xlme_ds/data/__pycache__"
    assert list(cached.rglob("masking._draw_masks*.nbc")) and written.returncode == 0, written.stderr
    shutil.rmtree(cached)
    cached.touch()  # a file, so that no folder can be made of that name, not even by root
    unwritten = masked(tmp_path, HOME="/proc", XDG_CACHE_HOME="/proc/none")
    assert unwritten.returncode == 0, unwritten.stderr
    assert unwritten.stdout == written.stdout and len(eval(written.stdout)) == 6


def test_a_changed_constant_of_another_file_is_compiled_again(tmp_path: Path) -> None:
    """With `<unk>` as 6 the token 5 is a special one, which is not masked."""
    shutil.copytree(ROOT / "xlme_ds", tmp_path / "xlme_ds", ignore=shutil.ignore_patterns("__pycache__"))
    ordinary = masked(tmp_path, token=5)
    assert len(eval(ordinary.stdout)) == 6, ordinary.stderr
    rows = tmp_path / "xlme_ds/data/rows.py"
    text = rows.read_text().replace("BOS, PAD, EOS, UNK = 0, 1, 2, 3", "BOS, PAD, EOS, UNK = 0, 1, 2, 6")
    assert text != rows.read_text()
    rows.write_text(text)
    special = masked(tmp_path, token=5)
    assert special.returncode == 0 and eval(special.stdout) == [], special.stderr
    assert masked(tmp_path).stdout == ordinary.stdout


def test_a_changed_function_of_another_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, own = tmp_path / "other_file.py", tmp_path / "own_file.py"
    other.write_text("from numba import njit\n\n\n@njit\ndef added(x):\n    return x + 1\n")
    own.write_text("from other_file import added\n\n\ndef twice(x):\n    return added(added(x))\n")
    monkeypatch.syspath_prepend(tmp_path)
    from own_file import twice  # type: ignore[import-not-found]

    before = constants_hash(twice)
    assert constants_hash(twice) == before
    other.write_text(other.read_text().replace("x + 1", "x + 2"))
    assert constants_hash(twice) != before
