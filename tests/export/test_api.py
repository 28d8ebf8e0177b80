"""`xlme_ds.load`: what the model says in Python is what the export says in transformers."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

import xlme_ds as xlme
import xlme_ds.config as configs
from tests.evaluate.folders import write_run
from tests.launch import ROOT, environment
from xlme_ds.api import ScoredPiece, TextModel, pretrain
from xlme_ds.config import RunConfig
from xlme_ds.data.schema import read_manifest, write_manifest
from xlme_ds.evaluate.__main__ import main as evaluate
from xlme_ds.export.__main__ import main as export
from xlme_ds.predict import main as predict
from xlme_ds.trained.weights import read_metadata, read_weights, save_weights

TEXT = "kalo mi ter un dorin"
PRETRAIN: Any = pretrain  # `xlme.pretrain` is a module after a test of the command has imported it


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("api") / "export"
    export(["--run", str(run), "--out", str(to)])
    return to


@pytest.fixture(scope="module", params=["run", "export"])
def model(request: pytest.FixtureRequest, run: Path, exported: Path) -> TextModel:
    return xlme.load(run if request.param == "run" else str(exported))


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, xlme_ds; xlme_ds.recipe('base_zero1'), xlme_ds.evaluate"
    code += "; xlme_ds.export.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_verdicts_are_those_of_transformers(model: TextModel, exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    theirs = AutoModelForPreTraining.from_pretrained(exported, trust_remote_code=True)
    inputs = tokenizer(TEXT, return_tensors="pt")
    expected = torch.sigmoid(theirs(**inputs).logits[0, 1:-1])
    found = model.judge(TEXT)
    assert [piece.text for piece in found] == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[1:-1]
    assert [piece.probability for piece in found] == pytest.approx(expected.tolist(), abs=1e-5)


def test_fillings_are_those_of_transformers(model: TextModel, exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    theirs = AutoModelForMaskedLM.from_pretrained(exported, subfolder="generator", trust_remote_code=True)
    text = "kalo<mask>mi<mask>. ter<mask>"  # after two of them no word begins
    inputs = tokenizer(text, return_tensors="pt")
    assert "mi" in tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    masked = inputs["input_ids"][0] == tokenizer.mask_token_id
    best = theirs(**inputs).logits[0, masked].softmax(-1).topk(3)
    found = model.fill(text, top=3)
    assert len(found) == 3
    for pieces, ids, shares in zip(found, best.indices, best.values, strict=True):
        assert [piece.text for piece in pieces] == tokenizer.convert_ids_to_tokens(ids)
        assert [piece.probability for piece in pieces] == pytest.approx(shares.tolist(), rel=1e-4)


def test_predictions_on_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as in Python; a mistake ends in one line."""
    model, words = xlme.load(run), ["--model", str(run), "--text", "kalo mi <mask>", TEXT]
    predict(words)
    filled, judged = capsys.readouterr().out.splitlines()
    best = ", ".join(
        f"{piece.text.lstrip('▁')} {piece.probability:.0%}" for piece in model.fill("kalo mi <mask>")[0][:3]
    )
    assert filled == f"fill:  kalo mi <mask>  {best}"
    assert re.sub(r" \[\d+% replaced\]", "", judged) == f"judge: {TEXT}"
    with pytest.raises(SystemExit, match="2"):
        predict([*words, "--language", "de"])
    said = f"{run} has no language embeddings, so it reads texts of all languages alike: leave language out"
    assert capsys.readouterr() == ("", f"xlme predict: error: {said}\n")


def test_vectors_are_those_of_sentence_transformers(model: TextModel, exported: Path) -> None:
    sentences = [TEXT, "ve sa pe", "kalo"]
    expected = SentenceTransformer(str(exported), trust_remote_code=True, device="cpu").encode(sentences)
    assert np.abs(model.encode(sentences) - expected).max() < 1e-5
    assert not np.allclose(model.encode(sentences, layer=1), expected, atol=1e-3)


