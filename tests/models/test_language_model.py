"""The masked language model against a written-out one: what it reads, its losses, predictions and gradients."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small import SMALL, batch_of, encoder_of, item, language_model, usual_batch
from xlme_ds.data.batch import Batch
from xlme_ds.data.schema import UNK
from xlme_ds.models.text_encoder import LanguageModel, Masking

MASK = SMALL.vocabulary - 1


def read_by_hand(batch: Batch, random: float, keep: float) -> Tensor:
    """One masked position after the other, by its uniform."""
    tokens, ordinary = batch.tokens_BT.clone(), list(range(UNK + 1, MASK))
    flat = tokens.view(-1)
    for place, uniform in zip(batch.masked_M.tolist(), batch.uniforms_M.tolist(), strict=True):
        if uniform < keep:
            continue
        share = (uniform - keep) / random if random else 1.0
        flat[place] = ordinary[int(share * len(ordinary))] if share < 1 else MASK
    return tokens


@pytest.mark.parametrize(("random", "keep"), [(0.1, 0.1), (0.0, 0.0), (0.5, 0.0), (0.0, 0.4), (0.6, 0.4)])
def test_tokens_at_masked_positions(random: float, keep: float) -> None:
    batch = usual_batch()
    read = Masking(random, keep).apply(batch, SMALL.vocabulary)
    assert torch.equal(read, read_by_hand(batch, random, keep))
    changed = (read != batch.tokens_BT).flatten().nonzero().flatten()
    assert set(changed.tolist()) <= set(batch.masked_M.tolist())


def test_shares_and_random_tokens_over_many_positions() -> None:
    """5,400 positions: a share of a tenth is met within 3.5 standard deviations; every ordinary token occurs, no
    other."""
    rng = np.random.default_rng(0)
    batch = batch_of([[item(rng, 900)] for _ in range(40)], [], 902)
    count, read = len(batch.masked_M), Masking(0.1, 0.1).apply(batch, SMALL.vocabulary).flatten()[batch.masked_M]
    kinds = Counter(
        "keep" if uniform < 0.1 else "random" if uniform < 0.2 else "mask" for uniform in batch.uniforms_M.tolist()
    )
    assert kinds["keep"] == pytest.approx(0.1 * count, abs=3.5 * (0.09 * count) ** 0.5)
    assert (read == MASK).sum() == kinds["mask"] == pytest.approx(0.8 * count, abs=3.5 * (0.16 * count) ** 0.5)
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(5)) * 0.1
    many = batch._replace(tokens_BT=torch.full((1, 4000), 9), masked_M=torch.arange(4000), uniforms_M=uniforms)
    assert set(Masking(0.1, 0.0).apply(many, SMALL.vocabulary).flatten().tolist()) == set(range(UNK + 1, MASK))


def reference(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """−log p and the most likely token, from whole logits in the model's precision."""
    table = torch.cat([getattr(model, f"embedding_{n}") for n in range(model.cfg.vocabulary_blocks)])
    read = read_by_hand(batch, 0.1, 0.1)
    hidden = model.encoder(F.embedding(read, table), batch.positions_BT, batch.segments_BT).flatten(0, 1)
    head = model.masked_head
    features = head.norm(F.gelu(head.dense(hidden[batch.masked_M])))
    logits = features @ table.t() + head.bias
    targets = batch.tokens_BT.flatten()[batch.masked_M]
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(1)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(norm="pre", vocabulary_blocks=3, activation_checkpointing=True), dict(relative_bias="none")],
)
def test_losses_predictions_and_gradients(changes: dict[str, object]) -> None:
    ours, theirs = language_model(**changes), language_model(**changes)
    batch = usual_batch()
    output, (nll, predicted) = ours(batch), reference(theirs, batch)
    torch.testing.assert_close(output.nll_M, nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.predicted_M, predicted)
    (output.nll_M**2).sum().backward()
    (nll**2).sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        scale = float(other.grad.abs().max())
        # Sums over tens of positions in another order.
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=2e-5 * scale, msg=name)


def test_its_encoder_is_taken_out_as_the_others_are() -> None:
    whole, batch = language_model(vocabulary_blocks=3), usual_batch()
    alone = encoder_of(whole, "encoder")
    assert {f"masked_head.{name}" for name in whole.masked_head.state_dict()} | alone.state_dict().keys() == (
        whole.state_dict().keys()
    )
    hidden = alone(read_by_hand(batch, 0.1, 0.1), batch.positions_BT, batch.segments_BT)
    found = whole.predict(hidden, batch.masked_M, batch.tokens_BT.flatten()[batch.masked_M], whole.embedding_blocks)
    assert torch.equal(found.nll_M, whole(batch).nll_M)
