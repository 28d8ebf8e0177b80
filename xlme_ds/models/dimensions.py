"""Effective dimensions of the token states of an encoder's layers; a small number means that the layers collapsed.

B rows, T tokens, D width, N tokens of a batch.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn


def effective_rank(products_DD: np.ndarray) -> float:
    """exp(−Σ p log p), p: each eigenvalue's share of their sum (Roy and Vetterli 2007); 1 if all vectors are on a line.

    `products_DD`: Σ x xᵀ of the vectors; NaN where one is not finite.
    """
    if not np.isfinite(products_DD).all():
        return math.nan
    shares = np.maximum(np.linalg.eigvalsh(products_DD.astype(np.float64)), 0)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@contextmanager
def token_products(model: nn.Module, encoder: str, inside_BT: Tensor) -> Iterator[dict[int, np.ndarray]]:
    """Σ x xᵀ [D, D] of the centred token states x after every layer of `encoder` that `model` holds, by the layer's
    number; 0 is the input of the first layer. They are of the last forward pass within the `with` block.

    `inside_BT`: bool, the tokens that are included.
    """
    products: dict[int, np.ndarray] = {}

    def keep(number: int, states_BTD: Tensor) -> None:
        x_ND = states_BTD.detach()[inside_BT].float()
        x_ND = x_ND - x_ND.mean(0)
        products[number] = (x_ND.T @ x_ND).cpu().numpy()

    def keep_output(number: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(number, output)

    name = re.compile(rf"(?:^|\.){encoder}\.(?:layers\.(\d+)|output_norm)$")
    matches = [(place, module) for path, module in model.named_modules() if (place := name.search(path))]
    layers = {int(place[1]): module for place, module in matches if place[1]}
    with ExitStack() as hooks:
        for number, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(keep_output, number + 1)))
            if number == 0:
                hooks.enter_context(layer.register_forward_pre_hook(lambda _layer, inputs: keep(0, inputs[0])))
        for place, norm in matches:
            if not place[1] and norm is not None:  # pre-LN: heads read the last layer through this norm
                hooks.enter_context(norm.register_forward_hook(partial(keep_output, max(layers) + 1)))
        yield products
