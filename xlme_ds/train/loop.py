"""The training loop. It knows neither the model nor the engine."""

import signal
from collections.abc import Sequence
from types import FrameType

from ..config import RunConfig
from ..engine.protocol import Engine
from .callbacks import Callback
from .schedule import learning_rate

# Slurm sends SIGUSR1 some time before the limit of a job (sbatch --signal), SIGTERM at it and on preemption.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers a signal to stop until the step is finished; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.interrupts = 0
        for number in _STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def release(self) -> None:
        """Give the signals their usual meaning back."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def fit(engine: Engine, config: RunConfig, callbacks: Sequence[Callback], start: int, stop: StopRequest) -> int:
    """Train from `start` finished steps to the end, or until any rank is asked to stop; returns the steps done."""
    done = start
    while done < config.train.steps and not engine.any(stop.received is not None):
        detailed = (done + 1) % config.train.log_every == 0 or done + 1 == config.train.steps
        stats = engine.train_batch(done, learning_rate(done, config.train.steps, config.optimizer), detailed)
        done += 1
        for callback in callbacks:
            callback.after_step(done, stats)
    for callback in callbacks:
        callback.close(done)
    return done
