"""bench/loader.py: a quick run has its figures, and the contenders read the same rows."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import loader as bench
from bench.loader import (
    OURS,
    PEER,
    LoaderSettings,
    in_training_order,
    one_pass,
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
    contenders = figures["contenders"]
    assert set(contenders) == {OURS, PEER}
    for kinds in contenders.values():
        assert 0 < kinds["lean"]["masked_per_row"] < 0.2 * 512
        assert kinds["bare"]["rows_per_s"] > 0 < kinds["lean"]["first_batch_ms"]
    expected = contenders[OURS]["lean"]["rows_per_s"] / contenders[PEER]["lean"]["rows_per_s"]
    # A median of the rounds' ratios and a ratio of medians, on a machine that may do other work.
    assert expected / 10 < figures["ratio_vs_datasets"] < expected * 10
    assert sorted(path.name for path in data.iterdir()) == ["mono", "para"]


def test_the_peer_makes_our_batches(data: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "peer", in_training_order(data, 64))
    ours, theirs = list(our_batches(data, 64, "lean")), list(peer_batches(tmp_path / "peer", "lean"))
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        for part in (0, 2, 3):
            assert torch.equal(one[part], other[part])
    bare = list(our_batches(data, 64, "bare"))
    assert all(torch.equal(one[0], other[0]) for one, other in zip(bare, ours, strict=True))
    for kind in ("bare", "customary"):
        ids = torch.cat([batch[0] for batch in peer_batches(tmp_path / "peer", kind)])
        assert torch.equal(ids, torch.cat([batch[0] for batch in ours]))


def test_positions_and_segments_of_a_peer_are_ours(data: Path) -> None:
    for batch in our_batches(data, 16, "lean"):
        made = peer_batch("lean", batch[0].numpy().astype(np.int32))
        assert torch.equal(made[2], batch[2]) and torch.equal(made[3], batch[3])
        assert made[2].dtype == made[3].dtype == torch.int64


@pytest.mark.parametrize("kind", ["lean", "customary"])
def test_masks_of_peers_spare_special_tokens(kind: str) -> None:
    if kind == "customary":
        pytest.importorskip("transformers")
    ids = np.random.default_rng(0).integers(0, 50, (16, 512)).astype(np.int32)
    tokens, masked = peer_batch(kind, ids)[:2]
    assert torch.equal(tokens, torch.from_numpy(ids.astype(np.int64)))
    assert (ids.ravel()[masked] > UNK).all() and 0.1 < len(masked) / (ids > UNK).sum() < 0.2


def test_figures_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of four rows after 0.25, 0.5 and 1.25 s, and twice as much time of two CPUs."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: 2 * now[0])

    def batches(kind: str) -> Iterator[tuple[torch.Tensor, ...]]:
        for seconds in (0.25, 0.5, 1.25):
            now[0] += seconds
            ids = torch.ones(4, 5, dtype=torch.int64)
            yield (ids,) if kind == "bare" else (ids, torch.arange(3))

    figures = {"rows_per_s": 6.0, "rows_per_cpu_s": 3.0, "first_batch_ms": 250.0}
    assert one_pass("a", batches, "lean", 60) == figures | {"masked_per_row": 0.75}
    assert one_pass("a", batches, "bare", 60) == figures | {"masked_per_row": 0.0}


def test_a_ratio_is_the_median_of_the_rounds_ratios(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {
        (OURS, "lean"): (10, 20, 90), (OURS, "bare"): (6, 6, 8), (PEER, "lean"): (5, 2, 30), (PEER, "bare"): (3, 1, 1),
        (PEER, "customary"): (1, 10, 9),
    }  # fmt: skip
    cpu = {(OURS, "lean"): (4, 4, 4), (PEER, "lean"): (1, 2, 4)}
    turns = [
        {key: {"rows_per_s": values[n], "rows_per_cpu_s": cpu.get(key, values)[n]} for key, values in speeds.items()}
        for n in range(3)
    ]
    monkeypatch.setattr(bench, "by_turns", lambda passes, rounds: turns)
    found = race(LoaderSettings(data, 32, 3))
    assert found["ratio_vs_datasets"] == 3 and found["ratio_vs_datasets_in_cpu_time"] == 2
    assert found["ratio_vs_customary"] == 10 and found["ratio_vs_bare"] == 6 and found["rows"] == 64
    assert found["contenders"][OURS]["lean"] == {"rows_per_s": 20, "rows_per_cpu_s": 4}
    assert found["contenders"][PEER]["customary"]["rows_per_s"] == 9


def test_a_pass_has_the_whole_batches_of_the_data(data: Path) -> None:
    """64 rows of each task: four batches of 16 + 16; of 40 rows two batches, and of 15 none."""
    assert (
        race(LoaderSettings(data, 16_384, 1))["rows"] == 2 * 64 and race(LoaderSettings(data, 40, 1))["rows"] == 2 * 32
    )
    with pytest.raises(ValueError, match="needs 16 rows of each task: raise --rows"):
        race(LoaderSettings(data, 15, 1))


def test_other_rows_are_an_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.our_batches

    def wrong(*arguments):  # type: ignore[no-untyped-def]
        for ids, *rest in right(*arguments):
            yield ids + (ids == PAD), *rest

    monkeypatch.setattr(bench, "our_batches", wrong)
    with pytest.raises(ValueError, match="ours read other rows"):
        race(LoaderSettings(data, 16, 1))
