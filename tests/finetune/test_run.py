"""The real command on made-up tasks that can be learned: every kind, two ranks, killed and resumed."""

import gc
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.numpy import save_file as write_tensors
from safetensors.torch import save_file
from seqeval.metrics import f1_score

import xlme_ds as xlme
from tests.finetune.tasks import write_base, write_entities, write_pairs, write_questions
from tests.launch import FORKED_PYTHON, ROOT, Python, distributed, environment, free_port, python, run_ranks
from xlme_ds.config import EngineConfig, ModelConfig, from_json
from xlme_ds.engine.ranks import SharedError
from xlme_ds.finetune import finetune_run
from xlme_ds.finetune.__main__ import _run, run_all, score_table
from xlme_ds.finetune.finetune_run import _read_inputs
from xlme_ds.finetune.finetune_run import finetune as finetune_here
from xlme_ds.finetune.settings import _TRAIN_DEFAULTS, FinetuneSettings, Job, TuningConfig, jobs
from xlme_ds.io.files import read_versioned
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.models.pipeline import encoder_flops
from xlme_ds.report.xtreme import read_models
from xlme_ds.report.xtreme_tables import tables
from xlme_ds.train.run_folder import RunFolder
from xlme_ds.train.stop import StopRequest
from xlme_ds.trained.config_json import read_run_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def words(base: Path, task: str, data: Path, out: Path, *more: object) -> list[str]:
    fixed = "--tuning.learning-rate 3e-3 --engine.precision fp32 --train.log-every 1 --train.save-every 10"
    where = ["--task", task, "--model", str(base), "--data", str(data), "--out", str(out)]
    return ["-m", "xlme_ds.finetune", *where, *fixed.split(), *map(str, more)]


def scores(out: Path) -> dict:
    return json.loads((out / "scores.json").read_text())


