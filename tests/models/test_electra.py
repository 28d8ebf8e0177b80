"""The joint model: what moves where, packing, recomputation, and where gradients go."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from tests.small import SMALL, batch_of, item, lively, model, rows_of, usual_batch
from xlme_ds.config import ObjectiveConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.rows import UNK
from xlme_ds.models.electra import Electra, rescale_uniforms
from xlme_ds.models.encoder import block_sizes, lookup
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.validate import validate

OBJECTIVE = ElectraObjective(ObjectiveConfig())


def losses(electra: Electra, batch: Batch) -> Tensor:
    return OBJECTIVE.sums(electra(batch), batch)


def test_only_masked_positions_change() -> None:
    batch = usual_batch()
    corrupted = model()(batch).corrupted_BT
    changed = (corrupted != batch.tokens_BT).flatten().nonzero().squeeze(1)
    assert len(changed) > 0
    assert set(changed.tolist()) <= set(batch.masked_M.tolist())


def test_uniforms_decide_the_samples() -> None:
    batch, electra = usual_batch(), model()
    first = electra(batch)
    assert torch.equal(first.corrupted_BT, electra(batch).corrupted_BT)
    other = electra(batch._replace(uniforms_M=1 - 2.0**-24 - batch.uniforms_M))
    assert not torch.equal(first.corrupted_BT, other.corrupted_BT)
    assert torch.equal(first.nll_M, other.nll_M)


def test_temperature_and_z_loss_leave_the_losses_as_they_are() -> None:
    """At any temperature the generator says the same; a low one takes its likeliest tokens."""
    batch, cfg = usual_batch(), SMALL
    usual, cold, penalised = (
        lively(ElectraObjective(ObjectiveConfig(**choices)).build(cfg))  # type: ignore[arg-type]
        for choices in ({}, dict(generator_temperature=1e-3), dict(z_loss=0.1))
    )
    first, second, third = (electra(batch) for electra in (usual, cold, penalised))
    assert torch.equal(first.nll_M, second.nll_M) and torch.equal(first.predicted_M, second.predicted_M)
    assert torch.equal(second.corrupted_BT.flatten()[batch.masked_M], second.predicted_M)
    assert not torch.equal(first.corrupted_BT, second.corrupted_BT)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, third, strict=True))
    weights = [torch.autograd.grad(of.nll_M.sum(), model.masked_head.bias)[0]
               for of, model in ((first, usual), (third, penalised))]  # fmt: skip
    assert not torch.equal(*weights)


def test_the_generator_never_sees_the_original() -> None:
    """Other tokens under the masks: the same samples and predictions, another loss."""
    batch, electra = usual_batch(), model()
    other_tokens = batch.tokens_BT.flatten().index_fill(0, batch.masked_M, 9).view_as(batch.tokens_BT)
    assert not torch.equal(other_tokens, batch.tokens_BT)
    one, other = electra(batch), electra(batch._replace(tokens_BT=other_tokens))
    for name in ("predicted_M", "corrupted_BT", "replaced_logits_BT"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert not torch.equal(one.nll_M, other.nll_M)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_random_tokens_replace_a_share_of_the_samples(share: float) -> None:
    """They are uniform over the ordinary tokens; the others are the generator's, which says the same everywhere."""
    electra = model()
    with torch.no_grad():
        for parameter in (*electra.masked_head.dense.parameters(), *electra.masked_head.norm.parameters()):
            parameter.zero_()
        electra.masked_head.bias.fill_(-30.0)
        electra.masked_head.bias[[7, 8]] = torch.tensor([0.0, 1.0])
    batch = batch_of([[[0, *[9] * 38, 2]]] * 850, [], 40, seed=5)
    output = electra(batch.with_added(random_1=torch.tensor([share])))
    written = torch.bincount(output.corrupted_BT.flatten()[batch.masked_M], minlength=SMALL.vocabulary).double()
    likely = torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(0)
    expected = torch.zeros_like(written)
    expected[UNK + 1 : -1] = share / (SMALL.vocabulary - UNK - 2)
    expected[[7, 8]] += (1 - share) * likely
    assert not written[expected == 0].any()
    there = expected > 0
    assert chisquare(written[there], expected[there] * written.sum()).pvalue > 1e-3
    assert torch.equal(output.nll_M, electra(batch).nll_M), "the generator's loss is not theirs"


