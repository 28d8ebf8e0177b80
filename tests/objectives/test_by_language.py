"""Losses by language of the token, added up one token after the other."""

from math import exp, log

import numpy as np
import pytest
import torch

from tests.small import LANGUAGES, batch_of, item, language_model, model
from xlme_ds.config import ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.objectives import objective_of


def rows() -> Batch:
    """Every language has monolingual tokens, the second and third in several rows, and sides of pairs."""
    rng = np.random.default_rng(7)
    mono = [[item(rng, size)] for size in (30, 9, 20, 17, 25)]
    para = [[item(rng, 5, 6), item(rng, 8, 3)], [item(rng, 15, 9)]]
    return batch_of(mono, para, 40, mask_fraction=0.4)


def test_electra() -> None:
    batch, objective = rows(), objective_of(ObjectiveConfig())
    with torch.no_grad():
        output = model()(batch)
    sums, counts = np.zeros((4, LANGUAGES)), np.zeros((4, LANGUAGES))
    masked = batch.masked_M.tolist()
    for row, task in enumerate(batch.task_B.tolist()):
        for column in range(batch.tokens_BT.shape[1]):
            if not batch.segments_BT[row, column]:
                continue
            language, place = int(batch.languages_BT[row, column]), row * batch.tokens_BT.shape[1] + column
            logit = float(output.replaced_logits_BT[row, column])
            replaced = bool(output.corrupted_BT[row, column] != batch.tokens_BT[row, column])
            sums[2 + task, language] += log(1 + exp(-logit if replaced else logit))
            counts[2 + task, language] += 1
            if place in masked:
                sums[task, language] += float(output.nll_M[masked.index(place)])
                counts[task, language] += 1
    assert counts.all()
    found = objective.by_language(output, batch, LANGUAGES).numpy()
    assert found == pytest.approx(np.stack([sums, counts]), rel=1e-5)
    assert found[0].sum(1) == pytest.approx(objective.sums(output, batch).numpy(), rel=1e-5)


@pytest.mark.parametrize("name", ["mlm", "ernie_m", "clm"])
def test_one_encoder(name: str) -> None:
    objective = objective_of(ObjectiveConfig(name, mask_fraction=1.0 if name == "clm" else 0.15))
    batch, whole = rows(), language_model()
    with torch.no_grad():
        output = whole(batch)
    terms = objective.term_of_masked(batch).tolist() if name == "ernie_m" else batch.task_of_masked().tolist()  # type: ignore[attr-defined]
    by_hand = np.zeros((2, len(objective.terms), LANGUAGES))
    for place, cost, term in zip(batch.masked_M.tolist(), output.nll_M.tolist(), terms, strict=True):
        language = int(batch.languages_BT.flatten()[place])
        by_hand[:, term, language] += cost, 1
    assert by_hand[1, 0].all()
    found = objective.by_language(output, batch, LANGUAGES).numpy()
    assert found == pytest.approx(by_hand, rel=1e-5)
    assert found[1].sum(1) == pytest.approx(objective.counts(batch).numpy())
