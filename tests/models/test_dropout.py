"""Dropout by keys: its bits, its share, where a layer drops, and that nothing but the keys decides."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.small import SMALL, language_model, lively, model, usual_batch
from xlme_ds.models.attention import shared_bias
from xlme_ds.models.dropout import _STEP, _mixed, derive, drop
from xlme_ds.models.encoder import Encoder, Part

KEYS = torch.tensor([5, -(2**63), 2**62 + 12345, -77])


def test_splitmix64_known_answers() -> None:
    """The first numbers of the published generator from the seed 1234567."""
    words = _mixed(torch.tensor(1234567) + torch.arange(1, 4) * _STEP)
    assert [int(word) % 2**64 for word in words] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_share_and_scale(rate: float) -> None:
    x = torch.ones(4, 100, 250, dtype=torch.float64)
    out = drop(x, rate, KEYS)
    kept = out != 0
    assert (1 - kept.double().mean()).item() == pytest.approx(rate, abs=3.5 * (rate * (1 - rate) / x.numel()) ** 0.5 + 2**-17)
    assert torch.equal(out[kept], torch.full_like(out[kept], float(out.max())))
    assert out.max().item() == pytest.approx(1 / (1 - rate), rel=2e-4)  # the rate is rounded to 2^-16
    for axis in ((1, 2), (0, 2), (0, 1)):  # no row, token or column is special: 4 standard deviations of each mean
        shares = 1 - kept.double().mean(axis)
        count = x.numel() / shares.numel()
        assert (shares - rate).abs().max() < 4.5 * (rate * (1 - rate) / count) ** 0.5


def test_nothing_but_key_and_place_decides() -> None:
    x = torch.randn(4, 12, 10)
    out = drop(x, 0.3, KEYS)
    for row in range(4):
        assert torch.equal(drop(x[row : row + 1], 0.3, KEYS[row : row + 1]), out[row : row + 1])
    assert torch.equal(drop(x[:, :7], 0.3, KEYS), out[:, :7])
    places = [drop(torch.ones(4, 50, 40), 0.5, derive(KEYS, place)) for place in (-1, 0, 1, 2)] + [
        drop(torch.ones(4, 50, 40), 0.5, KEYS)
    ]
    for n, one in enumerate(places):
        for other in places[:n]:
            assert (one == other).double().mean() == pytest.approx(0.5, abs=0.03)  # as independent ones do
    assert torch.equal(drop(x, 0.0, KEYS), x) and torch.equal(drop(x, 0.3, None), x)


def test_its_gradient_is_its_mask() -> None:
    x = torch.randn(4, 6, 9, requires_grad=True)
    out = drop(x, 0.4, KEYS)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, out != 0)
    torch.testing.assert_close(x.grad * x, out)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_where_an_encoder_drops(norm: str) -> None:
    """Written out from the layers' own parts: the embedded tokens, and what attention and feed-forward network add."""
    cfg = replace(SMALL, norm=norm, dropout=0.3)
    encoder = lively(Encoder(cfg, Part(range(2)))).train()
    batch = usual_batch()
    x = torch.randn(*batch.tokens_BT.shape, cfg.width)
    keys, distance = batch.keys_B, encoder.distances(batch.tokens_BT.shape[1])
    bias = shared_bias("sdpa", batch.segments_BT, distance, torch.float32)
    found = encoder(x, batch.positions_BT, batch.segments_BT, None, keys)

    def dropped(values: torch.Tensor, *places: int) -> torch.Tensor:
        of_place = keys
        for place in places:
            of_place = derive(of_place, place)
        return drop(values, 0.3, of_place)

    state = x + encoder.positions[batch.positions_BT]
    state = dropped(state if encoder.input_norm is None else encoder.input_norm(state), 0)
    for n in range(2):
        layer = encoder.layers[str(n)]

        def feed(y: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return layer.down(F.gelu(layer.up(y)))

        if norm == "pre":
            state = state + dropped(layer.attention(layer.attention_norm(state), bias), 1 + n, 0)
            state = state + dropped(feed(layer.feed_forward_norm(state)), 1 + n, 1)
        else:
            state = layer.attention_norm(state + dropped(layer.attention(state, bias), 1 + n, 0))
            state = layer.feed_forward_norm(state + dropped(feed(state), 1 + n, 1))
    torch.testing.assert_close(found, state if encoder.output_norm is None else encoder.output_norm(state))


def test_evaluation_drops_nothing() -> None:
    batch, with_dropout, without = usual_batch(), language_model(dropout=0.3), language_model()
    assert torch.equal(with_dropout.eval()(batch).nll_M, without(batch).nll_M)
    assert not torch.isclose(with_dropout.train()(batch).nll_M, without(batch).nll_M).all()


def test_a_checkpointed_layer_drops_the_same_again() -> None:
    batch, gradients = usual_batch(), []
    for checkpointing in (False, True):
        model = language_model(dropout=0.3, activation_checkpointing=checkpointing)
        model(batch).nll_M.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_generator_of_xlme_drops_nothing() -> None:
    """In training: losses, predictions and samples keep every bit, the discriminator's logits do not."""
    batch = usual_batch()
    with_dropout, without = model(dropout=0.3).train()(batch), model().train()(batch)
    for name in ("nll_M", "predicted_M", "corrupted_BT"):
        assert torch.equal(getattr(with_dropout, name), getattr(without, name))
    assert not torch.isclose(with_dropout.replaced_logits_BT, without.replaced_logits_BT).any()
