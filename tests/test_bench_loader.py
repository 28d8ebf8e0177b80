"""bench/loader.py: a quick run has its figures, and the contenders read the same rows."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import loader as bench
from bench.loader import (
    customary_batches,
    in_training_order,
    our_batches,
    peer_batch,
    peer_batches,
    race,
    write_rows,
)
from tests.rows import write_data
from xlme_ds.data.schema import PAD, UNK

pytest.importorskip("datasets", reason="the extra bench is not installed")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "mixed", 64, row_tokens=512, rows_per_shard=64)


def test_a_quick_run_has_its_figures(tmp_path: Path) -> None:
    data = write_data(tmp_path / "mixed", 256, row_tokens=512, rows_per_shard=256)
    flags = f"--data {data} --quick --json --rows 256".split()
    command = [sys.executable, "-W", "ignore", "-m", "bench.loader", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["rows"] == 512
    rates = figures["rows_per_s"]
    assert set(rates) == {"ours", "datasets", "customary"} and min(rates.values()) > 0
    expected = rates["ours"] / rates["datasets"]
    # A median of the rounds' ratios and a ratio of medians, on a machine that may do other work.
    assert expected / 10 < figures["ratio_vs_datasets"] < expected * 10
    assert sorted(path.name for path in data.iterdir()) == ["mono", "para"]


def test_the_peer_makes_our_batches(data: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "peer", in_training_order(data, 64))
    ours, theirs = list(our_batches(data, 64)), list(peer_batches(tmp_path / "peer"))
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        for part in (0, 2, 3):
            assert torch.equal(one[part], other[part])
    ids = torch.cat([batch[0] for batch in customary_batches(tmp_path / "peer")])
    assert torch.equal(ids, torch.cat([batch[0] for batch in ours]))


def test_positions_and_segments_of_a_peer_are_ours(data: Path) -> None:
    for batch in our_batches(data, 16):
        made = peer_batch(batch[0].numpy().astype(np.int32))
        assert torch.equal(made[2], batch[2]) and torch.equal(made[3], batch[3])
        assert made[2].dtype == made[3].dtype == torch.int64


@pytest.mark.parametrize("kind", ["lean", "customary"])
def test_masks_of_peers_spare_special_tokens(kind: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (32, 512)).astype(np.int32)
    if kind == "customary":
        pytest.importorskip("transformers")
        write_rows(tmp_path / "peer", ids)
        ((tokens, masked),) = customary_batches(tmp_path / "peer")
    else:
        tokens, masked = peer_batch(ids)[:2]
    assert torch.equal(tokens, torch.from_numpy(ids.astype(np.int64)))
    assert (ids.ravel()[masked] > UNK).all() and 0.1 < len(masked) / (ids > UNK).sum() < 0.2


def test_a_ratio_is_the_median_of_the_rounds_ratios(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = {"ours": (10, 20, 90), "datasets": (50, 40, 270), "customary": (100, 20, 900)}
    cpu = {"ours": (4, 4, 4), "datasets": (4, 8, 16), "customary": (1, 1, 1)}
    turns = [{name: {"wall": wall[name][n], "cpu": cpu[name][n]} for name in wall} for n in range(3)]
    monkeypatch.setattr(bench, "by_turns", lambda passes, rounds: turns)
    found = race(data, 32, 3)
    assert found["ratio_vs_datasets"] == 3 and found["ratio_vs_datasets_in_cpu_time"] == 2
    assert found["ratio_vs_customary"] == 10 and found["rows"] == 64
    assert found["rows_per_s"] == {"ours": 3.2, "datasets": 1.28, "customary": 0.64}


def test_a_pass_has_the_whole_batches_of_the_data(data: Path) -> None:
    """64 rows of each task: four batches of 16 + 16; of 40 rows two batches, and of 15 none."""
    assert race(data, 16_384, 1)["rows"] == 2 * 64 and race(data, 40, 1)["rows"] == 2 * 32
    with pytest.raises(ValueError, match="needs 16 rows of each task: raise --rows"):
        race(data, 15, 1)


def test_other_rows_are_an_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.our_batches

    def wrong(*arguments):  # type: ignore[no-untyped-def]
        for ids, *rest in right(*arguments):
            yield ids + (ids == PAD), *rest

    monkeypatch.setattr(bench, "our_batches", wrong)
    with pytest.raises(ValueError, match="ours read other rows"):
        race(data, 16, 1)