def finetune(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return python(*arguments)


def tagged(path: Path) -> list[list[str]]:
    """The tags of a file as XTREME's evaluation reads them: a tag a line (the last column), sentences end at empty
    lines."""
    sentences: list[list[str]] = [[]]
    for line in path.read_text().splitlines():
        if line.strip():
            sentences[-1].append(line.split("\t")[-1])
        else:
            sentences.append([])
    return [sentence for sentence in sentences if sentence]


def tune(
    base: Path,
    task: str,
    data: Path,
    out: Path,
    several: int = 1,
    random: bool = False,
    split: Any = "test",
    **tuning: Any,
) -> dict[str, Any]:
    """A run in this process."""
    settings = TuningConfig(**{"learning_rate": 3e-3, "batch": 8, "epochs": 1} | tuning)
    engine, stop = EngineConfig(kind="plain", precision="fp32"), StopRequest()
    train = replace(_TRAIN_DEFAULTS, save_every=1000)
    command = FinetuneSettings(task, base, (data,), out, random=random, split=split, engine=engine, train=train)
    job = Job(command, out, 1, settings, several)
    torch.set_num_threads(1)
    try:
        if several == 1:
            _run(job, 0, 1, stop)
        else:
            finetune_here(job, 0, 1, stop)
    finally:
        stop.release()
    return scores(out)


def refused(*call: Any, **tuning: Any) -> str:
    try:
        tune(*call, **tuning)
    except SharedError as error:
        said = str(error)
    else:
        raise AssertionError("it was not refused")
    gc.collect()  # the folder's lock, which ends with the process of a refused run
    return said


def without_labels(path: Path) -> str:
    """What XTREME's scripts leave of a test: words or texts alone, the same answer to every question. Returns what it
    was."""
    was = path.read_text()
    if path.suffix == ".json":
        data = json.loads(was)
        for question in (
            q for article in data["data"] for paragraph in article["paragraphs"] for q in paragraph["qas"]
        ):
            question["answers"] = [{"answer_start": 0, "text": ""}]
        path.write_text(json.dumps(data))
    else:
        path.write_text("".join(line.rpartition("\t")[0] + "\r\n" for line in was.splitlines()))
    return was


@pytest.mark.parametrize(
    ("task", "write", "name", "file"),
    [
        ("ner", write_entities, "test-de.tsv", "panx/test-de.tsv"),
        ("pos", write_entities, "test-de.tsv", "udpos/test-de.tsv"),
        ("pawsx", write_pairs, "test-de.tsv", "pawsx/test-de.tsv"),
        ("xquad", write_questions, "xquad.de.json", "xquad/test-de.json"),
    ],
)
def test_tests_without_labels_are_predicted_and_those_with_labels_scored(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, write: Any, name: str, file: str
) -> None:
    """The predictions are those of the same model on the same test with its labels, in the form that XTREME's
    evaluation reads."""
    data = write(tmp_path / "data")
    if task == "pos":
        for path in data.iterdir():
            path.write_text(path.read_text().replace("B-PER", "PROPN").replace("B-LOC", "NOUN").replace("\tO", "\tX"))
    labels = without_labels(data / name)
    fixed = {"train_examples": 40} | ({"train_languages": ("all",)} if task == "ner" else {})
    found = tune(base, task, data, tmp_path / "out", **fixed)
    said = capsys.readouterr().out
    before = said.partition("starting at step")[0]
    assert f"no labels in {name} (1 of 2 test sets)" in before
    assert ("; --split dev scores the dev sets instead" in before) == (data / "dev-en.tsv").exists()
    assert found["languages"].keys() == {"en"} and found["train_languages"] == (
        ["de", "en"] if task == "ner" else ["en"]
    )
    assert found["unlabelled"] == {"de": f"predictions/{file}"} and "gap" not in found
    assert found["mean"] == found["languages"]["en"]
    if task == "ner":  # the dev sets in place of the tests: English has one
        on_dev = tune(base, task, data, tmp_path / "dev", split="dev", **fixed)
        assert on_dev["split"] == "dev" and on_dev["languages"].keys() == {"en"} and on_dev["unlabelled"] == {}
        assert list((tmp_path / "dev/predictions").rglob("*.*")) == [tmp_path / "dev/predictions/panx/dev-en.tsv"]
    with_hash = lambda *names: {each: hashlib.sha256((data / each).read_bytes()).hexdigest() for each in names}  # noqa: E731
    assert found["training"] == with_hash(*found["training"]) and len(found["training"]) == len(
        found["train_languages"]
    )
    assert found["files"] == with_hash(*found["files"]) and name in found["files"]
    assert found["weights"] == json.loads((tmp_path / "out/config.json").read_text())["config"]["base"]
    bare = (tmp_path / "out/predictions" / file).read_text()

    (data / name).write_text(labels)
    assert f"of other test files ({name})" in refused(base, task, data, tmp_path / "out", **fixed)
    (tmp_path / "out/scores.json").unlink()
    (tmp_path / "out/predictions" / file).with_name("test-zz.tsv").write_text("of an earlier call, for other tests")
    whole = tune(base, task, data, tmp_path / "out", **fixed)
    assert whole["languages"].keys() == {"de", "en"} and whole["unlabelled"] == {}
    assert (tmp_path / "out/predictions" / file).read_text() == bare
    assert not (tmp_path / "out/predictions" / file).with_name("test-zz.tsv").exists()
    ours = whole["languages"]["de"]
    if task == "xquad":
        said_of = json.loads(bare)
        truth = {
            q["id"]: (p["context"], q["answers"][0]["text"])
            for p in json.loads(labels)["data"][0]["paragraphs"]
            for q in p["qas"]
        }
        assert said_of.keys() == truth.keys() and all(said_of[key] in truth[key][0] for key in truth)
        assert ours["em"] == pytest.approx(100 * sum(said_of[key] == truth[key][1] for key in truth) / len(truth))
    elif task == "pawsx":
        right = [line[-1] == given for line, given in zip(labels.splitlines(), bare.splitlines(), strict=True)]
        assert ours["accuracy"] == pytest.approx(100 * sum(right) / len(right))
    else:
        given, truth = tagged(tmp_path / "out/predictions" / file), tagged(data / name)
        with warnings.catch_warnings(action="ignore"):
            assert ours["f1"] == pytest.approx(100 * f1_score(truth, given))
        assert [len(sentence) for sentence in given] == [len(sentence) for sentence in truth]


def test_with_no_label_at_all_the_predictions_are_the_product(base: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pawsx")
    for code in ("en", "de"):
        without_labels(data / f"test-{code}.tsv")
    result = finetune(words(base, "pawsx", data, tmp_path / "out", "--tuning.epochs", 1, "--engine.kind", "plain"))
    assert result.returncode == 0, result.stderr
    for code in ("en", "de"):
        file = tmp_path / f"out/predictions/pawsx/test-{code}.tsv"
        assert f"{code}: no labels: predictions in {file}" in result.stdout and len(file.read_text().splitlines()) == 40
    file.unlink()  # of de; that of en stays
    again = finetune(words(base, "pawsx", data, tmp_path / "out", "--tuning.epochs", 1, "--engine.kind", "plain"))
    assert again.returncode == 0 and len(file.read_text().splitlines()) == 40, "written again, from the weights"
    found = scores(tmp_path / "out")
    assert found["languages"] == {} and "mean" not in found and found["dev"] is None


@pytest.mark.parametrize(("dev_set", "chosen_on", "trained_on"), [(True, "dev en", 80), (False, "held-out en", 72)])
def test_of_a_grid_the_setting_that_is_best_on_the_dev_set_is_reported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dev_set: bool, chosen_on: str, trained_on: int
) -> None:
    """Two rates, one of which learns nothing; without a dev set every tenth training example is one."""
    data = write_entities(tmp_path / "panx")
    if not dev_set:
        (data / "dev-en.tsv").unlink()
    found = {
        rate: tune(base, "ner", data, tmp_path / f"out/{rate}", 2, learning_rate=rate, epochs=3, train_examples=80)
        for rate in (1e-12, 3e-3)
    }
    assert capsys.readouterr().out.count("every tenth training example is held out") == 2 * (not dev_set)
    for rate, one in found.items():
        assert one["settings"] == 2 and one["dev"]["held_out"] == one["tuning"]["held_out"] == (not dev_set)
        steps = json.loads((tmp_path / f"out/{rate}/config.json").read_text())["config"]["train"]["steps"]
        assert steps == 3 * trained_on // 8
    assert found[3e-3]["dev"]["mean"]["f1"] > found[1e-12]["dev"]["mean"]["f1"]
    (model,) = read_models([tmp_path / "out"])
    (best,) = model.results["ner"].runs
    assert best.languages["de"] == (found[3e-3]["languages"]["de"]["f1"],)
    (row,) = [row for row in tables([model])[0].rows if not row.source]
    assert row.cells["ner"].remarks[-1] == f"best of 2 settings on {chosen_on}"


def test_scores_of_another_run_are_not_returned(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_entities(tmp_path / "panx"), tmp_path / "out"
    fixed = {"train_examples": 40}
    in_the_way = out / f".scores.json.{os.getpid()}.tmp"
    in_the_way.mkdir(parents=True)  # scores.json cannot be written, as on a full disk
    assert f"{out}/scores.json" in refused(base, "ner", data, out, **fixed)
    in_the_way.rmdir()
    found = tune(base, "ner", data, out, **fixed)
    (out / "finished.json").unlink()  # a kill after the scores
    assert tune(base, "ner", data, out, **fixed) == found
    assert f"{out}/scores.json exists already" in capsys.readouterr().out and (out / "finished.json").exists()
    assert tune(base, "ner", data, out, micro_batch=8, **fixed) == found, "the cut of a step may change"
    weights = out / "model/model.safetensors"
    whole = weights.read_bytes()
    for harm in (weights.unlink, lambda: weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))):
        harm()
        checked = python("-m", "xlme_ds.checkpoint", "check", "--run", str(out))
        assert checked.returncode == 1 and "model/model.safetensors  not usable: " in checked.stdout, checked
        assert tune(base, "ner", data, out, **fixed) == found
        assert weights.read_bytes() == whole, "from the last checkpoint"
    weights.unlink()
    shutil.move(out / "checkpoints", tmp_path / "checkpoints")  # a user needs the room
    assert tune(base, "ner", data, out, **fixed) == found and not weights.exists()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "has records but no usable checkpoint" in refused(base, "ner", data, out, **fixed)
    weights.unlink()
    (tmp_path / "checkpoints").rename(out / "checkpoints")
    assert f"{out} was started with" in refused(base, "ner", data, out, learning_rate=1e-3, **fixed)
    said = refused(base, "conll", write_conll(tmp_path / "conll"), out, learning_rate=1e-3, **fixed)
    assert f"{out} was started with task ner, this call has conll; tuning.learning_rate" in said
    assert "was started with tuning.dropout 0.1, this call has 0.0" in refused(
        base, "ner", data, out, dropout=0.0, **fixed
    )
    said = refused(base, "ner", data, out, dropout=0.0, batch=16, **fixed)
    assert re.search(
        r"was started with tuning\.batch \d+, this call has 16; tuning\.dropout 0\.1, this call has 0\.0: ", said
    )
    assert f"{base} is a run of pre-training: choose another" in refused(base, "ner", data, base, **fixed)
    other = write_base(tmp_path / "other", seed=2)
    assert f"{out} was started with another model (--model, --random): " in refused(other, "ner", data, out, **fixed)
    (out / "finished.json").unlink()
    assert "name the checkpoint RUN@STEP that this run started from" in refused(other, "ner", data, out, **fixed)
    text = (data / "train-en.tsv").read_text()
    fewer = "\n\n".join(text.split("\n\n")[:20])  # fewer steps, which is no setting of fine-tuning
    for other_text in (text.replace("kalo\t", "unve\t", 1), fewer):
        (data / "train-en.tsv").write_text(other_text)
        assert "was started on other training examples: use the same" in refused(base, "ner", data, out, **fixed)
    (data / "train-en.tsv").write_text(text)
    shutil.copy(data / "test-de.tsv", data / "test-sw.tsv")  # a language more: it would be left out without a word
    assert "has scores of other test files (test-sw.tsv): remove it" in refused(base, "ner", data, out, **fixed)
    (data / "test-sw.tsv").unlink()
    (data / "test-de.tsv").rename(tmp_path / "de")  # a language less
    assert "has scores of other test files (test-de.tsv): remove it" in refused(base, "ner", data, out, **fixed)
    (tmp_path / "de").rename(data / "test-de.tsv")
    (out / "scores.json").write_text('{"task')
    assert "scores.json is damaged: remove it" in refused(base, "ner", data, out, **fixed)
    (out / "config.json").unlink()
    assert "has model and scores.json but no config.json" in refused(base, "ner", data, out, **fixed)


