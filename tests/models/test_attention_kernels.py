"""The Triton kernels compiled for the GPUs that a cluster has, on a machine that has none.

`pytest -s` prints what the compiler makes of them: registers and spilled bytes of a thread, shared memory and threads
of a block, how many blocks a multiprocessor can hold by both, and atomic additions.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment

COMPILE = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xlme_ds.models import attention_triton as kernels

# Compute capability, and KiB of shared memory of a multiprocessor (CUDA programming guide, table of compute
# capabilities).
TARGETS = {"A100": (80, 164), "H100, H200": (90, 228)}
REGISTERS, RESERVED_KIB = 65_536, 1  # a multiprocessor's; shared memory that each block takes for itself
FLOATS, INTEGERS, COUNTS = {"d", "lse", "delta", "grad_d"}, {"first", "end"}, {"tokens", "heads"}
NUMBERS = {"scale": "fp32", "TILE": "constexpr", "K": "constexpr"}
STRIDES = {"row_stride", "head_stride", "token_stride"}

def compiled(kernel, capability):
    types = {}
    for name in kernel.arg_names:
        number = NUMBERS.get(name, "i32" if name in STRIDES | COUNTS else None)
        types[name] = number or ("*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*bf16")
    # Pointers and strides are multiples of 16 as in the model.
    multiples = {
        (n,): [["tt.divisibility", 16]]
        for n, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in STRIDES
    }
    source = ASTSource(kernel, types, {"TILE": kernels.TILES[2], "K": 64}, multiples)
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

def resources(cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:([0-9]+) STACK:([0-9]+)", said)
    return int(found[1]), int(found[2])

rows = []
for gpu, (capability, shared_kib) in TARGETS.items():
    for kernel in (kernels._forward, kernels._backward_queries, kernels._backward_keys):
        made = compiled(kernel, capability)
        registers, stack = resources(made.asm["cubin"])
        threads, shared = 32 * kernels.WARPS, made.metadata.shared / 1024
        blocks = int(min(REGISTERS // (registers * threads), shared_kib // (shared + RESERVED_KIB)))
        atomics = len(re.findall(r"^[ \\t]*(?:@%p[0-9]+ )?(?:atom|red)[.]", made.asm["ptx"], re.M))
        rows.append({
            "gpu": gpu, "kernel": kernel.__name__, "registers": registers, "spilled_bytes": stack, "shared_kib": shared,
            "threads": threads, "blocks_per_multiprocessor": blocks, "atomics": atomics,
        })
print(json.dumps(rows))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    # A cache of its own: the compiler is what is tested.
    variables = environment(TRITON_CACHE_DIR=tmp_path)
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    print(*kernels, sep="\n")
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel["atomics"] == 0, "two runs would differ"
        # Two blocks hide each other's waits; a few spilled numbers cost nothing, a hundred do.
        assert kernel["blocks_per_multiprocessor"] >= 2, kernel
        assert kernel["spilled_bytes"] <= 256, kernel