@pytest.mark.parametrize("name", ["electra", "all_tokens"])
def test_a_share_of_the_predicted_tokens_stays_readable(name: str) -> None:
    """The generator reads a quarter as they are, and samples from what it says in those places as in the others."""
    electra = lively(objective_of(ObjectiveConfig(name, generator_keep_fraction=0.25)).build(SMALL))  # type: ignore[arg-type]
    with torch.no_grad():  # it says the same everywhere, so that frequencies can be counted
        for parameter in electra.masked_head.dense.parameters():
            parameter.zero_()
        electra.masked_head.norm.weight.zero_()
        electra.masked_head.norm.bias.zero_()
    read: list[Tensor] = []
    electra.generator.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    batch = batch_of([[[0, *[9] * 38, 2]]] * 850, [], 40, seed=5)
    output, (embedded_BTD,) = electra(batch), read
    table = torch.cat(electra.embedding_blocks)
    in_place_MD = embedded_BTD.flatten(0, 1)[batch.masked_M]
    kept_M, hidden_M = ((in_place_MD == table[of]).all(1) for of in (9, SMALL.vocabulary - 1))
    masked = len(kept_M)
    assert torch.equal(kept_M, ~hidden_M)
    assert abs(int(kept_M.sum()) - masked / 4) < 4 * (masked * 3 / 16) ** 0.5
    unmasked = torch.ones(batch.tokens_BT.numel(), dtype=torch.bool).index_fill(0, batch.masked_M, False)
    assert torch.equal(embedded_BTD.flatten(0, 1)[unmasked], table[batch.tokens_BT.flatten()[unmasked]])

    probabilities = electra.masked_head.bias.detach().double().softmax(0).numpy()
    for group_M in (kept_M, hidden_M):
        samples = output.corrupted_BT.flatten()[batch.masked_M][group_M]
        assert (
            chisquare(torch.bincount(samples, minlength=SMALL.vocabulary), probabilities * len(samples)).pvalue > 1e-3
        )


@pytest.mark.parametrize("bound", [1e-6, 0.15, 0.5, 0.999])
def test_a_part_of_a_uniform_is_a_uniform(bound: float) -> None:
    """The ends of both parts become those of [0, 1), which stays open."""
    u = torch.tensor([0.0, np.nextafter(np.float32(bound), 0), np.float32(bound), 1 - 2.0**-24])
    within = rescale_uniforms(u < bound, u, bound)
    torch.testing.assert_close(within, torch.tensor([0.0, 1.0, 0.0, 1.0]), atol=2e-4, rtol=0)
    assert (within >= 0).all() and (within < 1).all()


