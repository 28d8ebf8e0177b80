"""ERNIE-M's masking: nothing of its own side reaches a masked token, in any layer, by a single bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.small import SMALL, batch_of, item, lively
from xlme_ds.data.batch import Batch
from xlme_ds.data.schema import EOS, UNK
from xlme_ds.models.pipeline import LanguageModelStage, PipelinePart
from xlme_ds.models.text_encoder import LanguageModel, Masking
from xlme_ds.objectives.ernie_m import CrossMasking

MASK = SMALL.vocabulary - 1
CROSSED, PLAIN = 1, 0  # the lowest bit of a pair's first uniform


def pairs(*bits: int) -> Batch:
    """One row of text and one of pairs, each of them crossed or not as its bit says; two masked tokens a side."""
    rng = np.random.default_rng(0)
    batch = batch_of([[item(rng, 14)]], [[item(rng, 7, 6) for _ in bits]], 16 * len(bits))
    tokens, places, uniforms = batch.tokens_BT, [3, 9], [0.55, 0.05]
    for n, bit in enumerate(bits):
        start = tokens.shape[1] + n * 16
        places += [start + 2, start + 6, start + 10, start + 12]
        uniforms += [(2**20 + bit) / 2**24, 0.01, 0.15, 0.7]  # the first three would be kept, kept and random
    return batch._replace(masked_M=torch.tensor(places), uniforms_M=torch.tensor(uniforms))


def allowed_by_hand(batch: Batch, bits: tuple[int, ...]) -> Tensor:
    """[B, T, T], one query and key after the other."""
    rows, width = batch.tokens_BT.shape
    masked = set(batch.masked_M.tolist())
    seen = torch.zeros(rows, width, width, dtype=torch.bool)
    for row in range(rows):
        segments, sides = batch.segments_BT[row].tolist(), []
        for column, token in enumerate(batch.tokens_BT[row].tolist()):
            first = column == 0 or segments[column] != segments[column - 1]
            sides.append("e" if first else "f" if sides[-1] == "f" or batch.tokens_BT[row, column - 1] == EOS else "e")
            assert token >= 0
        for i in range(width):
            for j in range(width):
                if segments[i] != segments[j]:
                    continue
                if row == 0 or segments[i] == 0 or bits[segments[i] - 1] == PLAIN:
                    seen[row, i, j] = True
                    continue
                query, key = (sides[n] + ("m" if row * width + n in masked else "u") for n in (i, j))
                seen[row, i, j] = key in {"eu": ["eu"], "fu": ["fu"], "em": ["fu", "em"], "fm": ["eu", "fm"]}[query]
    return seen


@pytest.mark.parametrize("bits", [(CROSSED,), (CROSSED, PLAIN, CROSSED), (PLAIN, CROSSED)])
def test_who_sees_whom(bits: tuple[int, ...]) -> None:
    batch, masking = pairs(*bits), CrossMasking(0.1, 0.1)
    crossed = masking.crossed(batch)
    assert not crossed[0].any()
    for n, bit in enumerate(bits):
        assert (crossed[1][batch.segments_BT[1] == n + 1] == bool(bit)).all()
    found = masking.attention_mask(masking.groups(batch))[:, 0]
    assert torch.equal(found, allowed_by_hand(batch, bits))
    assert found.any(2).all(), "every query sees something"
    read, usual = masking.apply(batch, SMALL.vocabulary), Masking(0.1, 0.1).apply(batch, SMALL.vocabulary)
    assert torch.equal(read[~crossed], usual[~crossed])
    inside = crossed.flatten()[batch.masked_M]
    assert (read.flatten()[batch.masked_M[inside]] == MASK).all()
    assert (usual.flatten()[batch.masked_M[inside]] != MASK).any(), "the usual masking would have shown some"


def model(**changes: object) -> LanguageModel:
    from dataclasses import replace

    cfg = replace(SMALL, discriminator_layers=3, max_positions=48, **changes)  # type: ignore[arg-type]
    return lively(LanguageModel(cfg, CrossMasking(0.1, 0.1)))


def losses(of: LanguageModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return of(batch).nll_M


@pytest.mark.parametrize("changes", [{}, dict(norm="pre"), dict(relative_bias="none")])
def test_nothing_leaks(changes: dict[str, object]) -> None:
    """Every token of a crossed pair is changed by itself, and every prediction asked whether it noticed."""
    batch, whole = pairs(CROSSED, PLAIN), model(**changes)
    width, before = batch.tokens_BT.shape[1], losses(model(**changes), batch)
    targets = {place - width: n for n, place in enumerate(batch.masked_M.tolist()) if width <= place < width + 16}
    e, f = {2, 6}, {10, 12}
    assert targets.keys() == e | f
    for column in range(16):
        token = int(batch.tokens_BT[1, column])
        if token <= UNK:
            continue
        tokens = batch.tokens_BT.clone()
        tokens[1, column] = 5 if token != 5 else 6
        moved = losses(whole, batch._replace(tokens_BT=tokens)) != before
        noticed = {place for place, n in targets.items() if moved[n]}
        if column in e | f:  # a target: its own loss is of another token, no one else can tell
            assert noticed == {column}
        else:
            assert noticed == (f if column < 8 else e), column
        assert not moved[[n for n in range(len(moved)) if n not in targets.values()]].any()


def test_a_plain_pair_notices_everything() -> None:
    batch, whole = pairs(CROSSED, PLAIN), model()
    width = batch.tokens_BT.shape[1]
    tokens = batch.tokens_BT.clone()
    tokens[1, 16 + 1] = 5 if tokens[1, 17] != 5 else 6
    moved = losses(whole, batch._replace(tokens_BT=tokens)) != losses(whole, batch)
    places = batch.masked_M - width
    assert moved[(places >= 16)].all() and not moved[(places < 16)].any()


def test_stages_mask_alike() -> None:
    batch, whole = pairs(CROSSED, PLAIN, CROSSED), model()
    stages = [
        LanguageModelStage(whole.cfg, whole.masking, part=part)
        for part in (PipelinePart(range(1), last=False), PipelinePart(range(1, 3), first=False))
    ]
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    stages[1].borrowed = stages[0].embedding_blocks
    found = stages[1].output(stages[1](stages[0](batch.tensors())), batch)
    torch.testing.assert_close(found.nll_M, whole(batch).nll_M, rtol=1e-5, atol=1e-6)


def test_about_half_of_the_pairs_are_crossed() -> None:
    rng = np.random.default_rng(1)
    batch = batch_of([], [[item(rng, 6, 5), item(rng, 7, 8)] for _ in range(200)], 40)
    first = CrossMasking(0.1, 0.1).crossed(batch)[batch.positions_BT == 1]
    assert len(first) == 400 and first.sum() == pytest.approx(200, abs=35)  # 3.5 standard deviations
