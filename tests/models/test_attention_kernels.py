"""Attention's Triton kernels compiled for the GPUs that a cluster has, on a machine that has none.

`pytest -s` prints what the compiler makes of them.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.models.compiled_kernels import reports

COMPILE = """
import json
from tests.models.compiled_kernels import TARGETS, report
from xlme_ds.models import attention_triton as kernels

FLOATS, INTEGERS, COUNTS = {"d", "lse", "delta", "grad_d"}, {"first", "end"}, {"tokens", "heads"}
NUMBERS = {"scale": "fp32", "TILE": "constexpr", "K": "constexpr"}
STRIDES = {"row_stride", "head_stride", "token_stride"}

def types(kernel):
    found = {}
    for name in kernel.arg_names:
        number = NUMBERS.get(name, "i32" if name in STRIDES | COUNTS else None)
        found[name] = number or ("*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*bf16")
    return found

constants = {"TILE": kernels.TILES[2], "K": 64}
options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
print(json.dumps([
    report(kernel, types(kernel), constants, STRIDES, options, gpu)
    for gpu in TARGETS
    for kernel in (kernels._forward, kernels._backward_queries, kernels._backward_keys)
]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    kernels = reports(COMPILE, tmp_path)
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel["atomics"] == 0, "two runs would differ"
        # Two blocks hide each other's waits; a few spilled numbers cost nothing, a hundred do.
        assert kernel["blocks_per_multiprocessor"] >= 2, kernel
        assert kernel["spilled_bytes"] <= 256, kernel
