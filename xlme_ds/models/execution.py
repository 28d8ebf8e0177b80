"""How the layers of a model are run, applied from outside of it: compiled, or computed again in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import ModelConfig
from .attention import AttentionBias, ItemBias
from .layers import TransformerLayer

Model = TypeVar("Model", bound=nn.Module)


def how_compiled(model: nn.Module, cfg: ModelConfig, on_gpu: bool) -> str:
    """The resolved `model.compile`: auto means layers on a GPU, and none where the model's layers read rows of any
    length (`compiles`)."""
    if cfg.compile != "auto":
        return cfg.compile
    return "layers" if on_gpu and getattr(model, "compiles", True) else "none"


def applied(model: Model, cfg: ModelConfig, on_gpu: bool = False) -> Model:
    """`model`, with layers that run as `model.compile` and `model.activation_checkpointing` say.

    Parameters, names and hooks stay as they are.
    """
    compile_as = how_compiled(model, cfg, on_gpu)
    if compile_as == "none" and not cfg.activation_checkpointing:
        return model
    for layer in [module for module in model.modules() if isinstance(module, TransformerLayer)]:
        kind: Any = type(layer)
        layer.__class__ = AppliedLayer if kind is TransformerLayer else checkpointed(kind)
        assert isinstance(layer, CheckpointedLayer)
        layer.compile_as, layer.checkpointing = compile_as, cfg.activation_checkpointing
    if cfg.compile == "graphs":  # a micro-batch overwrites what the CUDA graphs left of the one before
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    return model


class CheckpointedLayer(nn.Module):
    """A layer as training runs it; it computes what the class that is inherited next does."""

    compile_as: str = "none"
    checkpointing = False

    def __call__(self, *inputs: Any) -> Tensor:
        """The layer with its hooks; with checkpointing it saves nothing but its inputs for the backward pass."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(super().__call__, *inputs, use_reentrant=False)
        return super().__call__(*inputs)


@functools.cache
def checkpointed(kind: Any) -> Any:
    """A layer of another kind as training runs it: it is never compiled."""
    return type(f"Checkpointed{kind.__name__}", (CheckpointedLayer, kind), {})


class AppliedLayer(CheckpointedLayer, TransformerLayer):
    """`TransformerLayer`, compiled in training where that is asked for."""

    def forward(self, x_BTD: Tensor, bias: AttentionBias | ItemBias, keys_B: Tensor | None = None) -> Tensor:
        """The layer's output, by its compiled form in training; evaluations have rows of any number and length."""
        if self.compile_as == "none" or not self.training:
            return super().forward(x_BTD, bias, keys_B)
        return compiled(TransformerLayer.forward, self.compile_as)(self, x_BTD, bias, keys_B)


@functools.cache
def compiled(function: Callable[..., Any], how: str) -> Callable[..., Any]:
    """`function` compiled as one graph for the shapes of its inputs; other shapes are compiled for anew, and more than
    eight in a process are an error of torch's.

    `graphs` also replays it as a CUDA graph. Inductor's code for an aligned parameter reads any without a look
    (pytorch#193054): engines lay them on a grid (`engine/placement.py`).
    """
    return torch.compile(function, fullgraph=True, dynamic=False, mode="reduce-overhead" if how == "graphs" else None)
