"""The Triton kernels compiled for the GPUs that a cluster has, on a machine that has none."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    # A cache of its own: the compiler is what is tested.
    variables = environment(TRITON_CACHE_DIR=tmp_path)
    variables.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "bench.attention_kernels", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)["kernels"]
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel["atomics"] == 0, "two runs would differ"
        # Two blocks hide each other's waits; a few spilled numbers cost nothing, a hundred do.
        assert kernel["blocks_per_multiprocessor"] >= 2, kernel
        assert kernel["spilled_bytes"] <= 256, kernel
