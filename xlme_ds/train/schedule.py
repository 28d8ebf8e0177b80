"""The learning rate as a function of the step."""

import math
from collections.abc import Callable, Mapping

from ..config import OptimizerConfig, ScheduleConfig

PUBLISHED = ScheduleConfig()  # the schedule of XLM-E's paper


def learning_rate(step: int, steps: int, cfg: OptimizerConfig, schedule: ScheduleConfig = PUBLISHED) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up to the peak, then `schedule`."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    return cfg.learning_rate * _SHAPES[schedule.name](step, steps, cfg.warmup_steps, schedule.decay_steps)


def _linear(step: int, steps: int, warmup: int, decay: int) -> float:
    return (steps - step) / max(steps - warmup, 1)


def _cosine(step: int, steps: int, warmup: int, decay: int) -> float:
    return (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2


def _wsd(step: int, steps: int, warmup: int, decay: int) -> float:
    """1 until the last `decay` steps, then 1 - sqrt(steps of the decay that are done / `decay`) (Hägele et al., 2024,
    section 3)."""
    left = steps - step
    return 1.0 if left >= decay else 1 - math.sqrt(1 - left / decay)


def _inverse_sqrt(step: int, steps: int, warmup: int, decay: int) -> float:
    """sqrt(warmup / (step + 1)), as in XLM, which counts steps from 1."""
    return math.sqrt(max(warmup, 1) / (step + 1))


# Name of a schedule -> function of (step, steps, warmup, decay) that returns the learning rate of a step after the
# warm-up, as a fraction of the peak.
_SHAPES: Mapping[str, Callable[[int, int, int, int], float]] = {
    "linear": _linear, "cosine": _cosine, "wsd": _wsd, "inverse_sqrt": _inverse_sqrt,
}  # fmt: skip
