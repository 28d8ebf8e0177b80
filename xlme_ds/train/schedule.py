"""The learning rate as a function of the step."""

import math

from ..config import OptimizerConfig, ScheduleConfig

PUBLISHED = ScheduleConfig()  # the schedule of XLM-E's paper


def learning_rate(step: int, steps: int, cfg: OptimizerConfig, schedule: ScheduleConfig = PUBLISHED) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up to the peak, then `schedule`."""
    warmup, left = cfg.warmup_steps, steps - step
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    match schedule.name:
        case "linear":
            fraction = left / max(steps - warmup, 1)
        case "cosine":
            fraction = (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2
        case "wsd":  # 1 - sqrt(share of the decay that is done) in the last steps (Hägele et al., 2024, section 3)
            fraction = 1.0 if left >= schedule.decay_steps else 1 - math.sqrt(1 - left / schedule.decay_steps)
        case "inverse_sqrt":  # as in XLM, which counts steps from 1
            fraction = math.sqrt(max(warmup, 1) / (step + 1))
        case unknown:
            raise KeyError(unknown)
    return cfg.learning_rate * fraction
