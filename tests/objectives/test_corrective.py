"""Corrective language modelling: the losses by hand in float64 with their gradients, and the stages of a pipeline."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.models.test_pipeline import VARIANTS
from tests.objectives.test_all_tokens import assert_stages_are
from tests.small import LANGUAGES, SMALL, lively, usual_batch
from xlme_ds.config import ObjectiveConfig, RunConfig
from xlme_ds.models.encoder import lookup
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.objectives.token_head import CorrectiveModel
from xlme_ds.validate import validate

OBJECTIVE = objective_of(ObjectiveConfig("corrective"))


def built(**changes: object) -> CorrectiveModel:
    cfg = replace(SMALL, **changes)  # type: ignore[arg-type]
    validate(RunConfig("small", model=cfg, objective=ObjectiveConfig("corrective")))
    whole = lively(OBJECTIVE.build(cfg))
    assert isinstance(whole, CorrectiveModel)
    return whole


@pytest.mark.parametrize("sharing", ["tied", "gdes"])
def test_losses_and_gradients_are_those_of_a_whole_softmax(sharing: str) -> None:
    batch, whole = usual_batch(), built(embedding_sharing=sharing)
    output = whole(batch)
    exact = CorrectiveModel(whole.cfg).double()
    exact.load_state_dict(whole.state_dict())
    ids_BTD = lookup(output.corrupted_BT, exact.embedding_blocks)
    if sharing == "gdes":
        ids_BTD = ids_BTD.detach() + lookup(output.corrupted_BT, [exact.get_parameter("difference_0")])
    hidden = exact.discriminator(ids_BTD, batch.positions_BT, batch.segments_BT, batch.languages_BT, batch.seeds_B)
    head = exact.token_head
    assert head.dense is not None and head.norm is not None
    logits = head.norm(F.gelu(head.dense(hidden))) @ torch.cat(exact.embedding_blocks).t() + head.bias
    original_N = batch.tokens_BT.flatten()
    costs_M = F.cross_entropy(logits.flatten(0, 1)[batch.masked_M], original_N[batch.masked_M], reduction="none")
    wanted = torch.stack([costs_M[batch.task_of_masked() == task].sum() for task in (0, 1)])
    sums, counts = OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch)
    torch.testing.assert_close(sums[4:].double(), wanted, rtol=1e-5, atol=0)
    assert counts[4:].tolist() == [int((batch.task_of_masked() == task).sum()) for task in (0, 1)]
    by_language = OBJECTIVE.by_language(output, batch, LANGUAGES)
    torch.testing.assert_close(by_language[0].sum(1), sums.double(), rtol=1e-5, atol=0)
    assert torch.equal(by_language[1].sum(1), counts)
    sums[4:].sum().backward()
    wanted.sum().backward()
    for (name, ours), theirs in zip(whole.named_parameters(), exact.parameters(), strict=True):
        reached = not name.startswith(("generator", "masked_head", "replaced_head"))
        assert (theirs.grad is not None) == (ours.grad is not None and bool(ours.grad.any())) == reached, name
        if reached:
            error = (ours.grad.double() - theirs.grad).norm()  # type: ignore[union-attr,operator]
            assert error <= 1e-4 * theirs.grad.norm() + 1e-6, name  # type: ignore[union-attr]  float32 sums


def test_the_other_losses_are_electras() -> None:
    """The same weights give the same four losses; the loss is the weighted sum of all six."""
    batch, whole = usual_batch(), built()
    electra = ElectraObjective(ObjectiveConfig())
    theirs = lively(electra.build(SMALL))
    theirs.load_state_dict({name: whole.state_dict()[name] for name in theirs.state_dict()})
    with torch.no_grad():
        output, their_sums = whole(batch), electra.sums(theirs(batch), batch)
    sums, counts = OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch)
    assert torch.equal(sums[:4], their_sums)
    metrics = OBJECTIVE.summarise(sums, counts, OBJECTIVE.statistics(output, batch))
    of = [metrics[term] for term in OBJECTIVE.terms]
    assert metrics["loss"] == pytest.approx(of[0] + of[1] + 50 * (of[2] + of[3]) + of[4] + of[5])
    assert {name.removesuffix("_mono").removesuffix("_para") for name in metrics} == {"loss", *OBJECTIVE.quantities}


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("balance", [(1, 2), (0, 1, 2)])
def test_stages_are_the_model(changes: dict[str, object], balance: tuple[int, ...]) -> None:
    assert_stages_are(OBJECTIVE, built(**dict(discriminator_layers=3, vocabulary_blocks=3) | changes), balance)
