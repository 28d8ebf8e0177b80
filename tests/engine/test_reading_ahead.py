"""Rows that are read while a GPU computes the step before: the same steps, and errors in their turn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine
from xlme_ds.engine.ranks import SharedError


class Watched(Loader):
    """Notes the steps that are read. Step `damaged` cannot be read."""

    damaged = -1

    def micro_batches(self, step: int) -> list[Any]:
        self.noted.append(f"read {step}")
        if step == self.damaged:
            raise ValueError("a damaged shard")
        return super().micro_batches(step)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    config = tiny({"kind": "plain"}, 8)
    loader = Watched(write_data(tmp_path, rows=48), config.data, config.seed, 0.15)
    loader.noted = []
    built = build_engine(config, loader, None)
    update = built._update

    def noted_update(context: Any) -> float:
        loader.noted.append("update")
        return update(context)

    built._update, built._reads_ahead = noted_update, True  # as on a GPU
    return built


def test_the_next_rows_are_read_before_the_update(engine: Engine) -> None:
    state = engine.full_state()
    alone = [engine.train_batch(step, 1e-3, detailed=True) for step in range(3)]
    assert engine.loader.noted == ["read 0", "update", "read 1", "update", "read 2", "update"]
    engine.loader.noted.clear()
    for name, parameter in engine.named_parameters():
        parameter.data.copy_(state[name])
    engine.optimizer.state.clear()
    ahead = [engine.train_batch(step, 1e-3, True, next_step=[1, 2, None][step]) for step in range(3)]
    assert engine.loader.noted == ["read 0", "read 1", "update", "read 2", "update", "update"]
    assert ahead == alone


def test_rows_of_another_step_are_not_used(engine: Engine) -> None:
    engine.train_batch(0, 1e-3, False, next_step=1)
    engine.train_batch(2, 1e-3, False)
    assert engine.loader.noted == ["read 0", "read 1", "update", "read 2", "update"]


def test_an_error_of_the_next_step_waits_for_its_turn(engine: Engine) -> None:
    engine.loader.damaged = 1
    before = engine.full_state()
    assert engine.train_batch(0, 1e-3, False, next_step=1).applied
    assert any(not torch.equal(before[name], value) for name, value in engine.full_state().items())
    with pytest.raises(SharedError, match="a damaged shard"):
        engine.train_batch(1, 1e-3, False)
