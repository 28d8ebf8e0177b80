"""The Triton kernels of attention and GELU compiled for the GPUs that a cluster has, on a machine that has none.

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
from xlme_ds.models import attention_triton as kernels, gelu_triton
from xlme_ds.models.tiles import SKEWED_ROWS, SUMMED_ROWS, tiling_of

CAPABILITIES = {"A100": "8.0", "H100, H200": "9.0"}

FLOATS = "lse gate delta grad_d grad_far grad_gates grad_scale".split()
INTEGERS, COUNTS = {"first", "end"}, {"near", "tokens", "heads", "width", "rows"}

def types(kernel):
    found = {}
    for name in kernel.arg_names:
        number = "constexpr" if name.isupper() else "fp32" if name == "factor" else "i32" if name in COUNTS else None
        found[name] = number or ("*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*bf16")
    return found

def made(kernel, size, gpu, form, even=True):
    constants = {"M": form.queries, "N": form.keys, "K": size, "GATED": True, "BIASED": True, "EVEN": even}
    more = {"SKEWED_ROWS": SKEWED_ROWS, "SUMMED_ROWS": SUMMED_ROWS, "SIDE": 64}
    constants |= {name: value for name, value in more.items() if name in kernel.arg_names}
    options = {"num_warps": form.warps, "num_stages": form.stages}
    multiples = {"width", "tokens"} if even else {"width"}
    return report(kernel, types(kernel), constants, multiples, options, gpu) | {"head_size": size, "form": form}

def of_gelu(gpu, even):
    kernel, sizes = gelu_triton._backward, {name: getattr(gelu_triton, name) for name in ("ROWS", "STEP", "COLUMNS")}
    kinds = [*["*bf16"] * 3, "*fp32", "i32", "i32", *["constexpr"] * 4]
    warps = {"num_warps": gelu_triton.WARPS}
    multiples = {"tokens", "columns"} if even else ()
    types = dict(zip(kernel.arg_names, kinds, strict=True))
    return report(kernel, types, sizes | {"EVEN": even}, multiples, warps, gpu)

KERNELS = kernels._forward, kernels._backward_queries, kernels._backward_keys, kernels._backward_distances
if __name__ == "__main__":
    print(json.dumps([
        made(kernel, size, gpu, tiling_of(kernel.__name__, size, 2, CAPABILITIES[gpu]))
        for gpu in TARGETS for size in SIZES for kernel in KERNELS
    ] + [of_gelu(gpu, even) for gpu in TARGETS for even in (True, False)]))
""".replace("SIZES", str(SIZES))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    kernels = reports(COMPILE, tmp_path)
    assert len(kernels) == 2 * 4 * len(SIZES) + 4
    for kernel in kernels[-4:]:  # GELU's: as many threads as hide the waits for memory
        assert kernel["atomics"] == kernel["spilled_bytes"] == 0
        assert kernel["blocks_per_multiprocessor"] * kernel["threads"] >= 32 * 32, kernel
    for kernel in kernels[:-4]:
        assert kernel["atomics"] == 0, "two runs would differ"
        # Eight warps hide each other's waits; a few spilled numbers cost nothing, a hundred do.
        assert kernel["blocks_per_multiprocessor"] * kernel["threads"] >= 8 * 32, kernel
        assert kernel["wgmma" if kernel["gpu"] != "A100" else "mma"] > 0, kernel
        assert kernel["spilled_bytes"] <= 256, kernel
