"""What the training loop sees of an engine, and the step that all engines share: exact global means, whatever the
micro-batches and ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.state_files import StateReader, StateWriter
from ..data.batch import Batch
from ..objectives.protocol import BatchSource, Objective
from .optimizer import applied_rate, set_learning_rate
from .ranks import gather, on_all_ranks, raise_on_all_ranks
from .state import Bucket, read_state, write_state


@dataclass(frozen=True)
class StepStats:
    """Result of one optimizer step, the same on every rank.

    `metrics`: the objective's means over the global batch, empty unless they were asked for; `gradient_norm`: global,
    before clipping; `learning_rate`: the one that the optimizer had; `applied`: whether it changed anything - a step
    whose loss or gradient is not finite, or whose norm exceeds the limit, leaves weights, moments and Adam's step as
    they were; `suspects`: of a step that was left out, the rows whose own loss was not finite, a sentence part for each
    such micro-batch of any rank.
    """

    metrics: dict[str, float]
    gradient_norm: float
    learning_rate: float
    applied: bool = True
    suspects: tuple[str, ...] = ()


class Engine(ABC):
    """A model with its optimizer under some parallelism. Every public method is collective: all ranks call it alike.

    Forward, loss and accumulation are here; a subclass says how to go backward, update and reduce.
    """

    rank = 0
    world = 1

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: BatchSource | None,
        device: torch.device,
        optimizer: Any,
    ):
        """`optimizer`: torch's, or DeepSpeed's wrapper of it."""
        self.module = module
        self.objective = objective
        self.loader = loader
        self.heldout = heldout
        self.device = device
        self.optimizer = optimizer
        self._reads = True
        self._counting = True
        self._norm_limit = math.inf
        self._applied = False
        self._losses: list[tuple[Tensor, Batch]] = []  # of the step, by micro-batch

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, one term of a sum over all micro-batches and ranks."""

    @abstractmethod
    def _update(self) -> float:
        """Clip, take the optimizer step if `_accepts` the norm, clear the gradients; returns the global norm before
        clipping.

        Says in `_applied` whether the step was taken.
        """

    @abstractmethod
    def _buckets(self) -> Sequence[Bucket]:
        """The parts of weights and optimizer state that this rank owns."""

    @abstractmethod
    def _publish(self) -> None:
        """Make what was written into the buckets the weights to compute with; collective."""

    def _reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks, in place."""
        return values

    @abstractmethod
    def full_state(self) -> dict[str, Tensor]:
        """The whole model in float32 on the CPU of rank 0, by parameter name; empty on the other ranks."""

    def train_batch(self, step: int, learning_rate: float, detailed: bool, norm_limit: float = math.inf) -> StepStats:
        """Take optimizer step `step` (from 0) on its rows, unless its gradient norm exceeds `norm_limit`.

        `detailed` asks for the metrics. Raises SharedError when any rank cannot read its rows.
        """
        self.module.train()
        batches, counts = self._read(step)
        self._begin(norm_limit)
        weights = self.objective.weights.to(self.device) / counts.clamp(min=1)
        gathered = []
        for batch in batches:
            output = self.module(batch)
            sums = self.objective.sums(output, batch)
            self._backward(self._watched((weights.float() * sums).sum(), batch))
            if detailed:
                gathered.append((sums.detach().double(), self.objective.statistics(output, batch)))
        metrics = {}
        if detailed:
            sums, statistics = (self._reduce(torch.stack(group).sum(0)) for group in zip(*gathered, strict=True))
            metrics = self.objective.summarise(sums.cpu(), counts.cpu(), statistics.cpu())
        set_learning_rate(self.optimizer, learning_rate)
        return self._stats(step, batches, metrics, self._update())

    def _read(self, step: int) -> tuple[list[Batch], Tensor]:
        """This rank's micro-batches, and the counts of the whole step. Raises SharedError when a rank cannot read its
        own."""
        batches: list[Batch] = []
        error: Exception | None = None
        try:
            if self._reads:
                batches = [batch.to(self.device) for batch in self.loader.step(step)]
        except (ValueError, OSError) as failure:
            error = failure
        failed = torch.tensor([float(error is not None)], dtype=torch.float64, device=self.device)
        reduced = self._reduce(torch.cat([self._own_counts(batches), failed]))
        if reduced[-1] > 0:
            raise_on_all_ranks(error)
        return batches, reduced[:-1]

    def _own_counts(self, batches: Sequence[Batch]) -> Tensor:
        """What this rank adds to the counts of `batches`."""
        counts = torch.zeros(len(self.objective.terms), dtype=torch.float64, device=self.device)
        for batch in batches if self._counting else ():
            counts += self.objective.counts(batch)
        return counts

    def _begin(self, norm_limit: float) -> None:
        self._norm_limit, self._applied = norm_limit, False
        self._losses.clear()

    def _watched(self, loss: Tensor, batch: Batch) -> Tensor:
        """`loss`, remembered; where it is not finite its gradient is made so too: then the norm tells all ranks."""
        if loss.requires_grad:  # a pipeline evaluates by the same function
            self._losses.append((loss.detach(), batch))
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def _same(self, seen: Batch, batch: Batch) -> bool:
        """Whether the loss of `seen` is of `batch`."""
        return seen is batch

    def _accepts(self, norm: float) -> bool:
        """Whether a step with this global gradient norm (DeepSpeed says −1 for one that is not finite) is to be
        taken."""
        if not (math.isfinite(norm) and norm >= 0):
            return False
        return math.isinf(self._norm_limit) or not self.any(norm > self._norm_limit)

    def _stats(self, step: int, batches: Sequence[Batch], metrics: dict[str, float], norm: float) -> StepStats:
        if self._applied:
            return StepStats(metrics, norm, applied_rate(self.optimizer))
        mine = [
            self.loader.rows_of(step, micro_batch)
            for micro_batch, batch in enumerate(batches)
            for loss, seen in self._losses
            if self._same(seen, batch) and not torch.isfinite(loss)
        ]
        suspects = dict.fromkeys(rows for part in gather(mine) for rows in part)
        norm = norm if norm >= 0 else math.nan
        return StepStats(metrics, norm, applied_rate(self.optimizer), applied=False, suspects=tuple(suspects))

    def eval_batch(self, step: int) -> dict[str, Tensor]:
        """Additive sums, counts and statistics (float64, on the CPU) of step `step` of the held-out rows."""
        heldout = self.heldout
        assert heldout is not None
        return self._evaluate(on_all_ranks(lambda: heldout.step(step)))

    def probe_loss(self) -> float:
        """Loss of the probe batch with the weights as they are: the same under any engine and number of ranks."""
        totals = self._evaluate([on_all_ranks(self.loader.probe)])  # the same on all ranks: their number cancels out
        means = totals["sums"] / totals["counts"].clamp(min=1)
        return float((self.objective.weights * means).sum())

    def save(self, writer: StateWriter) -> None:
        """Hand this rank's part of weights and optimizer state to `writer`; they may change once this returns."""
        write_state(self._buckets(), writer)

    def load(self, reader: StateReader) -> None:
        """Take weights and optimizer state, from whatever engine. Raises SharedError when they are another model's."""
        on_all_ranks(lambda: read_state(self._buckets(), reader))
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
        """Whether `flag` is true on any rank."""
        return bool(self._reduce(torch.tensor(float(flag), device=self.device)) > 0)
