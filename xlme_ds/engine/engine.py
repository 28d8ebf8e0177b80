"""What the training loop sees of an engine, and the step that all engines share: exact global means, whatever the
micro-batches and ranks. With plain torch on one process it is the reference that every other engine is compared with.

Its state is flat buffers and the parts of parameters that lie in them, to write and to read.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.state_files import KINDS, MOMENTS, StateReader, StateWriter
from ..data.batch import Batch
from ..models.dimensions import effective_rank, token_products
from ..objectives.protocol import BatchSource, Objective, Pretraining
from .optimizer import set_learning_rate
from .ranks import gather, on_all_ranks, raise_on_all_ranks

if TYPE_CHECKING:  # this file runs where there is no pyarrow
    from ..data.loader import Loader


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


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flattened parameter `name`, at `offset` of a buffer."""

    name: str
    start: int
    numel: int
    offset: int


def first_state(master: Tensor) -> dict[str, Tensor]:
    """The state of `master` that the optimizer's first step would make."""
    moments = {kind: torch.zeros_like(master, dtype=torch.float32) for kind in MOMENTS}
    return {"step": torch.zeros((), device=master.device)} | moments


class Bucket:
    """Master weights in one buffer that an optimizer updates as one tensor, and this rank's pieces in it."""

    def __init__(self, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, master: Tensor):
        self.pieces = pieces
        self.optimizer = optimizer
        self.master = master

    @contextmanager
    def opened(self, to_write: bool) -> Iterator[dict[str, Tensor]]:
        """The buffers by kind, flat, and `step`; `to_write`: what is written into them stays."""
        state = self.optimizer.state[self.master] = self.optimizer.state[self.master] or first_state(self.master)
        moments = {kind: state[kind].view(-1) for kind in MOMENTS}
        yield {"step": state["step"], KINDS[0]: self.master.detach().view(-1)} | moments

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.optimizer.state.get(self.master, {}).get("step", 0))