def test_scores_are_a_table() -> None:
    scores = {"task": "xquad", "metric": ["f1", "exact"], "dev": None, "mean": {"f1": 70.625, "exact": 35.0},
              "gap": {"f1": -18.75, "exact": 1.0},
              "languages": {"de": {"f1": 61.25, "exact": 30}, "en": {"f1": 80.0, "exact": 40.0}}}  # fmt: skip
    assert score_table(scores) == [
        "xquad              f1     exact",
        "de               61.2      30.0",
        "en               80.0      40.0",
        "mean of 2        70.6      35.0",
        "en - others     -18.8       1.0",
    ]
    assert (
        score_table(scores | {"dev": {"mean": {"f1": 1.0, "exact": 2.0}}})[-1] == f"mean of dev sets{1:10.1f}{2:10.1f}"
    )
    dev_alone = {"task": "ner", "metric": ["f1"], "languages": {}, "dev": {"mean": {"f1": 1.0}}}
    assert score_table(dev_alone) == ["ner                     f1", "mean of dev sets       1.0"]


def test_in_python(base: Path, tmp_path: Path) -> None:
    """Twice in one process; a second call returns what is there."""
    data, fixed = write_entities(tmp_path / "panx"), dict(learning_rate=3e-3, batch=8, epochs=1, train_examples=16)
    found = xlme.finetune.run("ner", base, data, tmp_path / "one", **fixed)
    assert found is not None and found["mean"] == scores(tmp_path / "one")["mean"]
    on_dev = xlme.finetune.run("ner", base, [data], tmp_path / "two", split="dev", **fixed)
    assert on_dev is not None and on_dev["split"] == "dev" and found["split"] == "test"
    lines = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    config = read_versioned(tmp_path / "one/config.json")["config"]
    model, tokens = from_json(ModelConfig, config["model"]), lines[-1]["tokens"] / lines[-1]["step"] / 8  # of an input
    forward = encoder_flops(model, model.discriminator_layers, round(tokens))
    assert lines[-1]["flops_per_s"] / lines[-1]["tokens_per_s"] == pytest.approx(3 * forward), "of a token"
    again = xlme.finetune.run("ner", str(base), str(data), str(tmp_path / "one"), **fixed)
    with pytest.raises(ValueError, match=r"^there is no argument 'learning_rat': did you mean learning_rate\?$"):
        xlme.finetune.run("ner", base, data, tmp_path / "no", learning_rat=1e-5)
    with pytest.raises(ValueError, match=r"^there is no task 'nerr': did you mean ner\?$"):
        xlme.finetune.run("nerr", base, data, tmp_path / "no")  # type: ignore[arg-type]
    assert again is not None and again["languages"] == found["languages"]


