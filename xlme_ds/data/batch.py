"""What one forward pass reads: rows of both tasks, the masked positions and the uniforms that drive the sampling.

B rows, T tokens, M masked positions of the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import TASKS


class Batch(NamedTuple):
    """A micro-batch. All integers are int64; the model adds no randomness of its own."""

    tokens_BT: Tensor  # original ids, padded with PAD
    positions_BT: Tensor  # position inside the item, from 0 (in XLM's layout anew on the second side); 0 at padding
    segments_BT: Tensor  # number of the item inside its row, from 1; 0 at padding
    sides_BT: Tensor  # 0 on the first side of a pair and in monolingual rows, 1 on the second side; 0 at padding
    languages_BT: Tensor  # index of the side's language in the data's list; 0 at padding
    task_B: Tensor  # index into schema.TASKS
    keys_B: Tensor  # 64 bits of randomness of the row and its number, as int64: what dropout draws from
    masked_M: Tensor  # masked positions, as indices into the flattened tokens, ascending
    # Float32 in [0, 1): the generator's sample at each masked position is the inverse CDF at this value.
    uniforms_M: Tensor
    # Float32 [1]: share of the generator's samples in whose place random tokens are read; mostly none.
    random_1: Tensor = torch.empty(0)
    # Places that the model fills before it trains, as indices into the flattened tokens, ascending [P]; mostly none.
    open_P: Tensor = torch.empty(0, dtype=torch.int64)
    # Of monolingual sentences that translation reads, [B, T], else empty: noised copies, and the languages to write in.
    noised_BT: Tensor = torch.empty(0, dtype=torch.int64)
    into_BT: Tensor = torch.empty(0, dtype=torch.int64)

    def task_of_masked(self) -> Tensor:
        """Task of every masked position, [M]."""
        return self.task_B[self.masked_M // self.tokens_BT.shape[1]]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; on a GPU by pinned memory, from which the host need not wait for the copy."""
        pinned = (tensor.pin_memory() for tensor in self) if device.type == "cuda" else self
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in pinned))


def sum_by_language(
    values_N: Tensor, counted_N: Tensor, terms_N: Tensor, languages_N: Tensor, terms: int, languages: int
) -> Tensor:
    """Sums and numbers of those of `values_N` that are `counted_N` (0 or 1), float64 [2, terms, languages]."""
    both_2N = torch.stack([values_N * counted_N, counted_N]).double()
    sums = torch.zeros(2, terms * languages, dtype=torch.float64, device=values_N.device)
    return sums.index_add(1, terms_N * languages + languages_N, both_2N).view(2, terms, languages)


def sum_by_task(values: Tensor, tasks: Tensor, count: int = len(TASKS)) -> Tensor:
    """Sums of `values` [N] by task (or any other number below `count`), [count]."""
    return torch.stack([(values * (tasks == task)).sum() for task in range(count)])
