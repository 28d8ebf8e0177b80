"""Random token substitution: what is drawn, the labels, and the loss against loops; its stages; what it refuses; and
ELECTRA from its discriminator."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from tests.evaluate.folders import write_run
from tests.models.test_pipeline import VARIANTS
from tests.objectives.test_electra import slices
from tests.rows import write_data
from tests.small import SMALL, batch_of, encoder_of, item, lively, usual_batch
from xlme_ds.config import DataConfig, ModelConfig, ObjectiveConfig, RunConfig, StartConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.rows import PAD, UNK
from xlme_ds.evaluate.heldout_text import perplexity
from xlme_ds.first_weights import starting_weights
from xlme_ds.models.electra import Electra
from xlme_ds.models.pipeline import split_layers
from xlme_ds.objectives import objective_of
from xlme_ds.trained.runs import load_run
from xlme_ds.validate import validate

RTS = ObjectiveConfig("rts")
OBJECTIVE = objective_of(RTS)


def built(**changes: object) -> Electra:
    cfg = replace(SMALL, **changes)  # type: ignore[arg-type]
    validate(RunConfig("small", model=cfg, objective=RTS))
    return lively(OBJECTIVE.build(cfg))  # type: ignore[arg-type]


def test_the_chosen_positions_show_what_their_uniforms_say() -> None:
    """Ordinary token number floor(u · n) of the n that there are; nothing else changes."""
    batch = usual_batch()
    corrupted, expected = built()(batch).corrupted_BT, batch.tokens_BT.clone()
    width, ordinary = batch.tokens_BT.shape[1], SMALL.vocabulary - 5  # but <s>, <pad>, </s>, <unk> and <mask>
    for place, uniform in zip(batch.masked_M.tolist(), batch.uniforms_M.tolist(), strict=True):
        expected[place // width, place % width] = 4 + math.floor(uniform * ordinary)
    assert torch.equal(corrupted, expected)
    assert 0 < (corrupted != batch.tokens_BT).sum() <= len(batch.masked_M)


def test_all_ordinary_tokens_are_drawn_alike() -> None:
    batch = batch_of([[item(np.random.default_rng(row), 38)] for row in range(900)], [], 40, mask_fraction=0.5)
    drawn = built()(batch).predicted_M
    counts = np.bincount(drawn.numpy(), minlength=SMALL.vocabulary)
    assert not counts[: UNK + 1].any() and not counts[-1]
    counts, expected = counts[UNK + 1 : -1], len(drawn) / (SMALL.vocabulary - 5)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi2.ppf(1e-4, len(counts) - 1) < statistic < chi2.ppf(1 - 1e-4, len(counts) - 1)


def test_the_loss_is_a_loops() -> None:
    """A draw that equals the original has label 0, as on text whose every token is what is drawn."""
    batch, model = usual_batch(), built()
    equal = batch.masked_M[:3]
    drawn = model(batch).predicted_M[:3]
    batch = batch._replace(tokens_BT=batch.tokens_BT.flatten().index_copy(0, equal, drawn).view_as(batch.tokens_BT))
    with torch.no_grad():
        output = model(batch)
    assert torch.equal(output.corrupted_BT.flatten()[equal], batch.tokens_BT.flatten()[equal])
    sums, counts = [0.0, 0.0], [0, 0]
    for row, tokens in enumerate(batch.tokens_BT.tolist()):
        for column, token in enumerate(tokens):
            if token != PAD:
                logit = float(output.replaced_logits_BT[row, column])
                replaced = int(output.corrupted_BT[row, column]) != token
                sums[int(batch.task_B[row])] += math.log1p(math.exp(-logit if replaced else logit))
                counts[int(batch.task_B[row])] += 1
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert OBJECTIVE.counts(batch).tolist() == counts
    metrics = OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )
    assert [metrics["mrtd"], metrics["trtd"]] == pytest.approx(means, rel=1e-5)
    assert metrics["loss"] == pytest.approx(sum(means), rel=1e-5)
    replaced = (output.corrupted_BT != batch.tokens_BT) & (batch.task_B == 0)[:, None]
    ordinary = (batch.tokens_BT > UNK) & (batch.task_B == 0)[:, None]
    assert metrics["replaced_fraction_mono"] == pytest.approx(float(replaced.sum() / ordinary.sum()))
    assert {name.removesuffix("_mono").removesuffix("_para") for name in metrics} == {"loss", *OBJECTIVE.quantities}


def test_a_task_without_rows_is_left_out() -> None:
    batch = batch_of([[item(np.random.default_rng(0), 20)]], [], 24)
    with torch.no_grad():
        output = built()(batch)
    counted = OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    assert OBJECTIVE.counts(batch).tolist() == [22, 0] and "trtd" not in OBJECTIVE.summarise(*counted)


@pytest.mark.parametrize("size", [1, 3])
def test_everything_adds_up_over_any_cut(size: int) -> None:
    batch, model = usual_batch(), built(dropout=0.3)
    weights = (OBJECTIVE.weights / OBJECTIVE.counts(batch)).float()

    def run(pieces: list[Batch]) -> tuple[torch.Tensor, ...]:
        model.zero_grad()
        found = []
        for piece in pieces:
            output = model(piece)
            sums, counts = OBJECTIVE.sums(output, piece), OBJECTIVE.counts(piece)
            (weights * sums).sum().backward()
            by_language = OBJECTIVE.by_language(output, piece, 3)
            assert torch.equal(by_language[1].sum(1), counts)
            torch.testing.assert_close(by_language[0].sum(1), sums.double(), rtol=1e-5, atol=0)
            found.append(torch.cat([sums.detach(), counts]))
        return torch.stack(found).sum(0), *(parameter.grad.clone() for parameter in model.parameters())  # type: ignore[union-attr]

    for ours, theirs in zip(run(slices(batch, size)), run([batch]), strict=True):
        assert theirs.any(), "every parameter is trained"
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6  # float32 sums in another order


@pytest.mark.parametrize("changes", [changes for changes in VARIANTS if "embedding_sharing" not in changes])
@pytest.mark.parametrize("balance", [(1, 2), (0, 1, 2)])
def test_stages_are_the_model(changes: dict[str, object], balance: tuple[int, ...]) -> None:
    whole, batch = built(discriminator_layers=3, **changes), usual_batch()
    expected = whole(batch)
    OBJECTIVE.sums(expected, batch).sum().backward()
    stages = [OBJECTIVE.build(whole.cfg, part) for part in split_layers(balance)]
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(whole.state_dict())
    flow = batch.tensors()
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        flow = stage(flow)
        floats = [tensor.is_floating_point() for tensor in flow]
        assert floats == sorted(floats, reverse=True), "DeepSpeed needs them first"
        assert all(tensor.requires_grad for tensor in flow if tensor.is_floating_point()), "and gradients of each"
    found = stages[-1].output(flow, batch)  # type: ignore[operator]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    OBJECTIVE.sums(found, batch).sum().backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            theirs = whole.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()) + 1e-7)


@pytest.mark.parametrize(
    ("objective", "model", "sentence"),
    [
        (dict(mask_fraction=1.0), {}, r"objective\.mask_fraction is 1\.0"),
        (
            dict(pseudo_fractions=(0.1,)),
            {},
            r"objective\.pseudo_fractions is .*, and objective\.name rts does not read it: leave it empty",
        ),
        (
            dict(discriminator_weight=25.0),
            {},
            r"discriminator_weight is 25\.0, .* rts does not read it: leave it at 50",
        ),
        (dict(generator_temperature=0.5), {}, r"generator_temperature is 0\.5, .* rts does not read it: leave it at 1"),
        (
            dict(z_loss=0.5),
            {},
            r"objective\.z_loss is 0\.5, and objective\.name rts does not read it: leave it at 0\.0",
        ),
        ({}, dict(embedding_sharing="gdes"), r"rts has no generator, .* gdes needs one: set it to tied"),
    ],
)
def test_what_it_refuses(objective: dict[str, object], model: dict[str, object], sentence: str) -> None:
    run = RunConfig("x", model=ModelConfig(**model), objective=replace(RTS, **objective))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        validate(run)


def test_electra_goes_on_from_it(tmp_path: Path) -> None:
    """Both encoders and the embedding begin as its discriminator, whose head goes on too."""
    folder = write_run(tmp_path / "rts", objective="rts", layers=2)
    source, start = load_run(folder), StartConfig(str(folder), "discriminator")
    assert source.state.keys() == built().state_dict().keys()
    run = RunConfig("x", model=source.model, data=DataConfig(8, 8, 8), start=start)
    known = starting_weights(run, source.vocabulary)
    assert known is not None
    encoder = encoder_of(lively(OBJECTIVE.build(source.model)))  # type: ignore[arg-type]
    encoder.load_state_dict(source.encoder().state_dict())
    for name, value in source.state.items():
        assert torch.equal(known(name), value), name  # type: ignore[arg-type]
        if name.startswith("discriminator.layers.0"):
            assert torch.equal(known(name.replace("discriminator", "generator")), value)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"trained for rts, whose model has other parts than that of electra: set "
        r"start\.take to discriminator",
    ):
        starting_weights(replace(run, start=StartConfig(str(folder), "all")), source.vocabulary)


def test_it_has_no_perplexity(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "rts", objective="rts")
    with pytest.raises(ValueError, match="was trained for rts and predicts no tokens: name the run of another"):
        perplexity(folder, write_data(tmp_path / "heldout", 8))
