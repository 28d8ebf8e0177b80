"""Our training is that of transformers' ELECTRA in a loop of plain torch, step by step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.electra_peer import Peer
from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.train.schedule import learning_rate


def test_losses_and_weights_are_the_same(tmp_path: Path) -> None:
    """From the same first weights: 20 steps on the same rows, in micro-batches here."""
    run = tiny({"kind": "plain"}, 4, embedding_sharing="tied", relative_bias="none")
    run = replace(run, optimizer=replace(run.optimizer, weight_decay=0.5))  # so much that it shows
    loader = Loader(write_data(tmp_path / "data", rows=96), run.data, run.seed, run.objective.mask_fraction)
    engine, peer = build_engine(run, loader, None), Peer(run)
    for step in range(run.train.steps):
        rate = learning_rate(step, run.train.steps, run.optimizer, run.schedule)
        ours = engine.train_batch(step, rate, detailed=True).metrics
        theirs = peer.step(loader.step(step), rate)
        assert [ours[term] for term in ("mlm", "tlm", "mrtd", "trtd")] == pytest.approx(theirs, rel=1e-6), step
    state = peer.state()
    for name, value in engine.full_state().items():
        # 20 steps of up to 1e-3 move a weight by up to 1e-2; the rounding of a norm's weight near 1 is 1.2e-7.
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "other", [dict(relative_bias="gated"), dict(z_loss=1e-4), dict(dropout=0.1), dict(vocabulary_blocks=3)]
)
def test_another_model_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="no relative bias: name a run of electra with"):
        Peer(tiny({"kind": "plain"}, 4, **(dict(embedding_sharing="tied", relative_bias="none") | other)))
