"""DeepSpeed's pipeline engines: parts of the model on different processes, each part data parallel with ZeRO-1.

The ranks of a stage are consecutive: rank = stage · replicas + replica. Only the first and the last stage read data.
"""

import contextlib
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from ..config import ModelConfig, RunConfig
from ..data.batch import Batch
from ..data.loader import Loader
from ..models.execution import applied
from ..models.init import Known, initialise
from ..models.pipeline import Part
from ..objectives.protocol import Pretraining
from .engine import StepStats
from .optimizer import set_learning_rate
from .stage_exchange import PassAhead, tied_table
from .zero import ZeroEngine


class _PartSpec(LayerSpec):
    """Builds a part on the process that holds it."""

    def __init__(self, objective: Pretraining, cfg: ModelConfig, part: Part):
        super().__init__(nn.Module)
        self.objective, self.cfg, self.part = objective, cfg, part

    def build(self, log: bool = False) -> nn.Module:
        """The part, built."""
        return applied(self.objective.build(self.cfg, self.part), self.cfg)


def _held(module: PipelineModule) -> list[Any]:
    """The parts that this process holds, in the order of the model."""
    return [part for name, part in module.named_children() if name.isdigit()]


def _pipeline_module(
    config: RunConfig, objective: Pretraining, parts: Sequence[Part], known: Known | None
) -> PipelineModule:
    """The parts of this rank, initialised as the same parameters of the whole model are."""
    kind = PipelineModule
    if config.engine.pipeline_schedule == "dualpipev":
        from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

        kind = DualPipeVModule
    # One entry a part, not a layer: what its layers share (mask, relative bias) is then computed once for all of them.
    specs = [_PartSpec(objective, config.model, part) for part in parts]
    with contextlib.redirect_stdout(None):
        module = kind(specs, num_stages=config.engine.pipeline_stages, partition_method="uniform")
    for part in _held(module):
        initialise(part, config.seed, config.model.init_std, known=known)
    return module


