"""Sums, counts and metrics of masked language modelling against loops, and their cut into micro-batches."""

import numpy as np
import pytest
import torch

from tests.objectives.test_electra import slices
from tests.small import batch_of, item, language_model, usual_batch
from xlme_ds.config import ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.models.text_encoder import LanguageModelOutput
from xlme_ds.objectives import objective_of

OBJECTIVE = objective_of(ObjectiveConfig("mlm"))


def random_output(batch: Batch, seed: int = 0) -> LanguageModelOutput:
    g = torch.Generator().manual_seed(seed)
    targets = batch.tokens_BT.flatten()[batch.masked_M]
    right = torch.rand(len(targets), generator=g) < 0.5
    return LanguageModelOutput(torch.rand(len(targets), generator=g) * 9, torch.where(right, targets, targets - 1))


def metrics_of(output: LanguageModelOutput, batch: Batch) -> dict[str, float]:
    return OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )


def test_metrics_equal_a_loop() -> None:
    batch = usual_batch()
    output, width = random_output(batch), batch.tokens_BT.shape[1]
    sums, right, counts = [0.0, 0.0], [0, 0], [0, 0]
    for n, flat in enumerate(batch.masked_M.tolist()):
        task = int(batch.task_B[flat // width])
        sums[task] += float(output.nll_M[n])
        right[task] += int(output.predicted_M[n] == batch.tokens_BT[flat // width, flat % width])
        counts[task] += 1
    assert min(counts) > 0 and 0 < right[0] < counts[0]
    found = metrics_of(output, batch)
    assert found == {
        "loss": pytest.approx(sums[0] / counts[0] + sums[1] / counts[1], rel=1e-6),
        "mlm": pytest.approx(sums[0] / counts[0], rel=1e-6),
        "tlm": pytest.approx(sums[1] / counts[1], rel=1e-6),
        "accuracy_mono": right[0] / counts[0],
        "accuracy_para": right[1] / counts[1],
    }


def test_a_task_without_rows_is_left_out() -> None:
    batch = batch_of([[item(np.random.default_rng(0), 20)]], [], 24)
    assert metrics_of(random_output(batch), batch).keys() == {"loss", "mlm", "accuracy_mono"}


@pytest.mark.parametrize("changes", [{}, dict(dropout=0.3, language_embeddings=("de", "en", "fr"))])
@pytest.mark.parametrize("size", [1, 3])
def test_everything_adds_up_over_any_cut(size: int, changes: dict[str, object]) -> None:
    batch, model = usual_batch(), language_model(**changes)
    weights = (OBJECTIVE.weights / OBJECTIVE.counts(batch)).float()

    def run(pieces: list[Batch]) -> tuple[torch.Tensor, ...]:
        model.zero_grad()
        found = []
        for piece in pieces:
            output = model(piece)
            sums = OBJECTIVE.sums(output, piece)
            (weights * sums).sum().backward()
            found.append(torch.stack([sums.detach(), OBJECTIVE.counts(piece), OBJECTIVE.statistics(output, piece)]))
        return torch.stack(found).sum(0), *(p.grad.clone() for p in model.parameters() if p.grad is not None)

    for ours, theirs in zip(run(slices(batch, size)), run([batch]), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6  # float32 sums in another order


def test_shown_are_the_predictions_in_the_masked_places() -> None:
    batch = usual_batch()
    output = random_output(batch)
    tokens, scores = OBJECTIVE.tokens_and_probabilities(output, batch)
    assert scores is None
    flat = tokens.flatten()
    assert torch.equal(flat[batch.masked_M], output.predicted_M)
    flat[batch.masked_M] = batch.tokens_BT.flatten()[batch.masked_M]
    assert torch.equal(flat.view_as(batch.tokens_BT), batch.tokens_BT)
