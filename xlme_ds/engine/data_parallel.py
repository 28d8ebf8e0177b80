"""The step that all data-parallel engines share: exact global means, whatever the micro-batches and ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.batch import Batch, BatchSource
from ..objectives.electra import ElectraObjective
from .processes import together
from .protocol import StepStats
from .state import Bucket, read_state, write_state
from .statefile import StateReader, StateWriter


class DataParallelEngine(ABC):
    """Forward, loss and accumulation; a subclass says how to go backward, update and reduce."""

    rank = 0
    world = 1

    def __init__(
        self,
        module: nn.Module,
        objective: ElectraObjective,
        loader: BatchSource,
        heldout: BatchSource | None,
        device: torch.device,
    ):
        self.module = module
        self.objective = objective
        self.loader = loader
        self.heldout = heldout
        self.device = device

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, one term of a sum over all micro-batches and ranks."""

    @abstractmethod
    def _update(self, learning_rate: float) -> float:
        """Clip, take the optimizer step, clear the gradients; returns the global gradient norm before clipping."""

    @abstractmethod
    def _reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks, in place."""

    @abstractmethod
    def _buckets(self) -> Sequence[Bucket]:
        """The parts of weights and optimizer state that this rank owns."""

    @abstractmethod
    def _publish(self) -> None:
        """Make what was written into the buckets the weights to compute with; collective."""

    @property
    def skipped(self) -> int:
        """Steps left out because of an overflow."""
        return 0

    def train_batch(self, step: int, learning_rate: float, detailed: bool) -> StepStats:
        """See `Engine`."""
        self.module.train()
        batches = [batch.to(self.device) for batch in self.loader.step(step)]
        counts = self._reduce(torch.stack([self.objective.counts(batch) for batch in batches]).sum(0))
        weights = self.objective.weights.to(self.device) / counts.clamp(min=1)
        gathered = []
        for batch in batches:
            output = self.module(batch)
            sums = self.objective.sums(output, batch)
            self._backward((weights.float() * sums).sum())
            if detailed:
                gathered.append((sums.detach().double(), self.objective.statistics(output, batch)))
        metrics = {}
        if detailed:
            sums, statistics = (self._reduce(torch.stack(group).sum(0)) for group in zip(*gathered, strict=True))
            metrics = self.objective.summarise(sums.cpu(), counts.cpu(), statistics.cpu())
        return StepStats(metrics, self._update(learning_rate), self.skipped)

    def eval_batch(self, step: int) -> dict[str, Tensor]:
        """See `Engine`."""
        assert self.heldout is not None
        return self._evaluate(self.heldout.step(step))

    def probe_loss(self) -> float:
        """See `Engine`."""
        totals = self._evaluate([self.loader.probe()])  # the same on all ranks: their number cancels out
        means = totals["sums"] / totals["counts"].clamp(min=1)
        return float((self.objective.weights * means).sum())

    def save(self, writer: StateWriter) -> None:
        """See `Engine`."""
        write_state(self._buckets(), writer)

    def load(self, reader: StateReader) -> None:
        """See `Engine`."""
        together(lambda: read_state(self._buckets(), reader))
        self._publish()

    @torch.no_grad()
    def _evaluate(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Sums, counts and statistics of `batches`, added up over them and over the ranks."""
        self.module.eval()
        totals: dict[str, Tensor] = {}
        for batch in batches:
            batch = batch.to(self.device)
            output = self.module(batch)
            for name, value in (
                ("sums", self.objective.sums(output, batch).double()),
                ("counts", self.objective.counts(batch)),
                ("statistics", self.objective.statistics(output, batch)),
            ):
                totals[name] = totals[name] + value if name in totals else value
        return {name: self._reduce(value).cpu() for name, value in totals.items()}

    def any(self, flag: bool) -> bool:
        """See `Engine`."""
        return bool(self._reduce(torch.tensor(float(flag), device=self.device)) > 0)
