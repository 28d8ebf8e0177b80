"""The engine that the training loop uses, and the training step that all engines share. Losses are exact means over the
global batch, for any micro-batches and number of ranks. `Engine` itself is plain torch on one process: the reference
with which every other engine is compared."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.state_files import StateReader, StateWriter
from ..data.batch import Batch
from ..data.loader import Loader
from ..data.order import phase_index
from ..models.effective_rank import effective_rank, scatter_matrices
from ..models.encoder import use_rotary_base
from ..objectives.protocol import BatchSource, Objective, Pretraining
from .optimizer import set_learning_rate
from .ranks import SharedError, all_gather, on_all_ranks, raise_on_all_ranks
from .state_shards import Piece, StateShard, read_state_shards, write_state_shards
from .step import StepContext


@dataclass(frozen=True)
class StepStats:
    """Result of one optimizer step, equal on every rank.

    A step is skipped if its loss or gradient is not finite, or its gradient norm exceeds the limit. A skipped step
    leaves weights, moments and Adam's step count unchanged.
    """

    metrics: dict[str, float]  # the objective's means over the global batch; empty unless they were asked for
    gradient_norm: float  # over all parameters, before clipping
    learning_rate: float
    applied: bool = True  # false: the step was skipped
    suspects: tuple[str, ...] = ()  # if the step was skipped: the rows of each micro-batch whose loss is not finite


class Engine:
    """A model with its optimizer, in plain torch on one process. Every public method but `named_parameters` is
    collective: all ranks call it at the same point. Subclasses for DeepSpeed override the backward pass, the update and
    the sums over ranks.
    """

    rank = 0
    world = 1

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: Loader | None,
        device: torch.device,
        optimizer: Any,
        clip: float = math.inf,
    ):
        """`optimizer`: torch's, or DeepSpeed's wrapper of torch's. `clip`: the norm to which a larger gradient is
        scaled down in plain torch (DeepSpeed has its own setting for this)."""
        self.module = module
        self.objective = objective
        self.loader = loader
        self.heldout = heldout
        self.device = device
        self.optimizer = optimizer
        self.clip = clip
        self.seconds_reading = 0.0  # spent by this rank on reading its rows and waiting for the other ranks
        self._reads_ahead = device.type != "cpu"  # whether a step also reads the rows of the next step
        self._rows_ahead: dict[int, tuple[list[Batch], Tensor]] = {}  # the next step, and the result of `_read` for it
        self._reads_rows = True  # false in a pipeline's middle stages, which compute from the tensors sent to them
        self._counts_rows = True  # false in a pipeline's later stages, because the first stage counts the same rows

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by their names in the whole model."""
        return self.module.named_parameters()

    def prepare_step(self, step: int) -> None:
        """Prepare the model to compute step `step`: set the rotary base of its phase."""
        use_rotary_base(self.module, self.loader.phases[phase_index(self.loader.phases, step)].rotary_base)

    def train_batch(
        self,
        step: int,
        learning_rate: float,
        detailed: bool,
        norm_limit: float = math.inf,
        next_step: int | None = None,
    ) -> StepStats:
        """Take optimizer step `step`, counted from 0, on the rows of this step. The step is skipped if its gradient
        norm exceeds `norm_limit` or is not finite.

        `detailed` asks for the metrics. The rows of `next_step` are read while a GPU computes, but not in a pipeline.
        Raises SharedError when any rank cannot read the rows of `step`.
        """
        self.prepare_step(step)
        rows_ahead, self._rows_ahead = self._rows_ahead, {}
        batches, counts = rows_ahead[step] if step in rows_ahead else self._read(step)
        objective = self.objective.at(step)
        weights = (objective.weights / counts.clamp(min=1)).float()
        if self.device.type != "cpu":
            weights = weights.pin_memory().to(self.device, non_blocking=True)
        context = StepContext(objective, weights, norm_limit, detailed)
        set_learning_rate(self.optimizer, learning_rate)
        norm = self._take_step(context, batches, next_step)
        metrics = objective.summarise(**self._totals(context)) if detailed else {}
        return self._stats(context, step, batches, metrics, norm)

    def _read(self, step: int) -> tuple[list[Batch], Tensor]:
        """Returns (this rank's micro-batches, counts): the objective's counts in the global batch, float64 [terms].
        Raises SharedError when a rank cannot read its rows."""
        batches: list[Batch] = []
        error: Exception | None = None
        start_time = time.perf_counter()
        try:
            if self._reads_rows:
                batches = list(self.loader.micro_batches(step))
        except (ValueError, OSError) as failure:
            error = failure
        # The last element counts the ranks that failed. The counts are summed on the host: on a GPU the sum would wait
        # until the step before is finished.
        counts = torch.zeros(len(self.objective.terms) + 1, dtype=torch.float64)
        counts[-1] = error is not None
        for batch in batches if self._counts_rows else ():
            counts[:-1] += self.objective.counts(batch)
        if self._all_reduce(counts)[-1] > 0:
            raise_on_all_ranks(error)
        batches = [batch.to(self.device) for batch in batches]
        self.seconds_reading += time.perf_counter() - start_time
        return batches, counts[:-1]

    def _take_step(self, context: StepContext, batches: list[Batch], next_step: int | None) -> float:
        """Run the forward and backward pass of every micro-batch, and call `_update`; returns the norm from
        `_update`. If the engine reads ahead, read the rows of `next_step` before the update."""
        self.module.train()
        for batch in batches:
            self._backward(context.loss(self.module(batch), batch))
        if self._reads_ahead and next_step is not None:  # the GPU still computes, and `_update` would wait for the norm
            with suppress(SharedError):  # step `next_step` will read its rows again, and raise the error
                self._rows_ahead = {next_step: self._read(next_step)}
        return self._update(context)

    def _backward(self, loss: Tensor) -> None:
        """Compute the gradient of `loss`, this micro-batch's contribution to the step's loss, and add it to the step's
        gradient."""
        loss.backward()

    def _update(self, context: StepContext) -> float:
        """Clip the gradients, take the optimizer step if `_accepts` accepts their norm, and clear the gradients. Sets
        `context.applied`, and returns the global norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.clip))
        context.applied = self._accepts(context, norm)
        if context.applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _accepts(self, context: StepContext, norm: float) -> bool:
        """Whether to take a step with the global gradient norm `norm`. DeepSpeed gives −1 for a norm that is not
        finite."""
        if not (math.isfinite(norm) and norm >= 0):
            return False
        return math.isinf(context.norm_limit) or not self.any_rank(norm > context.norm_limit)

    def _totals(self, context: StepContext) -> dict[str, Tensor]:
        """`context.gathered`, added up over micro-batches and ranks; float64 on the CPU, by name."""
        terms = len(self.objective.terms)
        shapes: dict[str, tuple[int, ...]] = {"sums": (terms,), "counts": (terms,)}
        shapes["statistics"] = self.objective.statistics_shape
        if context.languages:
            shapes["by_language"] = 2, terms, context.languages
        totals = {name: torch.zeros(shape, dtype=torch.float64, device=self.device) for name, shape in shapes.items()}
        for micro_batch in context.gathered:
            for name, total in totals.items():
                total += micro_batch[name]
        return {name: self._all_reduce(total).cpu() for name, total in totals.items()}

    def _all_reduce(self, values: Tensor) -> Tensor:
        """Add up `values` over the ranks in place, and return them."""
        return values

    def _stats(
        self, context: StepContext, step: int, batches: Sequence[Batch], metrics: dict[str, float], norm: float
    ) -> StepStats:
        """The result of a step; collective if the step was skipped."""
        group = self.optimizer.param_groups[0]
        rate = float(group["lr"] / group["scale"])
        if context.applied:
            return StepStats(metrics, norm, rate)
        # A pipeline computes losses from copies of `batches`, so batches are compared by the seeds of their rows.
        faulty_seeds = [batch.seeds_B for loss, batch in context.losses if not torch.isfinite(loss)]
        own_suspects = [
            self.loader.describe_rows(step, micro_batch)
            for micro_batch, batch in enumerate(batches)
            if any(torch.equal(seeds_B, batch.seeds_B) for seeds_B in faulty_seeds)
        ]
        suspects = dict.fromkeys(itertools.chain(*all_gather(own_suspects)))  # a dict names each once, in order
        norm = norm if norm >= 0 else math.nan
        return StepStats(metrics, norm, rate, applied=False, suspects=tuple(suspects))

    def eval_batch(self) -> dict[str, Tensor]:
        """Evaluate the held-out rows. Returns a dict, float64 on the CPU: the arguments of `Objective.summarise`, and
        `by_language`, the loss sums and the counts, [2, terms, languages]."""
        heldout = self.heldout
        assert heldout is not None
        batches = on_all_ranks(lambda: heldout.micro_batches(0))  # every step has the same rows
        languages = max(len(store.languages) for store in heldout.stores.values())
        is_counted = getattr(heldout, "counted", ())  # only `HeldOutLoader` leaves batches out
        return self._evaluate(batches, is_counted, languages)

    @torch.no_grad()
    def effective_ranks(self, rows: int) -> list[float]:
        """The effective rank (`effective_rank`) of the first encoder's token states, one number for the embedding and
        one per layer. The tokens come from the first `rows` held-out rows of each task, so the result is the same under
        any engine and number of ranks."""
        heldout = self.heldout
        assert heldout is not None
        batch = on_all_ranks(lambda: heldout.first_rows(rows)).to(self.device)
        encoder = next(iter(cast(Pretraining, self.objective).encoders))
        with scatter_matrices(self.module, encoder, batch.segments_BT > 0) as matrices:
            self._evaluate([batch])
        own_layers = {layer: effective_rank(scatter_DD) for layer, scatter_DD in matrices.items()}
        by_layer: dict[int, float] = {}
        for layers in all_gather(own_layers):  # a pipeline stage has only some layers
            by_layer |= layers
        return [by_layer[layer] for layer in sorted(by_layer)]

    def probe_loss(self) -> float:
        """Loss of the probe batch. Its rows never change, so equal weights have an equal loss under any engine and
        number of ranks."""
        batch = self.objective.as_probe(on_all_ranks(self.loader.probe))
        totals = self._evaluate([batch])
        # Every rank, or every replica of a pipeline, evaluates this batch. Sums and counts both contain it that many
        # times, so the means are right.
        means = totals["sums"] / totals["counts"].clamp(min=1)
        return float((self.objective.weights * means).sum())

    @torch.no_grad()
    def _evaluate(
        self, batches: Sequence[Batch], is_counted: Sequence[bool] = (), languages: int = 0
    ) -> dict[str, Tensor]:
        """Evaluate `batches`; returns the result of `_totals`. `is_counted`: for each batch whether the totals include
        it; empty if they include all batches. `languages`: as in `StepContext`."""
        batches = [batch.to(self.device) for batch in batches]
        weights = self.objective.weights.float().to(self.device)
        context = StepContext(self.objective, weights, languages=languages)
        self._forward(context, batches)
        if is_counted:
            context.gathered = list(itertools.compress(context.gathered, is_counted))
        return self._totals(context)

    def _forward(self, context: StepContext, batches: list[Batch]) -> None:
        """Evaluate `batches`; `context` gathers their sums and statistics."""
        self.module.eval()
        for batch in batches:
            context.loss(self.module(batch), batch)

    def save(self, writer: StateWriter) -> None:
        """Copy this rank's part of weights and optimizer state to `writer`; training may continue once this returns."""
        write_state_shards(self._state_shards(), writer)

    def load(self, reader: StateReader) -> None:
        """Read weights and optimizer state that any engine saved. Raises SharedError if they belong to another
        model."""
        # ZeRO-3 empties the parameter's own tensor, and keeps the size in `ds_numel`.
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.named_parameters()}
        on_all_ranks(lambda: read_state_shards(self._state_shards(), reader, sizes))
        self._sync_module_weights()

    def _state_shards(self) -> list[StateShard]:
        """The buffers of weights and optimizer state that this rank owns."""
        return [StateShard([Piece(name, 0, p.numel(), 0)], self.optimizer, p) for name, p in self.named_parameters()]

    def _sync_module_weights(self) -> None:
        """Copy the weights from the shards, which `load` has filled, to the module; collective."""

    def full_state(self) -> dict[str, Tensor]:
        """All parameters in float32 on the CPU of rank 0, by name; empty on the other ranks."""
        return {name: value.detach().float().cpu().clone() for name, value in self.named_parameters()}

    def close(self) -> None:
        """Undo what would keep the engine in memory for as long as this process runs. Nothing else may be called
        afterwards."""

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        # The sum is taken on the host, as in `_read`.
        return bool(self._all_reduce(torch.tensor(float(flag))) > 0)
