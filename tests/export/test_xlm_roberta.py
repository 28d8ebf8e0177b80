"""XLM-R's weights compute in our encoder, and in the export made from it, what they compute in transformers."""

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, XLMRobertaConfig, XLMRobertaForMaskedLM, XLMRobertaModel

from tests.small import lively
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.export.__main__ import main
from xlme_ds.models.text_encoder import positions_and_segments
from xlme_ds.trained.encoders import load_encoder

TOKENS = torch.tensor([[0, 11, 12, 13, 17, 19, 2], [0, 21, 2, 1, 1, 1, 1], [0, 31, 32, 33, 34, 2, 1]])
INSIDE = TOKENS != 1


@pytest.fixture(scope="module", params=[(XLMRobertaModel, 1e-5), (XLMRobertaForMaskedLM, 1e-12)])
def theirs(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Any:
    architecture, epsilon = request.param
    config = XLMRobertaConfig(
        vocab_size=vocabulary.size,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=34,
        type_vocab_size=1,
        layer_norm_eps=epsilon,
        initializer_range=0.03,
    )
    return lively(architecture(config)).eval()


@pytest.fixture
def folder(theirs: Any, vocabulary: Vocabulary, tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path / "theirs")
    shutil.copy(vocabulary.path, tmp_path / "theirs" / "sentencepiece.bpe.model")
    return tmp_path / "theirs"


@pytest.mark.parametrize("pickled", [False, True])
def test_same_outputs(theirs: Any, folder: Path, tmp_path: Path, vocabulary: Vocabulary, pickled: bool) -> None:
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    main(["--from-hf", str(folder), "--out", str(tmp_path / "ours")])
    encoder, words = load_encoder(tmp_path / "ours")
    assert words.sha256 == vocabulary.sha256 and encoder.cfg.max_positions == 32
    assert (encoder.cfg.norm_epsilon, encoder.cfg.init_std) == (theirs.config.layer_norm_eps, 0.03)
    expected = theirs(TOKENS, INSIDE.long(), output_hidden_states=True)
    found = encoder.hidden_states(TOKENS, *positions_and_segments(TOKENS))
    assert len(found) == 4
    for ours, wanted in zip(found, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[INSIDE], wanted[INSIDE], rtol=0, atol=1e-5)
    if isinstance(theirs, XLMRobertaForMaskedLM):
        again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
        torch.testing.assert_close(
            again(TOKENS, INSIDE.long()).logits[INSIDE], expected.logits[INSIDE], rtol=0, atol=1e-4
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    original = AutoTokenizer.from_pretrained(folder)
    assert type(original).__name__ == "XLMRobertaTokenizer"
    for texts in (("kalo miter",), ("kalo miter", "dorin  sa")):
        assert tokenizer(*texts)["input_ids"] == original(*texts)["input_ids"]


def test_weights_in_half_precision_are_not_rounded_again(theirs: Any, folder: Path) -> None:
    deepcopy(theirs).bfloat16().save_pretrained(folder)
    again = type(theirs).from_pretrained(folder, dtype=torch.float32).eval()
    expected = again(TOKENS, INSIDE.long(), output_hidden_states=True).hidden_states
    found = load_encoder(folder).encoder.hidden_states(TOKENS, *positions_and_segments(TOKENS))
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[INSIDE], wanted[INSIDE], rtol=0, atol=1e-5)


def test_cut_after_a_layer(theirs: Any, folder: Path, tmp_path: Path) -> None:
    main(["--from-hf", str(folder), "--out", str(tmp_path / "ours"), "--layer", "2"])
    expected = theirs(TOKENS, INSIDE.long(), output_hidden_states=True).hidden_states[2]
    found = load_encoder(tmp_path / "ours").encoder(TOKENS, *positions_and_segments(TOKENS))
    torch.testing.assert_close(found[INSIDE], expected[INSIDE], rtol=0, atol=1e-5)


@pytest.fixture
def masked(vocabulary: Vocabulary, tmp_path: Path) -> tuple[Any, Path]:
    """A model with its masked head, and its folder."""
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, type_vocab_size=1)
    config = XLMRobertaConfig(vocab_size=vocabulary.size, max_position_embeddings=34, **sizes)
    theirs = lively(XLMRobertaForMaskedLM(config)).eval()
    theirs.save_pretrained(tmp_path / "masked")
    shutil.copy(vocabulary.path, tmp_path / "masked" / "sentencepiece.bpe.model")
    return theirs, tmp_path / "masked"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("form", ["decoder.bias", "shards", "pickled shards"])
