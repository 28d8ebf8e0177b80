"""BTMLM's two passes: attention masks by perturbation, the tokens that the first pass fills in, and the stages of a
pipeline against the complete model."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small import SMALL, lively, open_batch
from xlme_ds.data.batch import Batch
from xlme_ds.data.schema import EOS, PAD, UNK
from xlme_ds.models.pipeline import split_layers
from xlme_ds.models.text_encoder import LanguageModel
from xlme_ds.objectives.ernie_m import (
    BackTranslationModel,
    BackTranslationStage,
    OpenSideMasking,
    first_pass,
    second_pass,
)

MASK = SMALL.vocabulary - 1


def model(**changes: object) -> BackTranslationModel:
    cfg = replace(SMALL, discriminator_layers=3, **changes)  # type: ignore[arg-type]
    return lively(BackTranslationModel(cfg, OpenSideMasking(0.1, 0.1)))


def last_states(of: BackTranslationModel, batch: Batch) -> Tensor:
    """Last hidden states of the first row, [T, D], from one pass over the batch."""
    found: list[Tensor] = []
    handle = of.encoder.layers["2"].register_forward_hook(
        lambda _module, _read, hidden_BTD: found.append(hidden_BTD[0])
    )
    with torch.no_grad():
        LanguageModel.forward(of, batch)
    handle.remove()
    return found[0]


def roles(batch: Batch) -> list[str]:
    """Roles of the first row's columns: x, y (from the first open place on), or padding."""
    found: list[str] = []
    for token, segment in zip(batch.tokens_BT[0].tolist(), batch.segments_BT[0].tolist(), strict=True):
        begun = bool(found) and found[-1] == "y"
        found.append("padding" if segment == 0 else "y" if begun or token == PAD else "x")
    return found


@pytest.mark.parametrize("changes", [{}, dict(norm="pre"), dict(relative_bias="none")])
@pytest.mark.parametrize("filled", [False, True])
def test_attention_mask_by_perturbation(filled: bool, changes: dict[str, object]) -> None:
    """Each column's input is changed alone, and the outputs of three layers are compared bit for bit."""
    batch = open_batch([14], 24, (0.3,))
    of, names = model(**changes), roles(batch)
    assert [names.count(name) for name in ("x", "y", "padding")] == [16, 5, 3]
    first = first_pass(batch)
    batch = second_pass(batch, first, torch.arange(len(first.masked_M)) + 9) if filled else first
    before = last_states(of, batch)
    for column, name in enumerate(names):
        if name == "padding":
            continue
        with torch.no_grad():  # positions are unique in an item
            row = of.encoder.positions[column].clone()
            of.encoder.positions[column] += 0.5
        moved = (last_states(of, batch) != before).any(1).tolist()
        with torch.no_grad():
            of.encoder.positions[column] = row
        if filled:
            expected = [other != "padding" for other in names]
        else:
            expected = [other != "padding" if name == "x" else n == column for n, other in enumerate(names)]
        if column == 0:  # padding has position 0 as well
            expected = [True] * len(names)
        assert moved == expected, column


def test_first_pass_reads_the_sentence_and_masks_every_place() -> None:
    batch = open_batch([20, 37, 5], 40)
    first, masking = first_pass(batch), OpenSideMasking(0.1, 0.1)
    is_open = (batch.tokens_BT == PAD) & (batch.segments_BT > 0)
    assert first.masked_M.tolist() == is_open.flatten().nonzero().flatten().tolist()
    assert torch.equal(masking.apply(first, SMALL.vocabulary), batch.tokens_BT.masked_fill(is_open, MASK))
    assert torch.equal(OpenSideMasking(0.5, 0.5).apply(first, SMALL.vocabulary), masking.apply(first, SMALL.vocabulary))


def test_second_pass_reads_the_predictions_of_the_first() -> None:
    batch = open_batch([20, 37, 5], 40)
    first = first_pass(batch)
    predicted = torch.arange(len(first.masked_M)) + 10
    second = second_pass(batch, first, predicted)
    assert second.tokens_BT.flatten()[first.masked_M].tolist() == predicted.tolist()
    rest = torch.ones(batch.tokens_BT.numel(), dtype=torch.bool).index_fill(0, first.masked_M, False)
    assert torch.equal(second.tokens_BT.flatten()[rest], batch.tokens_BT.flatten()[rest])
    changed = {"tokens_BT", "added"}
    assert all(torch.equal(getattr(second, name), getattr(batch, name)) for name in set(Batch._fields) - changed)
    assert len(first_pass(second).masked_M) == 0


