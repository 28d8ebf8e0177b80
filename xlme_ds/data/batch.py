"""The input of one forward pass: rows of both tasks, the masked positions and the uniforms that drive the sampling.

B rows, T tokens, M masked positions of the batch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

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
    keys_B: Tensor  # the key from which dropout is drawn: 64 random bits of the row and its number, as int64
    masked_M: Tensor  # masked positions, as indices into the flattened tokens, ascending
    # Float32 in [0, 1): the generator's sample at each masked position is the inverse CDF at this value.
    uniforms_M: Tensor
    # Tensors that one objective adds for its own model, by name (`objectives.protocol.Pretraining.batches`).
    added: dict[str, Tensor] = {}  # noqa: RUF012 - never written to

    def task_of_masked(self) -> Tensor:
        """Task of every masked position, [M]."""
        return self.task_B[self.masked_M // self.tokens_BT.shape[1]]

    def with_added(self, **tensors: Tensor) -> "Batch":
        """A copy with more added tensors."""
        return self._replace(added=self.added | tensors)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, as a pipeline sends them; `of_tensors` reads them."""
        return (*self[:-1], *self.added.values())

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor], added: Sequence[str] = ()) -> Self:
        """The batch of `tensors`; `added`: names of those that an objective may have added."""
        own = len(cls._fields) - 1
        return cls._make([*tensors[:own], dict(zip(added, tensors[own:], strict=False))])

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`. To a GPU it goes through pinned memory, so that the host does not wait for it."""

        def moved(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return self.of_tensors([moved(tensor) for tensor in self.tensors()], list(self.added))


def sum_by_language(
    values_N: Tensor, counted_N: Tensor, terms_N: Tensor, languages_N: Tensor, terms: int, languages: int
) -> Tensor:
    """The sum and the number of the `values_N` with `counted_N` 1 (the others have 0), by term and language, float64
    [2, terms, languages]."""
    both_2N = torch.stack([values_N * counted_N, counted_N]).double()
    sums = torch.zeros(2, terms * languages, dtype=torch.float64, device=values_N.device)
    return sums.index_add(1, terms_N * languages + languages_N, both_2N).view(2, terms, languages)


def sum_by_task(values: Tensor, tasks: Tensor, count: int = len(TASKS)) -> Tensor:
    """Sums of `values` [N] by task (or any other number below `count`), [count]."""
    return torch.stack([(values * (tasks == task)).sum() for task in range(count)])
