"""What the compiler makes of the Triton attention kernels for A100 and H100 / H200; no GPU is needed.

    python -m bench.attention_kernels [--json] [--head-size 64]

Registers and spilled bytes of a thread, shared memory and threads of a block, how many blocks a multiprocessor can hold
by both, and atomic additions in the code: there must be none, or two runs would differ.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xlme_ds.models import attention_triton as kernels

KERNELS = (kernels._forward, kernels._backward_queries, kernels._backward_keys)
# Compute capability, and of a multiprocessor the KiB of shared memory (CUDA programming guide, table of compute
# capabilities).
TARGETS = {"A100": (80, 164), "H100, H200": (90, 228)}
REGISTERS, RESERVED_KIB = 65_536, 1  # a multiprocessor's; shared memory that each block costs besides
FLOATS = {"d", "lse", "delta", "grad_d"}
INTEGERS = {"first", "end"}
NUMBERS = {"scale": "fp32", "TILE": "constexpr", "K": "constexpr"}
STRIDES = {"row_stride", "head_stride", "token_stride"}
COUNTS = {"tokens", "heads"}


def compiled(kernel: Any, capability: int, head_size: int) -> Any:
    """`kernel` in bf16 for rows of any length, its pointers and strides multiples of 16 as in the model."""
    types = {}
    for name in kernel.arg_names:
        number = NUMBERS.get(name, "i32" if name in STRIDES | COUNTS else None)
        types[name] = number or ("*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*bf16")
    multiples = {
        (n,): [["tt.divisibility", 16]]
        for n, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in STRIDES
    }
    source = ASTSource(kernel, types, {"TILE": kernels.TILES[2], "K": head_size}, multiples)
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as cuobjdump of triton's own CUDA tools reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def measure(head_size: int) -> list[dict[str, Any]]:
    """A row for every kernel and GPU."""
    rows = []
    for gpu, (capability, shared_kib) in TARGETS.items():
        for kernel in KERNELS:
            made = compiled(kernel, capability, head_size)
            registers, stack = resources(made.asm["cubin"])
            threads, shared = 32 * kernels.WARPS, made.metadata.shared / 1024
            rows.append({
                "gpu": gpu,
                "kernel": kernel.__name__,
                "registers": registers,
                "spilled_bytes": stack,
                "shared_kib": shared,
                "threads": threads,
                "blocks_per_multiprocessor": int(
                    min(REGISTERS // (registers * threads), shared_kib // (shared + RESERVED_KIB))
                ),
                "atomics": len(re.findall(r"^\s*(@%p\d+ )?(atom|red)\.", made.asm["ptx"], re.M)),
            })  # fmt: skip
    return rows


def main() -> None:
    """Print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--head-size", type=int, default=64, choices=(16, 32, 64, 128))
    given = parser.parse_args()
    rows = measure(given.head_size)
    if given.json:
        print(json.dumps({"triton": triton.__version__, "head_size": given.head_size, "kernels": rows}, indent=1))
        return
    print(f"triton {triton.__version__}, bf16, heads of {given.head_size}, tiles of {kernels.TILES[2]}\n")
    for line in (list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)):
        print(f"| {' | '.join(map(str, line))} |")


if __name__ == "__main__":
    main()
