"""Search with caches against the whole decoder read anew for every token, by hand, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.translate.test_model import translator
from xlme_ds.data.schema import BOS, EOS, LAYOUTS, PAD, UNK
from xlme_ds.translate import decoding
from xlme_ds.translate.decoding import source_side, translate
from xlme_ds.translate.model import CachedDecoder, Side, TranslationModel

LANGUAGES = (2, 1)
FORMS = [{}, dict(norm="pre", decoder="interleaved", layout="xlm", masked_head="linear", vocabulary_blocks=2)]
FORMS += [dict(relative_bias="none", decoder_layers=1)]
SOURCES = [np.random.default_rng(n).integers(4, 96, n) for n in (6, 3, 9, 1)]


def ending(**changes: object) -> TranslationModel:
    """A model whose translations end now and then."""
    model = translator(3, **changes).eval()
    with torch.no_grad():
        model.masked_head.bias[EOS] += 3.5
    return model


def read_whole(model: TranslationModel, source: np.ndarray, written: list[int]) -> Tensor:
    """Log-probabilities of the token after each of `</s>` and `written`, [written + 1, V], nothing kept."""
    item = torch.from_numpy(LAYOUTS[model.cfg.layout].item(source)).long()[None]
    before, one = torch.tensor([[EOS, *written]]), torch.ones_like
    places = [torch.arange(tokens.shape[1])[None] for tokens in (item, before)]
    sides = [
        Side(tokens, place, language * one(tokens), one(tokens))
        for tokens, place, language in zip((item, before), places, LANGUAGES, strict=True)
    ]
    with torch.no_grad():
        hidden = model.decode(sides[1], model.encode(sides[0]), sides[0].segments)[0]
        scores = model.masked_head.logits(hidden, model.embedding_blocks)
    scores[:, [BOS, PAD, UNK, model.cfg.vocabulary - 1]] = float("-inf")
    return scores.log_softmax(-1)


@pytest.mark.parametrize("changes", FORMS)
def test_caches_change_nothing(changes: dict[str, object]) -> None:
    """Several sentences at once, padded, whose hypotheses change places on the way."""
    model = ending(**changes)
    written = np.random.default_rng(1).integers(4, 96, (len(SOURCES), 7)).tolist()
    order = list(range(len(SOURCES)))
    with torch.no_grad():
        decoder = CachedDecoder(
            model, source_side(model, SOURCES, LANGUAGES[0]), torch.full((len(SOURCES),), LANGUAGES[1])
        )
        for place in range(8):
            tokens = [EOS if place == 0 else written[n][place - 1] for n in order]
            found = decoder.log_probabilities(torch.tensor(tokens))
            for row, n in zip(found, order, strict=True):
                expected = read_whole(model, SOURCES[n], written[n][:place])[-1]
                torch.testing.assert_close(row, expected, rtol=1e-11, atol=1e-11)
            moved = [1, 0, 2, 3, 3] if place == 2 else list(range(len(order)))[::-1]
            decoder.reorder(moved)
            order = [order[n] for n in moved]


def greedy(model: TranslationModel, source: np.ndarray) -> list[int]:
    written: list[int] = []
    for _ in range(int(1.3 * len(source) + 5)):
        token = int(read_whole(model, source, written)[-1].argmax())
        if token == EOS:
            break
        written.append(token)
    return written


def best_of(model: TranslationModel, source: np.ndarray, beam: int, penalty: float) -> list[int]:
    """Beam search as a sorted list of everything."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for place in range(limit := int(1.3 * len(source) + 5)):
        grown = [
            (total + value, [*tokens, token])
            for total, tokens in live
            for token, value in enumerate(read_whole(model, source, tokens)[-1].tolist())
        ]
        grown.sort(key=lambda one: -one[0])
        ended = [one for one in grown[:beam] if one[1][-1] == EOS]
        done += [(total / len(tokens) ** penalty, tokens[:-1]) for total, tokens in ended]
        live = [one for one in grown if one[1][-1] != EOS][:beam]
        if len(done) >= beam:
            break
        if place == limit - 1:
            done += [(total / len(tokens) ** penalty, tokens) for total, tokens in live]
    return max(done)[1]


@pytest.mark.parametrize("changes", FORMS)
def test_beam_one_is_greedy(changes: dict[str, object]) -> None:
    model = ending(**changes)
    expected = [greedy(model, source) for source in SOURCES]
    assert translate(model, SOURCES, LANGUAGES) == expected
    limits = [int(1.3 * len(source) + 5) for source in SOURCES]
    assert any(len(one) < limit for one, limit in zip(expected, limits, strict=True))


@pytest.mark.parametrize(("beam", "penalty"), [(3, 0.3), (4, 1.0)])
def test_beams_are_those_of_a_sorted_list(beam: int, penalty: float) -> None:
    model = ending()
    expected = [best_of(model, source, beam, penalty) for source in SOURCES]
    assert translate(model, SOURCES, LANGUAGES, beam, penalty) == expected
    assert expected != [greedy(model, source) for source in SOURCES]


def test_a_long_one_ends_where_there_are_no_more_positions() -> None:
    model = translator(3).eval()
    with torch.no_grad():
        model.masked_head.bias[EOS] = -1e9
    (found,) = translate(model, [np.arange(10, 48)], LANGUAGES, beam=2)
    assert len(found) == model.cfg.max_positions == 40
    assert translate(model, [], LANGUAGES) == []


def test_few_sentences_at_a_time_are_translated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for logits of a whole vocabulary."""
    model = ending()
    expected, seen = translate(model, SOURCES, LANGUAGES, 3), list[int]()
    search = decoding._search

    def watched(*given: Any) -> None:
        seen.append(len(given[1]))
        search(*given)

    monkeypatch.setattr(decoding, "_search", watched)
    for hypotheses, sizes in ((6, [2, 2]), (1, [1, 1, 1, 1]), (12, [4])):
        monkeypatch.setattr(decoding, "_MAX_LOGITS", hypotheses * model.cfg.vocabulary)
        assert translate(model, SOURCES, LANGUAGES, 3) == expected
        assert seen == sizes
        seen.clear()
    for length, beam, most, wanted in ((510, 2, 9, [4, 4, 1]), (511, 2, 9, [3, 3, 3]), (510, 1, 5, [5, 4])):
        batches = decoding._batches(range(9), [np.zeros(length)] * 9, beam, most)
        assert [len(batch) for batch in batches] == wanted, "4,096 source tokens times hypotheses, with special tokens"
