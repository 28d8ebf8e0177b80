"""Tokens a second, from counted operations and bytes and three assumptions. A simple model: an estimate, no
measurement.

A step takes, on the GPU that has most to do, with m micro-batches and p stages:

    compute   = operations executed / (peak · utilisation)        recomputing of checkpointed layers and logits included
    bubble    = compute · (p − 1) / m                             1F1B: (p−1) of (m+p−1) slots are idle
    transfer  = bytes sent / (bandwidth · LINK_EFFICIENCY)        what is overlapped counts where it exceeds compute
    offload   = bytes of optimizer and gradients through PCIe and the host's memory
"""

from dataclasses import dataclass

from ..config import RunConfig
from ..counting import flops_per_step
from ..models.pipeline import stage_costs
from .communication import communication
from .hardware import GPU
from .layout import Layout
from .states import OPTIMIZER

UTILISATION = 0.4
"""Assumed share of the peak that a GPU reaches while it computes; measure it, and say --utilisation."""
LINK_EFFICIENCY = 0.7
"""Assumed share of a link's rate that a collective reaches."""
HOST = 10e9
"""Assumed bytes a second and GPU through PCIe and the host's memory, eight GPUs sharing one host."""
DAY = 86_400.0


@dataclass(frozen=True)
class Speed:
    """Seconds of an optimizer step, and what follows; `of_peak`: operations of the standard count over the peak."""

    compute: float
    bubble: float
    transfer: float
    offload: float
    tokens_per_s: float
    days: float
    of_peak: float

    @property
    def step(self) -> float:
        """Seconds of one optimizer step."""
        return self.compute + self.bubble + self.transfer + self.offload


def speed(run: RunConfig, of: Layout, gpu: GPU, utilisation: float) -> Speed:
    """Estimate of `run` in the layout `of` on GPUs of one kind."""
    tokens = sum(run.data.mean_rows) * of.row_tokens
    balance = [len(part.layers) for part in of.stages]
    busiest = max(stage_costs(of.work, balance, of.model.activation_checkpointing)) * tokens / of.replicas
    compute = busiest / (gpu.tflops * 1e12 * utilisation)
    bubble = compute * (len(of.stages) - 1) / of.accumulation
    transfer = _transfer(of, gpu, compute)
    offload = _offload(of)
    step = compute + bubble + transfer + offload
    return Speed(
        compute=compute,
        bubble=bubble,
        transfer=transfer,
        offload=offload,
        tokens_per_s=tokens / step,
        days=step * run.train.steps / DAY,
        of_peak=flops_per_step(run, of.row_tokens) / (step * of.gpus * gpu.tflops * 1e12),
    )


def _transfer(of: Layout, gpu: GPU, compute: float) -> float:
    """Seconds of sending that computing does not hide."""
    sent = communication(of)
    # Consecutive ranks share a stage (rank = stage · replicas + replica).
    among_replicas = gpu.link if of.replicas <= gpu.per_node else gpu.network
    among_stages = gpu.link if of.gpus <= gpu.per_node else gpu.network
    rate = LINK_EFFICIENCY * 1e9
    gradients, weights = sent.gradients / (among_replicas * rate), sent.weights / (among_replicas * rate)
    between = sent.stages / (among_stages * rate)
    if not sent.overlapped:
        return gradients + weights + between
    if of.zero.stage == 3:
        return max(0.0, gradients + weights - compute) + between
    return max(0.0, gradients - compute) + weights + between


def _offload(of: Layout) -> float:
    """Seconds that the host takes for the update: states read and written, gradients down, weights up."""
    if not of.zero.offload_optimizer:
        return 0.0
    part = max(of.sizes(stage).total for stage in range(len(of.stages))) / of.replicas
    return part * (2 * OPTIMIZER + 4 + of.element) / HOST
