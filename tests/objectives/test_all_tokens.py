"""All-tokens masked language modelling: the mixture of copy and softmax by hand in float64, its gradients, its stages,
and what it refuses."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_pipeline import VARIANTS
from tests.small import LANGUAGES, SMALL, lively, model, usual_batch
from xlme_ds.config import ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.models.encoder import lookup
from xlme_ds.models.pipeline import split_layers
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.protocol import Pretraining
from xlme_ds.objectives.token_head import AllTokensModel
from xlme_ds.validate import validate

OBJECTIVE = objective_of(ObjectiveConfig("all_tokens"))


def built(**changes: object) -> AllTokensModel:
    cfg = replace(SMALL, **changes)  # type: ignore[arg-type]
    validate(RunConfig("small", model=cfg, objective=ObjectiveConfig("all_tokens")))
    whole = lively(OBJECTIVE.build(cfg))
    assert isinstance(whole, AllTokensModel)
    return whole


def by_hand(whole: AllTokensModel, batch: Batch, corrupted_BT: Tensor) -> Tensor:
    """p of every token, [B, T]: D where it is what is read, and 1 − D times the whole softmax, in probabilities."""
    table = torch.cat(whole.embedding_blocks)
    ids_BT = lookup(corrupted_BT, whole.embedding_blocks)
    hidden = whole.discriminator(ids_BT, batch.positions_BT, batch.segments_BT, batch.languages_BT, batch.seeds_B)
    copied = 1 - torch.sigmoid(whole.replaced_head(hidden))
    head = whole.token_head
    assert head.dense is not None and head.norm is not None
    softmax = (head.norm(F.gelu(head.dense(hidden))) @ table.t() + head.bias).softmax(-1)
    of_original = softmax.gather(-1, batch.tokens_BT[..., None]).squeeze(-1)
    return copied * (corrupted_BT == batch.tokens_BT) + (1 - copied) * of_original


def test_losses_and_gradients_are_those_of_the_mixture() -> None:
    batch, whole = usual_batch(), built()
    output = whole(batch)
    assert (output.corrupted_BT != batch.tokens_BT).any()
    exact = AllTokensModel(SMALL).double()
    exact.load_state_dict(whole.state_dict())
    costs_BT = -by_hand(exact, batch, output.corrupted_BT).log() * (batch.segments_BT > 0)
    wanted = torch.stack([costs_BT[batch.task_B == task].sum() for task in (0, 1)])
    sums = OBJECTIVE.sums(output, batch)
    torch.testing.assert_close(sums[2:].double(), wanted, rtol=1e-5, atol=0)
    by_language = OBJECTIVE.by_language(output, batch, LANGUAGES)
    torch.testing.assert_close(by_language[0].sum(1), sums.double(), rtol=1e-5, atol=0)
    assert torch.equal(by_language[1].sum(1), OBJECTIVE.counts(batch))
    assert OBJECTIVE.counts(batch)[2:].sum() == (batch.segments_BT > 0).sum()
    sums[2:].sum().backward()
    wanted.sum().backward()
    for (name, ours), theirs in zip(whole.named_parameters(), exact.parameters(), strict=True):
        reached = not name.startswith(("generator", "masked_head"))
        assert (theirs.grad is not None) == (ours.grad is not None and bool(ours.grad.any())) == reached, name
        if reached:
            error = (ours.grad.double() - theirs.grad).norm()  # type: ignore[union-attr,operator]
            assert error <= 1e-4 * theirs.grad.norm() + 1e-6, name  # type: ignore[union-attr]  float32 sums


def test_the_generator_is_electras() -> None:
    batch, whole, electra = usual_batch(), built(), model()
    electra.load_state_dict({name: whole.state_dict()[name] for name in electra.state_dict()})
    ours, theirs = whole(batch), electra(batch)
    for name in theirs._fields[:-1]:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_metrics() -> None:
    batch, whole = usual_batch(), built()
    with torch.no_grad():
        output = whole(batch)
    counts = OBJECTIVE.counts(batch)
    metrics = OBJECTIVE.summarise(OBJECTIVE.sums(output, batch), counts, OBJECTIVE.statistics(output, batch))
    of = [metrics[term] for term in OBJECTIVE.terms]
    assert metrics["loss"] == pytest.approx(of[0] + of[1] + 50 * (of[2] + of[3]))
    assert {name.removesuffix("_mono").removesuffix("_para") for name in metrics} == {"loss", *OBJECTIVE.quantities}


def assert_stages_are(objective: Pretraining, whole: AllTokensModel, balance: tuple[int, ...]) -> None:
    """The last stage reads the first one's embedding; here it is the very parameter, so both gradients add up in it."""
    batch = usual_batch()
    expected = whole(batch)
    objective.sums(expected, batch).sum().backward()
    stages = [objective.build(whole.cfg, part) for part in split_layers(balance)]
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(whole.state_dict())
    stages[-1].borrowed = stages[0].embedding_blocks
    flow = batch.tensors()
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        flow = stage(flow)
        floats = [tensor.is_floating_point() for tensor in flow]
        assert floats == sorted(floats, reverse=True), "DeepSpeed needs them first"
    output = stages[-1].output(flow, batch)  # type: ignore[operator]
    for ours, theirs in zip(output, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    objective.sums(output, batch).sum().backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            theirs = whole.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max()) + 1e-7)


@pytest.mark.parametrize("changes", [changes for changes in VARIANTS if "embedding_sharing" not in changes])
@pytest.mark.parametrize("balance", [(1, 2), (0, 1, 2)])
def test_stages_are_the_model(changes: dict[str, object], balance: tuple[int, ...]) -> None:
    assert_stages_are(OBJECTIVE, built(discriminator_layers=3, vocabulary_blocks=3, **changes), balance)


def test_it_needs_one_embedding() -> None:
    run = RunConfig("x", model=ModelConfig(embedding_sharing="gdes"), objective=ObjectiveConfig("all_tokens"))
    with pytest.raises(ValueError, match=r"all_tokens needs one embedding .* gdes makes two: set it to tied"):
        validate(run)
