"""The real command under the real launcher, with the model in two stages: it trains, evaluates, saves and reports."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, environment, free_port, run_ranks
from tests.rows import train_vocabulary, write_data
from xlme_ds.trained.runs import load_run

OVERRIDES = {
    "engine.kind": "pipeline",
    "engine.deepspeed": "pipe_zero1",
    "engine.precision": "fp32",
    "model.width": 32,
    "model.heads": 4,
    "model.feed-forward": 64,
    "model.max-positions": 32,
    "model.discriminator-layers": 3,
    "data.mono-rows": 8,
    "data.para-rows": 4,
    "data.micro-batch": 2,
    "optimizer.warmup-steps": 4,
    "train.steps": 12,
    "train.log-every": 1,
    "train.eval-every": 6,
    "train.save-every": 6,
}


def arguments(folder: Path, out: Path, **changes: object) -> list[str]:
    vocabulary = json.loads((folder / "data/mono/manifest.json").read_text())["vocabulary_size"]
    settings = OVERRIDES | {"model.vocabulary": vocabulary} | changes
    folders = ["--data", str(folder / "data"), "--heldout", str(folder / "heldout"), "--out", str(out)]
    words = [word for key, value in settings.items() for word in (f"--{key}", *str(value).split())]
    return ["xlme_ds.pretrain", "--recipe", "quickstart", *folders, *words]


def launched(*command: str) -> subprocess.CompletedProcess[str]:
    """Two ranks by the real launcher."""
    launcher = f"deepspeed --num_gpus 2 --master_port {free_port()} --module"
    return subprocess.run(
        [*launcher.split(), *command], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=600
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    vocabulary = train_vocabulary(folder / "data" / "vocab")
    write_data(folder / "data", rows=100, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    write_data(folder / "heldout", rows=6, vocabulary=vocabulary.size, seed=1, sha256=vocabulary.sha256)
    shutil.copytree(folder / "data" / "vocab", folder / "heldout" / "vocab")
    return folder


def test_two_stages_train_and_report(folder: Path) -> None:
    out = folder / "run"
    words = arguments(folder, out, **{"engine.balance": "1 2"})
    rehearsed, _ = run_ranks(2, ["-m", *words, "--dry-run"])
    assert rehearsed.returncode == 0 and "a dry run: nothing was written" in rehearsed.stdout, rehearsed.stderr
    assert "2 processes, pipeline pipe_zero1, fp32" in rehearsed.stdout and "GiB a process" in rehearsed.stdout
    assert not out.exists()
    result = launched(*words)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "embedding, generator, layer 0 (" in result.stdout and "| layers 1-2 (" in result.stdout
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 13))
    assert records[-1]["loss"] < records[0]["loss"]
    assert {"auc_mono", "generator_accuracy_para", "grad_norm"} <= records[-1].keys()
    names = "heldout", "heldout_languages"
    heldout, languages = ([json.loads(line) for line in (out / f"{name}.jsonl").open()] for name in names)
    assert [line["step"] for line in heldout] == [line["step"] for line in languages] == [6, 12]
    for whole, parts in zip(heldout, languages, strict=True):
        for term, losses in parts["terms"].items():
            weighted = sum(loss * parts["tokens"][term][code] for code, loss in losses.items())
            assert whole[term] == pytest.approx(weighted / sum(parts["tokens"][term].values())), term
        assert parts["terms"].keys() == {"mlm", "tlm", "mrtd", "trtd"} and parts["unigram"].keys() == {"mono", "para"}
        assert len(parts["terms"]["mlm"]) > 1
    assert (out / "report.html").exists() and (out / "model" / "model.safetensors").exists()
    found = load_run(out.with_name("run@12")).state
    assert all(torch.equal(found[name], value) for name, value in load_run(out).state.items())
    again, _ = run_ranks(2, ["-m", *words])
    assert again.returncode == 0 and "all 12 steps are done" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize(
    ("processes", "changes", "message"),
    [
        (1, {}, "engine.pipeline_stages 2 needs a multiple of 2 processes, and 1 run: launch another"),
        (
            2,
            {"engine.pipeline-schedule": "dualpipev", "data.micro-batch": 4},
            "engine.pipeline_schedule dualpipev needs at least 4 micro-batches a step, but data.micro_batch 4 gives 2",
        ),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, processes: int, changes: dict[str, object], message: str) -> None:
    ranks = run_ranks(processes, ["-m", *arguments(folder, folder / f"wrong{processes}", **changes)])
    said = "".join(rank.stderr for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2] * processes
    assert message in said and "Traceback" not in said
