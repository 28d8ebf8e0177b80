"""An engine's training state as flat buffers and the parts of parameters that lie in them, to write and to read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.state_files import KINDS, MOMENTS, StateReader, StateWriter


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flattened parameter `name`, at `offset` of a buffer."""

    name: str
    start: int
    numel: int
    offset: int


def first_state(master: Tensor) -> dict[str, Tensor]:
    """The state of `master` that the optimizer's first step would make."""
    moments = {kind: torch.zeros_like(master, dtype=torch.float32) for kind in MOMENTS}
    return {"step": torch.zeros((), device=master.device)} | moments


class Bucket:
    """Master weights in one buffer that an optimizer updates as one tensor, and this rank's pieces in it."""

    def __init__(self, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, master: Tensor):
        self.pieces = pieces
        self.optimizer = optimizer
        self.master = master

    @contextmanager
    def opened(self, to_write: bool) -> Iterator[dict[str, Tensor]]:
        """The buffers by kind, flat; `to_write`: what is written into them stays."""
        yield self._buffers()

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.optimizer.state.get(self.master, {}).get("step", 0))

    @step.setter
    def step(self, value: int) -> None:
        self._state()["step"].fill_(value)

    def _state(self) -> dict[str, Tensor]:
        if not self.optimizer.state[self.master]:
            self.optimizer.state[self.master] = first_state(self.master)
        state: dict[str, Tensor] = self.optimizer.state[self.master]
        return state

    def _buffers(self) -> dict[str, Tensor]:
        state = self._state()
        return {KINDS[0]: self.master.detach().view(-1)} | {kind: state[kind].view(-1) for kind in MOMENTS}


def write_state(buckets: Sequence[Bucket], writer: StateWriter) -> None:
    """Hand all pieces of `buckets` to `writer`; returns when they are copied."""
    sizes = {f"{piece.name}/{kind}/{piece.start}": piece.numel
             for bucket in buckets for piece in bucket.pieces for kind in KINDS}  # fmt: skip
    writer.begin(sizes, max(bucket.step for bucket in buckets))
    for bucket in buckets:
        with bucket.opened(to_write=False) as buffers:
            for piece in bucket.pieces:
                for kind in KINDS:
                    writer.put(buffers[kind][piece.offset : piece.offset + piece.numel])
    writer.end()


@torch.no_grad()
def read_state(buckets: Sequence[Bucket], reader: StateReader) -> None:
    """Fill all pieces of `buckets` from `reader`. Raises ValueError when it holds another model's state."""
    for bucket in buckets:
        with bucket.opened(to_write=True) as buffers:
            for piece in bucket.pieces:
                for kind in KINDS:
                    reader.read(piece.name, kind, piece.start, buffers[kind][piece.offset : piece.offset + piece.numel])
        bucket.step = reader.step
