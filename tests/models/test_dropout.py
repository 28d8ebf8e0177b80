"""Dropout by keys: its bits, its share, where a layer drops, and that nothing but the keys decides."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small import SMALL, language_model, lively, model, usual_batch
from xlme_ds.models.attention import attention_bias, cpu_attend, dropout_attend
from xlme_ds.models.dropout import _STEP, _mixed, derive_seeds, drop, drop_weights
from xlme_ds.models.encoder import Encoder
from xlme_ds.settings_file import check_ranges


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    assert (1 - kept.double().mean()).item() == pytest.approx(
        rate, abs=3.5 * (rate * (1 - rate) / x.numel()) ** 0.5 + 2**-17
    )
    assert torch.equal(out[kept], torch.full_like(out[kept], float(out.max())))
    assert out.max().item() == pytest.approx(1 / (1 - rate), rel=2e-4)  # the rate is rounded to 2^-16
    for axis in ((1, 2), (0, 2), (0, 1)):  # no row, token or column is special: 4 standard deviations of each mean
        shares = 1 - kept.double().mean(axis)
        count = x.numel() / shares.numel()
        assert (shares - rate).abs().max() < 4.5 * (rate * (1 - rate) / count) ** 0.5


def test_the_largest_rate_of_the_settings_leaves_some() -> None:
    check_ranges(replace(SMALL, dropout=0.9999, attention_dropout=0.9999), "model.")
    out = drop(torch.ones(4, 100, 250), 0.9999, KEYS)
    assert 0 < out.count_nonzero() < 40 and out.isfinite().all()
    for name in ("dropout", "attention_dropout"):
        with pytest.raises(ValueError, match=rf"model.{name} is 0.99999\d*: it must be at least 0 and at most 0.9999$"):
            check_ranges(replace(SMALL, **{name: 1 - 2**-17}), "model.")


def test_nothing_but_key_and_place_decides() -> None:
    x = normal(4, 12, 10)
    out = drop(x, 0.3, KEYS)
    for row in range(4):
        assert torch.equal(drop(x[row : row + 1], 0.3, KEYS[row : row + 1]), out[row : row + 1])
    assert torch.equal(drop(x[:, :7], 0.3, KEYS), out[:, :7])
    places = [drop(torch.ones(4, 50, 40), 0.5, derive_seeds(KEYS, place)) for place in (-1, 0, 1, 2)] + [
        drop(torch.ones(4, 50, 40), 0.5, KEYS)
    ]
    for n, one in enumerate(places):
        for other in places[:n]:
            assert (one == other).double().mean() == pytest.approx(0.5, abs=0.03)  # as independent ones do
    assert torch.equal(drop(x, 0.0, KEYS), x) and torch.equal(drop(x, 0.3, None), x)


def test_fewer_queries_or_keys_lose_the_same_weights() -> None:
    whole = drop_weights(torch.ones(4, 2, 12, 12), 0.5, KEYS, 12)
    assert torch.equal(drop_weights(torch.ones(4, 2, 7, 5), 0.5, KEYS, 12), whole[:, :, :7, :5])


def test_its_gradient_is_its_mask() -> None:
    x = normal(4, 6, 9).requires_grad_()
    out = drop(x, 0.4, KEYS)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, out != 0)
    torch.testing.assert_close(x.grad * x, out)


def attended(attention: nn.Module, x: Tensor, distance: Tensor, segments: Tensor, kept: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(K) + gate · d) · kept, then v, one query and head after the other; `kept` is 0 or 1 / (1 −
    rate)."""
    (rows, tokens, width), heads = x.shape, attention.heads
    q, k, v = (part.view(rows, tokens, heads, -1) for part in attention.qkv(x).chunk(3, dim=-1))
    gate = attention.gate(q.transpose(1, 2)).squeeze(-1)
    out = torch.zeros(rows, tokens, heads, width // heads)
    for row, i, head in itertools.product(range(rows), range(tokens), range(heads)):
        seen = (segments[row] == segments[row, i]).nonzero().flatten()
        bias = gate[row, head, i] * distance[head, seen - i + tokens - 1]
        weights = (k[row, seen, head] @ q[row, i, head] / (width // heads) ** 0.5 + bias).softmax(0)
        out[row, i, head] = (weights * kept[row, head * tokens + i, seen]) @ v[row, seen, head]
    return attention.output(out.flatten(2))


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_where_an_encoder_drops(norm: str, rate: float) -> None:
    """Written out from the layers' own parts: the embedded tokens, what attention and feed-forward network add, and
    with `rate` attention weights."""
    cfg = replace(SMALL, norm=norm, dropout=0.3, attention_dropout=rate)
    encoder = lively(Encoder(cfg, 2)).train()
    batch = usual_batch()
    x = normal(*batch.tokens_BT.shape, cfg.width)
    keys, distance = batch.seeds_B, encoder.bias_by_distance(batch.tokens_BT.shape[1])
    found = encoder(x, batch.positions_BT, batch.segments_BT, None, keys)

    def dropped(values: Tensor, *places: int) -> Tensor:
        of_place = keys
        for place in places:
            of_place = derive_seeds(of_place, place)
        return drop(values, 0.3, of_place)

    state = x + encoder.positions[batch.positions_BT]
    state = dropped(state if encoder.input_norm is None else encoder.input_norm(state), 0)
    for n in range(2):
        layer = encoder.layers[str(n)]

        whole = torch.ones(len(x), cfg.heads * x.shape[1], x.shape[1])
        kept = drop(whole, rate, derive_seeds(derive_seeds(keys, 1 + n), 2))
        assert 1 - (kept > 0).double().mean() == pytest.approx(rate, abs=0.01)

        def attend(y: Tensor, layer: nn.Module = layer, kept: Tensor = kept) -> Tensor:
            return attended(layer.attention, y, distance, batch.segments_BT, kept)

        def feed(y: Tensor, layer: nn.Module = layer) -> Tensor:
            return layer.down(F.gelu(F.linear(y, layer.up.weight, layer.up.bias)))

        if norm == "pre":
            state = state + dropped(attend(layer.attention_norm(state)), 1 + n, 0)
            state = state + dropped(feed(layer.feed_forward_norm(state)), 1 + n, 1)
        else:
            state = layer.attention_norm(state + dropped(attend(state), 1 + n, 0))
            state = layer.feed_forward_norm(state + dropped(feed(state), 1 + n, 1))
    expected = state if encoder.output_norm is None else encoder.output_norm(state)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relative_bias", ["gated", "plain", "none"])
def test_complete_weights_attend_as_tiles_do(relative_bias: str) -> None:
    """`dropout_attend` at rate 0, with its gradients: next to it dropping is the only difference."""
    batch, cfg = usual_batch(), replace(SMALL, relative_bias=relative_bias)
    encoder = lively(Encoder(cfg, 1))
    bias = attention_bias(encoder.cfg, batch.segments_BT, encoder.bias_by_distance(40), torch.float32)
    g, shape = torch.Generator().manual_seed(3), (len(batch.tokens_BT), cfg.heads, 40)
    read = [torch.randn(*shape, cfg.width // cfg.heads, generator=g).requires_grad_() for _ in range(3)]
    read += [torch.rand(*shape, 1, generator=g).requires_grad_()] if relative_bias == "gated" else []
    q, k, v, gate = (*read, None)[:4]
    tiles, whole = cpu_attend(q, k, v, gate, bias), dropout_attend(q, k, v, gate, bias, 0.0, batch.seeds_B)
    torch.testing.assert_close(whole, tiles, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad((out**2).sum(), read) for out in (whole, tiles)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_attention_weights_of_a_row_are_dropped_alike_wherever_it_is() -> None:
    """Rows one after the other, all at once, and the last two."""
    encoder = lively(Encoder(replace(SMALL, attention_dropout=0.5), 2)).train()
    batch = usual_batch()
    x = normal(*batch.tokens_BT.shape, SMALL.width)

    def run(rows: slice) -> Tensor:
        return encoder(x[rows], batch.positions_BT[rows], batch.segments_BT[rows], None, batch.seeds_B[rows])

    together = run(slice(None))
    alone = torch.cat([run(slice(row, row + 1)) for row in range(len(x))])
    for other, rows in ((alone, slice(None)), (run(slice(-2, None)), slice(-2, None))):
        torch.testing.assert_close(other, together[rows], rtol=1e-5, atol=1e-5)
    short = int(batch.segments_BT[-1].count_nonzero())  # the last row without its padding
    assert 0 < short < x.shape[1]
    plain = lively(Encoder(replace(SMALL, attention_dropout=0.5, relative_bias="none"), 2)).train()
    whole = plain.run_layers(x, batch.segments_BT, None, seeds_B=batch.seeds_B)[-1:, :short]
    few, groups = x[-1:, :short], batch.segments_BT[-1:, :short]
    cut = plain.run_layers(few, groups, None, seeds_B=batch.seeds_B[-1:], row_tokens=x.shape[1])
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)
    assert not torch.isclose(together, encoder.eval()(x, batch.positions_BT, batch.segments_BT)).any(-1).all()


@pytest.mark.parametrize("rates", [dict(dropout=0.3), dict(attention_dropout=0.3)])
def test_evaluation_drops_nothing(rates: dict[str, float]) -> None:
    batch, with_dropout, without = usual_batch(), language_model(**rates), language_model()
    assert torch.equal(with_dropout.eval()(batch).nll_M, without(batch).nll_M)
    assert not torch.isclose(with_dropout.train()(batch).nll_M, without(batch).nll_M).all()


def test_a_checkpointed_layer_drops_the_same_again() -> None:
    batch, gradients = usual_batch(), []
    for checkpointing in (False, True):
        model = language_model(dropout=0.3, attention_dropout=0.3, activation_checkpointing=checkpointing)
        model(batch).nll_M.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_generator_of_xlme_drops_nothing() -> None:
    """In training: losses, predictions and samples keep every bit, the discriminator's logits do not."""
    batch = usual_batch()
    with_dropout, without = model(dropout=0.3, attention_dropout=0.3).train()(batch), model().train()(batch)
    for name in ("nll_M", "predicted_M", "corrupted_BT"):
        assert torch.equal(getattr(with_dropout, name), getattr(without, name))
    assert not torch.isclose(with_dropout.replaced_logits_BT, without.replaced_logits_BT).any()