@pytest.mark.parametrize("vocabulary", [97, 129])  # `<mask>` with others in a group of 128 ids, and alone
def test_no_special_token_is_written(vocabulary: int) -> None:
    """However likely they are: the most likely ordinary one instead. The loss is over the whole vocabulary as ever."""
    of, batch, specials = model(vocabulary=vocabulary), open_batch([20, 37, 5], 40), [0, PAD, EOS, UNK, vocabulary - 1]
    with torch.no_grad():
        of.masked_head.bias[specials] += 50.0
    first, second = first_pass(batch), spy(of, batch)
    with torch.no_grad():
        hidden = of.encoder.run_layers(
            of.encoder.first_layer_input(of.embed(of.masking.apply(first, vocabulary)), batch.positions_BT),
            of.masking.groups(first), of.encoder.bias_by_distance(40), of.masking.attention_mask,
        ).flatten(0, 1)  # fmt: skip
        head = of.masked_head

        def logits(hidden_MD: Tensor) -> Tensor:
            return head.norm(F.gelu(head.dense(hidden_MD))) @ of.embedding_0.t() + head.bias

        of_places = logits(hidden[first.masked_M])
        assert set(of_places.argmax(1).tolist()) <= set(specials), "they would be written"
        of_places[:, specials] = float("-inf")
        written = second.tokens_BT.flatten()[first.masked_M]
        assert torch.equal(written, of_places.argmax(1))
        found, plain = of(batch), LanguageModel.forward(of, second)
    assert torch.equal(found.nll_M, plain.nll_M) and set(found.predicted_M.tolist()) <= set(specials)
    assert found.nll_M.min() > 20, "the loss counts their probability"


def spy(of: BackTranslationModel, batch: Batch) -> Batch:
    """Record the input of the second pass."""
    found: list[Batch] = []
    groups = of.masking.groups

    class Watched(OpenSideMasking):
        def groups(self, read: Batch) -> Tensor:
            found.append(read)
            return groups(read)

    masking, of.masking = of.masking, Watched(of.masking.random_fraction, of.masking.keep_fraction)
    with torch.no_grad():
        of(batch)
    of.masking = masking
    return found[-1]


def test_first_pass_has_no_gradient() -> None:
    """The gradients of both passes are those of the second alone, its pseudo tokens given."""
    batch, ours, theirs = open_batch([20, 37, 5], 40), model(), model()
    ours(batch).nll_M.sum().backward()
    filled = spy(theirs, batch)
    LanguageModel.forward(theirs, filled).nll_M.sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad), name


def test_it_writes_without_dropout_and_trains_with_it() -> None:
    batch, of = open_batch([20, 37, 5], 40), model(dropout=0.3, attention_dropout=0.3).train()
    quiet = model()
    filled = spy(of, batch)
    assert torch.equal(filled.tokens_BT, spy(quiet, batch).tokens_BT)
    found, expected = of(batch), LanguageModel.forward(of.train(), filled)
    assert of.training and torch.equal(found.nll_M, expected.nll_M)
    assert not torch.isclose(found.nll_M, quiet(batch).nll_M).any()


@pytest.mark.parametrize("changes", [{}, dict(relative_bias="none", norm="pre", vocabulary_blocks=3)])
@pytest.mark.parametrize("balance", [(1, 2), (0, 1, 2)])
def test_stages_are_the_model_in_both_passes(balance: tuple[int, ...], changes: dict[str, object]) -> None:
    whole, batch = model(**changes), open_batch([20, 37, 5], 40)
    stages = [BackTranslationStage(whole.cfg, whole.masking, part=part) for part in split_layers(balance)]
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    stages[-1].borrowed = stages[0].embedding_blocks

    def run(read: Batch) -> tuple[Tensor, Tensor]:
        flow = tuple(read)
        for stage in stages:
            flow = stage(flow)
        return stages[-1].output(flow, read)

    with torch.no_grad():
        whole.masked_head.bias[[UNK, MASK]] = stages[-1].masked_head.bias[[UNK, MASK]] = (
            20.0  # the likeliest, at some places
        )
    first = first_pass(batch)
    stages[-1].exclude_special = True
    predicted_P = run(first)[1]
    stages[-1].exclude_special = False
    assert predicted_P.min() > UNK and predicted_P.max() < MASK
    found, expected = run(second_pass(batch, first, predicted_P)), whole(batch)
    torch.testing.assert_close(found[0], expected.nll_M, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1], expected.predicted_M)
