"""The steps that bench.gpu measured next to what bench.roofline counts for them, as a table.

    python -m bench.against docs/results/gpu.json

The count is of the tree that it runs in, at the same rows, micro-batches and settings, under DeepSpeed.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TITLES = ("step", "counted, tokens/s", "measured", "counted / measured", "planned, GiB", "measured peak")
GPUS = {"H200": "h200", "H100": "h100", "A100": "a100"}


def counted(row: dict[str, Any], gpu: str) -> dict[str, Any]:
    """What bench.roofline counts for a measured row."""
    micro_batches = row["rows"] // row["micro_batch"]
    words = ["--recipe", row["recipe"], "--data.micro-batch", row["micro_batch"], "--micro-batches", micro_batches]
    for name, value in row["settings"].items():
        if name != "engine":
            words += ["--model." + name.replace("_", "-"), value]
    command = [sys.executable, "-W", "ignore", "-m", "bench.roofline", "--json", "--gpu", gpu, *map(str, words)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def line(row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items()) or "default"
    name = f"{row['recipe']}, {row['micro_batch']} + {row['micro_batch']} rows, {settings}"
    rates = found["tokens_per_s"], row["tokens_per_s"]
    memory = (row.get("planned_memory_gib"), row.get("peak_memory_gib"))
    sizes = [f"{size:.1f}" if size else "" for size in memory]
    return [name, *(f"{rate:,.0f}" for rate in rates), f"{rates[0] / rates[1]:.2f}", *sizes]


def main() -> None:
    """Print the table as Markdown."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench.against GPU.json")
    figures = json.loads(Path(sys.argv[1]).read_text())
    device = figures["machine"]["device"]
    gpu = next((short for name, short in GPUS.items() if name in device), None)
    if gpu is None:
        sys.exit(f"bench.against: error: bench.roofline has no rates for {device}: measure on one of {', '.join(GPUS)}")
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for row in figures["steps"]:
        if "tokens_per_s" in row:
            print(f"| {' | '.join(line(row, counted(row, gpu)))} |", flush=True)


if __name__ == "__main__":
    main()
