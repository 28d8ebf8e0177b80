"""What the first and the last stage of a pipeline exchange besides activations: the tied embedding and predictions.

The first stage owns the embedding: it alone has moments, enters the norm and is in a checkpoint. The last stage has a
copy, filled after every step, whose gradient goes to the first before that reduces its own over the replicas.

Objectives whose rows have open places take a pass over the micro-batches of a step before the one that trains
(DeepSpeed's evaluation schedule). The places are filled where the tokens are read, in the first stage; every process
that reads rows knows where they are, so only the predictions travel, from the last stage to the first.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ..data.batch import Batch
from ..models.electra import block_sizes


class TiedTable:
    """One side of it, the owner's or the borrower's; the blocks of the table go one by one."""

    def __init__(self, engine: Any, table: Sequence[Tensor], owner: bool):
        self.table = table
        self.owner = owner
        self.other = engine.grid.stage_to_global(stage_id=engine.num_stages - 1 if owner else 0)
        self.gradients = [] if owner else [torch.zeros_like(block, dtype=torch.float32) for block in table]
        for block, gradient in zip(table, self.gradients, strict=False):
            block.register_post_accumulate_grad_hook(_moving_to(gradient))
        # Between the last backward pass and the reduction over the replicas; DeepSpeed binds it to its engine.
        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.ReduceTiedGrads: self._add_gradients}

    def share(self) -> None:
        """The owner's values to the borrower."""
        for block in self.table:
            if self.owner:
                dist.send(block.detach(), dst=self.other)
            else:
                dist.recv(block.detach(), src=self.other)

    def _add_gradients(self, engine: Any) -> None:
        """The borrower's gradients to the owner, in float32."""
        for gradient in self.gradients:
            dist.send(gradient, dst=self.other)
            gradient.zero_()
        parameters: Sequence[Any] = self.table if self.owner else ()
        for block in parameters:
            gradient = torch.empty_like(block, dtype=torch.float32)
            dist.recv(gradient, src=self.other)
            total = block._hp_grad if engine.using_bf16_optimizer else block.grad
            total.add_(gradient)


def _moving_to(total: Tensor) -> Callable[[Tensor], None]:
    """Adds up in float32 what the micro-batches give."""

    def move(block: Tensor) -> None:
        assert block.grad is not None
        total.add_(block.grad)
        block.grad = None

    return move


def tied_table(engine: Any, parts: Sequence[Any]) -> TiedTable | None:
    """What the process that holds `parts` has to do for it; None where that is nothing."""
    first, last = parts[0], parts[-1]
    if not first.ties:
        return None
    if first.part.first and last.part.last:  # DualPipeV: the last part reads the very parameters
        last.borrowed = first.table
    elif first.part.first:
        return TiedTable(engine, first.table, owner=True)
    elif last.part.last:
        like = next(last.parameters())
        last.borrowed = [
            torch.empty(size, last.cfg.width, dtype=like.dtype, device=like.device, requires_grad=True)
            for size in block_sizes(last.cfg)
        ]
        return TiedTable(engine, last.borrowed, owner=False)
    return None


class PassAhead:
    """One process's part in it; `last` is the last part that it holds."""

    def __init__(self, engine: Any, last: Any):
        self.engine, self.last = engine, last
        self.other = engine.grid.stage_to_global(stage_id=engine.num_stages - 1 if engine.is_first_stage() else 0)
        self._predicted: list[Tensor] = []

    def fill(self, batches: Sequence[Batch], micro_batches: int) -> list[Batch]:
        """`batches` as the second pass reads them, where this process holds the first part; elsewhere as they are.

        `micro_batches` is what the schedule runs, on every process; a process that reads has as many `batches`, or
        fewer, which are then repeated. Collective over the stages.
        """
        open_ones = [self.last.first_pass(batch) for batch in batches]
        self._predicted.clear()
        loss, self.engine.module.loss_fn = self.engine.module.loss_fn, self._keep
        self.last.writing = True
        self.engine.eval_batch(
            ((batch, batch) for batch in itertools.islice(itertools.cycle(open_ones), micro_batches)),
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=micro_batches,
        )
        self.engine.module.loss_fn = loss
        self.last.writing = False
        return self._exchange(batches, open_ones)

    def _keep(self, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
        """In place of the loss."""
        self._predicted.append(self.last.output(outputs, Batch(*labels)).predicted_M)
        return torch.zeros((), device=outputs[0].device)

    def _exchange(self, batches: Sequence[Batch], open_ones: Sequence[Batch]) -> list[Batch]:
        if not self.engine.is_first_stage():
            for predicted_P in self._predicted[: len(batches)]:
                dist.send(predicted_P, dst=self.other)
            return list(batches)
        if not self.last.part.last:
            for open_one in open_ones:
                self._predicted.append(torch.empty_like(open_one.masked_M))
                dist.recv(self._predicted[-1], src=self.other)
        found = zip(batches, open_ones, self._predicted, strict=False)  # more than the batches only filled the schedule
        return [self.last.second_pass(*each) for each in found]
