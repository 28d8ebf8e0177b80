"""A small run of bench/head_memory.py: the head's peak is counted in chunks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_the_head_takes_no_more_than_a_few_chunks() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.head_memory",
            "--json",
            "--vocabulary",
            "65536",
            "--positions",
            "256",
            "--chunks",
            "8192",
            "--blocks",
            "4",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    full, chunked = json.loads(done.stdout)["results"]
    assert (full["chunk"], chunked["chunk"], chunked["chunk_bytes"]) == (0, 8192, 256 * 8192 * 4)
    # One chunk, a product on its way into it, and some megabytes of the process's own; a chunk is 8 MiB here.
    assert chunked["in_chunks"] <= 3.0
    # The measurement sees what it should: logits, their softmax and their gradient for all 256 positions are 8 chunks
    # each.
    assert full["extra"] >= 2 * 8 * chunked["chunk_bytes"]
    assert chunked["loss"] == pytest.approx(full["loss"], rel=1e-6)
