"""What happens beside the steps: records, progress on the terminal, evaluation, checkpoints.

Every callback is called on every rank after every step, because some of them are collective.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import Training
from ..engine.processes import together
from ..engine.protocol import Engine, StepStats
from .checkpoint import Checkpoints
from .metrics import MetricsLog, StepLines


class Callback:
    """See the module."""

    log: StepLines | None = None

    def after_step(self, done: int, stats: StepStats) -> None:
        """`done` steps are finished; `stats` belongs to the last of them."""

    def close(self, done: int) -> None:
        """The loop ends after `done` steps, finished or stopped."""
        if self.log is not None:
            self.log.close()

    @property
    def trouble(self) -> OSError | None:
        """Why the records cannot be written; the ranks do not know it of each other."""
        return None if self.log is None else self.log.error


class Record(Callback):
    """Writes a line of metrics.jsonl at every logged step, and shows it."""

    def __init__(
        self,
        run: Path,
        config: Training,
        start: int,
        row_tokens: int,
        flops_per_step: float,
        show: Callable[[dict[str, Any], int], None],
        skipped: Callable[[], int],
    ):
        self.log: MetricsLog = MetricsLog(run, "metrics", start)
        self.skipped = skipped
        self.config = config
        self.tokens_per_step = int(sum(config.data.mean_rows)) * row_tokens
        self.flops_per_step = flops_per_step
        self.show = show
        self.last = (start, time.perf_counter())

    def after_step(self, done: int, stats: StepStats) -> None:
        """See `Callback`."""
        if not stats.metrics:
            return
        now = time.perf_counter()
        rate = (done - self.last[0]) / (now - self.last[1])
        self.last = (done, now)
        values = {
            "step": done,
            **stats.metrics,
            "lr": stats.learning_rate,
            "grad_norm": stats.gradient_norm,
            "skipped_steps": self.skipped(),
            "tokens": done * self.tokens_per_step,
            "tokens_per_s": rate * self.tokens_per_step,
            "flops_per_s": rate * self.flops_per_step,
        }
        self.log.write(values)
        self.show(values, self.config.train.steps)


class Evaluate(Callback):
    """Runs the held-out rows and writes a line of heldout.jsonl; collective."""

    def __init__(
        self,
        run: Path,
        engine: Engine,
        summarise: Callable[..., dict[str, float]],
        every: int,
        steps: int,
        start: int,
        constants: Mapping[str, float],
        show: Callable[[dict[str, Any], int], None] | None,
    ):
        self.engine = engine
        self.summarise = summarise
        self.every = every
        self.steps = steps
        self.constants = constants
        self.show = show
        self.log = MetricsLog(run, "heldout", start) if engine.rank == 0 else None

    def after_step(self, done: int, stats: StepStats) -> None:
        """See `Callback`."""
        if done == self.steps or (self.every and done % self.every == 0):
            totals = self.engine.eval_batch(0)
            values = {"step": done, **self.summarise(**totals), **self.constants}
            if self.log is not None and self.show is not None:
                self.log.write(values)
                self.show(values, self.steps)


class Save(Callback):
    """Saves a checkpoint at its cadence and at the end; collective."""

    def __init__(
        self, checkpoints: Checkpoints, engine: Engine, every: int, state: Callable[[], dict[str, Any]], start: int
    ):
        self.checkpoints = checkpoints
        self.engine = engine
        self.every = every
        self.state = state
        self.saved = start

    def after_step(self, done: int, stats: StepStats) -> None:
        """See `Callback`."""
        self.checkpoints.poll(self.engine)
        if done % self.every == 0:
            self._save(done)

    def close(self, done: int) -> None:
        """See `Callback`."""
        if done > self.saved:
            self._save(done)
        self.checkpoints.wait(self.engine)

    def _save(self, done: int) -> None:
        self.checkpoints.save(self.engine, done, together(self.state))
        self.saved = done
