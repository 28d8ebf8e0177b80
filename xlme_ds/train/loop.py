"""The training loop. It knows neither the model nor the engine."""

from collections.abc import Sequence

from ..config import Training
from ..engine.processes import share
from ..engine.protocol import Engine
from .callbacks import Callback
from .guard import Guard
from .schedule import learning_rate
from .stop import StopRequest
from .watchdog import Watchdog


def fit(
    engine: Engine,
    config: Training,
    guard: Guard,
    callbacks: Sequence[Callback],
    start: int,
    stop: StopRequest,
    watchdog: Watchdog,
) -> int:
    """Train from `start` finished steps to the end, or until any rank is asked to stop; returns the steps done.

    Raises SharedError when the records of any rank cannot be written.
    """
    callbacks = [guard, *callbacks]
    done = start
    while done < config.train.steps and guard.fault is None:
        if engine.any(stop.received is not None or _trouble(callbacks) is not None):
            break
        watchdog.beat(f"taking step {done + 1}")
        detailed = (done + 1) % config.train.log_every == 0 or done + 1 == config.train.steps
        rate = learning_rate(done, config.train.steps, config.optimizer)
        stats = engine.train_batch(done, rate, detailed, guard.norm_limit())
        done += 1
        watchdog.beat(f"evaluating or saving after step {done}")
        for callback in callbacks:
            callback.after_step(done, stats)
    share(_trouble(callbacks))
    watchdog.beat(f"saving after step {done}")
    for callback in callbacks:
        callback.close(done)
    share(_trouble(callbacks))
    return done


def _trouble(callbacks: Sequence[Callback]) -> OSError | None:
    return next((callback.trouble for callback in callbacks if callback.trouble is not None), None)
