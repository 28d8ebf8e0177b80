"""The real command on made-up tasks that can be learned: every kind, two ranks, killed and resumed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.finetune.tasks import write_base, write_entities, write_pairs, write_questions
from tests.launch import ROOT, environment, run_ranks
from xlme_ds.train.folder import RunFolder


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
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True)


def test_words_on_two_ranks_and_after_a_stop(base: Path, tmp_path: Path) -> None:
    """Two ranks under ZeRO-3 learn the tags, and one that was stopped ends bit for bit like one that was not."""
    data = write_entities(tmp_path / "panx")
    zero3 = ["--tuning.epochs", 4, "--tuning.batch", 8, "--engine.deepspeed", "zero3_cpu"]
    for result in run_ranks(2, words(base, "ner", data, tmp_path / "whole", *zero3)):
        assert result.returncode == 0, result.stderr
    found = scores(tmp_path / "whole")
    assert found["split"] == "test" and found["languages"].keys() == {"de", "en"}
    assert found["mean"]["f1"] > 95 and abs(found["gap"]["f1"]) < 5
    assert found["mean"]["f1"] == pytest.approx(sum(one["f1"] for one in found["languages"].values()) / 2)
    predictions = json.loads((tmp_path / "whole" / "predictions" / "de.json").read_text())
    assert len(predictions) == 30 and set(predictions[0]) <= {"O", "B-PER", "B-LOC"}

    broken = words(base, "ner", data, tmp_path / "broken", *zero3)
    killer = [sys.executable, "-c", KILLER, str(tmp_path / "broken"), *broken]
    assert subprocess.run(killer, cwd=ROOT, env=environment(), capture_output=True, timeout=300).returncode == 0
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
    assert again.returncode == 0 and "is there already" in again.stdout


KILLER = """
import subprocess, sys, time
from pathlib import Path
from tests.launch import ROOT, environment, free_port
out, port = Path(sys.argv[1]), free_port()
ranks = [subprocess.Popen([sys.executable, *sys.argv[2:]], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
         env=environment(RANK=r, LOCAL_RANK=r, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)) for r in range(2)]
while not list(out.glob("checkpoints/step_????????/complete.json")):
    assert all(rank.poll() is None for rank in ranks)
    time.sleep(0.02)
for rank in ranks:
    rank.kill()
for rank in ranks:
    rank.wait()
"""


def test_pairs_over_seeds_as_a_job_array_does(base: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pawsx")
    more = ["--seeds", 1, 2, "--tuning.epochs", 20, "--tuning.batch", 16, "--tuning.dropout", 0]
    listed = finetune(words(base, "pawsx", data, tmp_path / "out", *more, "--list"))
    assert listed.stdout.split() == [str(tmp_path / "out" / "seed1"), str(tmp_path / "out" / "seed2")]
    assert finetune(words(base, "pawsx", data, tmp_path / "out", *more, "--number", 1)).returncode == 0
    assert not (tmp_path / "out" / "seed1").exists()
    found = scores(tmp_path / "out" / "seed2")
    assert found["seed"] == 2 and found["mean"]["accuracy"] > 90
    more[2:3] = [3, 2]  # two runs one after the other in the same process, and one that is done
    result = finetune(words(base, "pawsx", data, tmp_path / "out", *more))
    assert result.returncode == 0, result.stderr
    assert "seed2/scores.json is there already" in result.stdout
    assert [scores(tmp_path / "out" / f"seed{seed}")["seed"] for seed in (1, 3)] == [1, 3]


def test_questions_from_another_sets_training_file(base: Path, tmp_path: Path) -> None:
    """Contexts longer than a window; trained with layer-wise rates; the score says of which metric it is."""
    data = write_questions(tmp_path / "qa")
    more = ["--tuning.epochs", 12, "--tuning.batch", 16, "--tuning.layer-decay", 0.9, "--engine.kind", "plain"]
    result = finetune(words(base, "xquad", data, tmp_path / "out", *more))
    assert result.returncode == 0, result.stderr
    found = scores(tmp_path / "out")
    assert found["metric"] == ["f1", "em"] and found["mean"]["em"] > 80


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tuning.train-languages", "sw"], "no training set of sw in --data, only of de, en"),
        (["--engine.kind", "pipeline"], "engine.kind pipeline is for pre-training"),
        (["--task", "xquad"], "no file of the task there"),
        (["--tuning.dropout", "1"], "tuning.dropout is 1.0: it must be at least 0 and below 1"),
        (["--tuning.batch", "7", "--tuning.micro-batch", "2"], "does not divide"),
        (["--number", "3"], "--number is 3: there are 1 runs"),
        ([], "out has a model but no config.json, which says how it was trained: restore it"),
    ],
)
def test_a_mistake_is_one_sentence(base: Path, tmp_path: Path, more: list[str], said: str) -> None:
    data = write_entities(tmp_path / "panx", 4)
    if not more:
        (tmp_path / "out" / "model").mkdir(parents=True)
    result = finetune(words(base, "ner", data, tmp_path / "out", *more))
    assert result.returncode == 2 and said in result.stderr, result.stderr
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_signal_in_the_second_of_two_runs_saves_it_too(base: Path, tmp_path: Path) -> None:
    """The runs of one call share their signals: the second must not lose them with the first."""
    data, out = write_entities(tmp_path / "panx"), tmp_path / "out"
    more = ["--seeds", 1, 2, "--tuning.epochs", 40, "--tuning.batch", 8, "--engine.kind", "plain"]
    command = [sys.executable, *words(base, "ner", data, out, *more)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    while RunFolder(out / "seed2").steps_logged() < 15:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate()[0]
    assert process.returncode == 0 and "seed2: stopped after step" in said, said
    assert (out / "seed1" / "scores.json").exists() and not (out / "seed2" / "scores.json").exists()
    saved = json.loads((out / "seed2" / "checkpoints" / "latest.json").read_text())["checkpoint"]
    assert saved == f"step_{RunFolder(out / 'seed2').steps_logged():08d}"
