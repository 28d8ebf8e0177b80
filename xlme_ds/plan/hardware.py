"""GPUs by name: what a plan needs to know of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """`memory_gib` as the data sheet has it; `tflops` is the dense peak of matrix products in `precision`.

    `link` joins the GPUs of one node, `network` is a GPU's share of what joins nodes; both GB/s in one direction.
    """

    name: str
    memory_gib: float
    tflops: float
    precision: str = "bf16"
    link: float = 32.0
    network: float = 25.0
    per_node: int = 8
    source: str = "given on the command line; PCIe 4.0 x16 in a node and 200 Gb/s a GPU between nodes are assumed"


# One direction of NVLink is half of what the data sheets add up. The network is that of the maker's own system.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 141, 989.4, link=450, network=50, source="NVIDIA H200 SXM data sheet; DGX H200: 8 × 400 Gb/s"),
        GPU("h100-80g", 80, 989.4, link=450, network=50, source="NVIDIA H100 SXM5 data sheet; DGX H100: 8 × 400 Gb/s"),
        GPU("a100-80g", 80, 312, link=300, network=25, source="NVIDIA A100 SXM data sheet; DGX A100: 8 × 200 Gb/s"),
        GPU("a100-40g", 40, 312, link=300, network=25, source="NVIDIA A100 SXM data sheet; DGX A100: 8 × 200 Gb/s"),
        GPU(
            "v100-32g",
            32,
            15.7,
            precision="fp32",
            link=150,
            network=6.25,
            source="NVIDIA V100 SXM2 data sheet, which has no bf16; DGX-1: 4 × 100 Gb/s",
        ),
        GPU(
            "a10-24g",
            24,
            125,
            link=32,
            network=3.125,
            source="NVIDIA A10 data sheet, PCIe 4.0 x16; 25 Gb/s a GPU between nodes is assumed",
        ),
    )
}


def gpu(text: str) -> GPU:
    """A GPU by its name, or by "memory in GiB,bf16 TFLOP/s". Raises ValueError for anything else."""
    if text in GPUS:
        return GPUS[text]
    try:
        memory, tflops = (float(part) for part in text.split(","))
    except ValueError:
        known = ", ".join(GPUS)
        raise ValueError(f'--gpu {text} is not known: choose one of {known}, or give "memory_gib,tflops"') from None
    if memory <= 0 or tflops <= 0:
        raise ValueError(f"--gpu {text}: memory and TFLOP/s must be positive")
    return GPU(text, memory, tflops)
