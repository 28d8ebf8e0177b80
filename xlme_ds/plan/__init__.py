"""Cost of a recipe and ways to run it, before anything runs: parameters, operations, memory, communication, days.

xlme.plan.run(xlme.recipe("base"), gpus=8, gpu="h100")["days"]

The model is built on the meta device, so the largest one takes no memory either. Speed is an estimate from counted
operations and bytes; no figure of it was measured.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import RunConfig


def run(
    config: "RunConfig", gpus: int | None = None, gpu: str = "a100-80g", utilisation: float = 0.4, layouts: int = 4
) -> dict[str, Any]:
    """The plan that `xlme plan --json` prints: the cost of `config` on GPUs, and the fastest `layouts`."""
    from .planner import plan  # it loads torch
    from .speed import gpu_of

    return plan(config, gpus, gpu_of(gpu), utilisation, layouts)
