"""Several machines by a hostfile, without Slurm and ssh (docs/howto/gpus.md), as two launchers on this machine."""

import subprocess
import sys
from pathlib import Path

from tests.launch import ROOT, environment, free_port
from tests.rows import train_vocabulary, write_data

SETTINGS = (
    "pretrain --recipe quickstart --model.vocabulary 120 --model.max-positions 32 --model.width 16 --model.heads 2 "
    "--model.feed-forward 32 --data.mono-rows 4 --data.para-rows 4 --data.micro-batch 2 --engine.precision fp32 "
    "--train.steps 2 --train.log-every 1 --train.eval-every 0 --optimizer.warmup-steps 1"
)


def test_the_same_command_on_every_machine(tmp_path: Path) -> None:
    data = tmp_path / "data"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    meet = f"--hostfile {tmp_path}/hosts --no_ssh --master_addr 127.0.0.1 --master_port {free_port()}"

    def start(number: int) -> "subprocess.Popen[str]":
        words = f"launch {meet} --node_rank {number} {SETTINGS} --data {data} --out {tmp_path / 'run'}"
        command = [sys.executable, "-m", "xlme_ds", *words.split()]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    machines = [start(number) for number in range(2)]
    said = [machine.communicate(timeout=240) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "2 processes" in said[0][0] and "finished" in said[0][0]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
