"""DeepSpeed's pipeline engines: parts of the model on different processes, each part data parallel with ZeRO-1.

The ranks of a stage are consecutive: rank = stage · replicas + replica. Only the first and the last stage read data.

If the embedding is tied, the first stage owns it: only the first stage's copy has moments, counts in the gradient norm
and is in checkpoints. After every step the first stage sends the new values to the last stage. After the last backward
pass the last stage sends its copy's gradient to the first stage. The first stage adds it to its own gradient, and
reduces the sum over the replicas.

An objective's rows may have open positions, for which the model must first predict a token. With such an objective, a
first pass over the micro-batches of a step (with DeepSpeed's evaluation schedule) precedes the training pass. The first
stage fills the open positions with the tokens that the last stage predicts. The last stage does not send the positions,
because the first stage reads the same rows.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import Tensor, nn

from ..config import RunConfig
from ..data.batch import Batch
from ..data.loader import Loader
from ..models.encoder import block_sizes
from ..models.execution import wrap_layers
from ..models.init import InitialValues, initialise
from ..models.pipeline import PipelinePart
from ..objectives.protocol import Pretraining
from .ranks import all_gather, on_gpu
from .step import StepContext
from .zero import ZeroEngine


class _PartSpec(LayerSpec):
    """One part of the model, built on the process that holds the part.

    DeepSpeed sees a part as one layer, so that attention mask and relative bias are computed once for all of the part's
    layers. Arguments: nn.Module (DeepSpeed needs a class), the objective, the model's settings, and the part.
    """

    def build(self, log: bool = False) -> nn.Module:
        objective, cfg, part = self.module_args
        return wrap_layers(objective.build(cfg, part), cfg, on_gpu())


class PipelineEngine(ZeroEngine):
    """A `ZeroEngine` in which DeepSpeed's schedule runs forward pass, backward pass and update."""

    def __init__(
        self,
        config: RunConfig,
        objective: Pretraining,
        parts: Sequence[PipelinePart],
        loader: Loader,
        heldout: Loader | None,
        initial_values: InitialValues | None,
        ds_config: dict[str, Any],
    ):
        dualpipev = config.engine.pipeline_schedule == "dualpipev"
        specs = [_PartSpec(nn.Module, objective, config.model, part) for part in parts]
        with contextlib.redirect_stdout(None):  # DeepSpeed prints the parts
            module_class = DualPipeVModule if dualpipev else PipelineModule
            module = module_class(specs, num_stages=config.engine.pipeline_stages, partition_method="uniform")
        # The parts on this process, in the model's order. DeepSpeed names each one by its index.
        own_parts: list[Any] = [part for name, part in module.named_children() if name.isdigit()]
        for part in own_parts:  # each parameter gets the value that it would have in the whole model
            initialise(part, config.seed, config.model.init_std, initial_values=initial_values)
        super().__init__(module, objective, loader, heldout, config.optimizer, ds_config)
        self._counts_rows = self.engine.is_first_stage()
        self._reads_rows = self.engine.is_first_stage() or self.engine.is_last_stage()
        self._min_micro_batches = 2 * self.engine.num_stages if dualpipev else 1
        # DeepSpeed 0.19.8 gives DualPipeV one buffer for each micro-batch of a training step. In an evaluation with
        # more micro-batches, two micro-batches would share a buffer.
        self._max_micro_batches = self.engine.gradient_accumulation_steps() if dualpipev else sys.maxsize
        self._last_own_part = own_parts[-1]
        self._predicted: list[Tensor] = []  # predictions of the first pass, by micro-batch
        self._tied_embedding = _TiedEmbedding(self.engine, own_parts)
        self._tied_embedding.sync_weights()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stage by their names in the whole model, without the part's index that
        DeepSpeed puts before them."""
        return ((name.split(".", 1)[1], parameter) for name, parameter in self.engine.module.named_parameters())

    def prepare_step(self, step: int) -> None:
        """As `Engine.prepare_step`. At a phase's first step, also make DeepSpeed forget the activations' shape, because
        the phase may have rows of another length than the phase before."""
        super().prepare_step(step)
        if any(step == phase.first_step for phase in self.loader.phases):
            self.engine.reset_activation_shape()

    def _read(self, step: int) -> tuple[list[Batch], Tensor]:
        batches, counts = super()._read(step)
        return self._fill_open_positions(batches, self.engine.gradient_accumulation_steps()), counts

    def _take_step(self, context: StepContext, batches: list[Batch], next_step: int | None) -> float:
        # Nothing is read ahead: in `_read` the model may fill open positions, and needs the weights after this step.
        self._context = context
        self.engine.module.loss_fn = partial(self._scheduled_loss, context)
        tensors = [batch.tensors() for batch in batches]
        self.engine.train_batch(zip(tensors, tensors, strict=True))  # as inputs and as labels
        self._tied_embedding.sync_weights()
        return self._gradient_norm(context)

    def _forward(self, context: StepContext, batches: list[Batch]) -> None:
        for _, group in itertools.groupby(batches, lambda batch: batch.tokens_BT.shape):
            self.engine.reset_activation_shape()  # these micro-batches may have another number of rows
            same_shape = list(group)
            for start in range(0, len(same_shape), self._max_micro_batches):
                chunk = same_shape[start : start + self._max_micro_batches]
                gathered_before = len(context.gathered)
                micro_batches = max(len(chunk), self._min_micro_batches)
                filled = self._fill_open_positions(chunk, micro_batches)
                self._evaluate_by_schedule(filled, micro_batches, partial(self._scheduled_loss, context))
                del context.gathered[gathered_before + len(chunk) :]  # sums of batches that the schedule repeated
        self.engine.reset_activation_shape()

    def _evaluate_by_schedule(
        self, batches: list[Batch], micro_batches: int, loss_function: Callable[..., Tensor]
    ) -> None:
        """Run DeepSpeed's evaluation schedule for `micro_batches` micro-batches: `batches`, repeated if there are
        fewer. The last stage calls `loss_function` with the outputs and the tensors of every micro-batch."""
        self.engine.module.loss_fn = loss_function
        tensors = itertools.cycle([batch.tensors() for batch in batches])
        self.engine.eval_batch(
            ((batch, batch) for batch in itertools.islice(tensors, micro_batches)),  # as inputs and as labels
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=micro_batches,
        )

    def _scheduled_loss(self, context: StepContext, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
        """The loss of a micro-batch, times `_loss_factor`. DeepSpeed calls this function on the last stage."""
        batch = self._batch(labels)
        return context.loss(self._last_own_part.output(outputs, batch), batch) * self._loss_factor

    def _batch(self, tensors: Sequence[Tensor]) -> Batch:
        return Batch.of_tensors(tensors, self._last_own_part.added)

    def _fill_open_positions(self, batches: list[Batch], micro_batches: int) -> list[Batch]:
        """Returns `batches` unchanged if the model needs one pass. Otherwise the process that holds the first part
        returns them with their open positions filled, and the others return them without their `added` tensors.

        `micro_batches`: the number of micro-batches that the schedule runs, equal on all processes. Collective over the
        stages.
        """
        if not self._last_own_part.two_passes:
            return batches
        open_batches = [self._last_own_part.first_pass(batch) for batch in batches]
        self._predicted.clear()
        self._last_own_part.exclude_special = True
        self._evaluate_by_schedule(open_batches, micro_batches, self._keep_predictions)
        self._last_own_part.exclude_special = False
        if not self.engine.is_first_stage():
            for predicted_P in self._predicted[: len(batches)]:
                dist.send(predicted_P, dst=self.engine.grid.stage_to_global(stage_id=0))
            return [batch._replace(added={}) for batch in batches]
        if not self._last_own_part.part.last:
            last_stage = self.engine.grid.stage_to_global(stage_id=self.engine.num_stages - 1)
            for open_batch in open_batches:
                self._predicted.append(torch.empty_like(open_batch.masked_M))
                dist.recv(self._predicted[-1], src=last_stage)
        # There are more predictions than batches if the schedule repeated batches.
        triples = zip(batches, open_batches, self._predicted, strict=False)
        return [self._last_own_part.second_pass(*triple) for triple in triples]

    def _keep_predictions(self, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
        """The loss function of the first pass: it stores the predictions and returns 0."""
        self._predicted.append(self._last_own_part.output(outputs, self._batch(labels)).predicted_M)
        return torch.zeros((), device=outputs[0].device)

    def _sync_module_weights(self) -> None:
        super()._sync_module_weights()
        self._tied_embedding.sync_weights()

    def full_state(self) -> dict[str, Tensor]:
        """All parameters, on rank 0: the first process of each later stage sends the stage's parameters to rank 0."""
        state = super().full_state()
        shapes_by_rank = all_gather({name: value.shape for name, value in state.items()})
        for source in range(1, self.world):
            for name, shape in shapes_by_rank[source].items():
                if self.rank == source:
                    dist.send(state.pop(name).to(self.device), dst=0)
                elif self.rank == 0:
                    whole = torch.empty(shape, device=self.device)
                    dist.recv(whole, src=source)
                    state[name] = whole.cpu()
        return state