def test_the_head_of_every_form_comes_along(masked: tuple[Any, Path], tmp_path: Path, form: str) -> None:
    theirs, folder = masked
    state = weights(folder)
    if form == "decoder.bias":  # the name of one tensor under two that is left to chance
        state["lm_head.decoder.bias"] = state.pop("lm_head.bias")
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        names = sorted(state)
        suffix, save = ("bin", torch.save) if "pickled" in form else ("safetensors", save_file)
        base = "pytorch_model" if "pickled" in form else "model"
        places = {name: f"{base}-{n % 11 + 1:05d}-of-00011.{suffix}" for n, name in enumerate(names)}
        for file in set(places.values()):
            save({name: state[name] for name in names if places[name] == file}, folder / file)
        (folder / f"{base}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
    main(["--from-hf", str(folder), "--out", str(tmp_path / "ours")])
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(
        again(TOKENS, INSIDE.long()).logits[INSIDE], theirs(TOKENS, INSIDE.long()).logits[INSIDE]
    )


def test_a_shard_that_is_missing_is_named(
    masked: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = masked[1]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    assert "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json" in refusal(
        capsys, folder, tmp_path / "no"
    )
    index.write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in refusal(capsys, folder, tmp_path / "no")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lm_head.layer_norm.bias": None}, "the head of masked language modelling lacks lm_head.layer_norm.bias"),
        ({"lm_head.bias": None}, "the head of masked language modelling lacks lm_head.bias"),
        ({"lm_head.decoder.weight": torch.ones(1)}, "has a table of its own instead of the embedding"),
        ({"classifier.out_proj.bias": torch.ones(2)}, "another head is left out, which has classifier.out_proj.bias"),
        ({"roberta.pooler.dense.bias": torch.ones(24)}, ""),
        ({}, ""),
    ],
)
def test_no_head_is_lost_without_a_word(
    masked: tuple[Any, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, torch.Tensor | None],
    told: str,
) -> None:
    folder = masked[1]
    state = {name: value for name, value in (weights(folder) | change).items() if value is not None}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    main(["--from-hf", str(folder), "--out", str(tmp_path / "ours")])
    error = capsys.readouterr().err
    assert (told in error) if told else error == f"{tmp_path / 'ours' / 'README.md'} shows how to load it\n"
    kept = "lm_head.bias" in load_file(tmp_path / "ours" / "model.safetensors")
    assert kept == ("masked language modelling" not in told and "table" not in told)


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, to: Path) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["--from-hf", str(folder), "--out", str(to)])
    assert stop.value.code == 2 and not to.exists() and not list(to.parent.glob("*.partial"))
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in (("model_type", "roberta"), ("hidden_act", "relu")):
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        assert f"config.json has {name} {value}: only" in refusal(capsys, folder, tmp_path / "no")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "does not hold the model of" in refusal(capsys, folder, tmp_path / "no")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 130}))
    assert "does not hold the model of" in refusal(capsys, folder, tmp_path / "no")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"12345678")
    assert re.search(r"is not a safetensors file \(.+\): copy it again", refusal(capsys, folder, tmp_path / "no"))
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor pytorch_model.bin" in refusal(capsys, folder, tmp_path / "no")
    torch.save(["no state"], folder / "pytorch_model.bin")
    assert "does not hold a dict of tensors" in refusal(capsys, folder, tmp_path / "no")
    torch.save({"model": tmp_path}, folder / "pytorch_model.bin")  # unpickling would call pathlib's code
    assert "cannot be loaded as a dict of tensors" in refusal(capsys, folder, tmp_path / "no")
    (folder / "sentencepiece.bpe.model").unlink()
    assert "has no sentencepiece.bpe.model" in refusal(capsys, folder, tmp_path / "no")


def test_it_has_no_generator(folder: Path) -> None:
    load_encoder(folder, "encoder")
    with pytest.raises(ValueError, match=r"has no generator: name the run that it was exported from"):
        load_encoder(folder, "generator")
