"""Bytes that a layer saves for its backward pass, as autograd saves them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.small import MODERN, SMALL, lively
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.models.attention import attention_bias
from xlme_ds.models.encoder import Encoder, layer_class
from xlme_ds.models.layers import MicroBatchShape
from xlme_ds.models.tiles import GROUP_SIZE, tiling_of
from xlme_ds.plan import activations
from xlme_ds.plan.layout import ParallelLayout

ROWS, TOKENS = 3, 40
ENGINE = EngineConfig()
SIDE = tiling_of("_backward_distances", 16, 2).keys  # of a tile of the Triton kernel


def layout(cfg: ModelConfig, element_bytes: int, on_gpu: bool) -> ParallelLayout:
    run = RunConfig("test", model=cfg, data=DataConfig(ROWS, 0, micro_batch=ROWS), engine=ENGINE)
    return ParallelLayout.of(run, 1, "bf16" if element_bytes == 2 else "fp32", TOKENS, on_gpu)


def saved_by_a_layer(cfg: ModelConfig, dtype: torch.dtype, device: str) -> int:
    """Bytes of all storages that autograd saves in one layer, parameters and what all layers share left out."""
    encoder = lively(Encoder(cfg, 1)).to(device, dtype)
    seeds_B = torch.arange(ROWS, device=device)
    segments_BT = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device)
    bias = attention_bias(cfg, segments_BT, encoder.bias_by_distance(TOKENS), dtype)
    x_BTD = torch.ones(ROWS, TOKENS, cfg.width, device=device).to(dtype).requires_grad_()
    outside = [*encoder.parameters(), *(one for one in bias if isinstance(one, Tensor))]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in outside}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in addresses:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder.layers["0"](x_BTD, bias, seeds_B)
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
        activations.uncheckpointed_layer_bytes(layout(cfg, dtype.itemsize, False)), abs=64
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("relative_bias", ["gated", "plain", "none"])
def test_a_layer_in_the_fused_kernel(norm: str, relative_bias: str) -> None:
    cfg = replace(SMALL, norm=norm, relative_bias=relative_bias)  # type: ignore[arg-type]
    # The kernel may pad its log-sum-exp to a multiple of 32 tokens.
    kept = saved_by_a_layer(cfg, torch.bfloat16, "cuda")
    assert kept == pytest.approx(activations.uncheckpointed_layer_bytes(layout(cfg, 2, True)), rel=0.05)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_softmax_on_a_gpu_counted_by_hand(temperature: float) -> None:
    """18 of 120 positions, 64 groups of ids, tiles of two groups; width 24. The kernels hold no tile in float32."""
    objective = ObjectiveConfig(generator_temperature=temperature)
    cfg = replace(SMALL, vocabulary=64 * GROUP_SIZE, head_chunk=2 * GROUP_SIZE)
    by_kernels, by_torch = (
        replace(layout(replace(cfg, kernels=kernels), 2, True), objective=objective) for kernels in ("auto", "torch")
    )
    sums, tile = 18 * 64 * 4 * (2 if temperature == 1 else 3), 18 * 2 * GROUP_SIZE

    def found(of: ParallelLayout, backward: bool) -> float:
        return activations.softmax_bytes(of, backward, last=False)

    assert found(by_kernels, False) == pytest.approx(sums + 18 * 64 * 24)  # with their weights in float64
    assert found(by_kernels, True) == pytest.approx(tile * (2 + 4 / 128) + 2 * 18 * 24 * 4)
    rows = 18 * 2 * GROUP_SIZE * (24 * 2 + 3 * 8)  # of the table, and where they come from
    assert found(by_torch, False) == pytest.approx(sums + max(rows, tile * (4 + (2 if temperature == 1 else 4))))
    assert found(by_torch, True) == pytest.approx(tile * (4 + 2) + 2 * 18 * 24 * 4)
    whole = layout(replace(cfg, kernels="auto"), 4, True)  # the kernels are for bf16
    assert found(whole, True) == pytest.approx(tile * 4 + 2 * 18 * 24 * 4)


N, D, F, H, E = ROWS * TOKENS, 32, 40, 2, 2  # tokens, width, feed-forward size, heads, bytes of a bf16
ALIKE = (8 * D + 2 * F) * N * E + 4 * N * 4  # of every layer: tensors of a token, and mean and scale of each norm
SCORES, LOG_SUMS = N * TOKENS * H, N * H * 4


@pytest.mark.parametrize(
    ("triton", "changes", "expected"),
    [
        (False, dict(), ALIKE + 2 * N * D * E + SCORES * E + N * H * 5 * E + LOG_SUMS),
        (False, dict(relative_bias="plain"), ALIKE + SCORES * E + LOG_SUMS),
        (False, dict(relative_bias="none"), ALIKE + N * TOKENS * E + LOG_SUMS),
        (False, dict(dropout=0.1, relative_bias="none"), ALIKE + N * TOKENS * E + LOG_SUMS + 2 * N * D),
        (False, dict(attention_dropout=0.1), ALIKE + N * D * E + SCORES * (2 * E + 1) + N * H * 5 * E),
        (True, dict(), ALIKE + N * H * 4 + LOG_SUMS),
        (True, dict(relative_bias="none", dropout=0.1), ALIKE + LOG_SUMS + 2 * N * D),
        # A global layer of three; three products of the feed-forward network, q, k and v apart from the norms' input.
        (True, dict(**MODERN), (8 * D + 4 * F) * N * E + 4 * N * 4 + LOG_SUMS),
        (False, dict(**MODERN),
         (5 + (3 + 2 * 5) / 3) * D * N * E + 4 * F * N * E + 4 * N * 4 + LOG_SUMS + N * TOKENS * E / 3),
    ],
)  # fmt: skip
def test_a_layer_on_a_gpu_counted_by_hand(triton: bool, changes: dict[str, Any], expected: float) -> None:
    cfg = replace(
        SMALL, **dict(width=D, heads=H, feed_forward=F) | changes | dict(global_every=3, discriminator_layers=3)
    )
    batch = MicroBatchShape(ROWS, TOKENS, N, E, on_gpu=True, triton=triton, pairs=0)
    assert layer_class(cfg).saved_bytes(cfg, batch) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("triton", "changes", "shared", "backward"),
    [
        (False, dict(), N * TOKENS + TOKENS**2 * (8 + H * E), 3 * SCORES * E - 2 * N * F * E),
        (False, dict(relative_bias="none"), N * TOKENS, 2 * N * F * E),
        (False, dict(relative_bias="none", attention_dropout=0.1), N * TOKENS, 3 * SCORES * E - 2 * N * F * E),
        (True, dict(feed_forward=2), N * 8 + 2 * H * 128 * 512 * E, 2 * H * 4 * (TOKENS + SIDE) * 4),
        (True, dict(relative_bias="none"), N * 8, 2 * N * F * E),
        (True, dict(**MODERN), 4 * N * D / H * 4 + 2 * N * 8, 4 * N * F * E - 2 * N * D * E),
        (False, dict(**MODERN), 4 * N * D / H * 4 + N * 2 * 8 * E + N * TOKENS, 8 * N * D * E - 2 * N * D * E),
    ],
)  # fmt: skip
def test_what_layers_share_and_a_backward_pass_holds_counted_by_hand(
    triton: bool, changes: dict[str, Any], shared: float, backward: float
) -> None:
    """`backward`: without the gradients of a layer's input and output."""
    cfg = replace(SMALL, **dict(width=D, heads=H, feed_forward=F) | changes)
    batch = MicroBatchShape(ROWS, TOKENS, N, E, on_gpu=True, triton=triton, pairs=0)
    assert layer_class(cfg).shared_bytes(cfg, batch) == pytest.approx(shared)
    assert layer_class(cfg).backward_bytes(cfg, batch) - 2 * N * D * E == pytest.approx(backward)


