"""The chunked softmax against the full one: loss, gradients, samples; and the sampler by itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chi2
from torch import Tensor

from xlme_ds.models.masked_head import inverse_cdf, vocabulary_softmax

M, D, V = 20, 16, 1300  # V is no multiple of the group of 128 ids
BELOW_ONE = 1 - 2.0**-24  # the largest uniform that the corruption gives


def problem(
    dtype: torch.dtype = torch.float32, blocks: int = 1, scale: float = 1.0
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    """Hidden states, embedding blocks, bias, targets, uniforms."""
    g = torch.Generator().manual_seed(0)
    hidden, embedding, bias = (torch.randn(*shape, generator=g) * scale for shape in ((M, D), (V, D), (V,)))
    targets = torch.randint(V, (M,), generator=g)
    targets[:3] = torch.tensor([0, V - 1, V - 1])
    uniforms = torch.rand(M, generator=g)
    size = -(-V // blocks)
    parts = [part.to(dtype).requires_grad_() for part in embedding.split(size)]
    assert len(parts) == blocks
    return hidden.to(dtype).requires_grad_(), parts, bias.to(dtype).requires_grad_(), targets, uniforms


def full_softmax(hidden: Tensor, blocks: list[Tensor], bias: Tensor) -> Tensor:
    """Logits [M, V] in float64."""
    return hidden.double() @ torch.cat([block.double() for block in blocks]).t() + bias.double()


def gradients(nll: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(0.5, 2.0, M, dtype=nll.dtype)  # every position counts, none alike
    return [grad.double() for grad in torch.autograd.grad((nll * weights).sum(), inputs)]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("chunk", [1, 256, V, V + 500])
def test_equals_the_full_softmax(blocks: int, chunk: int) -> None:
    hidden, parts, bias, targets, uniforms = problem(blocks=blocks)
    got = vocabulary_softmax(hidden, parts, bias, targets, uniforms, chunk)
    logits = full_softmax(hidden, parts, bias)
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert got.nll_M.dtype == torch.float32
    # float32 logits of size ~15 from 16 products: a few units of 2^-20.
    torch.testing.assert_close(got.nll_M.double(), expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(got.predicted_M, logits.argmax(1))
    inputs = [hidden, bias, *parts]
    for ours, theirs in zip(gradients(got.nll_M, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_samples(got.sample_M, logits.softmax(1).detach().numpy(), uniforms.numpy(), doubtful=1e-6)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("chunk", [1, 256, V])
def test_without_uniforms_nothing_is_drawn(blocks: int, chunk: int) -> None:
    hidden, parts, bias, targets, uniforms = problem(blocks=blocks)
    got, drawn = (vocabulary_softmax(hidden, parts, bias, targets, each, chunk) for each in (None, uniforms))
    assert torch.equal(got.predicted_M, full_softmax(hidden, parts, bias).argmax(1))
    assert torch.equal(got.sample_M, got.predicted_M) and torch.equal(got.nll_M, drawn.nll_M)
    inputs = [hidden, bias, *parts]
    assert all(map(torch.equal, gradients(got.nll_M, inputs), gradients(drawn.nll_M, inputs)))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_samples_have_the_temperature_and_the_loss_has_not(blocks: int, temperature: float) -> None:
    hidden, parts, bias, targets, uniforms = problem(blocks=blocks, scale=0.7)
    usual = vocabulary_softmax(hidden, parts, bias, targets, uniforms, 256)
    got = vocabulary_softmax(hidden, parts, bias, targets, uniforms, 256, temperature=temperature)
    tempered = (full_softmax(hidden, parts, bias) / temperature).softmax(1).detach().numpy()
    assert_samples(got.sample_M, tempered, uniforms.numpy(), doubtful=1e-5)
    assert not torch.equal(got.sample_M, usual.sample_M)
    assert torch.equal(got.nll_M, usual.nll_M) and torch.equal(got.predicted_M, usual.predicted_M)
    inputs = [hidden, bias, *parts]
    for ours, theirs in zip(gradients(got.nll_M, inputs), gradients(usual.nll_M, inputs), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("shift", [0.0, -30.0])  # of the bias, so that Z is above 1 and below
def test_z_loss_is_in_the_gradient_alone(blocks: int, shift: float) -> None:
    """Of −log p + z log² Z, by autograd in float64."""
    hidden, parts, bias, targets, uniforms = problem(blocks=blocks, scale=0.7)
    bias = (bias.detach() + shift).requires_grad_()
    got = vocabulary_softmax(hidden, parts, bias, targets, uniforms, 256, z_loss=0.1)
    logits, inputs = full_softmax(hidden, parts, bias), [hidden, bias, *parts]
    log_z = logits.logsumexp(1)
    assert bool((log_z > 0).all()) != bool((log_z < 0).all())
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(got.nll_M.double(), expected, atol=1e-5, rtol=1e-6)
    wanted = gradients(expected + 0.1 * log_z**2, inputs)
    for ours, theirs in zip(gradients(got.nll_M, inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5)  # log Z is up to 23, and rounded as it is


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("chunk", [1, 256, V])
def test_at_the_borders_of_tiles(blocks: int, chunk: int) -> None:
    """The first and the last id of every tile, of every group of 128 and of the vocabulary, as target and as sample.
    Tiles begin anew in every block, so the last one of a block is short."""
    g = torch.Generator().manual_seed(2)
    starts = {
        start for first in range(0, V, -(-V // blocks)) for start in range(first, min(first + -(-V // blocks), V), 128)
    }
    ids = torch.tensor(sorted(starts | {start - 1 for start in starts if start} | {V - 1}))
    assert len(ids) == 2 * len(starts) >= 22
    parts = [part.clone().requires_grad_() for part in (torch.randn(V, D, generator=g) * 0.1).split(-(-V // blocks))]
    hidden = torch.randn(len(ids), D, generator=g).requires_grad_()
    bias = (torch.randn(V, generator=g) * 0.2).requires_grad_()
    logits = full_softmax(hidden, parts, bias)
    probabilities = logits.softmax(1).detach()
    borders = probabilities.cumsum(1).gather(1, ids[:, None]).squeeze(1)
    of_id = probabilities.gather(1, ids[:, None]).squeeze(1)
    assert of_id.min() > 1e-4, "a hundredth of it is more than the rounding of uniforms and sums"
    expected = F.cross_entropy(logits, ids, reduction="none")
    for share in (0.01, 0.5, 0.99):  # of the way through the id's part of the distribution
        got = vocabulary_softmax(hidden, parts, bias, ids, (borders - (1 - share) * of_id).float(), chunk)
        assert torch.equal(got.sample_M, ids)
    torch.testing.assert_close(got.nll_M.double(), expected, atol=1e-5, rtol=0)
    inputs = [hidden, bias, *parts]
    ours, theirs = (torch.autograd.grad(nll.sum(), inputs) for nll in (got.nll_M, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_tables_gradient_goes_into_the_sum_of_an_engine(blocks: int) -> None:
    """A block with `gradient_adder` gets no gradient from autograd: every row of it arrives there, once a backward
    pass."""
    hidden, parts, bias, targets, uniforms = problem(blocks=blocks)
    nll = vocabulary_softmax(hidden, parts, bias, targets, uniforms, 256).nll_M
    expected = torch.autograd.grad(nll.sum(), [hidden, bias, *parts])
    sums = [torch.zeros_like(part) for part in parts]
    for part, total in zip(parts[1:] if blocks > 1 else parts, sums[1:] if blocks > 1 else sums, strict=True):
        part.gradient_adder = lambda total=total: lambda rows, tile: total[rows].add_(tile)  # type: ignore[attr-defined]
    for _ in range(2):
        vocabulary_softmax(hidden, parts, bias, targets, uniforms, 256).nll_M.sum().backward()
    for part, total, wanted in zip(parts, sums, expected[2:], strict=True):
        if hasattr(part, "gradient_adder"):
            assert part.grad is None and torch.equal(total, 2 * wanted)
        else:
            assert part.grad is not None and torch.equal(part.grad, 2 * wanted)
    assert torch.equal(hidden.grad, 2 * expected[0]) and torch.equal(bias.grad, 2 * expected[1])  # type: ignore[arg-type]


def assert_samples(sample: Tensor, probabilities: np.ndarray, uniforms: np.ndarray, doubtful: float) -> None:
    """Equal to numpy's float64 inverse CDF, but where the uniform lies within `doubtful` of a border between tokens."""
    cdf = probabilities.cumsum(1)
    expected = np.array([np.searchsorted(row, u * row[-1], side="right") for row, u in zip(cdf, uniforms, strict=True)])
    clear = np.abs(cdf - (uniforms * cdf[:, -1])[:, None]).min(1) > doubtful
    assert clear.mean() > 0.8, "too few samples are compared"
    assert np.array_equal(sample.numpy()[clear], expected[clear])


