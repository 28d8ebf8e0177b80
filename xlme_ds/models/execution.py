"""Compilation and activation checkpointing of a model's layers; the model's own code has neither."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import ModelConfig
from .encoder import Encoder

Model = TypeVar("Model", bound=nn.Module)


def resolve_compile(model: nn.Module, cfg: ModelConfig, on_gpu: bool) -> str:
    """The setting `model.compile`, where auto becomes `layers` or `none`. It becomes `layers` on a GPU if no encoder is
    `ragged`, that is, if all batches of an encoder have rows of one length."""
    if cfg.compile != "auto":
        return cfg.compile
    return "layers" if on_gpu and not any(encoder.ragged for encoder in _encoders(model)) else "none"


def _encoders(model: nn.Module) -> list[Encoder]:
    return [module for module in model.modules() if isinstance(module, Encoder)]


def wrap_layers(model: Model, cfg: ModelConfig, on_gpu: bool = False) -> Model:
    """Change `model` so that its layers are compiled and checkpointed as `cfg.compile` and
    `cfg.activation_checkpointing` say, and return it. Parameters, their names and the layers' hooks stay as they are. A
    `ragged` encoder is not compiled."""
    compiles = resolve_compile(model, cfg, on_gpu) == "layers"
    for encoder in _encoders(model):
        if cfg.activation_checkpointing:
            encoder.run_layer = _checkpointed
        if compiles and not encoder.ragged:
            for layer in encoder.layers.values():
                layer.forward = functools.partial(_compiled_in_training, layer)
    return model


def _checkpointed(layer: nn.Module, *inputs: Any) -> Tensor:
    """The layer's output. Only its inputs are saved for the backward pass, which runs the layer and its hooks again."""
    return checkpoint(layer, *inputs, use_reentrant=False) if torch.is_grad_enabled() else layer(*inputs)


def _compiled_in_training(layer: nn.Module, *inputs: Any) -> Tensor:
    """The layer's output. Compiled code runs only in training, because evaluations have batches of any shape, and each
    shape would be compiled anew."""
    forward = type(layer).forward
    return (compiled(forward) if layer.training else forward)(layer, *inputs)


# Enough graphs of one function: kinds of layers (3 with ModernBERT's body) × dropout or none × lengths of rows.
_MOST_GRAPHS = 64


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled as one graph for each shape of its inputs and each kind of layer. torch raises an error for
    more than `_MOST_GRAPHS` graphs of one function.

    `deterministic` forbids Inductor to choose the order of a sum by timing, so that a resumed run is bit-identical.
    Code that was compiled for an aligned parameter is used for unaligned ones without a check (pytorch#193054), so
    engines align all parameters (`engine/zero.py`).
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    return torch.compile(function, fullgraph=True, dynamic=False, options={"deterministic": True})
