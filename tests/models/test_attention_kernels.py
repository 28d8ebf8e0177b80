"""Attention's Triton kernels compiled for the GPUs that a cluster has, on a machine that has none.

`pytest -s` prints what the compiler makes of them.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.models.compiled_kernels import reports

SIZES = (32, 64, 128)  # of heads
COMPILE = """
import json, sys
from tests.models.compiled_kernels import TARGETS, report
from xlme_ds.models import attention_triton as kernels
from xlme_ds.models.tiles import Tiling, tiling

FLOATS = "d lse gate delta grad_d grad_gates grad_scale".split()
INTEGERS, COUNTS = {"first", "end"}, {"tokens", "heads"}
NUMBERS = {"factor": "fp32", "TILE": "constexpr", "K": "constexpr", "GATED": "constexpr"}

def types(kernel):
    found = {}
    for name in kernel.arg_names:
        number = NUMBERS.get(name, "i32" if name in COUNTS else None)
        found[name] = number or ("*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*bf16")
    return found

def made(kernel, size, gpu, tiled):
    constants = {"TILE": tiled.tile, "K": size, "GATED": True}
    options = {"num_warps": tiled.warps, "num_stages": tiled.stages}
    return report(kernel, types(kernel), constants, (), options, gpu) | {"head_size": size, "tile": tiled.tile}

KERNELS = kernels._forward, kernels._backward_queries, kernels._backward_keys
if __name__ == "__main__":
    print(json.dumps([
        made(kernel, size, gpu, tiling(size, 2)) for gpu in TARGETS for size in SIZES for kernel in KERNELS
    ]))
""".replace("SIZES", str(SIZES))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    kernels = reports(COMPILE, tmp_path)
    assert len(kernels) == 2 * 3 * len(SIZES)
    for kernel in kernels:
        assert kernel["atomics"] == 0, "two runs would differ"
        # Eight warps hide each other's waits; a few spilled numbers cost nothing, a hundred do.
        assert kernel["blocks_per_multiprocessor"] * kernel["threads"] >= 8 * 32, kernel
        assert kernel["wgmma" if kernel["gpu"] != "A100" else "mma"] > 0, kernel
        assert kernel["spilled_bytes"] <= 256, kernel