def test_the_chunk_size_changes_no_sample() -> None:
    hidden, parts, bias, targets, _ = problem()
    uniforms = torch.rand(M, generator=torch.Generator().manual_seed(5))
    samples = [vocabulary_softmax(hidden, parts, bias, targets, uniforms, chunk).sample_M for chunk in (V, 300, 1)]
    assert torch.equal(samples[0], samples[1]) and torch.equal(samples[0], samples[2])


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("chunk", [1, 256, V])
def test_bf16_within_the_rounding_of_its_logits(blocks: int, chunk: int) -> None:
    hidden, parts, bias, targets, uniforms = problem(torch.bfloat16, blocks, scale=0.7)
    got = vocabulary_softmax(hidden, parts, bias, targets, uniforms, chunk)
    logits = full_softmax(hidden, parts, bias)
    expected = F.cross_entropy(logits, targets, reduction="none")
    # Logits leave the product rounded to 8 bits: each is off by 2^-9 of itself, the loss by twice the largest of these.
    bound = float(logits.detach().abs().max()) * 2.0**-8
    assert (got.nll_M.double() - expected).abs().max() < bound < 0.05
    inputs = [hidden, bias, *parts]
    for ours, theirs in zip(gradients(got.nll_M, inputs), gradients(expected, inputs), strict=True):
        # Probabilities are off by `bound` in proportion; the sums over tiles are in float32, and rounded once.
        assert (ours - theirs).norm() < (bound + 2.0**-8) * theirs.norm()
    # The sampler sees the rounded logits: cumulated probabilities are off by at most `bound`.
    cdf = logits.softmax(1).cumsum(1).detach()
    at = cdf.gather(1, got.sample_M[:, None]).squeeze(1)
    before = torch.where(got.sample_M > 0, cdf.gather(1, (got.sample_M - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    assert ((before - bound <= uniforms) & (uniforms <= at + bound)).all()


def test_no_masked_position() -> None:
    hidden, parts, bias, targets, uniforms = problem()
    got = vocabulary_softmax(hidden[:0], parts, bias, targets[:0], uniforms[:0], 8)
    assert [len(part) for part in got] == [0, 0, 0]
    got.nll_M.sum().backward()
    for each in (bias, *parts):  # dense: to the embedding's, its lookups' gradients are added
        assert each.grad is not None and not each.grad.is_sparse and not each.grad.any()


def drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The place where the cumulated weights pass `uniforms` of their total, by `inverse_cdf`."""
    exact = weights.double()
    return inverse_cdf(exact, uniforms.double().unsqueeze(1) * exact.sum(1, keepdim=True))[0].squeeze(1)


@pytest.mark.parametrize("places", [1, 5, 128, 1300])
def test_choose_is_numpys_search(places: int) -> None:
    """Small whole weights: every sum is exact, so every sample must be equal, borders and zeros included."""
    rng = np.random.default_rng(places)
    weights = rng.integers(0, 4, (300, places)) * (rng.random((300, places)) < 0.3)
    weights[np.arange(300), rng.integers(0, places, 300)] += 1
    cdf = weights.cumsum(1).astype(np.float64)
    uniforms = np.round(rng.random(300) * 2**24).clip(max=2**24 - 1) * 2.0**-24
    uniforms[:50] = 0.0
    uniforms[50:100] = BELOW_ONE
    uniforms[100:200] = np.round(cdf[100:200, places // 2] / cdf[100:200, -1] * 2**24).clip(max=2**24 - 1) * 2.0**-24
    expected = [np.searchsorted(row, u * row[-1], side="right") for row, u in zip(cdf, uniforms, strict=True)]
    thresholds = torch.tensor(uniforms[:, None] * cdf[:, -1:])
    place, before = inverse_cdf(torch.tensor(weights, dtype=torch.float64), thresholds)
    assert place.squeeze(1).tolist() == expected
    assert before.squeeze(1).tolist() == [row[n - 1] if n else 0.0 for row, n in zip(cdf, expected, strict=True)]


def test_a_place_of_weight_zero_is_never_drawn() -> None:
    """Also where the threshold comes from a sum that was rounded differently."""
    g = torch.Generator().manual_seed(1)
    weights = torch.rand(64, 300, generator=g) * torch.rand(64, 1, generator=g) * 1e-3
    weights[torch.rand(64, 300, generator=g) < 0.6] = 0.0
    weights[::2, -40:] = 0.0
    weights[::3, :70] = 0.0
    borders = weights.double().cumsum(1) / weights.double().sum(1, keepdim=True)
    uniforms = [borders[:, column].float().clamp(max=BELOW_ONE) for column in range(0, 300, 7)]
    uniforms += [each.nextafter(torch.tensor(0.0)) for each in uniforms]
    for each in uniforms:
        assert (weights.gather(1, drawn(weights, each)[:, None]) > 0).all()
    first = (weights > 0).int().argmax(1)
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(1)
    assert torch.equal(drawn(weights, torch.zeros(64)), first)
    beyond = inverse_cdf(weights.double(), weights.double().sum(1, keepdim=True) * 1.001)[0]
    assert torch.equal(beyond.squeeze(1), last)


def test_a_far_logit_takes_everything() -> None:
    """Logits 200 apart: all other weights are exact zeros in float32, and the loss is finite."""
    bias = torch.zeros(V)
    bias[700] = 200.0
    uniforms = torch.tensor([0.0, 0.5, BELOW_ONE])
    got = vocabulary_softmax(torch.zeros(3, D), [torch.zeros(V, D)], bias, torch.tensor([700, 5, 6]), uniforms, 2)
    assert got.sample_M.tolist() == [700] * 3 and got.predicted_M.tolist() == [700] * 3
    assert got.nll_M.tolist() == [0.0, 200.0, 200.0]


def test_nan_shows_in_the_loss() -> None:
    """A diverged run ends with a NaN loss, not with an index outside the vocabulary."""
    hidden = torch.full((2, D), float("nan"))
    got = vocabulary_softmax(
        hidden, [torch.ones(V, D)], torch.zeros(V), torch.tensor([1, 2]), torch.tensor([0.0, 0.7]), 2
    )
    assert got.nll_M.isnan().all()
    assert ((got.sample_M >= 0) & (got.sample_M < V)).all()


def test_samples_follow_the_softmax() -> None:
    """Evenly spaced uniforms hit token k N·p_k ± 1 times; random ones pass a chi-square test at 10^-4."""
    draws, vocabulary = 12_000, 600
    g = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocabulary, 8, generator=g) * 0.2
    hidden = torch.randn(1, 8, generator=g).expand(draws, 8)
    expected = (hidden[0].double() @ embedding.double().t()).softmax(0) * draws
    assert expected.min() > 5
    even = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    for name, uniforms in (("even", even.float()), ("random", torch.rand(draws, generator=g))):
        targets = torch.zeros(draws, dtype=torch.int64)
        sample = vocabulary_softmax(hidden, [embedding], torch.zeros(vocabulary), targets, uniforms, 1024).sample_M
        counts = torch.bincount(sample, minlength=vocabulary).double()
        if name == "even":
            # One at either border, and what float32 makes of uniforms and probabilities (2^-24 · 12,000 is far below
            # 1).
            assert (counts - expected).abs().max() <= 1.01
        else:
            statistic = float(((counts - expected) ** 2 / expected).sum())
            assert chi2.ppf(1e-4, vocabulary - 1) < statistic < chi2.ppf(1 - 1e-4, vocabulary - 1)