class Engine:
    """A model with its optimizer, by plain torch on one process. Every public method is collective: all ranks call it
    alike.

    DeepSpeed's engines go backward, update and reduce in their own way, and override what says how.
    """

    rank = 0
    world = 1

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        loader: BatchSource,
        heldout: "Loader | None",
        device: torch.device,
        optimizer: Any,
        clip: float = math.inf,
    ):
        """`optimizer`: torch's, or DeepSpeed's wrapper of it; `clip`: the largest norm that plain torch leaves."""
        self.module = module
        self.objective = objective
        self.loader = loader
        self.heldout = heldout
        self.device = device
        self.optimizer = optimizer
        self.clip = clip
        self.seconds_reading = 0.0  # spent by this rank until its rows were there
        self._reads = True
        self._counting = True
        self._norm_limit = math.inf
        self._applied: bool | None = None  # None: not decided yet, or left out by DeepSpeed itself
        self._of_terms = objective.weights
        self._weights = self._of_terms.float().to(device)  # of the terms, in a step over their counts
        self._detailed = False
        self._languages = 0  # that sums are wanted by
        self._gathered: list[tuple[Tensor, ...]] = []  # sums, statistics, sums by language; by micro-batch
        self._losses: list[tuple[Tensor, Batch]] = []  # of the step, by micro-batch

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by their names in the whole model."""
        return self.module.named_parameters()

    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, one term of a sum over all micro-batches and ranks."""
        loss.backward()

    def _update(self) -> float:
        """Clip, take the optimizer step if `_accepts` the norm, clear the gradients; returns the global norm before
        clipping.

        Says in `_applied` whether the step was taken.
        """
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.clip))
        self._applied = self._accepts(norm)
        if self._applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _buckets(self) -> list[Bucket]:
        """The parts of weights and optimizer state that this rank owns."""
        return [Bucket([Piece(name, 0, p.numel(), 0)], self.optimizer, p) for name, p in self.named_parameters()]

    def _publish(self) -> None:
        """Make what was written into the buckets the weights to compute with; collective."""

    def _reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks, in place."""
        return values

    def full_state(self) -> dict[str, Tensor]:
        """The whole model in float32 on the CPU of rank 0, by parameter name; empty on the other ranks."""
        return {name: value.detach().float().cpu().clone() for name, value in self.named_parameters()}

    def train_batch(self, step: int, learning_rate: float, detailed: bool, norm_limit: float = math.inf) -> StepStats:
        """Take optimizer step `step` (from 0) on its rows, unless its gradient norm exceeds `norm_limit`.

        `detailed` asks for the metrics. Raises SharedError when any rank cannot read its rows.
        """
        self._norm_limit, self._applied, self._detailed = norm_limit, None, detailed
        self._losses.clear()
        batches, counts = self._read(step)
        weights = (self._of_terms / counts.clamp(min=1)).float()
        self._weights = (
            weights if self.device.type == "cpu" else weights.pin_memory().to(self.device, non_blocking=True)
        )
        set_learning_rate(self.optimizer, learning_rate)
        norm = self._take_step(batches)
        metrics = self.objective.at(step).summarise(**self._totals(counts)) if detailed else {}
        return self._stats(step, batches, metrics, norm)

    def _read(self, step: int) -> tuple[list[Batch], Tensor]:
        """This rank's micro-batches, and the counts of the whole step. Raises SharedError when a rank cannot read its
        own."""
        if (objective := self.objective.at(step)) is not self.objective:
            self._of_terms = objective.weights
        batches: list[Batch] = []
        error: Exception | None = None
        begun = time.perf_counter()
        try:
            if self._reads:
                batches = list(self.loader.step(step))
        except (ValueError, OSError) as failure:
            error = failure
        # On the host, which would otherwise wait until a GPU has done all of the step before.
        failed = torch.full((1,), float(error is not None), dtype=torch.float64)
        reduced = self._reduce(torch.cat([self._own_counts(batches, failed.device), failed]))
        if reduced[-1] > 0:
            raise_on_all_ranks(error)
        batches = [batch.to(self.device) for batch in batches]
        self.seconds_reading += time.perf_counter() - begun
        return batches, reduced[:-1]

    def _own_counts(self, batches: Sequence[Batch], device: torch.device) -> Tensor:
        """What this rank adds to the counts of `batches`, all of which are on `device`."""
        counts = torch.zeros(len(self.objective.terms), dtype=torch.float64, device=device)
        for batch in batches if self._counting else ():
            counts += self.objective.counts(batch)
        return counts

    def _take_step(self, batches: list[Batch]) -> float:
        """Forward and backward pass of every micro-batch, and the update; returns the norm as `_update` does."""
        self.module.train()
        for batch in batches:
            self._backward(self._loss(self.module(batch), batch))
        return self._update()

    def _loss(self, output: Any, batch: Batch) -> Tensor:
        """What the micro-batch adds to the loss of the step; where it is not finite its gradient is made so too: then
        the norm tells all ranks."""
        sums = self.objective.sums(output, batch)
        if self._detailed:
            found: tuple[Tensor, ...] = sums.detach().double(), self.objective.statistics(output, batch)
            if self._languages:
                found += (cast(Pretraining, self.objective).by_language(output, batch, self._languages),)
            self._gathered.append(found)
        return self._watched((self._weights * sums).sum(), batch)

    def _watched(self, loss: Tensor, batch: Batch) -> Tensor:
        if loss.requires_grad:  # not in an evaluation
            self._losses.append((loss.detach(), batch))
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def _totals(self, counts: Tensor) -> dict[str, Tensor]:
        """`counts`, and what was gathered since the last call added up over the ranks; float64, on the CPU."""
        terms = len(self.objective.terms)
        shapes: dict[str, tuple[int, ...]] = {"sums": (terms,), "statistics": self.objective.statistics_shape}
        if self._languages:
            shapes["by_language"] = 2, terms, self._languages
        totals = {name: torch.zeros(shape, dtype=torch.float64, device=self.device) for name, shape in shapes.items()}
        for found in self._gathered:
            for total, part in zip(totals.values(), found, strict=True):
                total += part
        self._gathered.clear()
        return {"counts": counts.cpu()} | {name: self._reduce(total).cpu() for name, total in totals.items()}

    def _accepts(self, norm: float) -> bool:
        """Whether a step with this global gradient norm (DeepSpeed says −1 for one that is not finite) is to be
        taken."""
        if not (math.isfinite(norm) and norm >= 0):
            return False
        return math.isinf(self._norm_limit) or not self.any(norm > self._norm_limit)

    def _stats(self, step: int, batches: Sequence[Batch], metrics: dict[str, float], norm: float) -> StepStats:
        group = self.optimizer.param_groups[0]
        rate = float(group["lr"] / group["scale"])
        if self._applied:
            return StepStats(metrics, norm, rate)
        mine = [
            self.loader.rows_of(step, micro_batch)
            for micro_batch, batch in enumerate(batches)
            for loss, seen in self._losses
            if not torch.isfinite(loss) and all(map(torch.equal, seen, batch))  # a pipeline hands on copies
        ]
        suspects = dict.fromkeys(rows for part in gather(mine) for rows in part)
        norm = norm if norm >= 0 else math.nan
        return StepStats(metrics, norm, rate, applied=False, suspects=tuple(suspects))

    def eval_batch(self, step: int) -> dict[str, Tensor]:
        """Additive sums, counts and statistics (float64, on the CPU) of step `step` of the held-out rows, and sums and
        counts by language [2, terms, languages]."""
        heldout = self.heldout
        assert heldout is not None
        self._languages = max(len(store.languages) for store in heldout.stores.values())
        totals = self._evaluate(on_all_ranks(lambda: heldout.step(step)), getattr(heldout, "counted", ()))
        self._languages = 0
        return totals

    @property
    def draws(self) -> bool:
        """Whether its model has a generator."""
        return "generator" in getattr(self.objective, "encoders", ())  # of a task there are none

    @torch.no_grad()
    def dimensions(self, rows: int) -> list[float]:
        """In how many dimensions the first encoder's token states vary on the first `rows` held-out rows of each task,
        the embedding first (`effective_rank`): the same under any engine and number of ranks."""
        heldout = self.heldout
        assert heldout is not None
        batch = on_all_ranks(lambda: heldout.first_rows(rows)).to(self.device)
        self._detailed = False  # nothing of it is reported
        with token_products(
            self.module, next(iter(cast(Pretraining, self.objective).encoders)), batch.segments_BT > 0
        ) as products:
            self._forward([batch])
        mine = {layer: effective_rank(products_DD) for layer, products_DD in products.items()}
        every = {layer: rank for held in gather(mine) for layer, rank in held.items()}  # a stage has some of the layers
        return [every[layer] for layer in sorted(every)]

    def probe_loss(self) -> float:
        """Loss of the probe batch with the weights as they are: the same under any engine and number of ranks.

        A generator draws its first token everywhere: any other may change with a rounding.
        """
        batch = on_all_ranks(self.loader.probe)
        batch = batch._replace(uniforms_M=batch.uniforms_M * 0) if self.draws else batch
        totals = self._evaluate([batch])  # the same on all ranks: their number cancels out
        means = totals["sums"] / totals["counts"].clamp(min=1)
        return float((self.objective.weights * means).sum())

    @torch.no_grad()
    def _evaluate(self, batches: Sequence[Batch], counted: Sequence[bool] = ()) -> dict[str, Tensor]:
        """`counted`: whether each batch counts, where not all do."""
        batches = [batch.to(self.device) for batch in batches]
        self._detailed = True
        self._forward(batches)
        if counted:
            self._gathered = list(compress(self._gathered, counted))
            batches = list(compress(batches, counted))
        return self._totals(self._reduce(self._own_counts(batches, self.device)))

    def _forward(self, batches: list[Batch]) -> None:
        """Evaluate `batches`, and gather their sums and statistics."""
        self.module.eval()
        for batch in batches:
            self._loss(self.module(batch), batch)

    def save(self, writer: StateWriter) -> None:
        """Hand this rank's part of weights and optimizer state to `writer`; they may change once this returns."""
        buckets = self._buckets()
        sizes = {f"{piece.name}/{kind}/{piece.start}": piece.numel
                 for bucket in buckets for piece in bucket.pieces for kind in KINDS}  # fmt: skip
        writer.begin(sizes, max(bucket.step for bucket in buckets))
        for bucket in buckets:
            with bucket.opened(to_write=False) as buffers:
                for piece, kind in product(bucket.pieces, KINDS):
                    writer.put(buffers[kind][piece.offset : piece.offset + piece.numel])
        writer.end()

    def load(self, reader: StateReader) -> None:
        """Take weights and optimizer state, from whatever engine. Raises SharedError when they are another model's."""
        on_all_ranks(lambda: self._read_state(reader))
        self._publish()

    @torch.no_grad()
    def _read_state(self, reader: StateReader) -> None:
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.named_parameters()}  # of ZeRO-3: the whole
        for bucket in self._buckets():
            with bucket.opened(to_write=True) as buffers:
                parts = (
                    (piece.name, kind, piece.start, buffers[kind][piece.offset : piece.offset + piece.numel])
                    for piece, kind in product(bucket.pieces, KINDS)
                )
                reader.read(parts, sizes)
                buffers["step"].fill_(reader.step)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self._reduce(torch.tensor(float(flag), device=self.device)) > 0)
