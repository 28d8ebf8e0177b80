"""An encoder taken out of the pre-training model computes what it computed there."""

from dataclasses import replace

import pytest
import torch

from tests.small import SMALL, encoder_of, model
from xlme_ds.models.text_encoder import languages_of, positions_and_segments

TOKENS = torch.tensor([[0, 11, 12, 13, 2], [0, 21, 2, 1, 1]])


@pytest.mark.parametrize("sharing", ["tied", "gdes"])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("which", ["discriminator", "generator"])
def test_states_equal_the_pre_training_models(sharing: str, blocks: int, norm: str, which: str) -> None:
    layers = {"generator_layers": 1, "discriminator_layers": 2}
    whole = model(embedding_sharing=sharing, vocabulary_blocks=blocks, norm=norm, **layers)
    places = positions_and_segments(TOKENS)
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


def test_sides_languages_and_positions_of_a_pair() -> None:
    cfg = replace(SMALL, language_embeddings=("de", "en", "zh-Hans"))
    xlme = torch.tensor([[0, 11, 12, 2, 21, 2, 1], [0, 11, 2, 1, 1, 1, 1]])
    xlm = torch.tensor([[2, 11, 2, 2, 21, 22, 2], [2, 11, 2, 1, 1, 1, 1]])
    codes = [("zh", "de"), ("en",)]
    assert languages_of(cfg, codes, xlme).tolist() == [[2, 2, 2, 2, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert positions_and_segments(xlme)[0][0].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert languages_of(cfg, codes, xlm).tolist() == [[2, 2, 2, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert positions_and_segments(xlm)[0].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0, 0]]
    for code in ("fr", "z", "zh-Han", "zh-Hans-CN", "d"):  # a part of a code is another language
        with pytest.raises(
            ValueError, match=rf"model\.language_embeddings has no {code}, only de en zh-Hans: leave out the data in"
        ):
            languages_of(cfg, [(code,), ("en",)], xlm)
    encoder = encoder_of(model(language_embeddings=cfg.language_embeddings))
    with pytest.raises(ValueError, match=r"has model\.language_embeddings: it needs the language of its input"):
        encoder(xlm, *positions_and_segments(xlm))
    assert encoder(xlm, *positions_and_segments(xlm), languages_of(cfg, codes, xlm)).shape == (2, 7, SMALL.width)


def test_padding_has_no_position_and_no_item() -> None:
    positions, segments = positions_and_segments(TOKENS)
    assert positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert segments.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
