"""Machine translation's packed step against one pair at a time by the formulas, in float64; and who sees whom."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small import LANGUAGES, SMALL, batch_of, lively, rows_of
from xlme_ds.config import ModelConfig, ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.masking import TaskRows
from xlme_ds.data.schema import EOS, LAYOUTS, PAD
from xlme_ds.models import attention, encoder, layers
from xlme_ds.models.attention import relative_position_bucket
from xlme_ds.models.execution import wrap_layers
from xlme_ds.objectives import objective_of
from xlme_ds.translate.decoding import translate
from xlme_ds.translate.model import TranslationModel
from xlme_ds.translate.sentences import SentenceInputs

MT = objective_of(ObjectiveConfig("mt", mask_fraction=1.0))
PAIRS = [[(5, 6), (1, 2), (7, 3)], [(15, 16)]]  # ordinary tokens of source and target, by row
XLM = dict(layout="xlm", relative_bias="none", masked_head="linear", norm_epsilon=1e-12)
FORMS = [
    {},
    XLM,
    dict(norm="pre", decoder="interleaved", relative_bias="plain"),
    dict(norm="pre", embedding_norm=True, decoder_layers=1, vocabulary_blocks=3, activation_checkpointing=True),
    dict(decoder="interleaved", layout="xlm", activation_checkpointing=True),
]


def config(**changes: object) -> ModelConfig:
    return replace(SMALL, language_embeddings=("de", "en", "fr"), **changes)  # type: ignore[arg-type]


def translator(seed: int = 0, **changes: object) -> TranslationModel:
    cfg = config(**changes)
    return lively(wrap_layers(MT.build(cfg), cfg), seed).double()


def texts(seed: int = 5) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    rng = np.random.default_rng(seed)
    return [[tuple(rng.integers(4, SMALL.vocabulary - 1, size) for size in pair) for pair in row] for row in PAIRS]


def packed(pairs: list[list[tuple[np.ndarray, np.ndarray]]], layout: str = "xlme", width: int = 44) -> Batch:
    return batch_of(
        [], [[LAYOUTS[layout].item(*pair).tolist() for pair in row] for row in pairs], width, mask_fraction=1
    )


class Formulas:
    """XLM's encoder and decoder, and DeltaLM's, of one pair; nothing is batched, packed or padded."""

    def __init__(self, model: TranslationModel):
        self.cfg = model.cfg
        self.p = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        self.table = torch.cat([self.p[f"embedding_{n}"] for n in range(model.cfg.vocabulary_blocks)])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.p[f"{name}.weight"], self.p[f"{name}.bias"], self.cfg.norm_epsilon)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{name}.weight"].t() + self.p[f"{name}.bias"]

    def added(self, norm: str, x: Tensor, branch) -> Tensor:  # type: ignore[no-untyped-def]
        return x + branch(self.norm(norm, x)) if self.cfg.norm == "pre" else self.norm(norm, x + branch(x))

    def fed(self, layer: str, x: Tensor) -> Tensor:
        return self.added(
            f"{layer}.feed_forward_norm",
            x,
            lambda y: self.linear(f"{layer}.down", F.gelu(self.linear(f"{layer}.up", y))),
        )

    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.cfg.heads, -1).transpose(0, 1)

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
        scores = self.heads(q) @ self.heads(k).mT / math.sqrt(self.cfg.width // self.cfg.heads) + bias
        return (scores.softmax(-1) @ self.heads(v)).transpose(0, 1).flatten(1)

    def own(self, network: str, layer: str, x: Tensor, causal: bool) -> Tensor:
        """Self-attention with the relative bias (XLM-E, section 3.3)."""
        q, k, v = self.linear(f"{layer}.qkv", x).chunk(3, -1)
        places = torch.arange(len(x))
        bias = torch.zeros(self.cfg.heads, len(x), len(x), dtype=x.dtype)
        if self.cfg.relative_bias != "none":
            which = relative_position_bucket(
                places - places[:, None], self.cfg.relative_buckets, self.cfg.relative_max_distance
            )
            bias = self.p[f"{network}.relative.weight"][which].permute(2, 0, 1)
        if self.cfg.relative_bias == "gated":
            update, reset = (torch.sigmoid(self.heads(q) @ self.p[f"{layer}.gate.{n}"]) for n in ("update", "reset"))
            gate = 1 + update + (1 - update) * self.p[f"{layer}.gate.scale"][:, None] * reset
            bias = bias * gate[..., None]
        if causal:
            bias = bias.masked_fill(places > places[:, None], float("-inf"))
        return self.linear(f"{layer}.output", self.weighted(q, k, v, bias))

    def cross(self, layer: str, x: Tensor, source: Tensor) -> Tensor:
        k, v = self.linear(f"{layer}.key_value", source).chunk(2, -1)
        return self.linear(f"{layer}.output", self.weighted(self.linear(f"{layer}.query", x), k, v, 0.0))

    def read(self, network: str, tokens: list[int], language: int) -> Tensor:
        x = (
            self.table[tokens]
            + self.p[f"{network}.languages"][language]
            + self.p[f"{network}.positions"][: len(tokens)]
        )
        normed = self.cfg.norm == "post" or self.cfg.embedding_norm
        return self.norm(f"{network}.input_norm", x) if normed else x

    def hidden(self, source: list[int], before: list[int], languages: tuple[int, int]) -> Tensor:
        """The decoder's last states after each of the tokens `before` the targets."""
        x = self.read("encoder", source, languages[0])
        for n in range(self.cfg.discriminator_layers):
            layer = f"encoder.layers.{n}"
            x = self.added(
                f"{layer}.attention_norm", x, lambda y, at=f"{layer}.attention": self.own("encoder", at, y, False)
            )
            x = self.fed(layer, x)
        source_states = self.norm("encoder.output_norm", x) if self.cfg.norm == "pre" else x
        x = self.read("decoder", before, languages[1])
        for n in range(sum(f"decoder.layers.{n}.up.weight" in self.p for n in range(9))):
            layer = f"decoder.layers.{n}"
            if self.cfg.decoder == "xlm":
                x = self.added(
                    f"{layer}.attention_norm", x, lambda y, at=f"{layer}.attention": self.own("decoder", at, y, True)
                )
                x = self.added(
                    f"{layer}.cross_norm", x, lambda y, at=f"{layer}.cross_attention": self.cross(at, y, source_states)
                )
            elif n % 2 == 0:
                x = self.added(
                    f"{layer}.attention_norm", x, lambda y, at=f"{layer}.attention": self.own("decoder", at, y, True)
                )
            else:
                x = self.added(
                    f"{layer}.attention_norm", x, lambda y, at=f"{layer}.attention": self.cross(at, y, source_states)
                )
            x = self.fed(layer, x)
        return self.norm("decoder.output_norm", x) if self.cfg.norm == "pre" else x

    def losses(self, source: np.ndarray, target: np.ndarray, languages: tuple[int, int]) -> Tensor:
        """−log p of every target token and of `</s>`."""
        opening = LAYOUTS[self.cfg.layout].opening
        x = self.hidden([opening, *source.tolist(), EOS], [EOS, *target.tolist()], languages)
        if self.cfg.masked_head == "dense":
            x = self.norm("masked_head.norm", F.gelu(self.linear("masked_head.dense", x)))
        logits = x @ self.table.t() + self.p["masked_head.bias"]
        return F.cross_entropy(logits, torch.tensor([*target.tolist(), EOS]), reduction="none")


