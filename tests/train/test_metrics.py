"""Records on a file system that is full: one error for the run to end with, no traceback of TensorBoard's thread."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import python

WRITE = """
import sys, time
from pathlib import Path
from xlme_ds.train.records import MetricsLog
run = Path(sys.argv[1])
log = MetricsLog(run, "metrics", 0)
log.write({"step": 1, "loss": 1.0})
log.board.flush()
try:
    (run / "filler").write_bytes(bytes(1 << 22))
except OSError:
    pass
for step in range(2, 4000):
    log.write({"step": step, "loss": 1.0})
log.close()
print("told:", log.error)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_once(small_disk: Path) -> None:
    done = python("-c", WRITE, str(small_disk))
    assert "told:" in done.stdout and "No space left on device" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
