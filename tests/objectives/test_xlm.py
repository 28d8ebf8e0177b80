"""XLM's objectives against a Transformer written from its equations in float64, one item, head and position after the
other."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.test_language_model import read_by_hand
from tests.small import LANGUAGES, SMALL, batch_of, item, language_model, lively, model
from xlme_ds.config import ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.schema import EOS, LAYOUTS, UNK
from xlme_ds.models.text_encoder import LanguageModel
from xlme_ds.objectives import objective_of

# Of its published code: the epsilon of its norms, and a prediction layer that is the tied embedding with a bias.
CODE = dict(norm_epsilon=1e-12, masked_head="linear")
XLM = dict(layout="xlm", relative_bias="none", language_embeddings=("de", "en", "fr")) | CODE
MLM, CLM = objective_of(ObjectiveConfig("mlm")), objective_of(ObjectiveConfig("clm", mask_fraction=1.0))
Sees = Callable[[int, int], bool]


def words(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(UNK + 1, SMALL.vocabulary - 1, size)


def xlm_batch(mask_fraction: float = 0.15) -> Batch:
    """Two monolingual rows, one with a document's end inside, and two rows of pairs."""
    rng, layout = np.random.default_rng(5), LAYOUTS["xlm"]
    mono = [layout.item(words(rng, 30)), layout.item(np.concatenate([words(rng, 9), [EOS], words(rng, 11)]))]
    pairs = [[(7, 5), (2, 6), (1, 1)], [(13, 15)]]
    para = [[layout.item(words(rng, a), words(rng, b)).tolist() for a, b in row] for row in pairs]
    return batch_of([[one.tolist()] for one in mono], para, 40, mask_fraction=mask_fraction)


def items(batch: Batch) -> list[tuple[int, int, int, list[int], list[int]]]:
    """(row, first column, column behind, positions, languages) of every item, from where its `</s>` stand."""
    found, side = [], 0
    for row, segments in enumerate(batch.segments_BT.tolist()):
        task = int(batch.task_B[row])
        if row and task != int(batch.task_B[row - 1]):
            side = 0  # `rows_of` numbers each task's languages from 0
        for number in range(1, max(segments) + 1):
            start, stop = segments.index(number), len(segments) - segments[::-1].index(number)
            tokens = batch.tokens_BT[row, start:stop].tolist()
            second = tokens.index(EOS, 1) + 1 if task else len(tokens)
            positions = [n if n < second else n - second for n in range(len(tokens))]
            languages = [(side + (n >= second)) % LANGUAGES for n in range(len(tokens))]
            side += 1 + task
            found.append((row, start, stop, positions, languages))
    return found


def normed(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean()
    return centred / math.sqrt((centred**2).mean() + 1e-12) * p[f"{name}.weight"] + p[f"{name}.bias"]


def linear(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    return p[f"{name}.weight"] @ x + p[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x])


def states(p: dict[str, np.ndarray], ids: list[int], positions: list[int], languages: list[int], sees: Sees) -> list:
    """Last hidden states of one item."""
    e = "encoder."
    sums = [
        p["embedding_0"][i] + p[f"{e}positions"][n] + p[f"{e}languages"][language]
        for i, n, language in zip(ids, positions, languages, strict=True)
    ]
    x = [normed(one, p, f"{e}input_norm") for one in sums]
    size = SMALL.width // SMALL.heads
    for layer in (f"{e}layers.{n}." for n in range(SMALL.discriminator_layers)):
        qkv = [linear(one, p, f"{layer}attention.qkv").reshape(3, SMALL.heads, size) for one in x]
        out = []
        for i, state in enumerate(x):
            seen = [j for j in range(len(x)) if sees(i, j)]
            heads = []
            for h in range(SMALL.heads):
                weights = np.exp([qkv[i][0, h] @ qkv[j][1, h] / math.sqrt(size) for j in seen])
                heads.append(sum(w * qkv[j][2, h] for w, j in zip(weights / weights.sum(), seen, strict=True)))
            attended = linear(np.concatenate(heads), p, f"{layer}attention.output")
            y = normed(state + attended, p, f"{layer}attention_norm")
            fed = linear(gelu(linear(y, p, f"{layer}up")), p, f"{layer}down")
            out.append(normed(y + fed, p, f"{layer}feed_forward_norm"))
        x = out
    return x


def nll(p: dict[str, np.ndarray], state: np.ndarray, target: int) -> float:
    """−log softmax over the vocabulary, the embedding tied."""
    logits = p["embedding_0"] @ state + p["masked_head.bias"]
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])


def reference(of: LanguageModel, batch: Batch, causal: bool) -> dict[int, float]:
    """−log p of every predicted token by its flat position."""
    p = {name: value.double().numpy() for name, value in of.state_dict().items()}
    read = batch.tokens_BT if causal else read_by_hand(batch, 0.1, 0.1)
    masked, width, found = set(batch.masked_M.tolist()), batch.tokens_BT.shape[1], {}
    for row, start, stop, positions, languages in items(batch):
        sees = (lambda i, j: j <= i) if causal else (lambda i, j: True)
        hidden = states(p, read[row, start:stop].tolist(), positions, languages, sees)
        for column, target in enumerate(batch.tokens_BT[row, start:stop].tolist()):
            flat = row * width + start + column
            cut = column == stop - start - 1 and not int(batch.task_B[row])  # the last `</s>` of monolingual text
            if (column > 0 and not cut) if causal else flat in masked:
                found[flat] = nll(p, hidden[column - causal], target)
    return found