def test_one_string_has_one_vector(model: TextModel) -> None:
    """A sequence of its letters would have one each."""
    one = model.encode(TEXT)
    assert one.ndim == 1 and np.array_equal(one, model.encode([TEXT])[0])
    assert model.encode([]).shape == (0, len(one))


def test_sentences_that_are_cut_are_counted(model: TextModel) -> None:
    longest = model._encoder.encoder.cfg.max_positions - 2
    ids = model._encoder.vocabulary.encode(text := " ".join(["kalo"] * 100))
    assert len(ids) > longest
    with pytest.warns(UserWarning, match=f"2 of 3 sentences were cut to {longest} tokens"):
        vectors = model.encode([text, "kalo", text + " mi"])
    assert np.array_equal(vectors[0], vectors[2])


def test_a_model_says_what_it_is(model: TextModel, run: Path) -> None:
    said, cfg = repr(model), model._encoder.encoder.cfg
    assert str(model.folder) in said and f"{cfg.discriminator_layers} layers of width {cfg.width}" in said
    assert said.endswith("on cpu>") and ("of electra" in said) == (model.folder == run)
    assert f", {cfg.vocabulary:,} pieces, up to {cfg.max_positions} tokens, on cpu>" in said
    assert " at step " not in said and f"<model of electra in {run}@2 at step 2: " in repr(xlme.load(f"{run}@2"))


def test_a_model_can_be_given_in_place_of_its_folder(run: Path, data: Path, tmp_path: Path) -> None:
    """Of a run that goes on after the model was loaded, its step too."""
    model: Any = xlme.load(run)
    assert os.fspath(model) == str(run)
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy/model/model.safetensors").unlink()
    for name in ("copy", "copy@2"):
        assert os.fspath(xlme.load(tmp_path / name)) == f"{tmp_path / 'copy'}@2"
    found = xlme.evaluate.losses(run, data / "heldout", rows=2)
    assert xlme.evaluate.losses(model, data / "heldout", rows=2) == found
    assert xlme.evaluate.losses([model], data / "heldout", rows=2) == found


def test_a_mistake_is_a_plain_value_error(tmp_path: Path) -> None:
    """A class of ours would say nothing to the reader of a traceback."""
    code = "from xlme_ds import pretrain, recipe; pretrain(recipe('quickstart'), 'none', 'out')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    assert re.match(rb"(\[rank0\]: )?ValueError: none does not exist: ", done.stderr.splitlines()[-1]), done.stderr
    with pytest.raises(ValueError, match=r"^none does not exist: ") as raised:
        xlme.finetune.run("ner", "none", "none", tmp_path)
    assert raised.type is ValueError


def test_a_device(run: Path) -> None:
    assert xlme.load(run, device="cpu").device == torch.device("cpu")
    for device in ("cuda:99", "gpu"):
        with pytest.raises(ValueError, match=f"device {device} cannot be used: "):
            xlme.load(run, device=device)
    # A device without numbers shows where tensors lie: all of the model's are there, and the text's follow.
    meta = xlme.load(run, device="meta")
    assert {value.device.type for value in meta._encoder.encoder.parameters()} == {"meta"}
    for encoder, head in (meta._masked_language_model, meta._discriminator):
        assert {value.device.type for part in (encoder.encoder, head) for value in part.parameters()} == {"meta"}


