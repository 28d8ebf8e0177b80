"""Sums apart by task, in the order of schema.TASKS: mono, para."""

import torch
from torch import Tensor

from ..data.batch import Batch
from ..data.schema import TASKS


def task_of_masked(batch: Batch) -> Tensor:
    """Task of every masked position, [M]."""
    return batch.task_B[batch.masked_M // batch.tokens_BT.shape[1]]


def by_task(values: Tensor, tasks: Tensor, count: int = len(TASKS)) -> Tensor:
    """Sums of `values` [N] by task (or any other number below `count`), [count]."""
    return torch.stack([(values * (tasks == task)).sum() for task in range(count)])
