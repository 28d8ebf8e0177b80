"""Signals that ask a run to stop. Nothing here loads torch: they may come while it is still being loaded."""

import signal
from types import FrameType

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
