"""Machine code where it cannot be cached."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.launch import ROOT, environment

PROGRAM = """
import numpy as np
from xlme_ds.data import corrupt
from xlme_ds.data.schema import Rows
assert {folder!r} in corrupt.__file__
one = np.ones(1, dtype=np.int64)
where, _ = corrupt.corrupt([(0, Rows(np.full((1, 42), 50, dtype=np.int32), one, 42 * one, one), one)], 1, 0.15)
print(where.tolist())
"""


def masked(folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """Positions that the package in `folder` masks, in a process of its own."""
    program = PROGRAM.format(folder=str(folder))
    env = environment(PYTHONPATH=folder, **variables)
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, env=env)


def test_a_run_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "xlme_ds", tmp_path / "xlme_ds", ignore=shutil.ignore_patterns("__pycache__"))
    written = masked(tmp_path)
    cached = tmp_path / "xlme_ds/data/__pycache__"
    assert list(cached.glob("corrupt._corrupt*.nbc")) and written.returncode == 0, written.stderr
    shutil.rmtree(cached)
    cached.touch()  # a file, so that no folder can be made of that name, not even by root
    unwritten = masked(tmp_path, HOME="/proc", XDG_CACHE_HOME="/proc/none")
    assert unwritten.returncode == 0, unwritten.stderr
    assert unwritten.stdout == written.stdout and len(eval(written.stdout)) == 6