def test_a_sample_equal_to_the_original_counts_as_original() -> None:
    """A generator that always says 7, on text that is all 7 but for one stretch of 8."""
    electra = model()
    with torch.no_grad():
        electra.masked_head.bias[7] = 1000.0
    sevens, mixed = [0, *[7] * 20, 2], [0, *[7] * 10, *[8] * 10, 2]
    batch = batch_of([[sevens], [mixed]], [], 22)
    output = electra(batch)
    assert torch.equal(output.corrupted_BT[0], batch.tokens_BT[0])
    labels = (output.corrupted_BT != batch.tokens_BT).float()
    eights = (batch.tokens_BT.flatten()[batch.masked_M] == 8).sum()
    assert 0 < labels.sum() == eights < len(batch.masked_M)
    cost = torch.nn.functional.binary_cross_entropy_with_logits(output.replaced_logits_BT, labels, reduction="sum")
    torch.testing.assert_close(OBJECTIVE.sums(output, batch)[2], cost, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("bias", ["gated", "none"])
def test_a_packed_row_equals_its_items_alone(norm: str, bias: str) -> None:
    electra = model(norm=norm, relative_bias=bias)
    batch = usual_batch()
    whole = electra(batch)
    exact = float64_copy(electra)
    hidden = discriminator_states(exact, batch, whole.corrupted_BT)
    sums, statistics, counts = torch.zeros(4), 0, torch.zeros(4, dtype=torch.float64)
    for row, segments in enumerate(batch.segments_BT):
        for segment in range(1, int(segments.max()) + 1):
            (columns,) = torch.where(segments == segment)
            alone = single_item(batch, row, columns)
            output = electra(alone)
            assert torch.equal(output.corrupted_BT[0], whole.corrupted_BT[row, columns])
            # float32 attention sums in another order, through three layers.
            torch.testing.assert_close(
                output.replaced_logits_BT[0], whole.replaced_logits_BT[row, columns], atol=2e-5, rtol=1e-5
            )
            states = discriminator_states(exact, alone, output.corrupted_BT)
            for ours, packed in zip(states, hidden, strict=True):
                torch.testing.assert_close(ours[0], packed[row, columns], atol=1e-12, rtol=1e-12)  # float64
            sums += OBJECTIVE.sums(output, alone)
            counts += OBJECTIVE.counts(alone)
            statistics = statistics + OBJECTIVE.statistics(output, alone)
    torch.testing.assert_close(OBJECTIVE.sums(whole, batch), sums, rtol=1e-5, atol=0)
    assert torch.equal(OBJECTIVE.counts(batch), counts)
    assert statistics.sum(1).tolist() == OBJECTIVE.statistics(whole, batch).sum(1).tolist()


def single_item(batch: Batch, row: int, columns: Tensor) -> Batch:
    """The item at `columns` of `row` as a row of its own, with its own masks and uniforms, cut out without collate."""
    width = batch.tokens_BT.shape[1]
    position = batch.masked_M - row * width
    mine = (position >= columns[0]) & (position <= columns[-1])
    return Batch(
        batch.tokens_BT[row : row + 1, columns],
        torch.arange(len(columns))[None],
        torch.ones(1, len(columns), dtype=torch.int64),
        batch.sides_BT[row : row + 1, columns],
        batch.languages_BT[row : row + 1, columns],
        batch.task_B[row : row + 1],
        batch.seeds_B[row : row + 1],
        position[mine] - columns[0],
        batch.uniforms_M[mine],
    )


def float64_copy(electra: Electra) -> Electra:
    copy = Electra(electra.cfg).double()
    copy.load_state_dict(electra.state_dict())
    return copy


def discriminator_states(electra: Electra, batch: Batch, corrupted_BT: Tensor) -> list[Tensor]:
    """Hidden states of the embeddings and of every layer."""
    inputs = electra.embed_for_discriminator(corrupted_BT), batch.positions_BT, batch.segments_BT
    with torch.no_grad():
        states = electra.discriminator.hidden_states(*inputs)
        assert torch.equal(states[-1], electra.discriminator(*inputs))
    assert len(states) == electra.cfg.discriminator_layers + 1
    return states


def test_padding_changes_nothing() -> None:
    """Add 11 columns of padding to the rows."""
    electra = model(max_positions=60)
    narrow = usual_batch(40)
    pad = torch.nn.functional.pad
    rows, columns = narrow.masked_M // 40, narrow.masked_M % 40
    wider = {name: pad(value, (0, 11)) for name, value in narrow._asdict().items() if name.endswith("_BT")}
    wider |= {"tokens_BT": pad(narrow.tokens_BT, (0, 11), value=1)}
    wide = narrow._replace(**wider, masked_M=rows * 51 + columns)
    torch.testing.assert_close(losses(electra, narrow), losses(electra, wide), rtol=1e-5, atol=0)
    assert torch.equal(electra(wide).corrupted_BT[:, :40], electra(narrow).corrupted_BT)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_activation_checkpointing_gives_the_same_gradients(norm: str) -> None:
    grads = []
    for checkpointing in (False, True):
        electra = model(norm=norm, activation_checkpointing=checkpointing)
        losses(electra, usual_batch()).sum().backward()
        grads.append({name: p.grad for name, p in electra.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None and torch.equal(grad, grads[1][name]), name  # the same operations on the same numbers


def test_vocabulary_blocks_give_the_same_losses_and_gradients() -> None:
    one = model()
    many = lively(Electra(replace(SMALL, vocabulary_blocks=3)))
    state = {k: v for k, v in one.state_dict().items() if k != "embedding_0"}
    blocks = one.embedding_0.detach().split(block_sizes(many.cfg))
    many.load_state_dict(state | {f"embedding_{n}": block for n, block in enumerate(blocks)})
    batch = usual_batch()
    results = []
    for electra in (one, many):
        total = losses(electra, batch)
        total.sum().backward()
        embedding = torch.cat([getattr(electra, f"embedding_{n}").grad for n in range(electra.cfg.vocabulary_blocks)])
        results.append((total.detach(), embedding, electra.generator.layers["0"].up.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # float32 sums cut differently


def test_block_sizes() -> None:
    assert block_sizes(replace(SMALL, vocabulary_blocks=3)) == [33, 33, 31]
    with pytest.raises(ValueError, match=r"model\.vocabulary 97 does not split.*use 49"):
        validate(RunConfig("x", model=replace(SMALL, vocabulary_blocks=60)))


@pytest.mark.parametrize("sharing", ["tied", "gdes"])
def test_parameters_with_a_gradient_of_the_discriminator(sharing: str) -> None:
    """Never into the generator; into the embedding when tied, into the difference alone with GDES."""
    electra = model(embedding_sharing=sharing)
    losses(electra, usual_batch())[2:].sum().backward()
    reached = {name.split(".")[0] for name, p in electra.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"discriminator", "replaced_head", "embedding_0" if sharing == "tied" else "difference_0"}


@pytest.mark.parametrize("sharing", ["tied", "gdes"])
def test_parameters_with_a_gradient_of_the_generator(sharing: str) -> None:
    electra = model(embedding_sharing=sharing)
    losses(electra, usual_batch())[:2].sum().backward()
    reached = {name.split(".")[0] for name, p in electra.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"generator", "masked_head", "embedding_0"}


def test_the_discriminator_reads_the_difference_on_top() -> None:
    electra = model(embedding_sharing="gdes")
    ids = torch.tensor([[5, 6], [7, 96]])
    expected = lookup(ids, [electra.embedding_0]) + lookup(ids, [electra.difference_0])
    assert torch.equal(electra.embed_for_discriminator(ids), expected)
    with torch.no_grad():
        electra.difference_0.zero_()
    tied = model(embedding_sharing="tied")
    tied.load_state_dict({k: v for k, v in electra.state_dict().items() if k != "difference_0"})
    assert torch.equal(losses(electra, usual_batch()), losses(tied, usual_batch()))


def test_every_parameter_is_trained() -> None:
    """The joint loss reaches every parameter, those of ids that occur nowhere through the softmax."""
    electra = model()
    losses(electra, usual_batch()).sum().backward()
    for name, parameter in electra.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_positions_matter_only_where_they_are_on() -> None:
    """Without absolute positions and bias the encoder is blind to order: a swapped item gives swapped states."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rows_of([[item(rng, 12)]], 14).tokens).long()
    swapped = tokens.clone()
    swapped[0, [2, 9]] = tokens[0, [9, 2]]
    segments, positions = torch.ones_like(tokens), torch.arange(14)[None]
    for switches, blind in (
        ({"absolute_positions": False, "relative_bias": "none"}, True),
        ({"relative_bias": "none"}, False),
        ({"absolute_positions": False}, False),
    ):
        electra = model(**switches)
        states = [
            electra.discriminator(lookup(ids, [electra.embedding_0]), positions, segments) for ids in (tokens, swapped)
        ]
        difference = (states[0][0, 4] - states[1][0, 4]).abs().max()
        assert (difference < 1e-5) == blind, switches
