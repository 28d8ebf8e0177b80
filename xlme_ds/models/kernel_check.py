"""Check of the Triton kernels before a run: their results on small inputs against the CPU's in float64.

If a GPU, driver or compiler gives wrong numbers, the run stops, instead of continuing with another loss curve. The
check compiles the kernels for the sizes that the run needs anyway, so it costs the run little time.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..config import ModelConfig
from .attention import Gate, ItemBias, RelativePositionTable, shared_bias
from .masked_head import masked_softmax

_ITEMS = (70, 50, 24, 16)  # tokens of the items of a row; the last is padding
_BOUND = 3e-2  # greatest allowed difference, relative to the largest number; bf16 rounds to 2^-9, several times


def check_kernels(cfg: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ValueError if the kernels are wrong on `device`; do nothing for a model that uses none."""
    if cfg.kernels == "torch":
        return
    reference = replace(cfg, kernels="torch"), torch.device("cpu"), torch.float64
    attention = "attention", _attention(cfg, device, dtype), _attention(*reference)
    head = "vocabulary softmax", _head(cfg, device, dtype), _head(*reference)
    for part, actual, expected in (attention, head):
        # `actual` is empty where the model's attention runs in other kernels.
        for name, ours, theirs in zip(expected, actual.values(), expected.values(), strict=False):
            error = float((ours.detach().cpu().double() - theirs.detach()).abs().max() / theirs.detach().abs().max())
            if not error <= _BOUND:  # nor a NaN
                raise ValueError(
                    f"the Triton kernels of the {part} are wrong on this {device.type} ({name} by {error:.2g} of its "
                    "largest number): set model.kernels to torch, and report it with the GPU and the versions of torch "
                    "and triton"
                )


def random_numbers(shape: tuple[int, ...], seed: int, std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal random numbers that require a gradient, with the same values in every dtype."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
    return values.bfloat16().to(device, dtype).requires_grad_()  # rounded to bf16 first: every dtype can hold them


def _attention(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients for two heads of the model's size; empty if attention runs in other kernels."""
    size, tokens = cfg.width // cfg.heads, sum(_ITEMS)
    small = replace(cfg, width=2 * size, heads=2)
    segments_BT = torch.repeat_interleave(torch.tensor([1, 2, 3, 0]), torch.tensor(_ITEMS))[None].to(device)
    qkv_BT3HK = random_numbers((1, tokens, 3, 2, size), 0, 1.0, device, dtype)
    table = RelativePositionTable(2, cfg.relative_buckets, cfg.relative_max_distance)
    table.weight.data = random_numbers((cfg.relative_buckets, 2), 1, 0.5, device, dtype).data
    bias = shared_bias(small, segments_BT, None if cfg.relative_bias == "none" else table(tokens), dtype)
    gate = Gate(2, size).to(device, dtype) if cfg.relative_bias == "gated" else None
    inputs = {"q, k, v": qkv_BT3HK} | ({} if cfg.relative_bias == "none" else {"the distance bias": table.weight})
    for seed, (name, parameter) in enumerate(gate.named_parameters() if gate is not None else ()):
        parameter.data = random_numbers(tuple(parameter.shape), 2 + seed, 0.5, device, dtype).data
        inputs[name] = parameter
    is_reference = device.type == "cpu" and dtype == torch.float64
    if not is_reference and not isinstance(bias, ItemBias):
        return {}
    out = bias.attend(qkv_BT3HK, gate, 0.0, None)
    return with_gradients({"output": out}, inputs)


def _head(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Losses and gradients for hidden states as wide as the model's."""
    width, std = cfg.width, cfg.width**-0.5
    shapes = {"hidden": ((200, width), 1.0), "table": ((1000, width), 2 * std), "bias": ((1000,), 0.5)}
    inputs = {
        name: random_numbers(shape, seed, spread, device, dtype)
        for seed, (name, (shape, spread)) in enumerate(shapes.items())
    }
    g = torch.Generator().manual_seed(0)
    targets, uniforms = torch.randint(1000, (200,), generator=g).to(device), torch.rand(200, generator=g).to(device)
    tokens = masked_softmax(inputs["hidden"], [inputs["table"]], inputs["bias"], targets, uniforms, 512, cfg.kernels)
    return with_gradients({"loss": tokens.nll_M}, inputs)


def with_gradients(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`outputs`, and the gradients of a sum of all their numbers with a different weight for each."""
    total = torch.zeros((), dtype=torch.float64, device=next(iter(outputs.values())).device)
    for value in outputs.values():
        weights = torch.linspace(0.5, 2.0, value.numel(), dtype=torch.float64, device=value.device)
        total = total + (value.double().flatten() * weights).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {**outputs, **{f"gradient of {name}": grad for name, grad in zip(inputs, gradients, strict=True)}}
