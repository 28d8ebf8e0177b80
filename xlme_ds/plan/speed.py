"""Estimates the speed of a layout: the bytes that GPUs send, and tokens per second, from three assumptions.

On the busiest GPU, with m micro-batches and p pipeline stages, the seconds of a step are the sum of:

    compute   = operations executed / (peak · utilisation)        including recomputed layers and logits
    bubble    = compute · (p − 1) / m                             1F1B: a GPU is idle in (p−1) of (m+p−1) intervals
    transfer  = (exposed bytes) / rate + max(0, (other bytes) / rate − seconds of computing in which they are sent)
                                                                  rate = bandwidth · LINK_EFFICIENCY
    offload   = (bytes of optimizer, gradients and weights) / HOST_RATE; nvme counts as the host's memory

Bytes are counted as the engines send them. In an all-reduce of n bytes over N ranks each rank sends 2n(N−1)/N bytes. In
a reduce-scatter or an all-gather it sends n(N−1)/N bytes (ring algorithms). Weights are sent in the type of the
computation. Gradients are summed in float32, or in bf16 with `engine.gradient_precision bf16`. With several
micro-batches per step:

| | gradients | weights |
|---|---|---|
| ZeRO-1, bf16 | reduce-scatter, once per step | all-gather, once per step |
| ZeRO-1, fp32 or offloaded | all-reduce, once per step | all-gather, once per step |
| ZeRO-2 | all-reduce in every micro-batch (default of `use_multi_rank_bucket_allreduce`) | all-gather, once per step |
| ZeRO-3 | reduce-scatter in every micro-batch | all-gather in every micro-batch, again for weights that were not held
|        |                                      | until the backward pass (`stage3_max_live_parameters`) |

A pipeline also sends hidden states forward and their gradients back. If the objective has an additional first pass
without gradients, a pipeline sends hidden states forward once more, and ZeRO-3 gathers again the weights that it does
not hold until the second pass.

Bytes that are sent while nothing computes are exposed. The gradient of a vocabulary table is complete at the very end
of a backward pass, so its sum over the ranks is exposed, under ZeRO-2 and 3 in every micro-batch. ZeRO-3 also exposes
the gathering of the tables at the start of each micro-batch, because they belong to the root module. ZeRO-1 and 2 also
expose the gathering of the new weights after the update. In a pipeline, or with `overlap_comm` off, all bytes are
exposed. The other bytes are sent during

| | |
|---|---|
| ZeRO-1 | the backward pass of the last micro-batch: BACKWARD_SHARE · compute / m |
| ZeRO-2 | all backward passes: BACKWARD_SHARE · compute |
| ZeRO-3 | all of compute |
"""

from dataclasses import dataclass

from ..config import RunConfig
from ..counting import flops_per_step
from ..models.pipeline import part_costs
from .activations import stage_transfer_bytes
from .layout import ParallelLayout
from .memory import FLOAT32_BYTES, OPTIMIZER_BYTES, reused_weights, uses_bf16_optimizer

# The three assumptions.
UTILISATION = 0.4  # fraction of its peak that a GPU reaches while it computes: measure it, and set --utilisation
LINK_EFFICIENCY = 0.7  # fraction of a link's bandwidth that a collective reaches
HOST_RATE = 10e9  # bytes per second for each GPU through PCIe and the host's memory, with eight GPUs on a host

# Fraction of a step's operations that the backward pass executes. It has two matrix products for each one of the
# forward pass.
BACKWARD_SHARE = 2 / 3
DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class GPU:
    """A kind of GPU, with numbers from its data sheet."""

    name: str
    memory_gib: float
    tflops: float  # dense peak of matrix products in `precision`
    precision: str = "bf16"
    link: float = 32.0  # GB/s in one direction between the GPUs of a node
    network: float = 25.0  # GB/s in one direction between nodes, for each GPU
    per_node: int = 8
    fp32_tflops: float = 0.0  # peak in float32 without tensor cores; 0: not known
    source: str = "given on the command line; PCIe 4.0 x16 in a node and 200 Gb/s a GPU between nodes are assumed"