def test_random_starts_from_the_weights_before_training(base: Path, tmp_path: Path) -> None:
    data, fixed = write_entities(tmp_path / "panx"), {"train_examples": 40}
    untrained = shutil.copytree(base, tmp_path / "untrained")
    cfg = read_run_config(untrained).model
    model = Electra(cfg)
    initialise(model, 1, cfg.init_std)  # seed 1 is the run's
    save_file(model.state_dict(), untrained / "model" / "model.safetensors")
    expected = tune(untrained, "ner", data, tmp_path / "expected", **fixed)
    found = tune(base, "ner", data, tmp_path / "found", random=True, **fixed)
    starts = [
        json.loads((tmp_path / out / "config.json").read_text())["config"]["base"] for out in ("expected", "found")
    ]
    assert starts[0] == starts[1] and found["languages"] == expected["languages"]
    assert (expected["random"], found["random"]) == (False, True)
    assert "was started with another model (--model, --random): the run is finished" in refused(
        base, "ner", data, tmp_path / "found", **fixed
    )


def test_every_example_is_read_in_its_language_wherever_the_model_has_it(base: Path, tmp_path: Path) -> None:
    """In training and in the tests: of the same model with its languages in another order the scores are the same."""
    data, fixed, found = write_entities(tmp_path / "panx"), {"train_examples": 40}, []
    for number, (codes, places) in enumerate(
        [(("de", "en", "sw"), (0, 1, 2)), (("sw", "de", "en"), (2, 0, 1)), (("sw", "de", "en"), (0, 1, 2))]
    ):
        folder = shutil.copytree(base, tmp_path / f"base{number}")
        config = json.loads((folder / "config.json").read_text())
        config["config"]["model"]["language_embeddings"] = codes
        (folder / "config.json").write_text(json.dumps(config))
        state = load_file(folder / "model" / "model.safetensors")
        table = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
        for encoder in ("generator", "discriminator"):
            state[f"{encoder}.languages"] = table[list(places)]
        write_tensors(state, folder / "model" / "model.safetensors")
        tune(folder, "ner", data, tmp_path / f"out{number}", **fixed)
        tests = sorted((tmp_path / f"out{number}" / "predictions").rglob("*.tsv"))
        found.append([path.read_text() for path in tests])
    assert len(found[0]) == 2 and found[0] == found[1] != found[2]
    (data / "test-de.tsv").rename(data / "test-fr.tsv")  # a test in a language that the model lacks
    assert "fr" in refused(tmp_path / "base0", "ner", data, tmp_path / "no", **fixed)
    assert not (tmp_path / "no/config.json").exists()


