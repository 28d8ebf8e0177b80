"""The real command under the real launcher: killed, stopped and resumed, it ends bit for bit as if left alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.launch import ROOT, TIMED, environment, free_port, python, run_ranks
from tests.rows import train_vocabulary, write_data
from xlme_ds.evaluate import losses
from xlme_ds.train.run_folder import RunFolder
from xlme_ds.trained.runs import load_run

STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 16 rows at 8 rows a step: a step in two starts or crosses a shard, and step 12 the second pass."""
    folder = tmp_path_factory.mktemp("resume")
    vocabulary = train_vocabulary(folder / "data" / "vocab")
    write_data(folder / "data", rows=100, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    write_data(folder / "heldout", rows=16, vocabulary=vocabulary.size, seed=1, sha256=vocabulary.sha256)
    shutil.copytree(folder / "data" / "vocab", folder / "heldout" / "vocab")
    return folder


def pretrain(folder: Path, out: Path, **changes: object) -> list[str]:
    """The words of the command after its module; `changes` of settings, with `__` for the dot."""
    vocabulary = json.loads((folder / "data/mono/manifest.json").read_text())["vocabulary_size"]
    overrides = {
        "model.vocabulary": vocabulary,
        "model.width": 32,
        "model.heads": 4,
        "model.feed-forward": 64,
        "model.max-positions": 32,
        "model.discriminator-layers": 2,
        "model.dropout": 0.1,
        "model.language-embeddings": "fr en de",
        "data.mono-rows": 8,
        "data.para-rows": 4,
        "data.micro-batch": 2,
        "engine.precision": "fp32",
        "optimizer.warmup-steps": 4,
        "train.steps": STEPS,
        "train.log-every": 1,
        "train.eval-every": 8,
        "train.save-every": 6,
        "train.keep-last": 2,
        "train.keep-every": 12,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [
        "xlme_ds.pretrain",
        "--recipe",
        "quickstart",
        "--data",
        str(folder / "data"),
        "--heldout",
        str(folder / "heldout"),
        "--out",
        str(out),
        *(word for key, value in overrides.items() for word in (f"--{key}", *str(value).split())),
    ]


def start(folder: Path, out: Path) -> subprocess.Popen[str]:
    launcher = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--module"]
    return subprocess.Popen(
        [*launcher, *pretrain(folder, out)],
        cwd=ROOT,
        env=environment(),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(folder: Path, out: Path) -> str:
    """Run to the end, with the variables that the launcher sets, and nothing that it loads; what rank 0 printed."""
    ranks = run_ranks(2, ["-m", *pretrain(folder, out)])
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stderr[-3000:] for rank in ranks)
    return ranks[0].stdout


def last_step(out: Path) -> int:
    return RunFolder(out).last_logged_step()


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + 300  # far beyond what a loaded machine needs; a hang must not hold the suite
    while last_step(out) < step:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} is not reached"
        time.sleep(0.02)


def kill_session(process: subprocess.Popen[str]) -> None:
    """SIGKILL the launcher and every rank: all share the session that the launcher leads."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == process.pid:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    process.wait()


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Path, Path, list[str]]:
    """A run left alone; one that was killed, then stopped by SIGTERM, then finished; and what its last two parts
    said."""
    alone, broken = folder / "alone", folder / "broken"
    finish(folder, alone)
    process = start(folder, broken)
    wait_for_step(process, broken, 9)
    while not (broken / "checkpoints/latest.json").exists():  # a thread writes the first one while steps go on
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    kill_session(process)
    process = start(folder, broken)
    said, alarm = [], threading.Timer(300, kill_session, [process])  # a hang must not hold the suite
    alarm.start()
    while not said or not said[-1].startswith("step "):  # the records may have later ones, from before the kill
        said.append(process.stdout.readline())
        assert said[-1], said
    alarm.cancel()
    ranks = [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_rank(entry, process.pid)
    ]
    os.kill(ranks[0], signal.SIGTERM)  # one rank is told, all must stop after the same step
    said.append(process.communicate(timeout=120)[0])
    assert process.returncode == 0, said
    return alone, broken, ["".join(said), finish(folder, broken)]


def _is_rank(entry: Path, session: int) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
        return (
            os.getsid(int(entry.name)) == session
            and b"xlme_ds.pretrain" in words
            and b"--out" in words
            and b"-u" in words[:3]
            and b"deepspeed.launcher.launch" not in words
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def lines(path: Path) -> list[dict]:
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMED}
        for line in path.read_text().splitlines()
    ]


def test_same_weights(runs: tuple[Path, Path, list[str]]) -> None:
    alone, broken = (load_file(run / "model" / "model.safetensors") for run in runs[:2])
    assert alone.keys() == broken.keys()
    for name in alone:
        assert alone[name].tobytes() == broken[name].tobytes(), name


def test_a_checkpoint_holds_the_model(runs: tuple[Path, Path, list[str]]) -> None:
    """Of ZeRO-3 on two processes, with language embeddings."""
    found = load_run(runs[0].with_name(f"{runs[0].name}@{STEPS}"))
    for name, value in load_file(runs[0] / "model" / "model.safetensors").items():
        assert found.state[name].numpy().tobytes() == value.tobytes(), name
    assert found.step == STEPS and found.encoder().cfg.language_embeddings == ("fr", "en", "de")
    for run in runs[:2]:
        left = [path for path in run.rglob("*.tmp") if path.is_file()]
        samples = json.loads((run / "samples.json").read_text())["samples"]
        assert {sample["step"] for sample in samples} == {STEPS} and not left


@pytest.mark.parametrize("name", ["metrics.jsonl", "heldout.jsonl", "dimensions.jsonl"])
def test_same_records(runs: tuple[Path, Path, list[str]], name: str) -> None:
    alone, broken = (lines(run / name) for run in runs[:2])
    first = [1] * (name == "dimensions.jsonl")
    assert [line["step"] for line in alone] == list(
        range(1, STEPS + 1) if name == "metrics.jsonl" else [*first, *range(8, STEPS + 1, 8)]
    )
    assert alone == broken


def test_it_resumed_where_it_stopped(runs: tuple[Path, Path, list[str]]) -> None:
    killed, stopped = runs[2]
    assert re.search(r"resuming after step (6|12|18) ", killed), killed  # the last checkpoint before the SIGKILL
    step = re.search(r"stopped after step (\d+) of 24 and saved", killed)
    assert step is not None, killed
    assert f"resuming after step {step[1]} " in stopped


def test_it_goes_on_in_one_process_of_plain_torch(folder: Path, runs: tuple[Path, Path, list[str]]) -> None:
    moved = folder / "moved"
    shutil.copytree(runs[0], moved)
    shutil.rmtree(moved / "checkpoints" / f"step_{STEPS:08d}")
    done = python("-m", *pretrain(folder, moved, engine__kind="plain"))
    assert done.returncode == 0, done.stderr
    assert "resuming after step 18 of 24, 1 process," in done.stdout
    ours, theirs = (lines(run / "metrics.jsonl") for run in (moved, runs[0]))
    assert ours[:18] == theirs[:18]
    # float32 sums in another order
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)


def test_losses_are_those_of_the_run(folder: Path, runs: tuple[Path, Path, list[str]]) -> None:
    """`xlme evaluate losses`, which has no engine, against what the engine wrote on two processes."""
    found = losses([runs[0].with_name(f"{runs[0].name}@{STEPS}"), runs[1]], folder / "heldout", rows=16)
    for name, model in zip(("overall", "languages"), found["models"], strict=True):
        file = "heldout.jsonl" if name == "overall" else "heldout_languages.jsonl"
        theirs = lines(runs[0] / file)[-1]
        for key, value in model["overall"].items() if name == "overall" else model["languages"].items():
            assert value == pytest.approx((theirs if name == "overall" else theirs["terms"])[key], rel=1e-5), key
    assert found["models"][0]["step"] == STEPS and found["models"][1]["step"] is None


def test_a_branch_lets_the_rate_fall(folder: Path, runs: tuple[Path, Path, list[str]]) -> None:
    """From a checkpoint of ZeRO-3 on two processes, in one process of plain torch."""
    command = pretrain(folder, folder / "branch", engine__kind="plain", schedule__name="wsd", schedule__decay_steps=4)
    for flag in ("--recipe", "--train.steps", "--data.micro-batch"):
        del command[command.index(flag) : command.index(flag) + 2]
    done = python("-m", command[0], "--branch", f"{runs[0]}@12", *command[1:])
    assert done.returncode == 0, done.stderr
    ours, theirs = lines(folder / "branch" / "metrics.jsonl"), lines(runs[0] / "metrics.jsonl")
    assert [line["step"] for line in ours] == [13, 14, 15, 16]
    assert ours[0]["loss"] == pytest.approx(theirs[12]["loss"], rel=1e-5), "before anything of its own was learned"
    rates = [line["lr"] / ours[0]["lr"] for line in ours]
    assert rates == pytest.approx([1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])
    both = python("-m", command[0], "--recipe", "quickstart", "--branch", f"{runs[0]}@12", *command[1:])
    assert both.returncode == 2 and "--recipe and --branch exclude each other" in both.stderr


def test_retention(runs: tuple[Path, Path, list[str]]) -> None:
    kept = sorted(p.name for p in (runs[0] / "checkpoints").iterdir())
    assert kept == ["latest.json", "step_00000012", "step_00000018", "step_00000024"]
    assert json.loads((runs[0] / "checkpoints/latest.json").read_text()) == {"format": 1, "checkpoint": "step_00000024"}


def test_run_folder(runs: tuple[Path, Path, list[str]]) -> None:
    for name in (
        "config.json",
        "report.html",
        "retrieval.json",
        "samples.json",
        "languages.json",
        "model/sentencepiece.model",
    ):
        assert (runs[0] / name).stat().st_size > 0, name
    assert list((runs[0] / "tensorboard").rglob("events.*"))
    heldout = lines(runs[0] / "heldout.jsonl")[-1]
    assert {
        "mlm",
        "tlm",
        "mrtd",
        "trtd",
        "auc_mono",
        "auc_para",
        "unigram_nll_mono",
        "unigram_nll_para",
    } <= heldout.keys()
    metrics = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert {
        "step",
        "loss",
        "mlm",
        "tlm",
        "mrtd",
        "trtd",
        "replaced_fraction_mono",
        "accuracy_replaced_mono",
        "accuracy_original_mono",
        "auc_mono",
        "generator_accuracy_mono",
        "lr",
        "grad_norm",
        "tokens",
        "tokens_per_s",
        "flops_per_s",
        "skipped_steps",
    } <= metrics.keys()
