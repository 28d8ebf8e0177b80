"""Compile a Triton kernel for a cluster's GPUs on a machine that has none, and report the result: registers and
spilled bytes of a thread, shared memory and threads of a block, number of blocks that a multiprocessor can hold by
both, atomic additions, and products by tensor cores (Hopper's `wgmma`, before it `mma`)."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tests.launch import ROOT, environment

# Compute capability, and KiB of shared memory of a multiprocessor (CUDA programming guide, table of compute
# capabilities).
TARGETS = {"A100": (80, 164), "H100, H200": (90, 228)}
REGISTERS, RESERVED_KIB = 65_536, 1  # a multiprocessor's; shared memory that each block takes for itself


def report(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    multiples_of_16: Collection[str],
    options: Mapping[str, int],
    gpu: str,
) -> dict[str, Any]:
    """`types` of all arguments; pointers are multiples of 16 as in the model, and the numbers named are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    capability, shared_kib = TARGETS[gpu]
    multiples = {
        (n,): [["tt.divisibility", 16]]
        for n, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in multiples_of_16
    }
    source = ASTSource(kernel, dict(types), dict(constants), multiples)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    registers, stack = _resources(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", made.asm["cubin"])
    threads, shared, ptx = 32 * options["num_warps"], made.metadata.shared / 1024, made.asm["ptx"]
    return {
        "gpu": gpu,
        "kernel": kernel.__name__,
        "registers": registers,
        "spilled_bytes": stack,
        "shared_kib": shared,
        "threads": threads,
        "blocks_per_multiprocessor": int(
            min(REGISTERS // (registers * threads), shared_kib // (shared + RESERVED_KIB))
        ),
        "atomics": len(re.findall(r"^[ \t]*(?:@%p[0-9]+ )?(?:atom|red)[.]", ptx, re.M)),
        "wgmma": len(re.findall(r"wgmma[.]mma_async", ptx)),
        "mma": len(re.findall(r"mma[.]sync", ptx)),
    }


def _resources(tool: Path, cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:([0-9]+) STACK:([0-9]+)", said)
    assert found
    return int(found[1]), int(found[2])


def reports(program: str, cache: Path) -> list[dict[str, Any]]:
    """The JSON that `program` prints on its last line; `pytest -s` shows it.

    The program runs in its own process, without the interpreter, and with its own cache, because the test is about the
    compiler.
    """
    variables = environment(TRITON_CACHE_DIR=cache)
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    print(*kernels, sep="\n")
    return kernels