class _TiedEmbedding:
    """The tied embedding on a process that holds `parts`. The process with the first part owns the embedding; the
    process with the last part, the borrower, has a copy. `blocks` are empty where there is nothing to send: on any
    other process, if one process has both parts, and if the model ties nothing."""

    def __init__(self, engine: Any, parts: Sequence[Any]):
        first, last = parts[0], parts[-1]
        self.blocks: Sequence[Any] = ()  # the blocks of the embedding, which are sent one by one
        self.gradients: Sequence[Tensor] = ()  # the gradients of the borrowed blocks
        self.owns = first.part.first
        self.peer = engine.grid.stage_to_global(stage_id=engine.num_stages - 1 if self.owns else 0)
        if first.ties_embedding and self.owns and last.part.last:
            # DualPipeV: the last part reads the first part's parameters.
            last.borrowed = first.embedding_blocks
        elif first.ties_embedding and self.owns:
            self.blocks = first.embedding_blocks
        elif first.ties_embedding and last.part.last:
            weight = next(last.parameters())  # any weight: the copies have its dtype and its device
            self.blocks = last.borrowed = [weight.new_empty(size, last.cfg.width) for size in block_sizes(last.cfg)]
            self.gradients = [torch.zeros_like(block, dtype=torch.float32) for block in self.blocks]
            for block, gradient in zip(self.blocks, self.gradients, strict=True):
                block.requires_grad_().register_post_accumulate_grad_hook(partial(_move_gradient, gradient))
        # DeepSpeed calls `_send_gradients` like a method of its engine, between the last backward pass and the
        # reduction over the replicas.
        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.ReduceTiedGrads: self._send_gradients}

    def sync_weights(self) -> None:
        """Send the owner's values to the borrower. Collective over owner and borrower."""
        for block in self.blocks:
            if self.owns:
                dist.send(block.detach(), dst=self.peer)
            else:
                dist.recv(block.detach(), src=self.peer)

    def _send_gradients(self, engine: Any) -> None:
        """Send the borrower's gradients to the owner, in float32; the owner adds them to its gradients."""
        for gradient in self.gradients:
            dist.send(gradient, dst=self.peer)
            gradient.zero_()
        for block in self.blocks if self.owns else ():
            gradient = torch.empty_like(block, dtype=torch.float32)
            dist.recv(gradient, src=self.peer)
            total = block._hp_grad if engine.using_bf16_optimizer else block.grad
            total.add_(gradient)


def _move_gradient(total: Tensor, block: Tensor) -> None:
    """Add the gradient of a micro-batch to the float32 sum `total`, and free the gradient."""
    assert block.grad is not None
    total.add_(block.grad)
    block.grad = None