@pytest.mark.parametrize("changes", FORMS)
def test_losses_and_gradients_are_those_of_one_pair_at_a_time(changes: dict[str, object]) -> None:
    model, layout = translator(**changes), str(changes.get("layout", "xlme"))
    pairs, formulas = texts(), Formulas(model)
    flat = [pair for row in pairs for pair in row]
    languages = [(2 * n % LANGUAGES, (2 * n + 1) % LANGUAGES) for n in range(len(flat))]  # as `rows_of` has them
    each = [formulas.losses(*pair, of) for pair, of in zip(flat, languages, strict=True)]
    batch, expected = packed(pairs, layout), torch.cat(each)
    output = model(batch)
    torch.testing.assert_close(output.nll_M.double(), expected, rtol=1e-5, atol=1e-5)  # the softmax is in float32
    assert [MT.counts(batch).item()] == [len(expected)] == [sum(len(target) + 1 for _, target in flat)]
    found = MT.summarise(MT.sums(output, batch).detach(), MT.counts(batch), MT.statistics(output, batch))
    assert found["loss"] == found["mt"] == pytest.approx(expected.mean().item(), rel=1e-6)
    sums, counts = MT.by_language(output, batch, LANGUAGES)
    for code in range(LANGUAGES):
        into = [losses for losses, (_, to) in zip(each, languages, strict=True) if to == code]
        assert sums[0, code].item() == pytest.approx(sum(one.sum().item() for one in into), rel=1e-5)
        assert counts[0, code] == sum(map(len, into))
    (output.nll_M**2).sum().backward()
    (expected**2).sum().backward()
    for name, parameter in model.named_parameters():
        theirs = formulas.p[name].grad
        assert parameter.grad is not None and theirs is not None, name
        bound = 2e-5 * float(theirs.abs().max())
        torch.testing.assert_close(parameter.grad.to_dense(), theirs, rtol=1e-4, atol=bound, msg=name)


