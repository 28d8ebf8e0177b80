"""A rank's part of the training state as shards: flat buffers that hold pieces of parameters. Checkpoints are written
from these shards and read into them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..checkpoint.state_files import MASTER_WEIGHTS, StateReader, StateWriter


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flattened parameter `name`, stored from `offset` on in a buffer."""

    name: str
    start: int
    numel: int
    offset: int


def initial_state(kinds: Sequence[str], master: Tensor) -> dict[str, Tensor]:
    """The optimizer's state for `master` before its first step: a step count of 0, and zeros for each of `kinds`, the
    names that `build_optimizer` has put into every parameter group."""
    zeros = {kind: torch.zeros_like(master, dtype=torch.float32) for kind in kinds}
    return {"step": torch.zeros((), device=master.device)} | zeros


class StateShard:
    """A flat buffer of master weights that an optimizer updates as one tensor, its optimizer state, and the pieces of
    parameters in it."""

    def __init__(self, pieces: Iterable[Piece], optimizer: torch.optim.Optimizer, master: Tensor):
        self.pieces = list(pieces)
        self.optimizer = optimizer
        self.master = master
        self.kinds = MASTER_WEIGHTS, *optimizer.param_groups[0]["kinds"]  # names of the buffers

    @contextmanager
    def opened(self, to_write: bool) -> Iterator[dict[str, Tensor]]:
        """Context that yields a dict: the flat buffers by kind, and the tensor `step`. `to_write`: write changes back,
        which buffers on a disk need."""
        states = self.optimizer.state
        state = states[self.master] = states[self.master] or initial_state(self.kinds[1:], self.master)
        buffers = {kind: state[kind].view(-1) for kind in self.kinds[1:]}
        yield {"step": state["step"], MASTER_WEIGHTS: self.master.detach().view(-1)} | buffers


def write_state_shards(shards: Sequence[StateShard], writer: StateWriter) -> None:
    """Copy all pieces of all buffers to `writer`; the buffers may change once this returns."""
    sizes = {f"{piece.name}/{kind}/{piece.start}": piece.numel
             for shard in shards for piece, kind in product(shard.pieces, shard.kinds)}  # fmt: skip
    states = (shard.optimizer.state.get(shard.master, {}) for shard in shards)
    writer.begin(sizes, max(int(state.get("step", 0)) for state in states))  # the number of optimizer steps taken
    for shard in shards:
        with shard.opened(to_write=False) as buffers:
            for piece, kind in product(shard.pieces, shard.kinds):
                writer.put(buffers[kind][piece.offset : piece.offset + piece.numel])
    writer.end()


@torch.no_grad()
def read_state_shards(shards: Sequence[StateShard], reader: StateReader, sizes: Mapping[str, int]) -> None:
    """Fill the pieces of all buffers from `reader`; `sizes`: element count of every parameter that this rank holds.
    Raises ValueError if the saved state lacks an element."""
    for shard in shards:
        with shard.opened(to_write=True) as buffers:
            parts = (
                (piece.name, kind, piece.start, buffers[kind][piece.offset : piece.offset + piece.numel])
                for piece, kind in product(shard.pieces, shard.kinds)
            )
            reader.read(parts, sizes)
            buffers["step"].fill_(reader.step)
