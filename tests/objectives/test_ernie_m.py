"""The three terms of ERNIE-M's first stage against a loop."""

import numpy as np
import pytest
import torch

from tests.small import batch_of, item
from xlme_ds.config import ObjectiveConfig
from xlme_ds.models.text_encoder import LanguageModelOutput
from xlme_ds.objectives.ernie_m import ErnieM


def test_metrics_equal_a_loop() -> None:
    rng = np.random.default_rng(3)
    batch = batch_of([[item(rng, 30)]], [[item(rng, 6, 5), item(rng, 7, 8)] for _ in range(8)], 40)
    objective, width = ErnieM(ObjectiveConfig("ernie_m")), 40
    targets = batch.tokens_BT.flatten()[batch.masked_M]
    nll_M, right_M = (torch.from_numpy(rng.random(len(targets), dtype=np.float32)) for _ in range(2))
    output = LanguageModelOutput(nll_M * 9, torch.where(right_M < 0.5, targets, 4))
    crossed = objective.masking.crossed(batch)
    sums, right, counts = [0.0] * 3, [0] * 3, [0] * 3
    for n, flat in enumerate(batch.masked_M.tolist()):
        row, column = divmod(flat, width)
        term = 0 if row == 0 else 2 if crossed[row, column] else 1
        sums[term] += float(output.nll_M[n])
        right[term] += int(output.predicted_M[n] == targets[n])
        counts[term] += 1
    assert min(counts) > 3
    assert objective.counts(batch).tolist() == counts
    found = objective.summarise(
        objective.sums(output, batch), objective.counts(batch), objective.statistics(output, batch)
    )
    means = [s / c for s, c in zip(sums, counts, strict=True)]
    assert found.pop("loss") == pytest.approx(sum(means), rel=1e-6)
    assert [found[term] for term in objective.terms] == pytest.approx(means, rel=1e-6)
    assert [found[name] for name in objective.accuracies] == [r / c for r, c in zip(right, counts, strict=True)]
