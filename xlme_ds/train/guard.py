"""Steps that are left out: counted, recorded, and too many of them in a row end the run.

The engine leaves a step out when its loss or gradient is not finite, or its gradient norm exceeds the limit that is set
here. Norm and limit are the same on all ranks, and so is all that follows from them.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..config import TrainConfig
from ..engine.protocol import StepStats
from .callbacks import Callback
from .metrics import StepLines

_WINDOW = 128  # steps; the rule and both numbers are OLMo-core's (SkipStepOptimizer)
_LEAST = 64


class Guard(Callback):
    """What it counts goes into checkpoints (`state`), so that a resumed run decides as if it had never stopped."""

    def __init__(
        self, config: TrainConfig, state: Mapping[str, Any], rows_of: Callable[[int], str], log: StepLines | None
    ):
        self.config = config
        self.skipped = int(state.get("skipped", 0))
        self.in_a_row = int(state.get("in_a_row", 0))
        self.norms: deque[float] = deque(state.get("norms", ()), maxlen=_WINDOW)
        self.rows_of = rows_of
        self.log = log
        self.fault: str | None = None
        """Why the run cannot go on."""

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run needs; a run that was ended here starts counting in a row anew."""
        in_a_row = 0 if self.fault is not None else self.in_a_row
        return {"skipped": self.skipped, "in_a_row": in_a_row, "norms": list(self.norms)}

    def norm_limit(self) -> float:
        """The largest gradient norm that the next step may have."""
        if not self.config.spike_sigma or len(self.norms) < _LEAST:
            return math.inf
        return statistics.fmean(self.norms) + self.config.spike_sigma * statistics.stdev(self.norms)

    def after_step(self, done: int, stats: StepStats) -> None:
        """See `Callback`."""
        if stats.applied:
            self.in_a_row = 0
        else:
            self._left_out(done, stats)
        if math.isfinite(stats.gradient_norm):
            self.norms.append(stats.gradient_norm)

    def _left_out(self, done: int, stats: StepStats) -> None:
        self.skipped += 1
        self.in_a_row += 1
        rows = list(stats.suspects) or [self.rows_of(done - 1)]
        norm = stats.gradient_norm
        if math.isfinite(norm):
            reason = f"gradient norm {norm:.4g}, {self.config.spike_sigma:g} sigma allow {self.norm_limit():.4g}"
        else:
            reason = "loss not finite" if stats.suspects else "gradient not finite"
        if self.log is not None:
            self.log.write({"step": done, "reason": reason, "rows": rows})
        if self.in_a_row >= self.config.max_bad_steps:
            self.fault = (
                f"{self.in_a_row} steps in a row, up to step {done}, were left out, the last for its {reason}; its rows are "
                f"{'; '.join(rows)}, those of the others stand in faults.jsonl: look at them with `python -m data_prep show`, "
                "or start a run with a lower optimizer.learning_rate"
            )
