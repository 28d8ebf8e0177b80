"""The four sums, their counts and the metrics against loops, and the AUC against scikit-learn's."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from tests.rows import write_data
from tests.small import SMALL, batch_of, item, lively, model, usual_batch
from xlme_ds.config import DataConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.collate import Purpose
from xlme_ds.data.schema import PAD, UNK
from xlme_ds.data.shards import RowStore
from xlme_ds.models.electra import ElectraOutput
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.electra import ElectraObjective, area_under_curve
from xlme_ds.validate import validate

OBJECTIVE = ElectraObjective(ObjectiveConfig())


def random_output(batch: Batch, seed: int = 0) -> ElectraOutput:
    """Any values in the right shapes; half of the masked positions are replaced, predictions are often right."""
    g = torch.Generator().manual_seed(seed)
    targets = batch.tokens_BT.flatten()[batch.masked_M]
    other = torch.where(targets == 5, 6, 5)
    keep = torch.rand(len(targets), generator=g) < 0.5
    corrupted = (
        batch.tokens_BT.flatten()
        .index_copy(0, batch.masked_M, torch.where(keep, targets, other))
        .view_as(batch.tokens_BT)
    )
    logits = torch.randn(batch.tokens_BT.shape, generator=g) * 2 + (corrupted != batch.tokens_BT)
    return ElectraOutput(
        torch.rand(len(targets), generator=g) * 9, torch.where(keep.roll(1), targets, other), corrupted, logits
    )


def naive_sums(output: ElectraOutput, batch: Batch) -> tuple[list[float], list[int]]:
    """Sums and counts in the order of ElectraObjective.terms, one token at a time."""
    width = batch.tokens_BT.shape[1]
    sums, counts = [0.0] * 4, [0] * 4
    for nll, flat in zip(output.nll_M.tolist(), batch.masked_M.tolist(), strict=True):
        task = int(batch.task_B[flat // width])
        sums[task] += nll
        counts[task] += 1
    for row, tokens in enumerate(batch.tokens_BT.tolist()):
        for column, token in enumerate(tokens):
            if token == PAD:
                continue
            logit = float(output.replaced_logits_BT[row, column])
            replaced = int(output.corrupted_BT[row, column]) != token
            probability = 1 / (1 + math.exp(-logit))
            sums[2 + int(batch.task_B[row])] -= math.log(probability if replaced else 1 - probability)
            counts[2 + int(batch.task_B[row])] += 1
    return sums, counts


def test_sums_and_counts_equal_a_loop() -> None:
    batch = usual_batch()
    output = random_output(batch)
    sums, counts = naive_sums(output, batch)
    assert min(counts) > 0 and (batch.tokens_BT == PAD).any()
    np.testing.assert_allclose(OBJECTIVE.sums(output, batch).numpy(), sums, rtol=1e-5)  # float32 sums of ~150 numbers
    assert OBJECTIVE.counts(batch).tolist() == counts


def test_the_loss_is_lambda_weighted_means() -> None:
    batch = usual_batch()
    output = random_output(batch)
    sums, counts = naive_sums(output, batch)
    means = [s / c for s, c in zip(sums, counts, strict=True)]
    metrics = OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )
    assert metrics["loss"] == pytest.approx(means[0] + means[1] + 50 * means[2] + 50 * means[3], rel=1e-5)
    assert [metrics[term] for term in ElectraObjective.terms] == pytest.approx(means, rel=1e-5)
    halved = ElectraObjective(ObjectiveConfig(discriminator_weight=25.0))
    assert halved.weights.tolist() == [1, 1, 25, 25]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(generator_temperature=0.0), r"objective\.generator_temperature is 0\.0: it must be positive"),
        (dict(z_loss=-1e-4), r"objective\.z_loss is -0\.0001: it must not be negative"),
        (dict(name="mlm", generator_temperature=2.0), "objective.name mlm does not read it: leave it at 1.0"),
        (
            dict(random_fakes=("0:1", "5:1.5")),
            r"random_fakes 0:1 5:1\.5 are shares .* one is 1\.5: lower it to 1 at most",
        ),
        (dict(random_fakes=("4:1",)), "objective.random_fakes: the weights 4:1 do not have the form STEP:WEIGHT with"),
        (dict(random_fakes=("0.5",)), "the weights 0.5 do not have the form STEP:WEIGHT with rising steps from 0"),
        (dict(random_fakes=("0:1", "5:0.5", "5:0")), "the weights 0:1 5:0.5 5:0 do not have the form STEP:WEIGHT"),
        (dict(random_fakes=("0:0", "5:inf")), "the weights 0:0 5:inf do not have the form STEP:WEIGHT"),
        (dict(random_fakes=("0:-1",)), "the weights 0:-1 do not have the form STEP:WEIGHT"),
        (dict(name="mlm", random_fakes=("0:1",)), "objective.name mlm does not read it: leave it empty"),
        (dict(generator_keep_fraction=1.0), r"generator_keep_fraction is 1\.0: it must be at least 0 and below 1"),
    ],
)
def test_choices_that_make_no_sense(settings: dict[str, object], sentence: str) -> None:
    objective, data = ObjectiveConfig(**settings), DataConfig(8, 0, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        validate(RunConfig("x", objective=objective, data=data))


def slices(batch: Batch, size: int) -> list[Batch]:
    """The batch in pieces of `size` rows."""
    width = batch.tokens_BT.shape[1]
    pieces = []
    for start in range(0, len(batch.tokens_BT), size):
        mine = (batch.masked_M >= start * width) & (batch.masked_M < (start + size) * width)
        rows = slice(start, start + size)
        pieces.append(
            batch._replace(
                **{name: value[rows] for name, value in batch._asdict().items() if name.endswith(("_BT", "_B"))},
                masked_M=batch.masked_M[mine] - start * width,
                uniforms_M=batch.uniforms_M[mine],
            )
        )
    return pieces


@pytest.mark.parametrize("size", [1, 2, 3])
def test_counts_sums_statistics_and_gradients_add_up_over_any_cut(size: int) -> None:
    batch, electra = usual_batch(), model()
    whole_counts = OBJECTIVE.counts(batch)
    weights = (OBJECTIVE.weights / whole_counts).float()

    def run(pieces: list[Batch]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        electra.zero_grad()
        sums, counts, statistics = [], [], []
        for piece in pieces:
            output = electra(piece)
            sums.append(OBJECTIVE.sums(output, piece))
            (weights * sums[-1]).sum().backward()
            counts.append(OBJECTIVE.counts(piece))
            statistics.append(OBJECTIVE.statistics(output, piece))
        grads = [p.grad.clone() for p in electra.parameters() if p.grad is not None]
        return torch.stack(sums).sum(0).detach(), torch.stack(counts).sum(0), torch.stack(statistics).sum(0), grads

    whole, cut = run([batch]), run(slices(batch, size))
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=0)
    assert torch.equal(cut[1], whole_counts)
    assert torch.equal(cut[2].sum(1), whole[2].sum(1))
    for ours, theirs in zip(cut[3], whole[3], strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6  # float32 sums in another order


def test_statistics_equal_a_loop() -> None:
    """Accuracies and replaced fraction over ordinary tokens alone: a wrong logit on a special token counts nowhere."""
    rng = np.random.default_rng(0)
    first = item(rng, 30)
    first[3] = UNK
    batch = batch_of([[first]] * 6, [[item(rng, 6, 5), item(rng, 8, 4)] for _ in range(6)], 40)
    output = random_output(batch)
    metrics = OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )
    for task, name in enumerate(("mono", "para")):
        rows = batch.task_B == task
        ordinary = (batch.tokens_BT > UNK)[rows]
        replaced = (output.corrupted_BT != batch.tokens_BT)[rows][ordinary]
        positive = (output.replaced_logits_BT > 0)[rows][ordinary]
        mine = rows[batch.masked_M // 40]
        right = (output.predicted_M == batch.tokens_BT.flatten()[batch.masked_M])[mine]
        assert metrics[f"generator_accuracy_{name}"] == pytest.approx(float(right.double().mean()))
        assert metrics[f"replaced_fraction_{name}"] == pytest.approx(float(replaced.double().mean()))
        assert metrics[f"accuracy_replaced_{name}"] == pytest.approx(float(positive[replaced].double().mean()))
        assert metrics[f"accuracy_original_{name}"] == pytest.approx(float((~positive)[~replaced].double().mean()))
        assert 0 < metrics[f"accuracy_replaced_{name}"] < 1 and 0 < metrics[f"accuracy_original_{name}"] < 1


def test_shown_are_the_replacements_and_how_probable_each_is() -> None:
    output = random_output(batch := usual_batch())
    tokens, scores = OBJECTIVE.tokens_and_probabilities(output, batch)
    assert torch.equal(tokens, output.corrupted_BT) and scores is not None
    expected = [[1 / (1 + math.exp(-logit)) for logit in row] for row in output.replaced_logits_BT.tolist()]
    assert scores.tolist() == [pytest.approx(row, rel=1e-5) for row in expected]


def test_a_run_that_diverged_still_has_statistics() -> None:
    batch = usual_batch()
    output = random_output(batch)
    nan = output._replace(replaced_logits_BT=output.replaced_logits_BT * float("nan"))
    totals = OBJECTIVE.statistics(nan, batch).sum(0), OBJECTIVE.statistics(output, batch).sum(0)
    assert torch.equal(totals[0][[0, 1, 2, 4]], totals[1][[0, 1, 2, 4]])  # what does not ask the discriminator


@pytest.mark.parametrize("scale", [0.3, 2.0, 30.0])
def test_auc_is_scikit_learns_up_to_its_bins(scale: float) -> None:
    """Only pairs (replaced, original) that share a bin are decided by halves: the error is at most half their share."""
    tokens = torch.full((40, 100), 9)
    corrupted = tokens.clone()
    corrupted[:, :15] = 8
    g = torch.Generator().manual_seed(1)
    logits = (torch.randn(40, 100, generator=g) + 0.7 * (corrupted == 8)) * scale
    none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    batch = Batch(tokens, *[torch.ones_like(tokens)] * 4, *[torch.zeros(40, dtype=torch.int64)] * 2, none, nothing)
    output = ElectraOutput(nothing, none, corrupted, logits)
    statistics = OBJECTIVE.statistics(output, batch)
    metrics = OBJECTIVE.summarise(torch.zeros(4), torch.tensor([1.0, 0, 1, 0]), statistics)
    labels, scores = (corrupted == 8).flatten().numpy(), logits.flatten().numpy()
    # The bins as documented: 512 equal ones from −16 to 16, the outer two open.
    bins = np.floor((np.clip(scores, -16, 16) + 16) / 32 * 512).clip(max=511)
    shared = sum((labels & (bins == b)).sum() * (~labels & (bins == b)).sum() for b in np.unique(bins)) / (
        labels.sum() * (~labels).sum()
    )
    assert abs(metrics["auc_mono"] - roc_auc_score(labels, scores)) <= shared / 2
    assert metrics["auc_mono"] == pytest.approx(roc_auc_score(labels, bins), abs=1e-12)
    if scale < 10:
        assert shared / 2 < (0.05 if scale < 1 else 0.01)


def test_area_under_curve_at_the_ends() -> None:
    low, high, none = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 3.0]), torch.zeros(2)
    assert area_under_curve(high, low) == 1.0
    assert area_under_curve(low, high) == 0.0
    assert area_under_curve(low, low) == 0.5
    assert math.isnan(area_under_curve(none, low)) and math.isnan(area_under_curve(low, none))


@pytest.mark.parametrize("sharing", ["tied", "gdes"])
@pytest.mark.parametrize("name", ["electra", "all_tokens", "corrective"])
def test_the_discriminators_rate_is_for_what_its_losses_alone_train(name: str, sharing: str) -> None:
    objective, batch = objective_of(ObjectiveConfig(name)), usual_batch()
    whole, reached = lively(objective.build(replace(SMALL, embedding_sharing=sharing))), []  # type: ignore[arg-type]
    for part in (slice(2), slice(2, None)):
        whole.zero_grad()
        objective.sums(whole(batch), batch)[part].sum().backward()
        reached.append({name for name, p in whole.named_parameters() if p.grad is not None and p.grad.any()})
    names = [name for name, _ in whole.named_parameters()]
    rates = dict(
        zip(names, objective.learning_rate_scales(names, OptimizerConfig(discriminator_rate=0.3)), strict=True)
    )
    assert {name for name, rate in rates.items() if rate == 0.3} == reached[1] - reached[0]
    assert set(rates.values()) == {0.3, 1.0} and reached[0] | reached[1] == set(names)


def test_a_task_without_rows_is_left_out() -> None:
    batch = batch_of([[item(np.random.default_rng(0), 20)]], [], 24)
    output = random_output(batch)
    metrics = OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )
    assert OBJECTIVE.counts(batch).tolist() == [3, 0, 22, 0]
    assert metrics.keys() == {
        "loss",
        "mlm",
        "mrtd",
        "generator_accuracy_mono",
        "replaced_fraction_mono",
        "accuracy_replaced_mono",
        "accuracy_original_mono",
        "auc_mono",
    }
    assert all(math.isfinite(metrics[name]) for name in ("loss", "mlm", "mrtd"))


def test_where_nothing_is_replaced_there_is_no_auc() -> None:
    output = random_output(batch := usual_batch())._replace(corrupted_BT=usual_batch().tokens_BT)
    metrics = OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )
    assert not {"auc_mono", "auc_para"} & metrics.keys() and metrics["replaced_fraction_mono"] == 0


def test_the_table_of_objectives_builds_models() -> None:
    assert sum(p.numel() for p in objective_of(ObjectiveConfig()).build(SMALL).parameters()) == sum(
        p.numel() for p in model().parameters()
    )


def test_random_fakes_are_for_training_alone(tmp_path: Path) -> None:
    objective = objective_of(ObjectiveConfig("electra", random_fakes=("0:1", "8:0")))
    store = RowStore(write_data(tmp_path / "mixed", 8) / "mono")
    purposes: tuple[Purpose, ...] = ("train", "evaluate", "compare", "show")
    for purpose in purposes:
        batch = objective.collate_for(store, purpose)([(0, store.read(np.arange(4)), np.arange(4))], 1, 0.15, 2)
        assert ("random_1" in batch.added) == (purpose == "train"), purpose
        assert purpose != "train" or batch.added["random_1"].tolist() == [0.75], "of step 2"
