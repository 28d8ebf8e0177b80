"""Checks the Triton kernels before a run: compares their results on small inputs with float64 on the CPU.

If a GPU, driver or compiler gives wrong numbers, the run stops, instead of training with wrong losses or gradients. The
check has the run's head size, width and feed-forward size, because the kernels are compiled for them. Attention has two
row lengths, and GELU two numbers of tokens: all tiles divide the first, and none divides the second, for which other
branches are compiled. Samples, a z-loss and a sampling temperature other than 1 are not checked.

The reference is the same model part with `model.kernels` torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..config import ModelConfig
from .attention import Gate, RelativePositionTable, TritonBias, attention_bias
from .layers import GeluLinear
from .masked_head import vocabulary_softmax

_ITEM_LENGTHS = (60, 40, 20)  # tokens of the items of a row; padding follows
_ROW_LENGTHS = (128, 144)  # all tiles divide the first; none divides the second
_GELU_TOKENS = (512, 300)  # so do GELU's
# Bound on max|difference| / max|reference|. A result is rounded to bf16 several times, each time by up to 2^-9 of its
# size.
_TOLERANCE = 3e-2


def check_kernels(cfg: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ValueError if the Triton kernels give wrong results on `device`; do nothing if `model.kernels` is torch."""
    if cfg.kernels == "torch":
        return
    for part, results, expected_results in _compared(cfg, device, dtype):
        for name, result in results.items():  # empty if the model's attention runs in other kernels
            expected = expected_results[name].detach()
            relative_error = float((result.detach().cpu().double() - expected).abs().max() / expected.abs().max())
            if not relative_error <= _TOLERANCE:  # true for NaN too
                raise ValueError(
                    f"the Triton kernels of the {part} are wrong on this {device.type} ({name} by "
                    f"{relative_error:.2g} of its largest number): set model.kernels to torch, and report this "
                    "error with the GPU and the versions of torch and triton"
                )


def _compared(
    cfg: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield (part of the model, its results, what they should be) for each part, computed one after the other."""
    reference = replace(cfg, kernels="torch"), torch.device("cpu"), torch.float64
    attention: dict[str, Tensor] = {}
    for tokens in _ROW_LENGTHS:
        attention = _attention(cfg, device, dtype, tokens)
        yield "attention", attention, _attention(*reference, tokens)
    yield "vocabulary softmax", _head(cfg, device, dtype), _head(*reference)
    if attention and cfg.biases:  # where attention runs in Triton kernels, so does GELU
        for tokens in _GELU_TOKENS:
            yield "GELU", _gelu(cfg, device, dtype, tokens), _gelu(*reference, tokens)


def random_numbers(shape: tuple[int, ...], seed: int, std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal random numbers that require a gradient; they are rounded to bf16, so that they are equal in all dtypes."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
    return values.bfloat16().to(device, dtype).requires_grad_()


def _attention(cfg: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    """The output and the gradients by name, for one row of `tokens` tokens and two heads of the model's head size. The
    dict is empty if attention does not run in the Triton kernels, although `cfg.kernels` allows them."""
    size = cfg.width // cfg.heads
    small = replace(cfg, width=2 * size, heads=2)
    lengths = torch.tensor([*_ITEM_LENGTHS, tokens - sum(_ITEM_LENGTHS)])
    segments_BT = torch.repeat_interleave(torch.tensor([1, 2, 3, 0]), lengths)[None].to(device)
    qkv_BT3HK = random_numbers((1, tokens, 3, 2, size), 0, 1.0, device, dtype)
    table = RelativePositionTable(2, cfg.relative_buckets, cfg.relative_max_distance)
    table.weight.data = random_numbers((cfg.relative_buckets, 2), 1, 0.5, device, dtype).data
    bias = attention_bias(small, segments_BT, None if cfg.relative_bias == "none" else table(tokens), dtype)
    gate = Gate(2, size).to(device, dtype) if cfg.relative_bias == "gated" else None
    inputs = {"q, k, v": qkv_BT3HK} | ({} if cfg.relative_bias == "none" else {"the distance bias": table.weight})
    for seed, (name, parameter) in enumerate(gate.named_parameters() if gate is not None else ()):
        parameter.data = random_numbers(tuple(parameter.shape), 2 + seed, 0.5, device, dtype).data
        inputs[name] = parameter
    if cfg.kernels != "torch" and not isinstance(bias, TritonBias):
        return {}
    return with_gradients({"output": bias.attend(qkv_BT3HK, gate, 0.0, None)}, inputs)


def _head(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The losses and the gradients by name, for 200 positions and 1,000 token ids. Hidden states are as wide as the
    model's."""
    inputs = {
        "hidden": random_numbers((200, cfg.width), 0, 1.0, device, dtype),
        "table": random_numbers((1000, cfg.width), 1, 2 * cfg.width**-0.5, device, dtype),
        "bias": random_numbers((1000,), 2, 0.5, device, dtype),
    }
    generator = torch.Generator().manual_seed(0)
    targets_M = torch.randint(1000, (200,), generator=generator).to(device)
    uniforms_M = torch.rand(200, generator=generator).to(device)
    hidden_MD, table_VD, bias_V = inputs.values()
    predicted = vocabulary_softmax(hidden_MD, [table_VD], bias_V, targets_M, uniforms_M, 512, cfg.kernels)
    return with_gradients({"loss": predicted.nll_M}, inputs)


def _gelu(cfg: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    """The output and the gradients by name, for a map from 64 numbers to the model's feed-forward size."""
    layer = GeluLinear(64, cfg.feed_forward).to(device, dtype)
    inputs = {"x": random_numbers((tokens, 64), 0, 1.0, device, dtype)}
    for seed, (name, parameter) in enumerate(layer.named_parameters()):
        parameter.data = random_numbers(tuple(parameter.shape), 1 + seed, 0.2, device, dtype).data
        inputs[name] = parameter
    return with_gradients({"output": layer(inputs["x"], triton=cfg.kernels != "torch")}, inputs)


def with_gradients(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`outputs` and the gradients of `inputs`, by name. The gradients are those of a weighted sum of all numbers in
    `outputs`, in which all numbers of one output have different weights."""
    total = torch.zeros((), dtype=torch.float64, device=next(iter(outputs.values())).device)
    for value in outputs.values():
        weights = torch.linspace(0.5, 2.0, value.numel(), dtype=torch.float64, device=value.device)
        total = total + (value.double().flatten() * weights).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {**outputs, **{f"gradient of {name}": grad for name, grad in zip(inputs, gradients, strict=True)}}