def clm_model(**changes: object) -> LanguageModel:
    return lively(CLM.build(language_model(**(XLM | changes)).cfg))


@pytest.mark.parametrize("causal", [False, True])
def test_losses_are_those_of_the_equations(causal: bool) -> None:
    batch = xlm_batch(1.0 if causal else 0.15)
    of, objective = (clm_model(), CLM) if causal else (language_model(**XLM), MLM)
    expected, output = reference(of, batch, causal), of(batch)
    assert list(expected) == batch.masked_M.tolist()
    np.testing.assert_allclose(output.nll_M.detach(), list(expected.values()), rtol=2e-5, atol=2e-5)
    by_task: list[list[float]] = [[], []]
    for flat, value in expected.items():
        by_task[int(batch.task_B[flat // 40])].append(value)
    found = objective.summarise(
        objective.sums(output, batch).detach(), objective.counts(batch), objective.statistics(output, batch)
    )
    means = [float(np.mean(values)) for values in by_task]
    assert [found[term] for term in objective.terms] == pytest.approx(means, rel=1e-5)
    assert found["loss"] == pytest.approx(sum(means), rel=1e-5)
    assert objective.counts(batch).tolist() == [len(values) for values in by_task]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_all_norms_have_the_epsilon(norm: str) -> None:
    both = model(norm=norm, embedding_norm=True, norm_epsilon=1e-7)
    norms = [module for module in both.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 2 * 3 + 2 * (1 + (norm == "pre")) + 1 and {one.eps for one in norms} == {1e-7}


def test_every_token_is_predicted_but_the_first_and_where_the_text_was_cut() -> None:
    """Of the code of XLM: `y = x[1:]`, ends of sentences too. Of two rows of text, one with an end inside, and pairs,
    in columns."""
    batch = xlm_batch(1.0)
    places = [divmod(flat, 40) for flat in batch.masked_M.tolist()]
    assert [column for row, column in places if row == 0] == list(range(1, 31))
    assert [column for row, column in places if row == 1] == list(range(1, 22))
    assert batch.tokens_BT[1, 10] == EOS == batch.tokens_BT[1, 22]
    firsts = {0, 16, 28}  # pairs of 7 + 5, 2 + 6 and 1 + 1 tokens, with four `</s>` each
    assert [column for row, column in places if row == 2] == [column for column in range(34) if column not in firsts]
    assert [column for row, column in places if row == 3] == list(range(1, 32))
    ours = batch_of(
        [[item(np.random.default_rng(1), 5)]], [[item(np.random.default_rng(2), 3, 2)]], 12, mask_fraction=1.0
    )
    assert ours.masked_M.tolist() == [1, 2, 3, 4, 5, *(12 + column for column in range(1, 8))]


@pytest.mark.parametrize("changes", [{}, dict(norm="pre", relative_bias="gated")])
def test_no_token_reaches_an_earlier_loss(changes: dict[str, object]) -> None:
    """Each token is changed by itself: losses before it, and in other items, keep every bit; its own and the next one's
    move."""
    of, batch = clm_model(**changes), xlm_batch(1.0)

    def losses(of_batch: Batch) -> Tensor:
        with torch.no_grad():
            return of(of_batch).nll_M

    before, places = losses(batch), batch.masked_M.tolist()
    for row, start, stop, *_ in items(batch):
        for flat in (row * 40 + column for column in range(start, stop)):
            if flat not in places:
                continue
            tokens = batch.tokens_BT.clone().flatten()
            tokens[flat] = 5 if tokens[flat] != 5 else 6
            moved = losses(batch._replace(tokens_BT=tokens.view(-1, 40))) != before
            noticed = {place for place, one in zip(places, moved.tolist(), strict=True) if one}
            assert noticed <= set(range(flat, row * 40 + stop))
            assert noticed >= {place for place in (flat, flat + 1) if place in places and place < row * 40 + stop}


def test_monolingual_rows_alone() -> None:
    batch = batch_of([[LAYOUTS["xlme"].item(words(np.random.default_rng(1), 20)).tolist()]], [], 24, mask_fraction=1.0)
    of = lively(CLM.build(SMALL))
    output = of(batch)
    found = CLM.summarise(CLM.sums(output, batch).detach(), CLM.counts(batch), CLM.statistics(output, batch))
    assert found.keys() == {"loss", "clm", "accuracy_mono"} and CLM.counts(batch).tolist() == [20, 0]


def test_languages_of_both_encoders_of_xlme() -> None:
    """Replaced token detection can have them too: the language of a token moves generator and discriminator."""
    batch = xlm_batch()
    of = model(language_embeddings=("de", "en", "fr"))
    other = batch._replace(languages_BT=(batch.languages_BT + 1) % 3)
    ours, theirs = of(batch), of(other)
    assert not torch.isclose(ours.nll_M, theirs.nll_M).any()
    assert not torch.isclose(ours.replaced_logits_BT, theirs.replaced_logits_BT)[batch.segments_BT > 0].all()
