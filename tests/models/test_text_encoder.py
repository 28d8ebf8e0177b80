"""An encoder taken out of the pre-training model computes what it computed there."""

import pytest
import torch

from tests.small import encoder_of, model
from xlme_ds.models.text_encoder import one_item_a_row

TOKENS = torch.tensor([[0, 11, 12, 13, 2], [0, 21, 2, 1, 1]])


@pytest.mark.parametrize("sharing", ["tied", "gdes"])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("which", ["discriminator", "generator"])
def test_states_are_those_of_the_whole_model(sharing: str, blocks: int, which: str) -> None:
    whole = model(embedding_sharing=sharing, vocabulary_blocks=blocks, generator_layers=1, discriminator_layers=2)
    places = one_item_a_row(TOKENS)
    if which == "discriminator":
        expected = whole.discriminator.hidden_states(whole.embed_for_discriminator(TOKENS), *places)
    else:
        embedded = torch.cat([getattr(whole, f"embedding_{n}") for n in range(blocks)])[TOKENS]
        expected = whole.generator.hidden_states(embedded, *places)
    encoder = encoder_of(whole, which)
    found = encoder.hidden_states(TOKENS, *places)
    assert len(found) == len(expected) == (3 if which == "discriminator" else 2)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder(TOKENS, *places), expected[-1], rtol=0, atol=1e-6)


def test_padding_has_no_position_and_no_item() -> None:
    positions, segments = one_item_a_row(TOKENS)
    assert positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert segments.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
