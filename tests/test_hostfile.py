"""Several machines by a hostfile, without Slurm and ssh (docs/howto/gpus.md), as two launchers on this machine."""

import json
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
    """Two machines with one process each give the losses of one process."""
    data = tmp_path / "data"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    meet = f"--hostfile {tmp_path}/hosts --no_ssh --master_addr 127.0.0.1 --master_port {free_port()}"

    def start(launcher: str, out: str) -> "subprocess.Popen[str]":
        words = f"{launcher} {SETTINGS} --data {data} --out {tmp_path / out}"
        command = [sys.executable, "-m", "xlme_ds", *words.split()]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    machines = [start(f"launch {meet} --node_rank {number}", "two") for number in range(2)]
    said = [machine.communicate(timeout=240) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "2 processes" in said[0][0] and "finished" in said[0][0]
    alone = start("launch --gpus 1", "one")
    assert alone.wait(240) == 0, alone.stderr
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / out / "metrics.jsonl").open()] for out in ("two", "one")
    ]
    assert len(losses[0]) == 2
    assert all(abs(two / one - 1) < 1e-5 for two, one in zip(*losses, strict=True)), losses
