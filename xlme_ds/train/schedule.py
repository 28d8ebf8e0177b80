"""The learning rate as a function of the step alone, so that a resumed run needs no schedule state."""

from ..config import OptimizerConfig


def learning_rate(step: int, steps: int, cfg: OptimizerConfig) -> float:
    """Rate of optimizer step `step` (from 0) of `steps`: linear warm-up to the peak, linear decay towards 0."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    return cfg.learning_rate * (steps - step) / max(steps - cfg.warmup_steps, 1)
