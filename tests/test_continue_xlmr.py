"""XLM-E starts from XLM-R, as Hugging Face stores it: what it computes before the first step."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from tests.rows import train_vocabulary, write_data
from tests.small import lively
from xlme_ds.config import RunConfig
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.first_weights import starting_weights
from xlme_ds.models.electra import Electra
from xlme_ds.models.heads import TiedTable
from xlme_ds.models.init import initialise
from xlme_ds.models.text_encoder import positions_and_segments
from xlme_ds.pretrain import main
from xlme_ds.recipes import recipe
from xlme_ds.trained.runs import load_run

LINES = ("kalo miter un", "dorin ve", "sape kalo inun mika lo")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab")


@pytest.fixture(scope="module")
def theirs(vocabulary: Vocabulary) -> XLMRobertaForMaskedLM:
    sizes = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40)
    config = XLMRobertaConfig(
        vocab_size=vocabulary.size, max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5, **sizes
    )
    return lively(XLMRobertaForMaskedLM(config)).eval()


@pytest.fixture(scope="module")
def folder(theirs: XLMRobertaForMaskedLM, vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("xlmr") / "xlm-roberta-tiny"
    theirs.save_pretrained(to)
    shutil.copy(vocabulary.path, to / "sentencepiece.bpe.model")
    return to


def tiny(folder: Path, vocabulary: Vocabulary, **changes: object) -> RunConfig:
    """The recipe in the size of the tiny model."""
    run = recipe("continue_xlmr")
    sizes = dict(vocabulary=vocabulary.size, width=24, heads=3, feed_forward=40, max_positions=32)
    model = replace(run.model, **(sizes | dict(discriminator_layers=3, generator_layers=1) | changes))  # type: ignore[arg-type]
    return replace(run, model=model, start=replace(run.start, folder=str(folder)))


def started(run: RunConfig, vocabulary: Vocabulary) -> Electra:
    whole = Electra(run.model)
    initialise(whole, 5, run.model.init_std, initial_values=starting_weights(run, vocabulary))
    return whole.eval()


@pytest.mark.parametrize(
    "changes", [{}, {"relative_bias": "none"}, {"embedding_sharing": "gdes", "vocabulary_blocks": 3}]
)
@torch.no_grad()
def test_outputs_are_hugging_faces(
    changes: dict[str, object], folder: Path, vocabulary: Vocabulary, theirs: XLMRobertaForMaskedLM
) -> None:
    """Of the discriminator all hidden states, with a gated bias too, which begins at 0; of the generator those of the
    first layer, and the head's probabilities on them."""
    ids = [[0, *vocabulary.encode(line).tolist(), 2] for line in LINES]
    tokens = torch.tensor([row + [1] * (max(map(len, ids)) - len(row)) for row in ids])
    inside = tokens != 1
    whole = started(tiny(folder, vocabulary, **changes), vocabulary)
    assert (whole.discriminator.relative is None) == ("relative_bias" in changes)
    expected = theirs.roberta(tokens, inside.long(), output_hidden_states=True).hidden_states
    read = whole.embed_for_discriminator(tokens)
    for which, states in (("discriminator", expected), ("generator", expected[:2])):
        found = getattr(whole, which).hidden_states(read, *positions_and_segments(tokens))
        assert len(found) == len(states)
        for ours, wanted in zip(found, states, strict=True):
            torch.testing.assert_close(ours[inside], wanted[inside], rtol=0, atol=1e-5)
    logits = theirs.lm_head(expected[1])[inside]
    wanted = torch.nn.functional.cross_entropy(logits, tokens[inside], reduction="none")
    table = whole.embedding_blocks
    found_M = whole.masked_head(found[-1][inside], TiedTable(table), tokens[inside], torch.zeros(int(inside.sum())))
    assert found_M.nll_M.isfinite().all()
    torch.testing.assert_close(found_M.nll_M, wanted, rtol=0, atol=1e-4)


def test_the_bias_is_trained(folder: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    """A table of zeros has a gradient: after two steps of the command it is not zero any more."""
    data = write_data(tmp_path / "data", rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    shutil.copytree(vocabulary.path.parent, data / "vocab")
    sizes = f"--model.vocabulary {vocabulary.size} --model.width 24 --model.heads 3 --model.feed-forward 40 "
    sizes += "--model.max-positions 32 --model.discriminator-layers 3 --model.generator-layers 1 "
    words = sizes + "--data.mono-rows 4 --data.para-rows 4 --data.micro-batch 4 --engine.kind plain --train.steps 2 "
    words += "--optimizer.warmup-steps 1 --train.eval-every 0 --start.folder"
    folders = ["--data", str(data), "--out", str(tmp_path / "run")]
    main(["--recipe", "continue_xlmr", *words.split(), str(folder), *folders])
    state = load_run(tmp_path / "run").state
    for which in ("generator", "discriminator"):
        assert 0 < state[f"{which}.relative.weight"].abs().max() < 1e-3


def test_refusals(folder: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has 3 layers, and the discriminator takes 4: lower model\.discriminator_layers"
    ):
        starting_weights(tiny(folder, vocabulary, discriminator_layers=4), vocabulary)
    with pytest.raises(ValueError, match=r"has no generator, which start\.take all takes: set start\.take to encoder"):
        run = tiny(folder, vocabulary)
        starting_weights(replace(run, start=replace(run.start, take="all")), vocabulary)
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"model_type": "roberta"}))
    with pytest.raises(ValueError, match=r"config\.json has model_type roberta: only model_type xlm-roberta can"):
        starting_weights(tiny(tmp_path / "other", vocabulary), vocabulary)
