"""Compares the model's kernels on a device with torch's kernels on the CPU in float64, on the same inputs.

Parameters and hidden states are numbers that bf16 represents exactly, so that rounding them adds no error. The error of
a floating-point tensor is (largest absolute difference) / (largest absolute number of the reference); the error of an
integer tensor is the fraction of its elements that differ. B rows, T tokens, M masked positions, D width.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.steps import DTYPES
from bench.measure import Figures
from bench.synthetic import synthetic_batch
from xlme_ds.config import ModelConfig, ObjectiveConfig
from xlme_ds.models.attention import RelativePositionTable, attention_bias
from xlme_ds.models.encoder import lookup
from xlme_ds.models.init import initialise
from xlme_ds.models.kernel_check import random_numbers, with_gradients
from xlme_ds.models.layers import TransformerLayer
from xlme_ds.models.masked_head import vocabulary_softmax
from xlme_ds.objectives.electra import ElectraObjective

Tensors = dict[str, Tensor]
Case = Callable[[torch.device, torch.dtype], Tensors]
# Upper bounds of errors. fp32: the terms of a sum, up to thousands, are added in another order. bf16: each number is
# rounded by up to 2^-8 of itself, several times in a row.
BOUNDS = {"fp32": 1e-4, "bf16": 3e-2}
# Upper bound of the error of integers. A uniform random number may lie so near the border of two tokens in the CDF that
# rounding decides which token is the sample.
INTEGERS = 0.01
SMALL = ModelConfig(
    vocabulary=1000, width=256, heads=4, feed_forward=512, generator_layers=1, discriminator_layers=2,
    max_positions=192, head_chunk=256, init_std=0.05,
)  # fmt: skip

MODERN = replace(
    SMALL, body="modern", norm="pre", embedding_norm=True, absolute_positions=False, relative_bias="none",
    generator_layers=3, discriminator_layers=3, local_window=64,
)  # fmt: skip


def parity(case: Case, device: torch.device, dtype: str) -> Figures:
    """Run `case` on the device and on the CPU in float64. Returns the figures of the tensor whose error is largest
    relative to its bound; `ok`, whether all tensors are within their bounds; and `compared`, the number of tensors."""
    reference = case(torch.device("cpu"), torch.float64)
    errors = []
    for name, value in case(device, DTYPES[dtype]).items():
        value, exact = value.detach().cpu(), reference[name].detach()
        if value.is_floating_point():
            difference = float((value.double() - exact).abs().max()) / (float(exact.abs().max()) or 1.0)
            errors.append((difference, BOUNDS[dtype], name))
        else:
            errors.append((float((value != exact).double().mean()), INTEGERS, name))
    error, bound, worst = max(errors, key=lambda item: item[0] / item[1])
    ok = all(error <= bound for error, bound, _ in errors)  # false for a NaN
    return {"worst": worst, "error": error, "bound": bound, "ok": ok, "compared": len(errors)}


def twice(case: Case) -> Case:
    """A case that runs a second time, and raises RuntimeError if that gives other bits."""

    def run(device: torch.device, dtype: torch.dtype) -> Tensors:
        tensors, again = case(device, dtype), case(device, dtype)
        if not all(torch.equal(tensors[name], again[name]) for name in tensors):
            raise RuntimeError(
                "a second run on the same inputs gave other bits: a resumed training run would not repeat the losses "
                "of an uninterrupted one"
            )
        return tensors

    return run


def layer(device: torch.device, dtype: torch.dtype, kernels: str) -> Tensors:
    """A layer with gated bias, block-diagonal mask and padding. `kernels` is the setting `model.kernels`."""
    module, table = TransformerLayer(SMALL), RelativePositionTable(SMALL.heads, 32, 128)
    for part, std in ((module, 0.1), (table, 0.5)):
        for seed, parameter in enumerate(part.parameters()):
            parameter.data = random_numbers(tuple(parameter.shape), seed, std, device, dtype).data
    x_BTD = random_numbers((3, 192, SMALL.width), 9, 1.0, device, dtype)
    rows = [{1: 70, 2: 50, 3: 60, 0: 12}, {1: 192}, {1: 1, 2: 100, 3: 91}]  # segment -> tokens; 0 is padding
    segments = [[segment for segment, count in row.items() for _ in range(count)] for row in rows]
    cfg = replace(SMALL, kernels=kernels)  # type: ignore[arg-type]
    out_BTD = module(x_BTD, attention_bias(cfg, torch.tensor(segments, device=device), table(192), dtype))
    return with_gradients({"output": out_BTD}, {"x": x_BTD, "table": table.weight, **dict(module.named_parameters())})


def token_lookup(device: torch.device, dtype: torch.dtype) -> Tensors:
    """The lookup of token embeddings, with one frequent token and the table in one block and in three. Both 2,048 and
    8,192 ids are looked up, because torch on a GPU computes the gradient in another kernel for more than 3,072 ids."""
    outputs: Tensors = {}
    for ids in (2048, 8192):
        table = random_numbers((600, 64), ids, 1.0, device, dtype)
        tokens = torch.randint(600, (ids,), generator=torch.Generator().manual_seed(0)).to(device)
        tokens[: ids // 2] = 7
        for blocks in (1, 3):
            out = lookup(tokens.view(8, -1), table.split(600 // blocks))
            tensors = with_gradients({"output": out}, {"table": table})
            outputs |= {f"{key}, {ids} ids, {blocks} blocks": value for key, value in tensors.items()}
    return outputs


def masked_head(device: torch.device, dtype: torch.dtype, kernels: str) -> Tensors:
    """The masked head, with its table in one block and in three: losses, gradients, predictions and samples. The
    uniform random numbers of the samples are equal on all devices."""
    g = torch.Generator().manual_seed(4)
    targets, uniforms = torch.randint(3000, (300,), generator=g).to(device), torch.rand(300, generator=g).to(device)
    outputs: Tensors = {}
    for blocks in (1, 3):
        hidden = random_numbers((300, 144), 1, 1.0, device, dtype)
        table = random_numbers((3000, 144), 2, 0.2, device, dtype)
        bias = random_numbers((3000,), 3, 0.5, device, dtype)
        head = vocabulary_softmax(hidden, table.split(3000 // blocks), bias, targets, uniforms, 256, kernels)
        cdf = (hidden.detach().double() @ table.detach().double().t() + bias.detach().double()).softmax(1).cumsum(1)
        low, high = (
            F.pad(cdf, (1, 0)).gather(1, head.sample_M[:, None] + end).squeeze(1) for end in (0, 1)
        )  # the sample's share of the CDF
        tensors = with_gradients({"loss": head.nll_M}, {"hidden": hidden, "table": table, "bias": bias})
        outside = (low - uniforms).clamp(min=0) + (uniforms - high).clamp(min=0)
        tensors["uniforms outside their sample's share of the CDF"] = outside
        # In bf16 a CPU rounds the logits. The rounding moves the borders of tokens in the CDF so far that samples
        # differ.
        if dtype != torch.bfloat16 or device.type == "cuda":
            tensors |= {"samples": head.sample_M, "predictions": head.predicted_M}
        outputs |= {f"{key}, {blocks} blocks": value for key, value in tensors.items()}
    return outputs


def electra(device: torch.device, dtype: torch.dtype, cfg: ModelConfig) -> Tensors:
    """The whole model, forward and backward. In bf16 some samples differ from the reference's, so only the losses and
    the norm of the gradient are compared."""
    objective = ElectraObjective(ObjectiveConfig())
    model = objective.build(cfg)
    initialise(model, 0, cfg.init_std)
    model = model.bfloat16().to(device, dtype)
    batch = synthetic_batch((3, 3), cfg.max_positions, cfg.vocabulary).to(device)
    output = model(batch)
    losses = objective.sums(output, batch).double() / objective.counts(batch)
    (losses * objective.weights.to(device)).sum().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([grad.double().norm() for grad in gradients.values()]).norm()
    exact = {} if dtype == torch.bfloat16 else {"samples": output.corrupted_BT} | gradients
    return {"losses": losses.detach(), "gradient norm": norm} | exact


CASES: dict[str, Case] = {
    "layer with gated bias and item mask": partial(layer, kernels="torch"),
    "token lookup": token_lookup,
    "masked head": partial(masked_head, kernels="torch"),
    "whole model": partial(electra, cfg=SMALL),
    "whole model, modern": partial(electra, cfg=MODERN),
}
ON_A_GPU: dict[str, Case] = {  # without a GPU these cases would run torch's kernels again
    "layer in Triton kernels, twice": twice(partial(layer, kernels="triton")),
    "masked head in Triton kernels, twice": twice(partial(masked_head, kernels="triton")),
}