def test_examples_are_numbered_over_all_training_files(base: Path, tmp_path: Path) -> None:
    """German and then English: each sentence has a number of its own, by which an error names it."""
    data = write_entities(tmp_path / "panx")
    tuning = TuningConfig(train_languages=("all",), train_examples=30)
    command = FinetuneSettings("ner", base, (data,), tmp_path / "out", engine=EngineConfig(kind="plain"))
    with closing(RunFolder(tmp_path / "out")) as folder:
        features = _read_inputs(Job(command, tmp_path / "out", 1, tuning), folder, 0, 1).loader.features
    numbers = [feature.example for feature in features]
    assert sorted(set(numbers)) == list(range(60)) and numbers == sorted(numbers)


def write_conll(folder: Path) -> Path:
    folder.mkdir()
    for name in ("eng.train", "eng.testa", "eng.testb"):
        (folder / name).write_text("kalo NNP I-NP B-PER\nter VB I-VP O\n\n" * 40)
    return folder


def test_words_on_two_ranks_and_after_a_stop(base: Path, tmp_path: Path) -> None:
    """Two ranks under ZeRO-3 learn the tags, and one that was stopped ends bit for bit like one that was not."""
    data = write_entities(tmp_path / "panx")
    wrong = (data / "test-de.tsv").read_text().replace("B-PER", "B-LOC", 1)  # so that German is worse than English
    (data / "test-de.tsv").write_text(wrong)
    zero3 = ["--tuning.epochs", 4, "--tuning.batch", 8, "--engine.deepspeed", "zero3_cpu"]
    for result in run_ranks(2, words(base, "ner", data, tmp_path / "whole", *zero3)):
        assert result.returncode == 0, result.stderr
    found = scores(tmp_path / "whole")
    assert found["split"] == "test" and found["languages"].keys() == {"de", "en"}
    german, english = (found["languages"][code]["f1"] for code in ("de", "en"))
    assert german < 100 and (german + english) / 2 == pytest.approx(found["mean"]["f1"]) and found["mean"]["f1"] > 95
    assert found["gap"]["f1"] == pytest.approx(english - german)
    predictions = tagged(tmp_path / "whole" / "predictions" / "panx" / "test-de.tsv")
    assert len(predictions) == 30 and {tag for one in predictions for tag in one} <= {"O", "B-PER", "B-LOC"}
    assert found["languages"]["de"]["f1"] == pytest.approx(100 * f1_score(tagged(data / "test-de.tsv"), predictions))
    assert (
        found["dev"]["languages"].keys() == {"en"} and found["dev"]["mean"]["f1"] > 95 and not found["dev"]["held_out"]
    )

    broken = words(base, "ner", data, tmp_path / "broken", *zero3)
    port = free_port()
    ranks = [Python(broken, **distributed(rank, 2, port)) for rank in range(2)]
    while not list((tmp_path / "broken").glob("checkpoints/step_????????/complete.json")):
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
    assert not (tmp_path / "broken" / "scores.json").exists()
    for result in run_ranks(2, broken):
        assert result.returncode == 0, result.stderr
        if "resuming" in result.stdout:
            break
    else:
        pytest.fail("the second call did not resume")
    whole, resumed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert whole.keys() == resumed.keys() and all((whole[name] == resumed[name]).all() for name in whole)
    assert scores(tmp_path / "broken")["languages"] == found["languages"]

    again = finetune(words(base, "ner", data, tmp_path / "whole", *zero3))
    assert again.returncode == 0 and "exists already" in again.stdout


