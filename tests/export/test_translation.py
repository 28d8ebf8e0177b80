"""An exported translating model searches, scores and trains as ours does, in both forms of the decoder."""

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

import xlme_ds as xlme
from tests.evaluate.folders import sentence, write_run
from tests.rows import write_data
from tests.small import batch_of
from xlme_ds.config import ObjectiveConfig, RunConfig, StartConfig
from xlme_ds.data.schema import EOS, LAYOUTS, PAD, UNK
from xlme_ds.evaluate.heldout_text import losses
from xlme_ds.export.__main__ import main
from xlme_ds.first_weights import starting_weights
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.runs import load_run
from xlme_ds.translate.decoding import translate
from xlme_ds.translate.model import TranslationModel
from xlme_ds.translate.translator import Translator, load_translator, translate_lines

CODES = ("de", "en", "fr", "zh-Hans")
INTO = {"source_language": "zh", "target_language": "en"}
FORMS: list[dict[str, Any]] = [
    {"layout": "xlm", "masked_head": "linear", "relative_bias": "none", "norm_epsilon": 1e-12, "vocabulary_blocks": 3},
    {"decoder": "interleaved", "norm": "pre", "decoder_layers": 2},
    {"decoder": "xlm", "relative_bias": "plain", "decoder_layers": 3},
]
ENDS = (4.0, 4.0, 2.6)  # what `</s>` is more likely by in each: some translations end before they must, not all
LENGTHS = (6, 3, 9, 1, 30)


class Both(NamedTuple):
    """The same model as ours and as theirs, in float64."""

    run: Path
    folder: Path
    ours: TranslationModel
    theirs: Any


def livelier(state: dict[str, Tensor], end: float) -> dict[str, Tensor]:
    """So that a translation is more than one token again and again."""
    for name, value in state.items():
        if name.startswith("decoder.layers") and value.dim() == 2:
            value *= 2.5
        elif name.endswith("bias") and ("norm" in name or "head" in name):
            value.zero_()
    state["masked_head.bias"][EOS] = end
    return state


