"""BTMLM against its equations, one sentence and one place after the other, in float64; its terms and its work."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rows import write_data
from tests.small import SMALL, lively, open_batch
from xlme_ds.config import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.counting import flops_per_step
from xlme_ds.data.batch import Batch
from xlme_ds.data.schema import PAD, read_manifest, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.models.masked_head import GROUP_SIZE
from xlme_ds.models.text_encoder import LanguageModel
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.ernie_m import first_pass
from xlme_ds.validate import validate

FRACTIONS = (0.1, 0.3)
CFG = replace(SMALL, relative_bias="none")
OBJECTIVE = objective_of(ObjectiveConfig("btmlm", random_fraction=0.0, keep_fraction=0.0, pseudo_fractions=FRACTIONS))
MASK = CFG.vocabulary - 1
State = Mapping[str, Tensor]


def norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].t() + state[f"{name}.bias"]


def logits(state: State, cfg: ModelConfig, tokens: list[int], languages: list[int], seen: list[list[int]]) -> Tensor:
    """[tokens, V] of one item, of which token i sees the tokens `seen[i]`: a post-LN Transformer, query by query."""
    x = state["embedding_0"][tokens] + state["encoder.positions"][: len(tokens)]
    if cfg.language_embeddings:
        x = x + state["encoder.languages"][languages]
    x = norm(state, "encoder.input_norm", x)
    for n in range(cfg.discriminator_layers):
        layer, size = f"encoder.layers.{n}", cfg.width // cfg.heads
        q, k, v = linear(state, f"{layer}.attention.qkv", x).split(cfg.width, dim=1)
        rows = []
        for i, keys in enumerate(seen):
            heads = []
            for head in range(cfg.heads):
                part = slice(head * size, (head + 1) * size)
                weights = torch.softmax(k[keys, part] @ q[i, part] / math.sqrt(size), 0)
                heads.append(weights @ v[keys, part])
            rows.append(torch.cat(heads))
        x = norm(state, f"{layer}.attention_norm", x + linear(state, f"{layer}.attention.output", torch.stack(rows)))
        up = F.gelu(linear(state, f"{layer}.up", x))
        x = norm(state, f"{layer}.feed_forward_norm", x + linear(state, f"{layer}.down", up))
    features = norm(state, "masked_head.norm", F.gelu(linear(state, "masked_head.dense", x)))
    return features @ state["embedding_0"].t() + state["masked_head.bias"]


def reference(state: State, cfg: ModelConfig, batch: Batch) -> tuple[Tensor, list[list[int]]]:
    """−log p(x_m | x \\ M, y) at all masked positions, and the y of every row, from p(y_j | x, M_j)."""
    losses, written, width = [], [], batch.tokens_BT.shape[1]
    for row, (tokens, segments) in enumerate(zip(batch.tokens_BT.tolist(), batch.segments_BT.tolist(), strict=True)):
        item, languages = tokens[: sum(segments)], batch.languages_BT[row, : sum(segments)].tolist()
        places = [n for n, token in enumerate(item) if token == PAD]
        sentence = list(range(places[0]))
        masks = [MASK if n in places else token for n, token in enumerate(item)]
        alone = [sentence if n in sentence else [*sentence, n] for n in range(len(item))]
        with torch.no_grad():
            found = (4 + logits(state, cfg, masks, languages, alone)[:, 4:-1].argmax(1)).tolist()  # an ordinary token
        written.append([found[n] for n in places])
        targets = [flat - row * width for flat in batch.masked_M.tolist() if flat // width == row]
        second = [MASK if n in targets else found[n] if n in places else token for n, token in enumerate(item)]
        all_of_it = [list(range(len(item)))] * len(item)
        logits_MV = logits(state, cfg, second, languages, all_of_it)[targets]
        losses.append(F.cross_entropy(logits_MV, torch.tensor(item)[targets], reduction="none"))
    return torch.cat(losses), written


@pytest.mark.parametrize("languages", [(), ("de", "en", "fr")])
def test_two_passes_equal_the_equations(languages: tuple[str, ...]) -> None:
    batch, cfg = open_batch([20, 37, 5], 40, FRACTIONS), replace(CFG, language_embeddings=languages)
    ours = lively(OBJECTIVE.build(cfg), seed=2)
    with torch.no_grad():
        ours.masked_head.bias[[0, 1, 2, 3, MASK]] += 10.0  # special tokens are the likeliest ones, at some places
    state = {name: value.detach().double().requires_grad_() for name, value in ours.named_parameters()}
    nll, written = reference(state, cfg, batch)
    flat = [token for one in written for token in one]
    assert len(set(flat)) > 2, "not always the same"
    output = ours(batch)
    assert ours.training and all(part.training for part in ours.modules()), "dropout is on again"
    # float32 against float64, through two layers and a softmax over logits of up to 20.
    torch.testing.assert_close(output.nll_M.double(), nll, rtol=2e-5, atol=2e-5)
    OBJECTIVE.sums(output, batch).sum().backward()
    nll.sum().backward()
    for name, parameter in ours.named_parameters():
        expected = state[name].grad
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-4, atol=2e-5 * scale, msg=name)


def test_metrics_equal_a_loop() -> None:
    batch = open_batch([20, 37, 5], 40, FRACTIONS)
    with torch.no_grad():
        output = lively(OBJECTIVE.build(CFG), std=0.1)(batch)
    targets = batch.tokens_BT.flatten()[batch.masked_M]
    output = output._replace(predicted_M=torch.where(torch.arange(len(targets)) % 3 == 0, targets, targets - 1))
    found = OBJECTIVE.summarise(
        OBJECTIVE.sums(output, batch), OBJECTIVE.counts(batch), OBJECTIVE.statistics(output, batch)
    )
    mean = np.mean(output.nll_M.tolist())
    share = np.mean([n % 3 == 0 for n in range(len(targets))])
    assert found == {
        "loss": pytest.approx(mean, rel=1e-6),
        "btmlm": pytest.approx(mean, rel=1e-6),
        "accuracy_mono": share,
    }


def test_work_is_what_both_passes_do() -> None:
    """Matrix products of a real forward pass over full rows, counted by torch, the masked share of the sentences as it
    is."""
    from torch.utils.flop_counter import FlopCounterMode

    batch, cfg = open_batch([38] * 6, 40, (0.25,)), CFG
    places = int(((batch.tokens_BT == PAD) & (batch.segments_BT > 0)).sum())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lively(OBJECTIVE.build(cfg))(batch)
    tokens = batch.tokens_BT.numel()
    # The shares of these rows of 40, three of which are special tokens, in place of a long row's.
    fraction = places / (tokens - places)
    settings = dict(mask_fraction=len(batch.masked_M) / (tokens - places), pseudo_fractions=(fraction,))
    objective = objective_of(ObjectiveConfig("btmlm", **settings))
    flops = objective.flops(cfg, 40)
    sampled = 2 * (len(batch.masked_M) + places) * GROUP_SIZE * cfg.width  # looked at twice, no work done
    ahead = flops.layers * flops.first_pass_layer + flops.first_pass_softmax
    assert counter.get_total_flops() == pytest.approx(tokens * (flops.forward + ahead) + sampled, rel=1e-9)
    run = RunConfig("test", model=cfg, objective=ObjectiveConfig("btmlm", **settings), data=DataConfig(6, 0))
    assert flops_per_step(run, 40) == pytest.approx(tokens * (3 * flops.forward + ahead))


def test_the_language_asked_for_is_a_signal_where_languages_have_embeddings() -> None:
    batch = open_batch([20, 37, 5], 40, FRACTIONS)
    second = batch.sides_BT == 1
    other = batch._replace(languages_BT=torch.where(second, (batch.languages_BT + 1) % 3, batch.languages_BT))
    for languages in ((), ("de", "en", "fr")):
        ours = lively(OBJECTIVE.build(replace(CFG, language_embeddings=languages)), seed=2)
        with torch.no_grad():
            first = first_pass(batch)
            asked, otherwise = (LanguageModel.forward(ours, b).predicted_M for b in (first, first_pass(other)))
        assert (asked != otherwise).any() == bool(languages)


def test_packed_sentences_are_read_to_compare_alone(tmp_path: Path) -> None:
    folder = write_data(tmp_path, rows=8) / "mono"
    objective = objective_of(ObjectiveConfig("btmlm", pseudo_fractions=(0.1,)))
    for packed in ("", "sentences", "documents"):
        manifest = read_manifest(folder)
        settings = manifest.settings | {name: name == packed for name in ("sentences", "documents")}
        write_manifest(folder, replace(manifest, settings=settings))
        for purpose in ("train", "evaluate"):
            with pytest.raises(ValueError, match=f"mixed with --{packed}") if packed else nullcontext():
                objective.check_rows(RowStore(folder), purpose)
        objective.check_rows(RowStore(folder), "compare")


@pytest.mark.parametrize(
    ("objective", "data", "words"),
    [
        (dict(name="btmlm"), (8, 0), "objective.name btmlm needs objective.pseudo_fractions"),
        (dict(name="mlm", pseudo_fractions=(0.1,)), (8, 0), "and objective.name mlm does not read it: leave it empty"),
        (dict(name="btmlm", pseudo_fractions=(0.1, 0.0)), (8, 0), "each must be above 0"),
        (dict(name="btmlm", pseudo_fractions=(0.1,)), (8, 8), "reads monolingual rows alone: set data.para_rows to 0"),
    ],
)
def test_settings_that_cannot_be(objective: dict[str, object], data: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate(RunConfig("x", objective=ObjectiveConfig(**objective), data=DataConfig(*data)))  # type: ignore[arg-type]
