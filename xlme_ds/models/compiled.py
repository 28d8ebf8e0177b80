"""torch.compile of what all layers share: compiled once, and called with the parameters of each."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

Compile = Literal["none", "layers", "graphs"]
_ALIGNMENT = 16  # bytes, of inductor's loads


@functools.cache
def compiled(function: Callable[..., Any], how: Compile) -> Callable[..., Any]:
    """`function(*inputs)` compiled as one graph for the shapes of its inputs, as a function of (places, *inputs).

    Other shapes and other `places` are compiled for anew, and more than eight in a process are an error of torch's.
    `graphs` replays it as a CUDA graph besides.
    """

    def run(places: tuple[int, ...], *inputs: Any) -> Any:
        assert all(place < _ALIGNMENT for place in places)  # what is not read is not compiled for
        return function(*inputs)

    return torch.compile(run, fullgraph=True, dynamic=False, mode="reduce-overhead" if how == "graphs" else None)


def places(module: nn.Module) -> tuple[int, ...]:
    """Of each parameter on a GPU, by how many bytes it misses alignment.

    DeepSpeed's are slices of one buffer, and not alike in all layers: a gate has one number a head. torch has code for
    aligned ones read others without a look (pytorch#193054).
    """
    return tuple(parameter.data_ptr() % _ALIGNMENT for parameter in module.parameters() if parameter.is_cuda)


def begin(how: Compile) -> None:
    """To be called before each micro-batch: it overwrites what the CUDA graphs left of the last one."""
    if how == "graphs":
        torch.compiler.cudagraph_mark_step_begin()