@pytest.mark.parametrize("changes", FORMS[:3])
def test_who_sees_whom(changes: dict[str, object]) -> None:
    """Each token is changed by itself: a source moves all losses of its own pair, a target its own loss and later ones,
    and nothing else moves by a bit."""
    layout = str(changes.get("layout", "xlme"))
    model, batch = translator(**changes), packed(texts(), layout)

    @torch.no_grad()
    def losses(of: Batch) -> Tensor:
        return model(of).nll_M

    before, places = losses(batch), MT.predicted_positions(batch)
    items = (torch.arange(2)[:, None] * 9 + batch.segments_BT).flatten()
    for place in (batch.tokens_BT.flatten() > EOS).logical_and(batch.segments_BT.flatten() > 0).nonzero().flatten():
        tokens = batch.tokens_BT.clone().flatten()
        tokens[place] = 5 if tokens[place] != 5 else 6
        moved = losses(batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT))) != before
        own = items[places] == items[place]
        expected = own & (places >= place) if batch.sides_BT.flatten()[place] else own
        assert torch.equal(moved, expected)


def test_padding_changes_nothing() -> None:
    model, pairs = translator(), texts()
    assert torch.equal(model(packed(pairs)).nll_M, model(packed(pairs, width=60)).nll_M)
    alone = model(packed(pairs[:1], width=48)).nll_M
    torch.testing.assert_close(alone, model(packed(pairs)).nll_M[: len(alone)], rtol=1e-6, atol=1e-6)


def test_the_language_to_translate_into_is_known() -> None:
    model, batch = translator(), packed(texts())
    second = (batch.sides_BT == 1).long()
    other = batch._replace(languages_BT=(batch.languages_BT + second) % LANGUAGES)
    assert (model(other).nll_M != model(batch).nll_M).all()


