"""A model of XLM-R's shape is an `xlm-roberta` folder, one with ModernBERT's body a `modernbert` folder: transformers'
own classes compute what ours does, without our code, and the folder goes back whole."""

import io
import json
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ModernBertForMaskedLM,
    ModernBertModel,
    XLMRobertaForMaskedLM,
    XLMRobertaModel,
)

import xlme_ds as xlme
from tests.evaluate.folders import write_run
from tests.export.test_tokenizer import HARD
from tests.launch import environment
from tests.small import MODERN
from xlme_ds.checkpoint import __main__ as checkpoint
from xlme_ds.config import EncoderName, StartConfig
from xlme_ds.evaluate.compared_models import load_predictors
from xlme_ds.export.__main__ import main
from xlme_ds.export.exported_folder import ExportedModel, write_folder
from xlme_ds.first_weights import starting_weights
from xlme_ds.models.heads import MaskedLanguageModelHead
from xlme_ds.models.text_encoder import positions_and_segments
from xlme_ds.trained.config_json import read_run_config
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.exports import read_heads
from xlme_ds.trained.runs import load_run

TOKENS = torch.tensor([[0, 11, 12, 13, 17, 19, 2], [0, 21, 2, 1, 1, 1, 1], [0, 31, 32, 33, 34, 2, 1]])
INSIDE = TOKENS != 1
TEXT = "kalo <mask> sador"
SHAPES: dict[str, dict[str, Any]] = {"xlm-roberta": {"relative_bias": "none"}, "modernbert": MODERN}
CLASSES = {
    "xlm-roberta": (XLMRobertaForMaskedLM, XLMRobertaModel),
    "modernbert": (ModernBertForMaskedLM, ModernBertModel),
}
# In float64; ModernBERT's class rotates in float32 all the same.
BOUNDS = {"xlm-roberta": 1e-12, "modernbert": 1e-5}


@pytest.fixture(scope="module", params=SHAPES)
def form(request: pytest.FixtureRequest) -> str:
    """The `model_type` of the exports."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def masked(form: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of masked language modelling with one encoder, and its export."""
    root = tmp_path_factory.mktemp("masked")
    run = write_run(root / "run", objective="mlm", vocabulary_blocks=3, norm_epsilon=1e-6, **SHAPES[form])
    main(["--run", str(run), "--out", str(root / "export")])
    return run, root / "export"


