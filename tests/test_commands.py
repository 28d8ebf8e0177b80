"""The commands around a run: the launcher, the benchmarks."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment, python
from tests.rows import train_vocabulary, write_data
from xlme_ds.benchmarks import benchmarks
from xlme_ds.launch import command


def xlme(*words: str, **variables: object) -> "subprocess.CompletedProcess[str]":
    return python("-m", "xlme_ds", *words, **variables)


def real(*words: str) -> "subprocess.CompletedProcess[str]":
    """A command that becomes another program."""
    command = [sys.executable, "-m", "xlme_ds", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)


def test_the_launchers_command_line() -> None:
    words = ["--gpus", "8", "--hostfile", "hosts", "pretrain", "--recipe", "base", "--gpus", "x"]
    launcher = command(words)
    assert launcher[:3] == ["deepspeed", "--num_gpus", "8"]
    module = launcher.index("--module")
    assert launcher[module - 2 : module] == ["--hostfile", "hosts"]
    assert launcher[module + 1 :] == ["xlme_ds.pretrain", "--recipe", "base", "--gpus", "x"]
    assert "--num_gpus" not in command(["finetune"])
    assert command(["--gpus=1", "finetune", "--grid"])[-4:] == ["ignore", "-m", "xlme_ds.finetune", "--grid"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8", "no command to launch: add pretrain or finetune, and its flags after it"),
        ("--gpus 0 pretrain", "--gpus 0: it must be a number of processes, at least 1"),
        ("--gpus eight pretrain", "--gpus eight: it must be a number of processes, at least 1"),
    ],
)
def test_a_mistake_of_a_launch(words: str, message: str) -> None:
    done = xlme("launch", *words.split())
    assert (done.returncode, done.stderr) == (2, f"xlme launch: error: {message}\n")


def test_a_launch_of_two_processes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    model = f"--model.vocabulary {vocabulary.size} --model.max-positions 32 --data.mono-rows 4 --data.para-rows 4"
    words = f"launch --gpus 2 pretrain --recipe quickstart {model}"
    words += f" --data.micro-batch 2 --dry-run --data {data} --out {tmp_path}/run"
    done = real(*words.split())
    assert done.returncode == 0 and done.stdout.count("a dry run: nothing was written") == 1, done.stderr
    assert "2 processes" in done.stdout


def test_benchmarks_are_listed_and_run() -> None:
    listed = xlme("bench").stdout
    names = [line.split()[0] for line in listed.splitlines()[2:]]
    assert {"gpu", "loader", "peers.mteb", "rehearsal", "roofline", "step", "tokenize", "xl_step"} <= set(names)
    assert not {"measure", "gpu.worker", "workers"} & set(names)
    assert all(line.split(maxsplit=1)[1:] for line in listed.splitlines()[2:])
    done = real("bench", "step", "--help")
    assert done.returncode == 0 and "--rounds" in done.stdout, done.stderr
    assert "did you mean `xlme bench loader`?" in xlme("bench", "loder").stderr


def test_a_wheel_has_no_benchmarks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an installed package has none, run this in a clone of the repository"):
        benchmarks(tmp_path / "bench")