@pytest.fixture(scope="module", params=range(3), ids=["xlm", "interleaved", "deeper"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    at = tmp_path_factory.mktemp("translation")
    run = write_run(at / "run", objective="mt", language_embeddings=CODES, **FORMS[request.param])
    folder, weights = at / "export", run / "model/model.safetensors"
    save_file(livelier(load_file(weights), ENDS[request.param]), weights)
    main(["--run", str(run), "--out", str(folder)])
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
    return Both(run, folder, load_translator(run).model.double(), theirs)


def sources(both: Both) -> list[np.ndarray]:
    top = both.ours.cfg.vocabulary - 1
    return [np.random.default_rng(n).integers(UNK + 1, top, n) for n in LENGTHS]


def padded(both: Both, left: bool = False) -> Tensor:
    items = [LAYOUTS[both.ours.cfg.layout].item(source) for source in sources(both)]
    rows = torch.full((len(items), max(map(len, items))), PAD)
    for row, one in zip(rows, items, strict=True):
        (row[len(row) - len(one) :] if left else row[: len(one)]).copy_(torch.from_numpy(one))
    return rows


def words(rows: Tensor) -> list[list[int]]:
    """The ordinary tokens of generated rows, which begin with `</s>` and have nothing else after their end."""
    assert (rows[:, 0] == EOS).all() and not set(rows.unique().tolist()) & {0, UNK}
    found = [row[1:] for row in rows.tolist()]
    ends = [(row.index(EOS) if EOS in row else row.index(PAD) if PAD in row else len(row)) for row in found]
    assert all(set(row[end + 1 :]) <= {PAD} for row, end in zip(found, ends, strict=True))
    return [row[:end] for row, end in zip(found, ends, strict=True)]


def test_greedy_translations_are_ours(both: Both) -> None:
    expected = translate(both.ours, sources(both), (3, 1))
    limits = [min(int(1.3 * n + 5), 40) for n in LENGTHS]
    shorter = [len(one) < limit for one, limit in zip(expected, limits, strict=True)]
    assert any(shorter) and not all(shorter)
    rows = padded(both)
    assert words(both.theirs.generate(rows, **INTO)) == expected
    assert words(both.theirs.generate(input_ids=padded(both, left=True), **INTO)) == expected
    assert words(both.theirs.generate(rows, **INTO, use_cache=False)) == expected
    encoded = both.theirs.get_encoder()(rows, language_ids=torch.tensor([3] * len(rows)))
    mask = (rows != PAD).long()
    assert words(both.theirs.generate(encoder_outputs=encoded, attention_mask=mask, **INTO)) == expected


@pytest.mark.parametrize("beam, penalty", [(4, 1.0), (3, 0.4)])
def test_beam_search_is_ours(both: Both, beam: int, penalty: float) -> None:
    expected = translate(both.ours, sources(both), (3, 1), beam, penalty)
    assert expected != translate(both.ours, sources(both), (3, 1))
    found = both.theirs.generate(padded(both), num_beams=beam, length_penalty=penalty, **INTO)
    assert words(found) == expected
    search = deepcopy(both.theirs.generation_config)
    search.num_beams, search.length_penalty = beam, penalty
    assert words(both.theirs.generate(padded(both), search, **INTO)) == expected


@pytest.mark.parametrize("stopping", ["never", False])
def test_a_search_may_go_on_after_as_many_translations_as_beams(both: Both, stopping: str | bool) -> None:
    """`early_stopping` of an argument, of a given configuration and of the model's own."""
    theirs, rows = deepcopy(both.theirs), padded(both)
    expected = words(theirs.generate(rows, num_beams=3, length_penalty=2.0, early_stopping=stopping, **INTO))
    assert expected != words(theirs.generate(rows, num_beams=3, length_penalty=2.0, **INTO))
    search = deepcopy(theirs.generation_config)
    search.num_beams, search.length_penalty, search.early_stopping = 3, 2.0, stopping
    assert words(theirs.generate(rows, search, **INTO)) == expected
    theirs.generation_config = search
    assert words(theirs.generate(rows, **INTO)) == expected


def test_rows_of_several_languages(both: Both) -> None:
    pairs = [(0, 1), (1, 0), (2, 1), (1, 3), (0, 2)]
    expected = [translate(both.ours, [one], pair)[0] for one, pair in zip(sources(both), pairs, strict=True)]
    of, into = torch.tensor(pairs).t()
    assert words(both.theirs.generate(padded(both), language_ids=of, decoder_language_ids=into)) == expected


def test_new_tokens_change_no_translation(both: Both) -> None:
    theirs = deepcopy(both.theirs)
    theirs.resize_token_embeddings(theirs.config.vocab_size + 3)
    assert words(theirs.generate(padded(both), **INTO)) == translate(both.ours, sources(both), (3, 1))


def test_losses_of_given_targets_are_ours(both: Both) -> None:
    """One row a pair, as `rows_of` gives them languages."""
    texts = [(each, each[::-1][: max(1, len(each) // 2)]) for each in sources(both)[:4]]
    items = [[LAYOUTS[both.ours.cfg.layout].item(*pair).tolist()] for pair in texts]
    expected = both.ours(batch_of([], items, 40, mask_fraction=1)).nll_M.double()
    labels = torch.full((4, max(len(target) for _, target in texts) + 1), -100)
    for row, (_, target) in zip(labels, texts, strict=True):
        row[: len(target) + 1] = torch.tensor([*target.tolist(), EOS])
    languages = torch.arange(8).view(4, 2) % 3
    inputs = {"input_ids": padded(both)[:4], "labels": labels}
    inputs |= {"language_ids": languages[:, 0], "decoder_language_ids": languages[:, 1]}
    for attention in ("sdpa", "eager"):
        both.theirs.set_attn_implementation(attention)
        found = both.theirs(**inputs)
        nll = -found.logits.log_softmax(-1)[labels != -100].gather(1, labels[labels != -100][:, None])[:, 0]
        torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-5)  # our softmax is in float32
        torch.testing.assert_close(found.loss, nll.mean())
    both.theirs.set_attn_implementation("sdpa")


def test_gradient_reaches_every_parameter(both: Both) -> None:
    settings = {"trust_remote_code": True, "dtype": torch.float64, **INTO}
    model = AutoModelForSeq2SeqLM.from_pretrained(both.folder, **settings).train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(padded(both), labels=padded(both)[:, 1:]).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(gradient.abs().max() > 0 for gradient in found[0].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-9)


def test_unknown_languages_are_refused(both: Both) -> None:
    rows = padded(both)
    for code in ("sw", "z", "zh-Han"):
        with pytest.raises(
            ValueError, match=rf"^target_language {code} is no language of this model: choose one of de en fr zh-Hans$"
        ):
            both.theirs.generate(rows, source_language="de", target_language=code)
    with pytest.raises(ValueError, match=r"^source_language is missing: choose one of de en fr zh-Hans$"):
        both.theirs.generate(rows, target_language="de")
    with pytest.raises(ValueError, match="a static cache does not fit this model: leave out cache_implementation"):
        both.theirs.generate(rows, cache_implementation="static", **INTO)
    with pytest.raises(ValueError, match="give decoder_input_ids or labels"):
        both.theirs(rows)


def test_the_encoder_of_the_folder(both: Both, tmp_path: Path) -> None:
    """Everything that reads an encoder reads that of the export; `--which encoder` writes it alone."""
    main(["--run", str(both.run), "--out", str(tmp_path / "encoder"), "--which", "encoder"])
    assert json.loads((tmp_path / "encoder/config.json").read_text())["architectures"] == ["XLMEModel"]
    assert not list((tmp_path / "encoder").glob("*translation*"))
    expected = load_encoder(both.run).encoder.state_dict()
    rows, of = padded(both), torch.tensor([0] * len(LENGTHS))
    alone = AutoModel.from_pretrained(tmp_path / "encoder", trust_remote_code=True)(rows, language_ids=of)[0]
    whole = AutoModel.from_pretrained(both.folder, trust_remote_code=True)(rows, language_ids=of)[0]
    torch.testing.assert_close(alone, whole, rtol=0, atol=0)
    table = torch.cat([expected.pop(name) for name in list(expected) if name.startswith("embedding_")])
    for folder in (both.folder, tmp_path / "encoder"):
        found = load_encoder(folder).encoder.state_dict()
        assert torch.equal(found.pop("embedding_0"), table) and found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    vectors = xlme.load(both.folder).encode(["kalo mi"], language="de")
    np.testing.assert_array_equal(vectors, xlme.load(both.run).encode(["kalo mi"], language="de"))
    settings = {"device": "cpu", "trust_remote_code": True, "config_kwargs": {"language": "de"}}
    theirs = SentenceTransformer(str(both.folder), **settings).encode(["kalo mi"])  # type: ignore[arg-type]
    np.testing.assert_allclose(theirs, vectors, atol=1e-5)
    with pytest.raises(ValueError, match="was not trained with masked language modelling"):
        xlme.load(both.folder).fill("kalo <mask>", language="de")


def test_ours_reads_the_whole_export(both: Both, tmp_path: Path) -> None:
    """To translate, and to score held-out pairs; also one that transformers saved again."""
    both.theirs.float().save_pretrained(tmp_path / "saved")
    both.theirs.double()
    (tmp_path / "saved/sentencepiece.bpe.model").write_bytes((both.folder / "sentencepiece.bpe.model").read_bytes())
    expected = load_run(both.run)
    data = write_data(tmp_path / "data", 4, 40, expected.vocabulary.size, sha256=expected.vocabulary.sha256)
    for folder in (both.folder, tmp_path / "saved"):
        model = load_translator(folder).model.double()
        assert translate(model, sources(both), (3, 1)) == translate(both.ours, sources(both), (3, 1))
        if both.ours.cfg.layout == "xlme":  # as the data have it
            one, other = losses([both.run, folder], data)["models"]
            assert one["overall"] == other["overall"]
    AutoModel.from_pretrained(both.folder, trust_remote_code=True).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"/saved does not hold the model of .*: Missing key.*decoder\.positions"):
        load_translator(tmp_path / "saved")


def test_a_run_starts_from_the_whole_export(both: Both, tmp_path: Path) -> None:
    """Every parameter is there; an objective without a decoder, or an export without one, is refused."""
    run, start = load_run(both.run), StartConfig(str(both.folder), "all")
    config = RunConfig("next", model=run.model, objective=run.objective, start=start)
    known = starting_weights(config, run.vocabulary)
    assert known is not None
    for name, value in run.state.items():
        assert torch.equal(known(name), value), name
    with pytest.raises(ValueError, match="was trained for mt, whose model has other parts than that of mlm: set start"):
        starting_weights(replace(config, objective=ObjectiveConfig("mlm")), run.vocabulary)
    xlme.export.run(both.run, tmp_path / "encoder", which="encoder")
    alone = replace(config, start=StartConfig(str(tmp_path / "encoder"), "all"))
    with pytest.raises(ValueError, match=r"has no decoder, which start\.take all takes: set start\.take to encoder"):
        starting_weights(alone, run.vocabulary)


@pytest.mark.parametrize("both", [1], indirect=True)
def test_text_in_a_process_without_this_package(both: Both, tmp_path: Path) -> None:
    """By the card's own lines, which name the first and the last language."""
    lines = [sentence(123), "kalo", sentence(98765, 8)]
    card = (both.folder / "README.md").read_text()
    assert "A translation model for the languages de, en, fr, zh-Hans." in card
    code = card.split("```python\n")[1].split("```")[0]
    assert "AutoModelForSeq2SeqLM" in code and 'target_language="zh-Hans"' in code
    code = code.replace('"FOLDER"', repr(str(both.folder))).replace('["Ein Satz.", "Noch einer."]', repr(lines))
    code = f"import sys; sys.modules['xlme_ds'] = None\n{code}\nimport json; print(json.dumps(texts))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = load_translator(both.run)
    cpu = Translator(ours.folder, ours.model.cpu(), ours.vocabulary)
    assert json.loads(done.stdout.splitlines()[-1]) == translate_lines(cpu, lines, (0, 3), 1, 1.0)[0]


def test_the_tokenizer_gives_our_sources(both: Both) -> None:
    tokenizer, vocabulary = AutoTokenizer.from_pretrained(both.folder), load_run(both.run).vocabulary
    item = LAYOUTS[both.ours.cfg.layout].item(vocabulary.encode(sentence(7)))
    assert tokenizer(sentence(7))["input_ids"] == item.tolist()
