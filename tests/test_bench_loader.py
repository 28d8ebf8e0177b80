"""bench/loader.py: a quick run has its figures, and the contenders read the same rows."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import loader as bench
from bench.loader import OURS, PEER, in_training_order, our_batches, race
from bench.peers.loaders import peer_batch, peer_batches, write_rows
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
    assert expected / 3 < figures["ratio_vs_datasets"] < expected * 3
    assert sorted(path.name for path in data.iterdir()) == ["mono", "para"]


def test_the_peer_makes_our_batches(data: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "peer", in_training_order(data, 64))
    ours, theirs = list(our_batches(data, 64, "lean")), list(peer_batches(tmp_path / "peer", "lean"))
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        for part in (0, 2, 3):
            assert torch.equal(one[part], other[part])
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


def test_other_rows_are_an_error(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.our_batches

    def wrong(*arguments):  # type: ignore[no-untyped-def]
        for ids, *rest in right(*arguments):
            yield ids + (ids == PAD), *rest

    monkeypatch.setattr(bench, "our_batches", wrong)
    with pytest.raises(ValueError, match="ours read other rows"):
        race(data, 16, 1, tmp_path)