def test_pairs_over_seeds_as_a_job_array_does(base: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pawsx")
    more = ["--seeds", 1, 2, "--tuning.epochs", 20, "--tuning.batch", 16, "--tuning.dropout", 0]
    more += ["--engine.kind", "plain"]
    listed = finetune(words(base, "pawsx", data, tmp_path / "out", *more, "--list"))
    assert listed.stdout.split() == [str(tmp_path / "out" / "seed1"), str(tmp_path / "out" / "seed2")]
    ranks = run_ranks(2, words(base, "pawsx", data, tmp_path / "out", *more, "--list"))
    assert [rank.stdout for rank in ranks] == [listed.stdout, ""]
    assert finetune(words(base, "pawsx", data, tmp_path / "out", *more, "--number", 1)).returncode == 0
    assert not (tmp_path / "out" / "seed1").exists()
    found = scores(tmp_path / "out" / "seed2")
    assert found["seed"] == 2 and found["mean"]["accuracy"] > 90
    more[2:3] = [3, 2]  # two runs one after the other in the same process, and one that is done
    result = finetune(words(base, "pawsx", data, tmp_path / "out", *more))
    assert result.returncode == 0, result.stderr
    assert "seed2/scores.json exists already" in result.stdout
    assert [scores(tmp_path / "out" / f"seed{seed}")["seed"] for seed in (1, 3)] == [1, 3]


def test_questions_from_another_sets_training_file(base: Path, tmp_path: Path) -> None:
    """Contexts longer than a window; trained with layer-wise rates; the score says of which metric it is."""
    data = write_questions(tmp_path / "qa")
    more = ["--tuning.epochs", 12, "--tuning.batch", 16, "--tuning.layer-decay", 0.9, "--engine.kind", "plain"]
    result = finetune(words(base, "xquad", data, tmp_path / "out", *more))
    assert result.returncode == 0, result.stderr
    found = scores(tmp_path / "out")
    assert found["metric"] == ["f1", "em"] and found["mean"]["em"] > 80


def test_help_offers_what_fine_tuning_takes() -> None:
    shown = python("-m", "xlme_ds.finetune", "--help").stdout
    assert "--engine.kind deepspeed|plain" in shown and "Settings of engine:" in shown and "--config FILE" in shown
    assert not [text for text in ("pipeline", "auto: the faster", "frozen") if text in shown]


LATE = """
import datetime, os, time
import torch.distributed as dist
from xlme_ds.engine.ranks import all_gather, extend_timeout
dist.init_process_group("gloo")
dist.barrier()
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
extend_timeout()
time.sleep(3 * (dist.get_rank() == 0))
print(all_gather(dist.get_rank()), flush=True)
os._exit(0)
"""


def test_ranks_wait_for_the_one_that_scores_longest(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    ranks = run_ranks(2, [str(tmp_path / "late.py")])
    assert [rank.stdout for rank in ranks] == ["[0, 1]\n"] * 2, ranks


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tuning.train-languages", "sw"], "no training set of sw in the data, only of de, en"),
        (["--engine.kind", "pipeline"], "engine.kind pipeline is for pre-training"),
        (["--train.eval_every=5"], "--train.eval-every is for pre-training and has no effect here: leave it out"),
        (["--task", "xquad"], "no file of the task in"),
        (["--tuning.dropout", "1"], "tuning.dropout is 1.0: it must be at least 0 and at most 0.9999"),
        (
            ["--tuning.batch", "7", "--tuning.micro-batch", "2"],
            "micro-batches of at most tuning.micro_batch 2 examples: choose 8 examples",
        ),
        (["--number", "1"], "--number is 1: the last run is 0"),
        (["--number=-1"], "--number is -1: the last run is 0"),
        (["--seeds"], "--seeds has no value: write one after it"),
        (["--seeds", "1", "2", "1"], "--seeds names a number twice: name each once"),
        ([], "out has model but no config.json, which says how it was trained: restore it"),
    ],
)
def test_a_mistake_is_one_sentence(base: Path, tmp_path: Path, more: list[str], said: str) -> None:
    data = write_entities(tmp_path / "panx", 4)
    if not more:
        (tmp_path / "out" / "model").mkdir(parents=True)
    task, rest = (more[1], more[2:]) if more[:1] == ["--task"] else ("ner", more)
    result = finetune(words(base, task, data, tmp_path / "out", *rest))
    assert result.returncode == 2 and said in result.stderr, result.stderr
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_signal_in_the_second_of_two_runs_saves_it_too(base: Path, tmp_path: Path) -> None:
    """The runs of one call share their signals: the second must not lose them with the first."""
    data, out = write_entities(tmp_path / "panx"), tmp_path / "out"
    more = ["--seeds", 1, 2, "--tuning.epochs", 10, "--tuning.batch", 8, "--engine.kind", "plain"]
    process = Python(words(base, "ner", data, out, *more))
    while RunFolder(out / "seed2").last_logged_step() < 15:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate()[0]
    assert process.returncode == 0 and "seed2: stopped after step" in said, said
    assert (out / "seed1" / "scores.json").exists() and not (out / "seed2" / "scores.json").exists()
    saved = json.loads((out / "seed2" / "checkpoints" / "latest.json").read_text())["checkpoint"]
    assert saved == f"step_{RunFolder(out / 'seed2').last_logged_step():08d}"