class PipelineEngine(ZeroEngine):
    """The schedule drives forward, backward and update; everything around it is `ZeroEngine`'s."""

    def __init__(
        self,
        config: RunConfig,
        objective: Pretraining,
        parts: Sequence[Part],
        loader: Loader,
        heldout: Loader | None,
        known: Known | None,
        ds_config: dict[str, Any],
    ):
        module = _pipeline_module(config, objective, parts, known)
        super().__init__(module, objective, loader, heldout, config.optimizer, ds_config)
        self._undo_averaging = self.engine.dp_world_size * self.engine.gradient_accumulation_steps()
        self._reads = self.engine.is_first_stage() or self.engine.is_last_stage()
        self._counting = self.engine.is_first_stage()
        self._weights = torch.zeros(len(objective.terms), device=self.device)
        self._gathered: list[tuple[Tensor, Tensor]] = []
        self._detailed = False
        dual = config.engine.pipeline_schedule == "dualpipev"
        self._least_micro_batches = 2 * self.engine.num_stages if dual else 1
        # DualPipeV numbers its buffers by the micro-batches of training: with more of them two share one (0.19.8).
        self._most_micro_batches = self.engine.gradient_accumulation_steps() if dual else sys.maxsize
        module.loss_fn = self._loss
        self._last = _held(module)[-1]
        self._ahead = PassAhead(self.engine, self._last) if self._last.passes_ahead else None
        self._tied = tied_table(self.engine, _held(module))
        self._share()

    def _loss(self, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
        """On the last stage, for every micro-batch."""
        batch = Batch(*labels)
        output = self._last.output(outputs, batch)
        sums = self.objective.sums(output, batch)
        if self._detailed:
            self._gathered.append((sums.detach().double(), self.objective.statistics(output, batch)))
        return self._watched((self._weights * sums).sum() * self._undo_averaging, batch)

    def _same(self, seen: Batch, batch: Batch) -> bool:
        return torch.equal(seen.tokens_BT, batch.tokens_BT)  # the schedule hands on copies

    def _collect(self) -> tuple[Tensor, Tensor]:
        """Sums and statistics of the whole step, on every rank; the last stages have them."""
        sums = torch.zeros(len(self.objective.terms), dtype=torch.float64, device=self.device)
        statistics = torch.zeros(self.objective.statistics_shape, dtype=torch.float64, device=self.device)
        for one, others in self._gathered:
            sums += one
            statistics += others
        self._gathered.clear()
        return self._reduce(sums), self._reduce(statistics)

    def train_batch(self, step: int, learning_rate: float, detailed: bool, norm_limit: float = math.inf) -> StepStats:
        """Take optimizer step `step` by the schedule; arguments and result as of any engine."""
        batches, counts = self._read(step)
        batches = self._filled(batches, self.engine.gradient_accumulation_steps())
        self._begin(norm_limit)
        self._weights = (self.objective.weights.to(self.device) / counts.clamp(min=1)).float()
        self._detailed = detailed
        set_learning_rate(self.optimizer, learning_rate)
        self.engine.train_batch((batch, batch) for batch in batches)
        self._share()
        metrics = {}
        if detailed:
            sums, statistics = self._collect()
            metrics = self.objective.summarise(sums.cpu(), counts.cpu(), statistics.cpu())
        return self._stats(step, batches, metrics, float(self.engine.get_global_grad_norm()))

    def _evaluate(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        batches = [batch.to(self.device) for batch in batches]
        counts = self._reduce(self._own_counts(batches))
        self._detailed = True
        self.engine.reset_activation_shape()  # these micro-batches may have another number of rows
        for first in range(0, len(batches), self._most_micro_batches):
            self._evaluate_some(batches[first : first + self._most_micro_batches])
        self.engine.reset_activation_shape()
        sums, statistics = self._collect()
        return {"sums": sums.cpu(), "counts": counts.cpu(), "statistics": statistics.cpu()}

    def _evaluate_some(self, batches: list[Batch]) -> None:
        """As many as the schedule takes; their sums and statistics join those that are gathered."""
        micro_batches, before = max(len(batches), self._least_micro_batches), len(self._gathered)
        batches = self._filled(batches, micro_batches)
        self.engine.eval_batch(
            ((batch, batch) for batch in itertools.islice(itertools.cycle(batches), micro_batches)),
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=micro_batches,
        )
        del self._gathered[before + len(batches) :]  # those that only filled the schedule

    def _filled(self, batches: list[Batch], micro_batches: int) -> list[Batch]:
        return batches if self._ahead is None else self._ahead.fill(batches, micro_batches)

    def _share(self) -> None:
        if self._tied is not None:
            self._tied.share()

    def _publish(self) -> None:
        super()._publish()
        self._share()

    def canonical_names(self) -> dict[str, str]:
        """The model's name of every parameter of this rank's stage, by the name that DeepSpeed has for it."""
        return {name: name.split(".", 1)[1] for name, _ in self.engine.module.named_parameters()}

    def full_state(self) -> dict[str, Tensor]:
        """The whole model in float32 on the CPU of rank 0, by parameter name; empty on the other ranks."""
        names = self.canonical_names()
        leads = self.engine.grid.get_data_parallel_rank() == 0
        mine = [(names[name], tuple(p.shape)) for name, p in self.engine.module.named_parameters() if leads]
        listings: list[Any] = [None] * self.world
        dist.all_gather_object(listings, mine)
        state = {}
        for name, parameter in self.engine.module.named_parameters():
            whole = safe_get_full_fp32_param(parameter).detach().float().contiguous()  # collective within the stage
            if self.rank == 0:
                state[names[name]] = whole.cpu().clone()
            elif leads:
                dist.send(whole, dst=0)
        if self.rank == 0:
            for source, listing in enumerate(listings[1:], start=1):
                for name, shape in listing:
                    whole = torch.empty(shape, device=self.device)
                    dist.recv(whole, src=source)
                    state[name] = whole.cpu()
        return state
