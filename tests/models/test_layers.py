"""One layer against other people's: Hugging Face's post-LN layer of XLM-R and torch's pre-LN encoder layer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import XLMRobertaConfig
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaLayer

from tests.small import SMALL, lively
from xlme_ds.models.attention import TorchBias, item_mask
from xlme_ds.models.encoder import Encoder
from xlme_ds.models.layers import LayerNorm, TransformerLayer

SEGMENTS = torch.tensor([[1] * 6 + [2] * 4 + [0] * 2, [1] * 12])
# Two orders of the same float32 sums over ~40 terms of size ~1; in float64 a formula error has nowhere to hide.
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14}


def inputs(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    x = torch.randn(*SEGMENTS.shape, SMALL.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x * scale).to(dtype).requires_grad_()


def compare(ours: nn.Module, theirs_out: Tensor, x: Tensor, theirs_x: Tensor, bound: float) -> None:
    out = ours(x, TorchBias(item_mask(SEGMENTS), None))
    torch.testing.assert_close(out, theirs_out, atol=4 * bound, rtol=bound)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (ours_grad,) = torch.autograd.grad((out * weight).sum(), x)
    (theirs_grad,) = torch.autograd.grad((theirs_out * weight).sum(), theirs_x)
    torch.testing.assert_close(ours_grad, theirs_grad, atol=20 * bound, rtol=10 * bound)


def copy_common(ours: TransformerLayer, pairs: dict[nn.Module, nn.Module]) -> None:
    with torch.no_grad():
        for source, target in pairs.items():
            target.weight.copy_(source.weight)
            target.bias.copy_(source.bias)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_post_ln_is_hugging_faces_xlm_r_layer(dtype: torch.dtype, epsilon: float) -> None:
    cfg = replace(SMALL, relative_bias="none", norm="post", norm_epsilon=epsilon)
    ours = lively(TransformerLayer(cfg), std=0.2).to(dtype)
    small = 1e-3 if epsilon < 1e-5 else 1.0  # what enters the norms then has variances that another epsilon would drown
    with torch.no_grad():
        for module in (ours.attention.output, ours.attention_norm, ours.down):
            module.weight *= small
            module.bias *= small
    theirs = XLMRobertaLayer(
        XLMRobertaConfig(
            hidden_size=SMALL.width,
            num_attention_heads=SMALL.heads,
            intermediate_size=SMALL.feed_forward,
            hidden_act="gelu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=epsilon,
            attn_implementation="eager",
        )
    ).to(dtype)
    copy_common(
        ours,
        {
            ours.attention.output: theirs.attention.output.dense,
            ours.attention_norm: theirs.attention.output.LayerNorm,
            ours.up: theirs.intermediate.dense,
            ours.down: theirs.output.dense,
            ours.feed_forward_norm: theirs.output.LayerNorm,
        },
    )
    self_attention = theirs.attention.self
    with torch.no_grad():
        for n, part in enumerate((self_attention.query, self_attention.key, self_attention.value)):
            part.weight.copy_(ours.attention.qkv.weight.chunk(3)[n])
            part.bias.copy_(ours.attention.qkv.bias.chunk(3)[n])
    x, theirs_x = inputs(dtype, small), inputs(dtype, small)
    mask = torch.zeros(SEGMENTS.shape[0], 1, 12, 12, dtype=dtype).masked_fill(
        ~item_mask(SEGMENTS), torch.finfo(dtype).min
    )
    compare(ours, theirs(theirs_x, mask), x, theirs_x, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_pre_ln_is_torchs_encoder_layer(dtype: torch.dtype) -> None:
    ours = lively(TransformerLayer(replace(SMALL, relative_bias="none", norm="pre")), std=0.2).to(dtype)
    theirs = nn.TransformerEncoderLayer(
        SMALL.width,
        SMALL.heads,
        SMALL.feed_forward,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=1e-5,
        batch_first=True,
        norm_first=True,
        dtype=dtype,
    )
    copy_common(
        ours,
        {
            ours.attention.output: theirs.self_attn.out_proj,
            ours.attention_norm: theirs.norm1,
            ours.up: theirs.linear1,
            ours.down: theirs.linear2,
            ours.feed_forward_norm: theirs.norm2,
        },
    )
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(ours.attention.qkv.weight)
        theirs.self_attn.in_proj_bias.copy_(ours.attention.qkv.bias)
    x, theirs_x = inputs(dtype), inputs(dtype)
    hidden = ~item_mask(SEGMENTS).squeeze(1).repeat_interleave(SMALL.heads, 0)
    compare(ours, theirs(theirs_x, src_mask=hidden), x, theirs_x, BOUNDS[dtype])


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_bf16_gradients_of_a_layer_norm_over_many_tokens(shift: float) -> None:
    """One rounding to bf16 away from the gradients in float64, also where gradients have a mean."""
    g = torch.Generator().manual_seed(0)
    ours = LayerNorm(6).bfloat16()
    whole = torch.nn.LayerNorm(6).double()
    x = torch.randn(30, 300, 6, generator=g).bfloat16()
    weight = (torch.randn(30, 300, 6, generator=g) + shift * torch.arange(6)).bfloat16()
    found: list[Tensor] = []
    for norm in (ours, whole):
        given = x.clone().to(norm.weight.dtype).requires_grad_()
        norm(given).backward(weight.to(norm.weight.dtype))
        assert given.grad is not None
        found += [given.grad, norm.weight.grad, norm.bias.grad]
    for mine, exact in zip(found[:3], found[3:], strict=True):
        assert float((mine - exact).norm() / exact.norm()) < 0.01


def test_bf16_gradients_of_positions_and_languages_that_come_often() -> None:
    cfg = replace(SMALL, absolute_positions=True, language_embeddings=("de", "en"), norm="pre", embedding_norm=False)
    encoder = Encoder(cfg, layers=0).bfloat16()
    places = torch.zeros(500, 4, dtype=torch.long)
    encoder.first_layer_input(torch.zeros(500, 4, cfg.width, dtype=torch.bfloat16), places, places).sum().backward()
    for table in (encoder.positions, encoder.languages):
        assert table is not None and table.grad is not None
        assert table.grad[0].tolist() == [2000.0] * cfg.width and not table.grad[1:].any()
