"""Bytes that a layer saves for its backward pass, as autograd saves them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.small import SMALL, lively
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.models.attention import shared_bias
from xlme_ds.models.encoder import Encoder
from xlme_ds.models.tiles import GROUP
from xlme_ds.plan import activations
from xlme_ds.plan.layout import ParallelLayout

ROWS, TOKENS = 3, 40
ENGINE = EngineConfig()


def layout(cfg: ModelConfig, element: int, fused: bool) -> ParallelLayout:
    run = RunConfig("test", model=cfg, data=DataConfig(ROWS, 0, micro_batch=ROWS), engine=ENGINE)
    return ParallelLayout.of(run, 1, "bf16" if element == 2 else "fp32", TOKENS, fused)


def saved_by_a_layer(cfg: ModelConfig, dtype: torch.dtype, device: str) -> int:
    """Bytes of all storages that autograd saves in one layer, parameters and what all layers share left out."""
    encoder = lively(Encoder(cfg, 1)).to(device, dtype)
    keys_B = torch.arange(ROWS, device=device)
    segments_BT = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device)
    bias = shared_bias(cfg, segments_BT, encoder.bias_by_distance(TOKENS), dtype)
    x_BTD = torch.ones(ROWS, TOKENS, cfg.width, device=device).to(dtype).requires_grad_()
    outside = [*encoder.parameters(), *(one for one in bias if isinstance(one, Tensor))]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in outside}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in addresses:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder.layers["0"](x_BTD, bias, keys_B)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("relative_bias", ["gated", "plain", "none"])
@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)])
def test_a_layer_on_the_cpu(norm: str, relative_bias: str, dtype: torch.dtype, dropout: tuple[float, float]) -> None:
    rates = dict(dropout=dropout[0], attention_dropout=dropout[1])
    cfg = replace(SMALL, norm=norm, relative_bias=relative_bias, **rates)  # type: ignore[arg-type]
    # The scale of q·k is kept as a number of 8 bytes by some versions of torch.
    assert saved_by_a_layer(cfg, dtype, "cpu") == pytest.approx(
        activations.layer(layout(cfg, dtype.itemsize, False)), abs=64
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("relative_bias", ["gated", "plain", "none"])
def test_a_layer_in_the_fused_kernel(norm: str, relative_bias: str) -> None:
    cfg = replace(SMALL, norm=norm, relative_bias=relative_bias)  # type: ignore[arg-type]
    # The kernel may pad its log-sum-exp to a multiple of 32 tokens.
    kept = saved_by_a_layer(cfg, torch.bfloat16, "cuda")
    assert kept == pytest.approx(activations.layer(layout(cfg, 2, True)), rel=0.05)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_softmax_on_a_gpu_counted_by_hand(temperature: float) -> None:
    """18 of 120 positions, 64 groups of ids, tiles of two groups; width 24. The kernels hold no tile in float32."""
    objective = ObjectiveConfig(generator_temperature=temperature)
    cfg = replace(SMALL, vocabulary=64 * GROUP, head_chunk=2 * GROUP)
    by_kernels, by_torch = (
        replace(layout(replace(cfg, kernels=kernels), 2, True), objective=objective) for kernels in ("auto", "torch")
    )
    sums, tile = 18 * 64 * 4 * (2 if temperature == 1 else 3), 18 * 2 * GROUP

    def found(of: ParallelLayout, backward: bool) -> float:
        return activations.softmax_bytes(of, backward, last=False)

    assert found(by_kernels, False) == pytest.approx(sums + 18 * 64 * 24)  # with their weights in float64
    assert found(by_kernels, True) == pytest.approx(tile * (2 + 4 / 128) + 2 * 18 * 24 * 4)
    rows = 18 * 2 * GROUP * (24 * 2 + 3 * 8)  # of the table, and where they come from
    assert found(by_torch, False) == pytest.approx(sums + max(rows, tile * (4 + (2 if temperature == 1 else 4))))
    assert found(by_torch, True) == pytest.approx(tile * (4 + 2) + 2 * 18 * 24 * 4)
    whole = layout(replace(cfg, kernels="auto"), 4, True)  # the kernels are for bf16
    assert found(whole, True) == pytest.approx(tile * 4 + 2 * 18 * 24 * 4)


def test_dropout_saves_nothing_of_a_generator() -> None:
    rates = dict(dropout=0.1, attention_dropout=0.1)
    with_dropout, without = layout(replace(SMALL, **rates), 2, False), layout(SMALL, 2, False)  # type: ignore[arg-type]
    assert activations.generator(with_dropout) == activations.generator(without) > 0
    assert activations.stage(with_dropout, 0) > activations.stage(without, 0)


def test_checkpointing_saves_only_the_input_of_a_layer() -> None:
    cfg = replace(SMALL, activation_checkpointing=True)
    of = layout(cfg, 2, False)
    assert activations.saved_layer(of) == ROWS * TOKENS * cfg.width * 2
    assert activations.layer_backward_bytes(of) - activations.layer_backward_bytes(
        layout(SMALL, 2, False)
    ) == activations.layer(of)


def test_positions_at_which_a_head_predicts() -> None:
    """XLM-E's generator predicts at 15% of the positions; all-tokens MLM's discriminator at every one."""
    run = RunConfig("test", model=SMALL, data=DataConfig(ROWS, 0, micro_batch=ROWS), engine=ENGINE)
    run = replace(run, objective=ObjectiveConfig("all_tokens", mask_fraction=0.15))
    whole = ParallelLayout.of(run, 1, "fp32", TOKENS)
    first, last = (activations.predicted_positions(whole, last) for last in (False, True))
    assert (first, last) == pytest.approx((0.15 * ROWS * TOKENS, ROWS * TOKENS))
