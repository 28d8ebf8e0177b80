"""The model cut into stages computes what the whole one does: outputs, gradients and parameter names."""

import pytest
import torch

from tests.small import SMALL, language_model, lively, model, usual_batch
from xlme_ds.config import ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.models.pipeline import ElectraStage, split_layers
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.objectives.mlm import MaskedLanguageModelling

WEIGHTS = torch.tensor([1.0, 1.0, 50.0, 50.0])
VARIANTS = [
    {},
    dict(norm="pre", embedding_norm=True, embedding_sharing="gdes", vocabulary_blocks=3, activation_checkpointing=True),
    dict(relative_bias="plain"),
    dict(relative_bias="none", absolute_positions=False),
    dict(dropout=0.3, language_embeddings=("de", "en", "fr")),
]


def run_stages(stages: list[ElectraStage], batch: Batch) -> tuple[torch.Tensor, ...]:
    """Every stage on its own graph as on its own process, with gradients sent back by hand; returns the last
    outputs."""
    crossings = []
    flow = stages[0](batch.tensors())
    for stage in stages[1:]:
        received = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in flow)
        crossings.append((flow, received))
        flow = stage(received)
    (WEIGHTS * ElectraObjective.sums(stages[-1].output(flow, batch), batch)).sum().backward()
    for sent, received in reversed(crossings):
        floats = [t for t in sent if t.is_floating_point()]
        assert all(t.is_floating_point() for t in sent[: len(floats)]), "DeepSpeed needs them first"
        torch.autograd.backward(floats, [t.grad for t in received if t.is_floating_point()])
    return flow


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("balance", [(1, 2), (0, 1, 2), (0, 1, 1, 1)])
def test_stages_are_the_model(changes: dict[str, object], balance: tuple[int, ...]) -> None:
    whole = model(discriminator_layers=3, **changes)
    batch = usual_batch()
    expected = whole(batch)
    (WEIGHTS * ElectraObjective.sums(expected, batch)).sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    stages = [ElectraStage(whole.cfg, part=part) for part in split_layers(balance)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(gradients), "every parameter stands in one stage, under its name"
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    outputs = run_stages(stages, batch)
    for ours, theirs in zip(stages[-1].output(outputs, batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            scale = float(gradients[name].abs().max())
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6 * scale + 1e-7, msg=name)


def test_only_the_rows_set_the_shapes() -> None:
    stage = lively(ElectraStage(SMALL, part=split_layers((1, 1))[0]))
    few, many = usual_batch(), usual_batch(seed=4)
    few = few._replace(masked_M=few.masked_M[:1], uniforms_M=few.uniforms_M[:1])
    assert len(few.masked_M) != len(many.masked_M)
    assert [t.shape for t in stage(few.tensors())] == [t.shape for t in stage(many.tensors())]


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("balance", [(1, 2), (0, 1, 2), (0, 1, 1, 1)])
def test_stages_of_one_encoder(changes: dict[str, object], balance: tuple[int, ...]) -> None:
    """The last stage reads the first one's embedding; here it is the very parameter, so that both gradients add up in
    it."""
    whole = language_model(discriminator_layers=3, **changes)
    batch = usual_batch()
    expected = whole(batch)
    (expected.nll_M**2).sum().backward()
    objective = MaskedLanguageModelling(ObjectiveConfig("mlm"))
    stages = [objective.build(whole.cfg, part) for part in split_layers(balance)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(whole.state_dict()), "every parameter stands in one stage, under its name"
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    stages[-1].borrowed = stages[0].embedding_blocks
    flow = batch.tensors()
    for stage in stages:
        flow = stage(flow)
        floats = [t.is_floating_point() for t in flow]
        assert floats == sorted(floats, reverse=True), "DeepSpeed needs them first"
    found = stages[-1].output(flow, batch)
    torch.testing.assert_close(found.nll_M, expected.nll_M, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.predicted_M, expected.predicted_M)
    (found.nll_M**2).sum().backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            theirs = whole.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()) + 1e-7)