def test_a_stop_says_how_many_runs_are_left(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in the middle of scoring, which ends with exit code 0 too."""
    engine = EngineConfig(kind="plain", precision="fp32")
    tuning = TuningConfig(epochs=1, train_examples=8)
    settings = FinetuneSettings(
        "pawsx", base, (write_pairs(tmp_path / "pawsx"),), tmp_path / "out", seeds=(1, 2), engine=engine, tuning=tuning
    )
    stop, predict = StopRequest(), finetune_run.predict

    def predict_and_stop(*of: Any) -> Any:
        stop.received = "SIGTERM"
        return predict(*of)

    monkeypatch.setattr(finetune_run, "predict", predict_and_stop)
    try:
        assert run_all(settings, jobs(settings), stop) == [None, None]
    finally:
        stop.release()
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"{tmp_path}/out: stopped with 2 of 2 runs without scores; the same command continues"
    assert "seed1: scoring test-de.tsv, 1 of 2" in said[-2]


def test_a_job_has_ended_when_every_run_of_its_grid_has_scores(tmp_path: Path) -> None:
    """slurm/finetune.sh after a step that saved and ended with exit code 0, as a stopped one does: it is requeued until
    all nine are there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    saves = f"date +%s%N > {tmp_path}/out/pos-en/seed1/latest.json"
    for name, does in (("srun", saves), ("scontrol", "echo told $*")):
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "XLME_PYTHON": FORKED_PYTHON, "SLURM_SUBMIT_DIR": str(ROOT),
                 "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "XLME_TASKS": "pos",
                 "XLME_SEEDS": "1", "XLME_SETTINGS": "--grid", "XLME_OUT": str(tmp_path / "out"),
                 "XLME_SUBMITTED": "1"} | Python.forking()  # fmt: skip

    def job() -> str:
        command = ["bash", "slurm/finetune.sh"]
        return subprocess.run(
            command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=True
        ).stdout

    rates, batches = ("1e-05", "2e-05", "3e-05"), (8, 16, 32)
    folders = [tmp_path / f"out/pos-en/seed1/lr{rate}_b{batch}_e10" for rate in rates for batch in batches]
    for folder in folders[:8]:
        folder.mkdir(parents=True)
        (folder / "scores.json").write_text("{}")
    assert "told requeue 7_0" in job()
    folders[8].mkdir()
    (folders[8] / "scores.json").write_text("{}")
    assert job() == ""


