"""The input of one forward pass: rows of text and of pairs, the masked positions, and for each of these a random
number, with which the generator samples a token.

A row holds items: pieces of text, or translation pairs with two sides. B rows, T tokens, M masked positions of the
batch; in the sums below, N values to add up.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .rows import TASKS


class Batch(NamedTuple):
    """A micro-batch. Integers are int64. All randomness of a forward pass comes from `seeds_B` and `uniforms_M`."""

    tokens_BT: Tensor  # original ids, padded with PAD
    # The position of the token in its item, from 0. In XLM's layout the second side starts at 0 again. Padding has 0.
    positions_BT: Tensor
    segments_BT: Tensor  # 1 + the index of the item in its row; 0 at padding
    sides_BT: Tensor  # 1 on the second side of a pair, else 0
    languages_BT: Tensor  # index of the language in the list of the data's languages; 0 at padding
    task_B: Tensor  # index into rows.TASKS
    # 64 random bits, a function of seed, task and row number: the row's dropout is drawn from them.
    seeds_B: Tensor
    masked_M: Tensor  # masked positions, as ascending indices into the flattened tokens
    # Random numbers, float32 in [0, 1). At each masked position the generator samples the first token at which its
    # cumulative probability exceeds this number.
    uniforms_M: Tensor
    # Tensors that an objective adds for its model, by name (`objectives.protocol.Pretraining.collate_for`).
    added: dict[str, Tensor] = {}  # noqa: RUF012 - never written to

    def task_of_masked(self) -> Tensor:
        """Task of every masked position, int64 [M]."""
        return self.task_B[self.masked_M // self.tokens_BT.shape[1]]

    def with_added(self, **tensors: Tensor) -> "Batch":
        """A copy of the batch that also has these added tensors."""
        return self._replace(added=self.added | tensors)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, the added ones last; `of_tensors` turns them into a batch again."""
        return (*self[:-1], *self.added.values())

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor], added: Sequence[str] = ()) -> Self:
        """The batch of `tensors`, in the order of the method `tensors`. `added`: names of an objective's tensors;
        `tensors` ends with these tensors, in this order, or has none of them."""
        fields = len(cls._fields) - 1
        return cls._make([*tensors[:fields], dict(zip(added, tensors[fields:], strict=False))])

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`. A copy to a GPU goes through pinned memory, so that the host does not wait for it."""

        def moved(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return self.of_tensors([moved(tensor) for tensor in self.tensors()], list(self.added))


def sum_by_language(
    values_N: Tensor, counted_N: Tensor, term_N: Tensor, language_N: Tensor, terms: int, languages: int
) -> Tensor:
    """Returns float64 [2, terms, languages]: for each term of the loss and each language, the sum and the number of
    the values that count.

    `counted_N` is 1 for a value that counts and 0 for a value that does not. `term_N` and `language_N` are the index of
    each value's term and of its language.
    """
    both_2N = torch.stack([values_N * counted_N, counted_N]).double()
    sums = torch.zeros(2, terms * languages, dtype=torch.float64, device=values_N.device)
    return sums.index_add(1, term_N * languages + language_N, both_2N).view(2, terms, languages)


def sum_by_task(values_N: Tensor, task_N: Tensor, tasks: int = len(TASKS)) -> Tensor:
    """The sum of the values of each task, [tasks]. `task_N`: the task of each value, or another index below `tasks`."""
    return torch.stack([(values_N * (task_N == task)).sum() for task in range(tasks)])