_H200 = "NVIDIA H200 SXM data sheet; DGX H200: 8 × 400 Gb/s"
_H100 = "NVIDIA H100 SXM5 data sheet; DGX H100: 8 × 400 Gb/s"
_A100 = "NVIDIA A100 SXM data sheet; DGX A100: 8 × 200 Gb/s"
_V100 = "NVIDIA V100 SXM2 data sheet, which has no bf16; DGX-1: 4 × 100 Gb/s"
_A10 = "NVIDIA A10 data sheet, PCIe 4.0 x16; 25 Gb/s a GPU between nodes is assumed"
# `link` is half of the data sheet's rate of NVLink (A10: of PCIe), which is the sum of both directions. `network` is
# the rate of NVIDIA's own systems (A10: assumed).
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 141, 989.4, fp32_tflops=67, link=450, network=50, source=_H200),
        GPU("h100-80g", 80, 989.4, fp32_tflops=67, link=450, network=50, source=_H100),
        GPU("a100-80g", 80, 312, fp32_tflops=19.5, link=300, network=25, source=_A100),
        GPU("a100-40g", 40, 312, fp32_tflops=19.5, link=300, network=25, source=_A100),
        GPU("v100-32g", 32, 15.7, precision="fp32", link=150, network=6.25, source=_V100),
        GPU("a10-24g", 24, 125, fp32_tflops=31.2, link=32, network=3.125, source=_A10),
    )
}


def parse_gpu(text: str) -> GPU:
    """A GPU by its name (H100 and h100 are h100-80g, a100 is a100-80g), or by "memory in GiB,bf16 TFLOP/s". Raises
    ValueError for anything else."""
    for name, gpu in GPUS.items():
        if text.lower() in (name, name.partition("-")[0]):
            return gpu
    try:
        memory, tflops = (float(part) for part in text.split(","))
    except ValueError:
        names = ", ".join(GPUS)
        raise ValueError(f'gpu {text} is not known: choose one of {names}, or give "memory_gib,tflops"') from None
    if not (1e-3 <= memory <= 1e6 and 1e-3 <= tflops <= 1e6):
        raise ValueError(f"gpu {text}: memory and TFLOP/s must be positive, from 0.001 to 1,000,000")
    return GPU(text, memory, tflops)


def communication_bytes(layout: ParallelLayout) -> dict[str, float]:
    """The bytes that the busiest GPU sends in an optimizer step. It sends `gradients` and `weights` to the replicas of
    its stage, and the bytes `stages` to other stages. `total` is the sum of these three. `exposed` counts those of the
    total that are sent while nothing computes."""
    by_stage = [_sent_by(layout, stage) for stage in range(len(layout.stages))]
    totals = [sent["gradients"] + sent["weights"] + sent["stages"] for sent in by_stage]
    busiest = by_stage[totals.index(max(totals))]
    return busiest | {"exposed": busiest["exposed"] + busiest["stages"], "total": max(totals)}


