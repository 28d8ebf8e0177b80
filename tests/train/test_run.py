"""Held-out rows are shared evenly among micro-batches and ranks, whatever their number."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.data.loader import Loader
from xlme_ds.train.run import heldout_data


@pytest.mark.parametrize("rows", [2, 7, 50, 100])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_batch", [1, 8, 16])
def test_heldout_rows_divide(tmp_path: Path, rows: int, world: int, micro_batch: int) -> None:
    folder = write_data(tmp_path / "data", rows=rows)
    config = tiny({"kind": "plain"}, 8)
    config = replace(
        config, data=replace(config.data, micro_batch=micro_batch), train=replace(config.train, eval_rows=60)
    )
    data = heldout_data(config, folder, world)
    assert 0 < data.mono_rows <= min(rows, 60) and data.micro_batch <= micro_batch
    plan = Loader(folder, data, 1, 0.15, 0, world).plan
    assert plan.accumulation * plan.world * plan.micro[0] == data.mono_rows
    assert 0 < data.para_rows <= min(rows, 60)


def test_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few rows for 4 micro-batches"):
        heldout_data(tiny({"kind": "plain"}, 8), write_data(tmp_path / "data", rows=3), world=4)
