"""Several machines by a hostfile, without Slurm and ssh (docs/howto/gpus.md): two network namespaces."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import ROOT, environment
from tests.rows import train_vocabulary, write_data

SETTINGS = (
    "pretrain --recipe quickstart --model.vocabulary 120 --model.max-positions 32 --model.width 16 --model.heads 2 "
    "--model.feed-forward 32 --data.mono-rows 4 --data.para-rows 4 --data.micro-batch 2 --engine.precision fp32 "
    "--train.steps 2 --train.log-every 1 --train.eval-every 0 --optimizer.warmup-steps 1"
)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them; the addresses are 10.213.7.1 and .2."""
    names = [f"xlme-{os.getpid()}-{node}" for node in range(2)]
    if os.getuid() or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip(f"netns add {names[1]}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for node, name in enumerate(names):
            ip(f"-n {name} addr add 10.213.7.{node + 1}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def test_the_same_command_on_every_machine(tmp_path: Path, nodes: list[str]) -> None:
    data = tmp_path / "data"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    meet = f"--hostfile {tmp_path}/hosts --no_ssh --master_addr 10.213.7.1 --master_port 29500"

    def start(number: int) -> "subprocess.Popen[str]":
        words = f"launch {meet} --node_rank {number} {SETTINGS} --data {data} --out {tmp_path / 'run'}"
        command = ["ip", "netns", "exec", nodes[number], sys.executable, "-m", "xlme_ds", *words.split()]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {"GLOO_SOCKET_IFNAME": "eth0"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    machines = [start(number) for number in range(2)]
    said = [machine.communicate(timeout=600) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "2 processes" in said[0][0] and "finished" in said[0][0]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