def _sent_by(layout: ParallelLayout, stage: int) -> dict[str, float]:
    """The bytes that a GPU of a stage sends in an optimizer step, with the keys of `communication_bytes` except
    `total`. Here `exposed` does not count the bytes to other stages."""
    sizes, micro_batches = layout.sizes(stage), layout.accumulation
    ring_share = (layout.replicas - 1) / layout.replicas
    all_gather = layout.element_bytes * sizes.total * ring_share  # bytes of an all-gather of all weights
    # Bytes of a reduce-scatter of all gradients.
    reduce_scatter = layout.reduced_element_bytes * sizes.total * ring_share
    table_share = sizes.tables / sizes.total
    if layout.zero["stage"] == 3:
        # For the backward pass, weights that are no longer held are gathered again. The tables, which belong to the
        # root module, are still held.
        backward = all_gather * (1 - (sizes.tables + sum(reused_weights(layout, stage))) / sizes.total)
        still_held = (
            not layout.flops.first_pass_layer or sizes.discriminator <= layout.zero["stage3_max_reuse_distance"]
        )
        first_pass = 0.0 if still_held else all_gather * sizes.discriminator / sizes.total
        gradients = micro_batches * reduce_scatter
        weights = micro_batches * (all_gather + backward + first_pass)
        exposed = micro_batches * table_share * (reduce_scatter + all_gather)
    else:
        reductions = micro_batches if layout.zero["stage"] == 2 else 1
        # An all-reduce sends as much as two reduce-scatters.
        reduction = reduce_scatter if uses_bf16_optimizer(layout) else 2 * reduce_scatter
        gradients = reduction * reductions
        weights = all_gather
        exposed = table_share * gradients + weights
    if not layout.zero["overlap_comm"] or len(layout.stages) > 1:
        exposed = gradients + weights
    is_last = stage == len(layout.stages) - 1
    # The additional first pass, without gradients, sends forward too.
    sends = layout.neighbours(stage) + bool(layout.flops.first_pass_layer and not is_last)
    between = micro_batches * sends * stage_transfer_bytes(layout)
    if stage == 0:  # this stage sends the updated embedding to the last stage
        between += layout.element_bytes * layout.embedding_copy_size
    elif is_last:  # this stage sends the embedding's gradient to the first stage
        between += FLOAT32_BYTES * layout.embedding_copy_size
    return {"gradients": gradients, "weights": weights, "stages": between, "exposed": exposed}


def speed(run: RunConfig, layout: ParallelLayout, gpu: GPU, utilisation: float) -> dict[str, float]:
    """The estimated seconds of a step of `run`: `compute`, `bubble`, `transfer`, `offload` and their sum `step`. The
    dict also has `tokens_per_s`, the `days` of the whole run, and `of_peak` = (standard count of a step's operations /
    `step`) / peak of all GPUs."""
    tokens = sum(run.data.mean_rows) * layout.row_tokens
    balance = [len(stage.layers) for stage in layout.stages]
    costs = part_costs(layout.flops, balance, layout.model.activation_checkpointing)
    compute = max(costs) * tokens / layout.replicas / (gpu.tflops * 1e12 * utilisation)
    seconds = {
        "compute": compute,
        "bubble": compute * (len(layout.stages) - 1) / layout.accumulation,
        "transfer": _transfer(layout, gpu, compute),
        "offload": 0.0,
    }
    parameters = max(layout.sizes(stage).total for stage in range(len(layout.stages))) / layout.replicas
    if layout.offloads_optimizer:  # the state is read and written, gradients go to the host, and weights to the GPU
        seconds["offload"] += parameters * (2 * OPTIMIZER_BYTES + 4 + layout.element_bytes) / HOST_RATE
    if layout.engine.offload_parameters != "none":  # weights go to the GPU in both passes of every micro-batch
        seconds["offload"] += parameters * 2 * layout.accumulation * layout.element_bytes / HOST_RATE
    step = sum(seconds.values())
    of_peak = flops_per_step(run, layout.row_tokens) / (step * layout.gpus * gpu.tflops * 1e12)
    rates = {"tokens_per_s": tokens / step, "days": step * run.train.steps / DAY, "of_peak": of_peak}
    return seconds | {"step": step} | rates


def _transfer(layout: ParallelLayout, gpu: GPU, compute: float) -> float:
    """The seconds of a step in which a GPU sends and does not compute. `compute`: the seconds in which it computes."""
    sent = communication_bytes(layout)
    # These are the rates of the links in GB/s. Consecutive ranks share a stage (rank = stage · replicas + replica).
    among_replicas = gpu.link if layout.replicas <= gpu.per_node else gpu.network
    among_stages = gpu.link if layout.gpus <= gpu.per_node else gpu.network
    usable = LINK_EFFICIENCY * 1e9  # bytes per second for each GB/s of a link's rate
    between = sent["stages"] / (among_stages * usable)
    exposed = (sent["exposed"] - sent["stages"]) / (among_replicas * usable)
    others = (sent["gradients"] + sent["weights"]) / (among_replicas * usable) - exposed
    overlapping_share = {1: BACKWARD_SHARE / layout.accumulation, 2: BACKWARD_SHARE, 3: 1.0}[layout.zero["stage"]]
    return between + exposed + max(0.0, others - overlapping_share * compute)