@pytest.mark.parametrize("decoder", ["xlm", "interleaved"])
def test_what_is_dropped_does_not_depend_on_the_other_rows(decoder: str) -> None:
    model = translator(decoder=decoder, dropout=0.2, attention_dropout=0.2).train()
    sizes, rng = [[(20, 3)], [(3, 16)]], np.random.default_rng(4)  # each has another width by itself, on both sides
    pairs = [[tuple(rng.integers(4, SMALL.vocabulary - 1, size) for size in pair) for pair in row] for row in sizes]
    batch, quiet = packed(pairs), translator(decoder=decoder)
    for row in range(2):
        of = [each[row : row + 1] for each in batch[:7]]
        alone = model(Batch(*of, batch.masked_M[:0], batch.uniforms_M[:0])).nll_M
        together = model(batch)
        mine = together.nll_M[together.places_M // 44 == row]
        torch.testing.assert_close(alone, mine, rtol=1e-6, atol=1e-6)
        assert not torch.isclose(mine, quiet(batch).nll_M[together.places_M // 44 == row]).any()


@pytest.mark.parametrize("changes", FORMS)
def test_sentences_by_the_formulas(changes: dict[str, object]) -> None:
    """Denoising and back-translation of packed sentences, next to pairs: what is written is the search's translation,
    and the losses are those of one sentence at a time."""
    layout, model = str(changes.get("layout", "xlme")), translator(**changes)
    with torch.no_grad():
        model.masked_head.bias[EOS] += 3.0  # so that translations end
    rng = np.random.default_rng(2)
    lengths, opening = ((3, 7), (12,)), LAYOUTS[layout].opening
    mono = [[[opening, *rng.integers(4, 96, size).tolist(), EOS] for size in row] for row in lengths]
    parts: TaskRows = [(0, rows_of(mono, 44), np.arange(2) + 10)]
    parts += [(1, rows_of([[LAYOUTS[layout].item(*pair).tolist() for pair in row] for row in texts()], 44, 1),
               np.arange(2))]  # fmt: skip
    made = SentenceInputs(("0:0.5", "10:0"), ("0:2",), (0, 1, 2), SMALL.vocabulary - 1)
    batch = made(parts, 3, 1.0, 5)
    objective = objective_of(ObjectiveConfig("mt", 1.0, denoising=made.denoising, back_translation=("0:2",))).at(5)
    assert objective.weights.tolist() == [0.25, 2.0, 1.0]
    formulas, expected = Formulas(model), {"ae": [], "bt": []}
    for row, number, one in ((row, n + 1, one) for row, items in enumerate(mono) for n, one in enumerate(items)):
        inside = batch.segments_BT[row] == number
        own, into = (int(values[row][inside][0]) for values in (batch.languages_BT, batch.added["target_languages_BT"]))
        noise = [token for token in batch.added["noised_BT"][row][inside].tolist() if token != PAD][1:-1]
        text = np.array(one[1:-1])
        expected["ae"].append(formulas.losses(np.array(noise), text, (own, own)))
        (written,) = translate(model.eval(), [text], (own, into))
        expected["bt"].append(formulas.losses(np.array(written, dtype=int), text, (into, own)))
    output = model.train()(batch)
    assert model.training and model.encoder.training
    sums, counts = objective.sums(output, batch), objective.counts(batch)
    assert counts.tolist() == [25, 25, 15 + sum(len(pair[1]) for row in texts() for pair in row) - 11]
    for n, term in enumerate(("ae", "bt")):
        assert sums[n].item() == pytest.approx(torch.cat(expected[term]).sum().item(), rel=1e-5)
    found = objective.summarise(sums.detach(), counts, objective.statistics(output, batch))
    assert found["loss"] == pytest.approx(0.25 * found["ae"] + 2 * found["bt"] + found["mt"])
    (sums[:2].double() @ objective.weights[:2]).backward()
    loss = sum(
        weight * torch.cat(expected[term]).sum()
        for term, weight in zip(("ae", "bt"), objective.weights[:2].tolist(), strict=True)
    )
    loss.backward()
    for name, parameter in model.named_parameters():
        if name != "masked_head.bias":  # another one: the copy was made after it was changed
            torch.testing.assert_close(parameter.grad, formulas.p[name].grad, rtol=2e-4, atol=2e-5, msg=name)
    languages = objective.by_language(output, batch, LANGUAGES)
    torch.testing.assert_close(languages.sum(2)[0], sums.double(), rtol=1e-6, atol=1e-6)


def test_rows_of_text_are_passed_over() -> None:
    """As in an evaluation of data with both tasks."""
    layout = LAYOUTS["xlme"]
    mono = batch_of([[layout.item(np.arange(5, 20)).tolist()]], [], 44, mask_fraction=1)
    output = translator()(mono)
    assert MT.counts(mono).tolist() == [0.0] and not len(output.nll_M)


def drawn(model: TranslationModel, monkeypatch: pytest.MonkeyPatch, batch: Batch) -> list[Tensor]:
    """All keys that a pass in training drops by."""
    found: list[Tensor] = []

    def watched(function):  # type: ignore[no-untyped-def]
        def keyed(x: Tensor, rate: float, seeds_B: Tensor, *more: int) -> Tensor:
            found.append(seeds_B)
            return function(x, rate, seeds_B, *more)

        return keyed

    for module, name in ((attention, "drop_weights"), (layers, "drop"), (encoder, "drop")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    model.train()(batch)
    return found


@pytest.mark.parametrize("decoder", ["xlm", "interleaved"])
def test_every_place_drops_by_itself(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sentences' two passes: twice for the embeddings, and for every attention's weights and every branch; all by
    keys of their own."""
    model = translator(decoder=decoder, dropout=0.2, attention_dropout=0.3)
    batch, _ = long_sentences()
    found = drawn(model, monkeypatch, batch)
    branches = {"xlm": 2 * 2 + 2 * 3, "interleaved": 2 * 2 + 2 * 2}[decoder]
    attentions = {"xlm": 2 + 2 * 2, "interleaved": 2 + 2}[decoder]
    assert len(found) == 2 * (2 + branches + attentions)
    assert len({tuple(keys.tolist()) for keys in found}) == len(found)


def long_sentences() -> tuple[Batch, int]:
    """A row with a sentence as long as the model can read, and their number of tokens."""
    rng, size = np.random.default_rng(3), SMALL.max_positions - 2
    rows = rows_of([[[0, *rng.integers(4, 96, size).tolist(), EOS]]], SMALL.max_positions)
    parts: TaskRows = [(0, rows, np.arange(1) + 5)]
    made = SentenceInputs(("0:1",), ("0:1",), (0, 1, 2), SMALL.vocabulary - 1)
    return made(parts, 3, 1.0, 0), size


def test_sources_that_grow_longer_than_their_row_drop_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of a mask has a count of its own: no two of its rows are one moved along."""
    model = translator(attention_dropout=0.5).train()
    with torch.no_grad():
        model.masked_head.bias[EOS] -= 50.0  # translations as long as they may be
    rows = rows_of([[[0, 5 + n, EOS] for n in range(4)]], 12)
    parts: TaskRows = [(0, rows, np.arange(1))]
    batch = SentenceInputs((), ("0:1",), (0, 1, 2), SMALL.vocabulary - 1)(parts, 3, 1.0, 0)
    kept: list[Tensor] = []
    real = attention.drop_weights

    def watched(weights: Tensor, *how) -> Tensor:  # type: ignore[no-untyped-def]
        kept.append(real(torch.ones_like(weights), *how) > 0)
        return real(weights, *how)

    monkeypatch.setattr(attention, "drop_weights", watched)
    model(batch)
    assert max(mask.shape[-1] for mask in kept) > 2 * 12
    for mask in kept:
        lines, size = mask.flatten(0, 2), mask.shape[-1]
        for moved in range(0, size - 12, 4):  # four numbers are made of a word
            same = lines[1:, : size - moved] == lines[:-1, moved:]
            assert same.double().mean() < 0.75, moved


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_of_n_tokens_a_translation_has_at_most_xlms_number(size: int) -> None:
    """1.3 n + 5 of ordinary tokens, here as in the search."""
    model = translator().eval()
    with torch.no_grad():
        model.masked_head.bias[EOS] -= 50.0
    rows = rows_of([[[0, *range(5, 5 + size), EOS]]], 40)
    parts: TaskRows = [(0, rows, np.arange(1))]
    batch = SentenceInputs((), ("0:1",), (0, 1, 2), SMALL.vocabulary - 1)(parts, 3, 1.0, 0)
    assert int((model.back_translated_sources(batch).segments > 0).sum()) == int(1.3 * size + 5) + 2


def test_what_is_written_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A translation that never ends has no more tokens than a source may have, is written without dropout, and is
    trained on with it."""
    model = translator(dropout=0.2, attention_dropout=0.2).train()
    with torch.no_grad():
        model.masked_head.bias[EOS] -= 50.0
    batch, size = long_sentences()
    written = [model.back_translated_sources(batch) for _ in range(2)]
    assert int((written[0].segments > 0).sum()) == size + 2 and model.training
    assert torch.equal(written[0].tokens, written[1].tokens)
    assert torch.equal(written[0].tokens, model.eval().back_translated_sources(batch).tokens)
    assert model.train()(batch).nll_M.isfinite().all()