LIVE_ENGINES = """
import functools, gc, sys
import deepspeed
from xlme_ds.finetune.__main__ import main

counts, initialize = [], deepspeed.initialize

@functools.wraps(initialize)
def counted(**settings):
    counts.append(sum(isinstance(thing, deepspeed.DeepSpeedEngine) for thing in gc.get_objects()))
    return initialize(**settings)

gc.disable()  # so that only the command itself frees an engine
deepspeed.initialize = counted
main(sys.argv[1:])
print("engines before each run:", counts)
"""


@pytest.mark.parametrize(("precision", "engine"), [("bf16", "zero1"), ("fp32", "zero2")])
def test_a_run_of_a_command_frees_its_engine(base: Path, tmp_path: Path, precision: str, engine: str) -> None:
    """A grid has 45 runs: on a GPU their engines would take its memory, one after another."""
    where = ["--task", "ner", "--model", str(base), "--data", str(write_entities(tmp_path / "ner", 40))]
    settings = (
        f"--seeds 1 2 --engine.precision {precision} --engine.deepspeed {engine} --tuning.epochs 1 --tuning.batch 20 "
        "--tuning.micro-batch 10 --tuning.train-examples 20"
    )
    done = python("-c", LIVE_ENGINES, *where, "--out", str(tmp_path / "out"), *settings.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "engines before each run: [0, 0]"