def test_what_the_package_shows(tmp_path: Path) -> None:
    shown = [name for name in dir(xlme) if not name.startswith("_")]
    modules = {"plan", "evaluate", "finetune", "export", "translate"}
    classes = {"RunConfig": RunConfig, "ScoredPiece": ScoredPiece, "TextModel": TextModel}
    assert set(shown) == {"recipe", "pretrain", "load", "recipes", *classes, *modules}
    assert all(getattr(xlme, name) is value for name, value in classes.items())
    assert "lambda" not in str(inspect.signature(xlme.RunConfig)) and "base" in xlme.recipes.SUMMARIES
    assert all(getattr(xlme, name).__doc__ for name in shown)
    assert dir(xlme.recipes) == ["RECIPES", "SUMMARIES"]
    assert [dir(getattr(xlme, name)) for name in sorted(modules)] == [
        ["align", "losses", "pairs", "perplexity", "tatoeba", "words"], ["from_hf", "run"], ["run"], ["run"], ["lines"]
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"^there is no which 'decoder': did you mean encoder\?$"):
        xlme.export.run(tmp_path, tmp_path / "out", which="decoder")  # type: ignore[arg-type]
    for name, said in (
        ("fintune", r"^there is no name 'xlme\.fintune': did you mean xlme\.finetune\?$"),
        ("zzz", r"^there is no name 'xlme\.zzz': choose one of .*, finetune, .*, pretrain,"),
        ("report", r"^xlme\.report is only a command: run `xlme report --help` in a shell$"),
    ):
        with pytest.raises(AttributeError, match=said):
            xlme.__getattr__(name)  # another test may have imported the module of this name
    found = xlme.plan.run(xlme.recipe("base"), gpus=8, gpu="h100")
    assert found["hardware"]["gpu"] == "h100-80g" and len(found["layouts"]) == 4
    for options in ({"gpus": 0}, {"gpus": -2}, {"layouts": -1}, {"utilisation": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))} is {next(iter(options.values()))}: it must be "):
            xlme.plan.run(xlme.recipe("base"), **options)  # type: ignore[arg-type]
    for config, name in (("large", "large"), ({"train": {}}, "base")):
        words = rf'^config is a {type(config).__name__}: give a RunConfig, such as xlme\.recipe\("{name}"\)$'
        with pytest.raises(ValueError, match=words):
            xlme.plan.run(config)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            pretrain(config, "data", Path("run"))  # type: ignore[arg-type]
    base = xlme.recipe("base")
    with pytest.raises(
        ValueError, match=r"^train is a dict: give a TrainConfig, such as replace\(config\.train, \.\.\.\)$"
    ):
        xlme.plan.run(replace(base, train={"steps": 5}))  # type: ignore[arg-type]
    assert xlme.recipe("base", name="mine") == replace(base, name="mine")
    first, *sections, _ = repr(base).splitlines()
    names = [line.partition("=")[0].strip() for line in sections]
    assert first == "RunConfig(" and names == [field.name for field in fields(base)]
    assert eval(repr(base), vars(configs)) == base and tomllib.loads(str(base))["train"]["steps"] == base.train.steps
    changed = xlme.recipe("base", seed=2, train={"steps": 20_000}, data={"phase_steps": (1, 2)})
    assert changed == replace(
        base, seed=2, train=replace(base.train, steps=20_000), data=replace(base.data, phase_steps=(1, 2))
    )
    assert xlme.recipe("base", train=changed.train) == replace(base, train=changed.train)
    written = tmp_path / "base.toml"
    written.write_text(str(changed), encoding="utf-8")
    assert xlme.recipe(written) == xlme.recipe(str(written)) == changed
    assert xlme.recipe(str(written), seed=3) == replace(changed, seed=3)
    written.write_text('recipe = "base"\n[model]\nheads = 7\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"not a multiple of model\.heads 7"):
        xlme.recipe(written)
    for settings, said in (
        ({"model": {"heads": 7}}, "^model.width 768 is not a multiple of model.heads 7: "),
        ({"train": 500}, "^xlme.recipe: train is 500, but it must be a dictionary or an instance of TrainConfig$"),
    ):
        with pytest.raises(ValueError, match=said):
            xlme.recipe("base", **settings)
    with pytest.raises(
        ValueError, match=r"^xlme\.recipe: there is no setting 'train\.stpes': did you mean train\.steps\?$"
    ):
        xlme.recipe("base", train={"stpes": 3})


def test_a_model_is_loaded_on_a_gpu_if_there_is_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And on the CPU when DeepSpeed is told to use it. Here torch only says that there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert xlme.load(run).device == torch.device("cpu")
    monkeypatch.delenv("DS_ACCELERATOR")
    with pytest.raises(ValueError, match=r"^device cuda cannot be used: "):
        xlme.load(run)
    with pytest.raises(ValueError, match=r"^device  cannot be used: "):
        xlme.load(run, "")


def test_a_recipe_may_be_changed_again() -> None:
    config = xlme.recipe("base", train={"steps": 7}, optimizer={"warmup_steps": 1})
    changed = xlme.recipe(config, seed=5)
    assert (changed.seed, changed.train, config.seed) == (5, config.train, 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e-4}, "there is no setting 'lr': did you mean optimizer={\"learning_rate\": ...}?"),
        ({"steps": 9}, "there is no setting 'steps': did you mean train={\"steps\": ...}?"),
        ({"train.steps": 9}, "there is no setting 'train.steps': did you mean train={\"steps\": ...}?"),
        ({"optimiser": {}}, "there is no setting 'optimiser': did you mean optimizer?"),
        ({"optimizer": {"lr": 1}}, "there is no setting 'optimizer.lr': did you mean optimizer.learning_rate?"),
        ({"train": {"steps": 0}}, "train.steps is 0: it must be at least 1"),
        ({"model": {"body": "bert"}}, "model.body bert is not known: choose one of xlme, modern"),
        ({"data": {"phase_rotary_bases": [1, 0]}}, "data.phase_rotary_bases is (1.0, 0.0): each must be positive"),
    ],
)
def test_a_mistake_in_the_settings_of_a_recipe(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'xlme.recipe: {said}')}$"):
        xlme.recipe("base", **settings)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda api: api.recipe(3), "name is 3: it must be a string"),
        (lambda api: api.load(None), "folder is None: it must be a path"),
        (lambda api: PRETRAIN(api.recipe("base"), None, "o"), "data is None: it must be a path or a list of paths"),
        (lambda api: PRETRAIN(api.recipe("base"), "d", 1), "out is 1: it must be a path"),
        (lambda api: api.plan.run(api.recipe("base"), gpus="8"), "gpus is '8': it must be a whole number"),
        (lambda api: api.plan.run(api.recipe("base"), utilisation="1"), "utilisation is '1': it must be a number"),
        (lambda api: api.evaluate.pairs(["r", 3], "d"), "models is ['r', 3]: it must be a path or a list of paths"),
        (lambda api: api.evaluate.pairs("r", "d", layer="x"), "layer is 'x': it must be a whole number"),
        (lambda api: api.evaluate.pairs("r", "d", limit=None), "limit is None: it must be a whole number"),
        (lambda api: api.export.run("r", None), "out is None: it must be a path"),
        (lambda api: api.finetune.run("ner", "r", "d", "o", seed="1"), "seed is '1': it must be a whole number"),
        (lambda api: api.finetune.run("ner", "r", "d", "o", epoch=1),
         "there is no argument 'epoch': did you mean epochs?"),
        (lambda api: api.finetune.run("ner", "r", "d", "o", lr=3),
         "there is no argument 'lr': did you mean learning_rate?"),
        (lambda api: api.finetune.run("ner", "r", "d", "o", epochs="1"),
         "tuning.epochs is '1': it must be a whole number"),
        (lambda api: api.finetune.run("ner", "r", "d", "o", train_languages="en"),
         "tuning.train_languages is 'en': it must be a list"),
        (lambda api: api.finetune.run("nre", "r", "d", "o"), "there is no task 'nre': did you mean ner?"),
        (lambda api: api.evaluate.pairs("r", "d", which="foo"),
         "there is no which 'foo': choose one of encoder, discriminator, generator"),
        (lambda api: api.translate.lines("r", [3], "en", "de"), "text is [3]: it must be a list of strings"),
    ],
)  # fmt: skip
def test_an_argument_of_the_wrong_type(call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        call(xlme)


def test_numbers_of_numpy_are_taken(run: Path, data: Path, tmp_path: Path) -> None:
    two, half = np.int64(2), np.float32(0.5)
    assert json.dumps(xlme.evaluate.losses(run, data / "heldout", rows=two, seed=two))
    assert json.dumps(xlme.evaluate.pairs(run, data / "heldout", limit=np.int64(20), layer=two))
    assert json.dumps(xlme.plan.run(xlme.recipe("base"), gpus=two, utilisation=half, layouts=two))
    assert xlme.load(xlme.export.run(run, tmp_path / "cut", layer=two)).encode("a").shape == (32,)


def test_colleagues_can_read_what_is_written(run: Path, exported: Path) -> None:
    for folder in (run / "model", exported, exported / "generator"):
        modes = {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}
        assert modes == {(exported / "config.json").stat().st_mode & 0o777}


def test_an_export_is_that_which_was_loaded(exported: Path, tmp_path: Path) -> None:
    """Vectors come from the weights at loading, and heads are not read from other weights."""
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    loaded, weights = xlme.load(copy), copy / "model.safetensors"
    vector = xlme.load(exported).encode("a b")
    weights.write_bytes(weights.read_bytes()[:100])
    assert np.array_equal(loaded.encode("a b"), vector)
    with pytest.raises(ValueError, match="copy is no longer the export that was loaded: load it again"):
        loaded.judge("a b")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        xlme.load(copy)


def test_a_loaded_run_needs_its_folder_no_more(model: TextModel, run: Path, tmp_path: Path) -> None:
    """Another run may take its place, with another vocabulary."""
    loaded = xlme.load(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")
    assert loaded.judge("a b") == model.judge("a b") and loaded.fill("a<mask>b") == model.fill("a<mask>b")


def test_a_language_without_an_embedding(tmp_path: Path) -> None:
    loaded = xlme.load(write_run(tmp_path / "run", objective="mlm", language_embeddings=("de", "zh-Hans")))
    assert np.array_equal(loaded.encode("kalo", language="zh"), loaded.encode("kalo", language="zh-Hans"))
    for language, said in (("", "has language embeddings"), ("xx", "has no embedding of the language xx")):
        with pytest.raises(ValueError, match=f"run {said}: set language= to one of de, zh-Hans$"):
            loaded.encode("kalo", language=language)


def test_another_export_may_get_the_inode_of_a_deleted_one(exported: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    loaded, weights, other = xlme.load(copy), copy / "model.safetensors", tmp_path / "other.safetensors"
    save_weights({name: -value for name, value in read_weights(weights).items()}, other, read_metadata(weights))
    assert other.stat().st_size == weights.stat().st_size
    weights.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="copy is no longer the export that was loaded: load it again"):
        loaded.judge("a b")


def test_refusals(model: TextModel, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the text has no <mask>: write it where"):
        model.fill(TEXT)
    pieces = model._encoder.encoder.cfg.vocabulary
    assert len(model.fill("<mask>", top=pieces)[0]) == pieces
    for top in (-1, 0, pieces + 1):
        with pytest.raises(ValueError, match=f"top is {top}: it must be 1 to {pieces}, the number of pieces"):
            model.fill("<mask>", top=top)
    for read in (model.encode, model.judge, model.fill):
        with pytest.raises(ValueError, match="the text has no Unicode character at position 2: decode it as UTF-8"):
            read(os.fsdecode(b"a \xff<mask>"))
        with pytest.raises(ValueError, match="has no language embeddings, so it reads texts of all languages alike"):
            read("a <mask>" if read == model.fill else "a", language="zzz")
    with pytest.raises(ValueError, match=r"^the text has <mask>, which only `fill` reads: "):
        model.judge("a <mask> b")
    with pytest.raises(ValueError, match=r"^layer is True: it must be a whole number$"):
        model.encode("a", layer=True)
    with pytest.raises(ValueError, match=r"^folder is '': it must be a path$"):
        xlme.load("")
    with pytest.raises(ValueError, match=r"^models is \['a', ''\]: it must be a path or a list of paths$"):
        xlme.evaluate.pairs(["a", ""], "d")
    for read in (model.judge, model.fill):
        with pytest.raises(ValueError, match=r"^text is \['hello'\]: it must be a string$"):
            read(["hello"])  # type: ignore[arg-type]
    for sentences in (3, [3], {"a": 1}, {"a"}):
        said = f"sentences is {sentences}: it must be a string or a list of strings"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            model.encode(sentences)  # type: ignore[arg-type]
    layers = model._encoder.encoder.cfg.discriminator_layers
    # Arrays and iterators of strings are read too, and numpy's numbers.
    several: list[Any] = [[TEXT], np.array([TEXT]), iter([TEXT])]
    last: Any = np.int64(layers)
    assert all(np.array_equal(model.encode(texts, layer=last), model.encode([TEXT])) for texts in several)
    for layer in (-2, layers + 1, 99):
        with pytest.raises(ValueError, match=f"there is no layer {layer}: choose 0 to {layers}, or -1 for the last$"):
            model.encode([TEXT], layer=layer)
    longest = model._encoder.encoder.cfg.max_positions - 2  # the special tokens take two
    one = "kalo" if len(model.judge("kalo")) == 1 else "o"
    for count, refused in ((longest, False), (longest + 1, True)):
        text = " ".join([one] * count)
        assert len(model._encoder.vocabulary.encode(text)) == count
        if refused:
            with pytest.raises(
                ValueError, match=f"the text has {count + 2} tokens, but the model reads at most {longest + 2}"
            ):
                model.judge(text)
        else:
            assert len(model.judge(text)) == count
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, but the model reads at most"):
        model.judge(TEXT * 100)
    with pytest.raises(ValueError, match=r"none does not exist: name the folder"):
        xlme.load(tmp_path / "none")
    with pytest.raises(
        TypeError, match=r"^TextModel.fill\(\) got an unexpected keyword argument 'top_k': its arg.* top"
    ):
        model.fill("<mask>", top_k=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=rf"{run}@latest: latest is not a step: name one that `xlme checkpoint list"):
        xlme.load(f"{run}@latest")
    with pytest.raises(ValueError, match=rf"step_00000002 is a checkpoint: write it as {run}@2$"):
        xlme.load(run / "checkpoints/step_00000002")
    with pytest.raises(ValueError, match="step_00000003 does not exist: name the folder"):
        xlme.load(run / "checkpoints/step_00000003")
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        with pytest.raises(ValueError, match="fetched by `hf download xlm-roberta-base --local-dir DIR`"):
            xlme.load("xlm-roberta-base")
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/config.json").write_text("{}")
    shutil.copytree(tmp_path / "runs/x", tmp_path / "runs/w.partial")  # an export that did not finish
    for name, words in (
        ("runs", r"has no config\.json: name the folder of a run or of an export, such as {}"),
        ("runs/y", "does not exist: name the folder of a run or of an export, such as {}"),
        ("runs/x/model", "does not exist: name the run, {}"),
        ("runs/x/config.json", "is no folder: name the run, {}"),
    ):
        with pytest.raises(ValueError, match=f"{name} {words.format(tmp_path / 'runs/x')}$"):
            xlme.load(tmp_path / name)
    monkeypatch.chdir(run)
    with pytest.raises(ValueError, match=f"^nowhere does not exist: name the run, {run.resolve()}$"):
        xlme.load("nowhere")
    monkeypatch.chdir(run / "checkpoints")
    with pytest.raises(ValueError, match=rf"step_00000002 is a checkpoint: write it as {run.resolve()}@2$"):
        xlme.load("step_00000002")


def test_the_guides_python(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of docs/howto/evaluate.md; and every function returns what its command prints."""
    text = (ROOT / "docs/howto/evaluate.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    (tmp_path / "runs").mkdir()
    for name in ("base", "quickstart"):
        (tmp_path / "runs" / name).symlink_to(run)
    (tmp_path / "heldout").symlink_to(data / "heldout")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("@1000", "@2").replace("runs/quickstart/data/heldout", "heldout"), names)
    early, last, untrained = names["results"]["models"]
    assert [model["step"] for model in (early, last, untrained)] == [2, None, None]
    assert [model["model"] for model in (early, last, untrained)][:2] == ["small@2", "small"]
    for key in ("overall", "languages", "pairs"):  # the checkpoint of the last step
        assert early[key] == last[key]
    assert early["overall"] != untrained["overall"]

    folders = {"model": "runs/base", "data": "heldout"}
    words = [word for name, value in folders.items() for word in (f"--{name}", value)]
    for test, options, function in (
        ("pairs", {"limit": 100, "layer": 1, "which": "generator"}, xlme.evaluate.pairs),
        ("perplexity", {"passes": 2, "seed": 3, "limit": 5}, xlme.evaluate.perplexity),
    ):
        capsys.readouterr()
        more = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        evaluate([test, *words, *more, "--json"])
        found: dict[str, Any] = function(*folders.values(), **options)
        assert json.loads(capsys.readouterr().out) == found and found["models"][0]["step"] is None
    with pytest.raises(ValueError, match=r"^limit 4 leaves too few pairs"):
        xlme.evaluate.pairs("runs/base", "heldout", limit=4)
    with pytest.raises(ValueError, match=r"^there is no model_type 'bert': choose one of xlme, xlm-roberta, "):
        xlme.export.run("runs/base", "no", model_type="bert")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"'xlme\.evaluate\.zzz': choose one of align, losses, pairs, "):
        _ = xlme.evaluate.zzz


@pytest.mark.parametrize("test", ["losses", "perplexity", "pairs"])
def test_scores_on_training_text_are_told(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], test: str
) -> None:
    """Its own folder, the text that it was mixed from, or the part that a split keeps in training."""
    other = tmp_path / "other"
    shutil.copytree(data / "heldout", other)

    def change(place: Path, **settings: object) -> Path:
        for task in ("mono", "para"):
            manifest = read_manifest(place / task)
            write_manifest(place / task, replace(manifest, settings=manifest.settings | settings))
        return place

    def told(place: Path, model: Path = run) -> bool:
        few = {"losses": ["--rows", "2"], "perplexity": ["--limit", "1"]}.get(test, ["--limit", "6"])
        evaluate([test, "--model", str(model), "--random", "--data", str(place), *few])
        said = capsys.readouterr()
        (folder,) = {"pairs": ["para"]}.get(test, ["mono"])
        sentence = f"{place / folder} is text that {model} was trained on: its scores say nothing about unseen text"
        assert (sentence in said.err) == (
            f"not unseen: text that {model.name} was trained on" in " ".join(said.out.split())
        )
        return sentence in said.err

    assert told(data / "mixed") and not told(data / "heldout")
    if test != "losses":
        return
    assert told(change(other, split="train"))
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    assert config["data"]["encoded"] == []
    (copy / "config.json").write_text(json.dumps(config | {"data": config["data"] | {"encoded": ["text"]}}))
    assert told(change(other, split="all", encoded="text"), copy) and not told(change(other, encoded="more"), copy)
    of_a_later_phase = {"phases": {"mono from step 9": read_manifest(other / "mono").fingerprint()}}
    (copy / "config.json").write_text(json.dumps(config | {"data": config["data"] | of_a_later_phase}))
    assert told(other, copy)