def test_dropout_saves_nothing_of_a_generator() -> None:
    rates = dict(dropout=0.1, attention_dropout=0.1)
    with_dropout, without = layout(replace(SMALL, **rates), 2, False), layout(SMALL, 2, False)  # type: ignore[arg-type]
    assert activations.saved_generator_bytes(with_dropout) == activations.saved_generator_bytes(without) > 0
    assert activations.saved_stage_bytes(with_dropout, 0) > activations.saved_stage_bytes(without, 0)


def test_checkpointing_saves_only_the_input_of_a_layer() -> None:
    cfg = replace(SMALL, activation_checkpointing=True)
    of = layout(cfg, 2, False)
    assert activations.saved_layer_bytes(of) == ROWS * TOKENS * cfg.width * 2
    assert activations.layer_backward_bytes(of) - activations.layer_backward_bytes(
        layout(SMALL, 2, False)
    ) == activations.uncheckpointed_layer_bytes(of)


def test_positions_at_which_a_head_predicts() -> None:
    """XLM-E's generator predicts at 15% of the positions; all-tokens MLM's discriminator at every one."""
    run = RunConfig("test", model=SMALL, data=DataConfig(ROWS, 0, micro_batch=ROWS), engine=ENGINE)
    run = replace(run, objective=ObjectiveConfig("all_tokens", mask_fraction=0.15))
    whole = ParallelLayout.of(run, 1, "fp32", TOKENS)
    first, last = (activations.predicted_positions(whole, last) for last in (False, True))
    assert (first, last) == pytest.approx((0.15 * ROWS * TOKENS, ROWS * TOKENS))
