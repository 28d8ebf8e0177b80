"""The planner estimates what a recipe costs and finds the fastest ways to run it, without running it.

xlme.plan.run(xlme.recipe("base"), gpus=8, gpu="h100")["days"]

The model is built on the meta device, so even the largest one takes no memory. Speed is estimated from counted
operations and bytes, not measured.
"""

from typing import TYPE_CHECKING, Any

from ..io.argument_types import check_argument_types

if TYPE_CHECKING:
    from ..config import RunConfig

__all__ = ["run"]


@check_argument_types
def run(
    config: "RunConfig", gpus: int | None = None, gpu: str = "a100-80g", utilisation: float = 0.4, layouts: int = 4
) -> dict[str, Any]:
    """The plan that `xlme plan --json` prints: the cost of `config` on `gpus` GPUs (by default 1, or one for each
    pipeline stage), and the fastest layouts, at most `layouts`.

    `gpu` is h200, h100, a100, a100-40g, v100, a10, or "memory in GiB,bf16 TFLOP/s". `utilisation` is the fraction of
    the peak FLOP/s that a GPU reaches while it computes.

    The plan describes the unchanged `config`. Its numbers include `days`, `gpu_hours` and `tokens_per_s` of all GPUs;
    `fits` says whether the memory suffices. Its dictionaries include `parameters`, with the key `trained_total`;
    `memory_per_gpu_gib`, in GiB, with `total`; and `flops`, in FLOP, with `per_step` and, for the whole run,
    `["standard"]["both"]`. The key `layouts` has a list of dictionaries, each with the costs of one layout and the
    `settings` that select it. Raises ValueError for a number out of range, and if `config` cannot run on `gpus` GPUs.
    """
    from ..validate import check_class  # it loads torch
    from .planner import check_numbers, plan
    from .speed import parse_gpu

    check_class(config)
    check_numbers(gpus, utilisation, layouts)
    return plan(config, gpus, parse_gpu(gpu), utilisation, layouts)


def __dir__() -> list[str]:
    return __all__
