"""A pass over the micro-batches of a step before the one that trains: all parts of a pipeline predict, the first one
fills in.

It is DeepSpeed's evaluation schedule. Open places are filled where the tokens are read, in the first part; every
process that reads rows knows where they are, so nothing but the predictions travels, from the last part to the first.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batch import Batch


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
