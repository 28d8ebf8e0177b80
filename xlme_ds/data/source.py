"""The interface between engines and data; it needs no Arrow."""

from collections.abc import Sequence
from typing import Any, Protocol

from .order import StepPlan


class BatchSource(Protocol):
    """What an engine needs of its data: the batches of a step. `loader.Loader` implements it for data folders."""

    plan: StepPlan
    row_tokens: int  # tokens of a row; the mean, where they differ

    @property
    def fingerprints(self) -> dict[str, str]:
        """A checksum of the data, by part: a resumed run must have the same."""

    def step(self, step: int) -> Sequence[Any]:
        """All micro-batches of this rank in step `step`."""

    def rows_of(self, step: int, micro_batch: int | None = None) -> str:
        """The rows of that micro-batch of this rank, or of the whole step, in words: `mono 328-335, para 164-167`."""

    def probe(self) -> Any:
        """The same small batch on all ranks, whatever their number."""
