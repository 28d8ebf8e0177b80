"""The token embedding that the last stage of a pipeline reads and the first one owns.

Only the first stage's is a parameter of the optimizer: it alone has moments, enters the norm and stands in a
checkpoint. The last one has a copy, filled after every step, whose gradient goes to the first before that reduces its
own over the replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

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
