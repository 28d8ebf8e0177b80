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
            raise ValueError(f"engine.kind plain runs on one process, {world} were launched: use engine.kind deepspeed")
    elif not dist.is_initialized():
        import deepspeed

        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)
    return rank, world


@contextmanager
def process_group(engine: EngineConfig) -> Iterator[tuple[int, int]]:
    """`start_process_group`, and leaving it: a process that just ends may abort in the threads of its connections."""
    try:
        yield start_process_group(engine)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def together(function: Callable[[], Result]) -> Result:
    """Run `function` on every rank; a ValueError on any of them is raised, with its message, on all."""
    result, message = None, None
    try:
        result = function()
    except ValueError as error:
        message = str(error)
    messages = [message]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
    for first in messages:
        if first is not None:
            raise ValueError(first)
    return result  # type: ignore[return-value]
