"""An objective is one file: one that no other file knows trains under every engine, and shows itself everywhere."""

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.test_parity import pipe, plain, zero
from tests.launch import python, run_ranks
from tests.rows import train_vocabulary, write_data
from xlme_ds.config import DataConfig, ObjectiveConfig, RunConfig
from xlme_ds.validate import validate

TOY = dict(objective="toy", steps=6)
CASES: dict[int, dict[str, dict[str, object]]] = {
    1: {"plain": plain(**TOY)},
    2: {**{f"zero{stage}": zero(stage, 2, **TOY) for stage in (1, 2, 3)}, "pipeline": pipe(2, 2, **TOY)},
}
TITLES = ("Toy loss of the first half", "Toy loss of the second half")
SETTINGS = (
    "--recipe quickstart --objective.name toy --engine.kind plain --engine.precision fp32 --train.steps 4 "
    "--train.save-every 4 --train.log-every 1 --train.eval-every 2 --optimizer.warmup-steps 1 --data.mono-rows 4 "
    "--data.para-rows 4 --data.micro-batch 4 --model.width 32 --model.heads 4 --model.feed-forward 64 "
    "--model.discriminator-layers 2 --model.max-positions 32"
)


def test_every_engine_has_its_curve(tmp_path: Path) -> None:
    data, curves = write_data(tmp_path / "data", rows=96), {}
    for world, cases in CASES.items():
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        words = ["tests.engine.worker", str(tmp_path / "cases.json"), str(data), str(tmp_path / f"world{world}")]
        ranks = run_ranks(world, ["-m", "tests.objectives.toy", *words])
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stderr[-3000:] for rank in ranks)
        curves |= {name: json.loads((tmp_path / f"world{world}/{name}.json").read_text()) for name in cases}
    for name, curve in curves.items():
        assert curve["loss"] == pytest.approx(curves["plain"]["loss"], rel=1e-5), name
        assert curve["heldout"]["sums"] == pytest.approx(curves["plain"]["heldout"]["sums"], rel=1e-5), name
    assert curves["plain"]["loss"][-1] < curves["plain"]["loss"][0]


def run(*words: str) -> str:
    done = python("-m", "tests.objectives.toy", *words, COLUMNS=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_shows_itself(tmp_path: Path) -> None:
    vocabulary = train_vocabulary(tmp_path / "data" / "vocab")
    for seed, name in enumerate(("data", "heldout")):
        write_data(tmp_path / name, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
    shutil.copytree(vocabulary.path.parent, tmp_path / "heldout" / "vocab")
    settings = [*SETTINGS.split(), "--model.vocabulary", str(vocabulary.size)]
    data, out, export = str(tmp_path / "data"), str(tmp_path / "run"), str(tmp_path / "export")
    terminal = run("xlme_ds.pretrain", *settings, "--data", data, "--heldout", str(tmp_path / "heldout"), "--out", out)
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] == pytest.approx(last["toy_near"] + last["toy_far"] / 2)
    assert f"toy_near: {TITLES[0]} (nats a token)" in terminal and f"toy_far: {TITLES[1]}" in terminal
    assert f"toy_near {last['toy_near']:.3f}  toy_far {last['toy_far']:.3f}" in terminal
    page = (tmp_path / "run/report.html").read_text()
    assert all(f"<figcaption>{title} (nats a token)" in page for title in TITLES) and "a toy of the tests" in page
    assert f"{TITLES[0]}</" in page, "the first term has a key figure"
    run("xlme_ds.export", "--run", out, "--out", export)
    card = (tmp_path / "export/README.md").read_text()
    assert all(f"| {title} in nats a token, monolingual text |" in card for title in TITLES)
    assert "Pre-trained for a toy of the tests" in card and "unigram model, monolingual text" in card
    planned = run("xlme_ds.plan", *settings, "--engine.kind", "deepspeed", "--gpus", "1", "--details")
    assert all(title in planned for title in TITLES) and "a toy of the tests" in planned


def test_its_settings_are_checked() -> None:
    from tests.objectives.toy import Toy
    from xlme_ds.objectives import OBJECTIVES, objective_of

    assert isinstance(objective_of(ObjectiveConfig("toy")), Toy)
    toy = RunConfig("x", objective=ObjectiveConfig("toy"), data=DataConfig(8, 8, 8))
    validate(toy)
    for wrong, sentence in (
        (dict(data=DataConfig(800, 800, 800)), "a toy has small micro-batches"),
        (dict(objective=ObjectiveConfig("toy", mask_fraction=1.0)), "objective.mask_fraction is 1.0"),
        (dict(objective=ObjectiveConfig("toyy")), r"toyy is not known: choose one of electra, .*, for example toy"),
    ):
        with pytest.raises(ValueError, match=sentence):
            validate(RunConfig(**{**toy.__dict__, **wrong}))
    del OBJECTIVES["toy"]