@pytest.fixture(scope="module")
def two(form: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of replaced token detection with two encoders, and its export."""
    root = tmp_path_factory.mktemp("two")
    run = write_run(root / "run", objective="electra", embedding_sharing="gdes", **SHAPES[form])
    main(["--run", str(run), "--out", str(root / "export")])
    return run, root / "export"


def load(auto: Any, folder: Path, **settings: object) -> Any:
    return auto.from_pretrained(folder, dtype=torch.float64, **settings)


def hidden_states(run: Path, which: EncoderName, tokens: Tensor = TOKENS) -> list[Tensor]:
    return load_run(run).encoder(which).double().hidden_states(tokens, *positions_and_segments(tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_and_logits_are_ours(
    form: str, masked: tuple[Path, Path], two: tuple[Path, Path], attention: str
) -> None:
    """In float64, for both encoders of a run too."""
    cases: list[tuple[Path, Path, EncoderName]] = [(*masked, "encoder"), (*two, "discriminator")]
    cases.append((two[0], two[1] / "generator", "generator"))
    for run, folder, which in cases:
        expected = hidden_states(run, which)
        auto = AutoModel if which == "discriminator" else AutoModelForMaskedLM
        found = load(auto, folder, attn_implementation=attention)(TOKENS, INSIDE.long(), output_hidden_states=True)
        assert len(found.hidden_states) == len(expected)
        for theirs, ours in zip(found.hidden_states, expected, strict=True):
            torch.testing.assert_close(theirs[INSIDE], ours[INSIDE], rtol=0, atol=BOUNDS[form])
        if auto is AutoModelForMaskedLM:
            state, cfg = load_run(run).state, load_run(run).model
            head = MaskedLanguageModelHead(cfg).double()
            own = {name.removeprefix("masked_head."): value for name, value in state.items() if "masked_head" in name}
            head.load_state_dict(own)
            assert head.dense is not None and head.norm is not None
            table = torch.cat([state[f"embedding_{n}"] for n in range(cfg.vocabulary_blocks)]).double()
            logits = F.linear(head.norm(F.gelu(head.dense(expected[-1]))), table, head.bias)
            torch.testing.assert_close(found.logits[INSIDE], logits[INSIDE], rtol=0, atol=BOUNDS[form])


def test_padding_on_the_left_changes_nothing(form: str, masked: tuple[Path, Path]) -> None:
    row = TOKENS[:1]
    padded = F.pad(row, (3, 0), value=1)
    found = load(AutoModel, masked[1])(padded, (padded != 1).long())[0][:, 3:]
    torch.testing.assert_close(found, hidden_states(masked[0], "encoder", row)[-1], rtol=0, atol=BOUNDS[form])


def test_the_longest_item_is_read(form: str, masked: tuple[Path, Path]) -> None:
    """As many positions as ours has, and no more of learned ones."""
    row = torch.arange(40)[None] + 4
    encoder = load(AutoModel, masked[1])
    found = encoder(row)[0]
    torch.testing.assert_close(found, hidden_states(masked[0], "encoder", row)[-1], rtol=0, atol=BOUNDS[form])
    assert AutoTokenizer.from_pretrained(masked[1]).model_max_length == 40
    if form == "xlm-roberta":
        with pytest.raises((IndexError, RuntimeError)):
            encoder(torch.arange(41)[None] + 4)


def test_files_are_those_that_transformers_saves(
    form: str, masked: tuple[Path, Path], two: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder, kind in zip((masked[1], two[1]), CLASSES[form], strict=True):
        config = AutoConfig.from_pretrained(folder)
        assert (config.model_type, config.architectures) == (form, [kind.__name__])
        kind(config).save_pretrained(tmp_path / kind.__name__)
        theirs, ours = (load_file(each / "model.safetensors") for each in (tmp_path / kind.__name__, folder))
        assert {name: value.shape for name, value in ours.items()} == {
            name: value.shape for name, value in theirs.items()
        }
        settings = json.loads((folder / "config.json").read_text())
        saved = json.loads((tmp_path / kind.__name__ / "config.json").read_text())
        for base in (
            "global_rope_theta",
            "local_rope_theta",
        ):  # older versions and other readers have them by this name
            settings.pop(base, None)
        assert {name: saved.get(name) for name in settings} == settings
        assert not list(folder.rglob("*.py")) and "trust_remote_code" not in (folder / "README.md").read_text()


FRESH = """
import importlib.util, json, sys
folder, text, site = sys.argv[1:]
sys.path.append(site)  # not as a site folder: an editable installation is not followed
assert importlib.util.find_spec("xlme_ds") is None
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline
from sentence_transformers import SentenceTransformer
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(text, return_tensors="pt")
found = {"ids": inputs["input_ids"][0].tolist()}
print("quiet", file=sys.stderr)
found["logits"] = AutoModelForMaskedLM.from_pretrained(folder)(**inputs).logits[0].tolist()
print("quiet", file=sys.stderr)
found["hidden"] = AutoModel.from_pretrained(folder)(**inputs)[0][0].tolist()
found["fill"] = [[each["token"], each["score"]] for each in pipeline("fill-mask", folder)(text)]
found["vector"] = SentenceTransformer(folder).encode([text])[0].tolist()
print(json.dumps(found))
"""


def test_without_our_package(masked: tuple[Path, Path], tmp_path: Path) -> None:
    """In a process in which xlme_ds cannot be imported, no code is trusted."""
    run, folder = masked
    site = Path(sentence_transformers.__file__).parents[1]
    variables = {name: value for name, value in environment(HF_HUB_OFFLINE=1).items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", FRESH, str(folder), TEXT, str(site)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    vocabulary = load_run(run).vocabulary
    assert found["ids"] == [0, *vocabulary.encode("kalo"), vocabulary.mask_id, *vocabulary.encode("sador"), 2]
    ids = torch.tensor([found["ids"]])
    hidden = hidden_states(run, "encoder", ids)[-1]
    torch.testing.assert_close(torch.tensor(found["hidden"]), hidden[0].float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["vector"]), hidden[0].mean(0).float(), rtol=0, atol=1e-5)
    (filled,) = xlme.load(run).fill(TEXT)
    assert [vocabulary.piece(token) for token, _ in found["fill"]] == [piece.text for piece in filled]
    assert [score for _, score in found["fill"]] == pytest.approx([piece.probability for piece in filled], abs=1e-6)
    _, with_head, without = done.stderr.split("quiet")  # the second load reports the head that it leaves out
    assert "UNEXPECTED" not in with_head and "UNEXPECTED" in without


def reported(auto: Any, folder: Path, **settings: object) -> str:
    """What transformers logs while it loads."""
    stream, logger = io.StringIO(), logging.getLogger("transformers")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        auto.from_pretrained(folder, **settings)
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


def test_an_encoder_loads_without_a_report(masked: tuple[Path, Path], two: tuple[Path, Path], tmp_path: Path) -> None:
    """Of parameters that are in the file and not in the class, or the other way; in the form with our code too."""
    assert "UNEXPECTED" in reported(AutoModel, masked[1])  # a report as it looks
    assert "REPORT" not in reported(AutoModel, two[1])
    assert "REPORT" not in reported(AutoModelForMaskedLM, two[1], subfolder="generator")
    gated = write_run(tmp_path / "run")
    main(["--run", str(gated), "--out", str(tmp_path / "export")])
    for auto, part in ((AutoModel, "."), (AutoModel, "generator"), (AutoModelForPreTraining, ".")):
        assert "REPORT" not in reported(auto, tmp_path / "export" / part, trust_remote_code=True)
    tagger = reported(AutoModelForTokenClassification, tmp_path / "export", trust_remote_code=True)
    assert "head.output.bias" in tagger and "UNEXPECTED" not in tagger


def test_the_tokenizer_is_ours(masked: tuple[Path, Path]) -> None:
    """Class and files of XLM-R's own tokenizer are not put in its place."""
    tokenizer, vocabulary = AutoTokenizer.from_pretrained(masked[1]), load_run(masked[0]).vocabulary
    for line in HARD:
        assert tokenizer(line)["input_ids"] == [0, *vocabulary.encode(line).tolist(), 2], ascii(line)
    assert tokenizer("kalo", "sador")["input_ids"].count(2) == 2
    places = tokenizer("kalo mi ter", return_offsets_mapping=True)["offset_mapping"]
    assert not any("kalo mi ter"[start:end].startswith(" ") for start, end in places)


def test_a_layer_of_it_joins_pairs_as_it_does(form: str, masked: tuple[Path, Path], tmp_path: Path) -> None:
    """With one `</s>` between the texts, as the model was trained; XLM-R has two."""
    if form == "modernbert":
        pytest.skip("--from-hf reads only models of XLM-R's shape")
    run, folder = masked
    main(["--from-hf", str(folder), "--layer", "1", "--out", str(tmp_path / "cut")])
    # The export of a fine-tuned model does not say which encoder it is.
    encoder, vocabulary = load_run(run).encoder(), load_run(run).vocabulary
    write_folder(tmp_path / "tuned", ExportedModel(encoder, "XLMEModel", model_type="xlm-roberta"), vocabulary, "")
    main(["--from-hf", str(tmp_path / "tuned"), "--out", str(tmp_path / "again")])
    # Saved by transformers without its tokenizer, with the vocabulary copied next to it.
    AutoModel.from_pretrained(tmp_path / "tuned").save_pretrained(tmp_path / "saved")
    shutil.copy(folder / "sentencepiece.bpe.model", tmp_path / "saved")
    main(["--from-hf", str(tmp_path / "saved"), "--out", str(tmp_path / "third")])
    folders = folder, tmp_path / "cut", tmp_path / "again", tmp_path / "third"
    first, *others = (AutoTokenizer.from_pretrained(of)("kalo", "sador")["input_ids"] for of in folders)
    assert others == [first] * 3 and first.count(2) == 2


def test_a_discriminator_converted_again_keeps_its_head(
    form: str, two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if form == "modernbert":
        pytest.skip("--from-hf reads only models of XLM-R's shape")
    main(["--from-hf", str(two[1]), "--out", str(tmp_path / "again")])
    assert f"{two[1] / 'generator'} is left out" in capsys.readouterr().err
    assert xlme.load(tmp_path / "again").judge("kalo mi ter") == xlme.load(two[1]).judge("kalo mi ter")
    main(["--from-hf", str(two[1] / "generator"), "--out", str(tmp_path / "generator")])
    assert "left out" not in capsys.readouterr().err
    assert xlme.load(tmp_path / "generator").fill("kalo <mask>") == xlme.load(two[1]).fill("kalo <mask>")


@pytest.mark.parametrize("saved", [False, True])
def test_it_goes_back_whole(masked: tuple[Path, Path], tmp_path: Path, saved: bool) -> None:
    """Bit for bit, also from shards that transformers saved."""
    run, folder = masked
    if saved:
        AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(tmp_path / "saved", max_shard_size="8KB")
        shutil.copy(folder / "sentencepiece.bpe.model", tmp_path / "saved")
        folder = tmp_path / "saved"
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    config, state = read_run_config(run), load_run(run).state
    config = replace(config, start=StartConfig(str(folder), take="all"))
    weights = starting_weights(config, load_run(run).vocabulary)
    assert weights is not None
    for name, value in state.items():
        found = weights(name)
        assert found is not None and torch.equal(found, value), name
    (predictor,) = load_predictors(folder, with_untrained=False)
    assert xlme.load(folder).fill(TEXT) == xlme.load(run).fill(TEXT)
    assert torch.equal(predictor.model.state_dict()["masked_head.bias"], state["masked_head.bias"])
    with pytest.raises(ValueError, match=r"has no discriminator: set --which or start.take to encoder"):
        load_encoder(folder, "discriminator")


def test_two_encoders_go_back_whole(two: tuple[Path, Path]) -> None:
    run, folder = two
    config, state = read_run_config(run), load_run(run).state
    weights = starting_weights(replace(config, start=StartConfig(str(folder), take="all")), load_run(run).vocabulary)
    assert weights is not None
    for name, value in state.items():
        found = weights(name)
        assert found is not None and torch.equal(found, value), name
    assert read_heads(folder).keys() == {name for name in state if name.startswith("replaced_head.")}
    for ours, theirs in zip(*(xlme.load(each).judge("kalo miter") for each in two), strict=True):
        assert ours == theirs


def test_an_encoder_may_be_cut_and_taken_alone(form: str, two: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = two
    cases = [(tmp_path / "generator", "generator", -1)]
    xlme.export.run(run, tmp_path / "generator", which="generator")
    if form == "xlm-roberta":  # a pre-LN model has one norm after its last layer alone
        xlme.export.run(run, tmp_path / "cut", layer=1)
        cases.append((tmp_path / "cut", "discriminator", 1))
    for folder, which, layer in cases:
        found = load(AutoModel, folder)(TOKENS, INSIDE.long())[0]
        expected = hidden_states(run, which)[layer]  # type: ignore[arg-type]
        torch.testing.assert_close(found[INSIDE], expected[INSIDE], rtol=0, atol=BOUNDS[form])
        assert torch.equal(load_encoder(folder).encoder.embedding_0, load_run(run).encoder(which).embedding_0)  # type: ignore[arg-type]


def test_longer_rows_start_from_it(tmp_path: Path) -> None:
    """ModernBERT's body has no table of positions: another rotary base and longer rows take every weight."""
    run = write_run(tmp_path / "run", **MODERN)
    config, start = read_run_config(run), StartConfig(str(run), take="all")
    longer = replace(config, start=start, model=replace(config.model, max_positions=8192, rotary_base=5e5))
    weights = starting_weights(longer, load_run(run).vocabulary)
    assert weights is not None
    assert all(torch.equal(weights(name), value) for name, value in load_run(run).state.items())  # type: ignore[arg-type]
    other = read_run_config(write_run(tmp_path / "other", like=run))
    for changed, told in (
        (replace(other, start=start), "has body modern, model.body is xlme: set it to the same"),
        (replace(longer, model=replace(longer.model, local_window=16)), "has local_window 8, model.local_window is 16"),
    ):
        with pytest.raises(ValueError, match=told):
            starting_weights(changed, load_run(run).vocabulary)


def test_exports_are_averaged_and_checked(
    form: str, two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = two
    other = write_run(tmp_path / "other", seed=2, embedding_sharing="gdes", like=run, **SHAPES[form])
    xlme.export.run(other, tmp_path / "export")
    folder = shutil.copytree(folder, tmp_path / "first")
    (folder / "model.onnx").write_bytes(b"of the first alone")
    checkpoint.main(
        ["average", "--model", str(folder), "--model", str(tmp_path / "export"), "--out", str(tmp_path / "mean")]
    )
    state, vocabulary = load_run(run).state, load_run(run).vocabulary
    config = replace(read_run_config(run), start=StartConfig(str(tmp_path / "mean"), take="all"))
    weights = starting_weights(config, vocabulary)
    assert weights is not None
    for name, value in load_run(other).state.items():
        found = weights(name)
        assert found is not None
        torch.testing.assert_close(found, (value + state[name]) / 2, rtol=0, atol=1e-6)
    assert not (tmp_path / "mean/model.onnx").exists()
    damaged = tmp_path / "mean/replaced_head.safetensors"
    checkpoint.main(["check", "--run", str(tmp_path / "mean")])
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(SystemExit):
        checkpoint.main(["check", "--run", str(tmp_path / "mean")])
    assert "replaced_head.safetensors  not usable" in capsys.readouterr().out


def test_a_resized_vocabulary(masked: tuple[Path, Path], tmp_path: Path) -> None:
    """Old tokens keep their logits; ours reads the model again after it has its size back."""
    run, folder = masked
    loaded = load(AutoModelForMaskedLM, folder)
    before, size = loaded(TOKENS, INSIDE.long()).logits, loaded.config.vocab_size
    loaded.resize_token_embeddings(size + 5)
    loaded.save_pretrained(tmp_path / "longer")
    shutil.copy(folder / "sentencepiece.bpe.model", tmp_path / "longer")
    for found in (loaded, load(AutoModelForMaskedLM, tmp_path / "longer")):
        after = found(TOKENS, INSIDE.long()).logits
        assert after.shape[-1] == size + 5
        torch.testing.assert_close(after[..., :size], before, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=rf"{size + 5} tokens, its vocabulary {size}: call resize_token_embeddings"):
        load_encoder(tmp_path / "longer")
    loaded.resize_token_embeddings(size)
    loaded.float().save_pretrained(tmp_path / "back")
    shutil.copy(folder / "sentencepiece.bpe.model", tmp_path / "back")
    state = load_run(run).state
    assert all(torch.equal(value, state[name]) for name, value in read_heads(tmp_path / "back").items())


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_problem_type_chooses_the_loss(two: tuple[Path, Path], problem: str) -> None:
    labels = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    loaded = load(AutoModelForSequenceClassification, two[1], num_labels=2, problem_type=problem)
    found = loaded(TOKENS, INSIDE.long(), labels=labels)
    loss = F.binary_cross_entropy_with_logits if problem.startswith("multi") else F.mse_loss
    torch.testing.assert_close(found.loss, loss(found.logits, labels))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"relative_bias": "gated"}, "the model has relative_bias gated, which XLM-R does not have"),
        ({"relative_bias": "none", "norm": "pre"}, "the model has norm pre"),
        ({"relative_bias": "none", "absolute_positions": False}, "the model has absolute_positions False"),
        ({"relative_bias": "none", "language_embeddings": ("de", "en")}, "the model has language_embeddings"),
        ({"relative_bias": "none", "layout": "xlm"}, "the model has layout xlm"),
        ({"relative_bias": "none", "masked_head": "linear"}, "the model has masked_head linear"),
    ],
)
def test_another_shape_is_written_as_ours_or_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    run = write_run(tmp_path / "run", objective="mlm", **changes)
    with pytest.raises(SystemExit) as stop:
        main(["--run", str(run), "--out", str(tmp_path / "no"), "--model-type", "xlm-roberta"])
    assert stop.value.code == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and "leave out model_type xlm-roberta" in line
    main(["--run", str(run), "--out", str(tmp_path / "x")])
    assert json.loads((tmp_path / "x/config.json").read_text())["model_type"] == "xlme"


def test_our_code_may_be_asked_for(form: str, two: tuple[Path, Path], tmp_path: Path) -> None:
    if form == "modernbert":
        with pytest.raises(ValueError, match="body modern, which our classes do not have: leave out model_type xlme"):
            xlme.export.run(two[0], tmp_path / "x", model_type="xlme")
        assert not (tmp_path / "x").exists()
        return
    xlme.export.run(two[0], tmp_path / "x", model_type="xlme")
    assert json.loads((tmp_path / "x/config.json").read_text())["model_type"] == "xlme"
    assert re.search("AutoModelForPreTraining", (tmp_path / "x/README.md").read_text())
    assert torch.equal(load_encoder(tmp_path / "x").encoder.embedding_0, load_encoder(two[1]).encoder.embedding_0)
