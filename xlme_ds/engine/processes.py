"""The processes of a run: joining them, and failing together."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from ..config import EngineConfig

Result = TypeVar("Result")


class SharedError(ValueError):
    """A mistake of the user's that every rank raises with the same message."""


def start_process_group(engine: EngineConfig) -> tuple[int, int]:
    """Join the processes that the launcher started, and return (rank, world); a process that none started is alone.

    Raises ValueError when `engine` cannot run on that many.
    """
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if engine.kind == "plain":
        if world > 1:
            raise SharedError(
                f"engine.kind plain runs on one process, {world} were launched: use engine.kind deepspeed"
            )
    elif not dist.is_initialized():
        import deepspeed

        if on_gpu():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu() else "gloo", verbose=False)
    return rank, world


@contextmanager
def process_group(engine: EngineConfig) -> Iterator[tuple[int, int]]:
    """`start_process_group`, and leaving it: a process that just ends may abort in the threads of its connections."""
    try:
        yield start_process_group(engine)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def on_gpu() -> bool:
    """Whether this run computes on GPUs; DS_ACCELERATOR=cpu keeps it off them."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def broadcast(value: Result) -> Result:
    """The root's `value`, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def together(function: Callable[[], Result]) -> Result:
    """Run `function` on every rank; a ValueError or OSError on any of them is raised on all, as a SharedError."""
    result, message = None, None
    try:
        result = function()
    except (ValueError, OSError) as error:
        message = str(error)
    messages = [message]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
    for first in messages:
        if first is not None:
            raise SharedError(first)
    return result  # type: ignore[return-value]
