"""bench/loader.py: a quick run has its figures, the contenders read the same rows, and a large store is what it
claims."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.loader import OURS, Settings, race
from bench.loader_peers import PEERS, Ours, collator_mask, customary, lean, plain_mask
from bench.loader_rows import SHARD_ROWS, Text, in_training_order, linked
from tests.rows import write_data
from xlme_ds.data.schema import PAD, TASKS, UNK, read_manifest
from xlme_ds.data.shards import RowStore

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text(tmp_path, synthetic=True)


def test_a_quick_run_has_its_figures() -> None:
    flags = [
        "--quick",
        "--json",
        "--synthetic",
        "--model",
        "tiny",
        "--rows",
        "256",
        "--resumes",
        "1",
        "--gigabytes",
        "1",
        "100",
    ]
    command = [sys.executable, "-W", "ignore", "-m", "bench.loader", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["rows"] == 512 and figures["fraction_of_step"] == figures["load_s"] / figures["step_s"] > 0
    sizes = figures["resumes"]
    assert list(sizes) == ["1 GB", "100 GB"]
    assert figures["resume_s"] == sizes["100 GB"]["from the disk"]["first_batch_s"] > 0
    for name, kinds in sizes.items():
        for found in kinds.values():
            assert found["gigabytes"] == pytest.approx(float(name.split()[0]), rel=0.15)
            assert found["step"] * 16 == pytest.approx(found["shards"] / 2 * SHARD_ROWS / 2, rel=0.01)
    small, large = (sizes[name]["cached"] for name in ("1 GB", "100 GB"))
    assert large["peak_mib"] - small["peak_mib"] < 10  # a hundred times the data
    contenders = figures["contenders"]
    assert set(contenders) == {OURS} | set(PEERS) - set(figures["left_out"])
    for name, words in figures["left_out"].items():
        assert "pip install" in words and PEERS[name].missing() == words
    for kinds in contenders.values():
        assert kinds["lean"]["masked_per_row"] == pytest.approx(0.15 * 500, rel=0.1)
        assert kinds["bare"]["rows_per_s"] > 0 < kinds["lean"]["first_batch_ms"]
    peers = [found["lean"]["rows_per_s"] for name, found in contenders.items() if name != OURS]
    assert (figures["ratio_vs_best_peer"] is None) == (not peers)
    if peers:
        expected = contenders[OURS]["lean"]["rows_per_s"] / max(peers)
        assert expected / 3 < figures["ratio_vs_best_peer"] < expected * 3


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_gives_our_batches(text: Text, name: str) -> None:
    if why := PEERS[name].missing():
        pytest.skip(why)
    folder = text.write("mixed", 64)
    peer = PEERS[name](text.scratch / "peer", 64, 16)
    peer.write(in_training_order(folder, 64, 16))
    ours = list(Ours(folder, 64, 16).batches("lean", 0))
    theirs = list(peer.batches("lean", 0))
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        for part in (0, 2, 3):
            assert torch.equal(one[part], other[part])
    for kind in ("bare", "customary"):
        found = torch.cat([batch[0] for batch in peer.batches(kind, 0)])  # type: ignore[arg-type]
        assert torch.equal(found, torch.cat([batch[0] for batch in ours]))


def test_positions_and_segments_of_a_peer_are_ours(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "mixed", 16)
    for batch in Ours(folder, 16, 8).batches("lean", 0):
        made = lean(batch[0].numpy().astype(np.int32), plain_mask)
        assert torch.equal(made[2], batch[2]) and torch.equal(made[3], batch[3])
        assert made[2].dtype == made[3].dtype == torch.int64


def test_masks_of_peers_spare_special_tokens() -> None:
    masks = [plain_mask]
    ids = np.random.default_rng(0).integers(0, 50, (16, 512)).astype(np.int32)
    if importlib.util.find_spec("transformers"):
        masks.append(collator_mask)
        tokens, masked = customary(list(ids))
        assert torch.equal(tokens, torch.from_numpy(ids.astype(np.int64)))
        assert (ids.ravel()[masked] > UNK).all() and 0.1 < len(masked) / (ids > UNK).sum() < 0.2
    for mask in masks:
        masked = mask(torch.from_numpy(ids.astype(np.int64)))
        assert (ids.ravel()[masked] > UNK).all() and 0.1 < len(masked) / (ids > UNK).sum() < 0.2


def test_other_rows_are_refused(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ours.batches

    def wrong(self, kind, workers):  # type: ignore[no-untyped-def]
        for ids, *rest in right(self, kind, workers):
            yield ids + (ids == PAD), *rest

    monkeypatch.setattr(Ours, "batches", wrong)
    monkeypatch.setattr("bench.loader.PEERS", {})
    with pytest.raises(ValueError, match="ours read other rows"):
        race(text, Settings(rows=16, rounds=1, workers=False))


def test_a_linked_store_is_read_as_any(text: Text) -> None:
    source = text.write("shard", 64, shard_rows=64)
    size = sum(read_manifest(source / task).shards[0].bytes for task in TASKS)
    folder = linked(source, text.scratch / "large", 5 * size / 1e9)
    for task in TASKS:
        few, many = RowStore(source / task), RowStore(folder / task)
        assert (many.rows, len(many.manifest.shards)) == (5 * 64, 5)
        rows = many.read(np.array([2 * 64 + 7, 4 * 64 + 7]))
        assert (rows.tokens == few.read(np.array([7])).tokens).all()
    path = folder / "mono" / "00003.arrow"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match=r"00003\.arrow cannot be read"):
        RowStore(folder / "mono").read(np.array([3 * 64]))
