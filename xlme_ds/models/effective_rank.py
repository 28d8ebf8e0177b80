"""The effective number of dimensions of the token states after each layer. A small number means that the states differ
in few directions.

B rows, T tokens of a row, D width, N tokens of a batch that count.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn


def effective_rank(scatter_DD: np.ndarray) -> float:
    """exp(−Σ p log p), where p are the eigenvalues of `scatter_DD` divided by their sum (Roy and Vetterli 2007).

    `scatter_DD` is Σ x xᵀ over the vectors x. If all vectors are on one line, the result is 1. If `scatter_DD` has a
    number that is not finite, the result is NaN.
    """
    if not np.isfinite(scatter_DD).all():
        return math.nan
    shares = np.maximum(np.linalg.eigvalsh(scatter_DD.astype(np.float64)), 0)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@contextmanager
def scatter_matrices(model: nn.Module, encoder_name: str, included_BT: Tensor) -> Iterator[dict[int, np.ndarray]]:
    """Yield a dict that a forward pass in the `with` block fills for the encoder named `encoder_name`. For each of its
    layers that `model` holds, the dict gets Σ x xᵀ [D, D], where x are the token states minus their mean. Key 0 is for
    the input of the first layer, and key n + 1 for the output of layer n, after `output_norm` if it is the last layer.

    `included_BT`: bool, whether a token counts.
    """
    matrices: dict[int, np.ndarray] = {}

    def keep(key: int, _module: nn.Module, inputs: tuple[Any, ...], output: Tensor | None = None) -> None:
        x_ND = (inputs[0] if output is None else output).detach()[included_BT].float()
        x_ND = x_ND - x_ND.mean(0)
        matrices[key] = (x_ND.T @ x_ND).cpu().numpy()

    encoders: list[Any] = [module for path, module in model.named_modules() if path.split(".")[-1] == encoder_name]
    with ExitStack() as hooks:
        for encoder in encoders:  # a process of DualPipeV has two parts of the encoder
            modules = {int(index) + 1: layer for index, layer in encoder.layers.items()}
            if encoder.output_norm is not None:  # with pre-LN, heads read the last layer's output through this norm
                modules[max(modules)] = encoder.output_norm
            for key, module in modules.items():
                hooks.enter_context(module.register_forward_hook(partial(keep, key)))
            if "0" in encoder.layers:
                hooks.enter_context(encoder.layers["0"].register_forward_pre_hook(partial(keep, 0)))
        yield matrices
