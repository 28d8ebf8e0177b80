"""Held-out rows are shared evenly among micro-batches and ranks, whatever their number."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.worker import tiny
from tests.rows import train_vocabulary, write_data
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["full_state", "write_report"])
def test_a_signal_after_the_last_step_loses_nothing(tmp_path: Path, place: str, number: int) -> None:
    """While the state is gathered it waits; while the report is drawn the command ends, and draws it next time."""
    vocabulary = train_vocabulary(tmp_path / "mixed/vocab")
    write_data(tmp_path / "mixed", rows=8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    for signalled in (True, False):
        child = os.fork()
        if not child:
            _pretrain_one_step(tmp_path, vocabulary.size, place if signalled else "")
        if signalled:
            while not (tmp_path / "there").exists():
                time.sleep(0.01)
            os.kill(child, number)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert (tmp_path / "run/finished.json").exists() == (not signalled or place == "full_state")


def _pretrain_one_step(folder: Path, vocabulary: int, place: str) -> None:
    """Run the command in this process, slow in `place`, and leave."""
    from xlme_ds.engine.engine import Engine
    from xlme_ds.pretrain import main as pretrain
    from xlme_ds.report import run_page

    def slow(real):  # type: ignore[no-untyped-def]
        def call(*arguments):  # type: ignore[no-untyped-def]
            (folder / "there").touch()
            end = time.monotonic() + 2
            while time.monotonic() < end:
                time.sleep(0.01)
            return real(*arguments)

        return call

    for owner, name in ((Engine, "full_state"), (run_page, "write_report")):
        if name == place:
            setattr(owner, name, slow(getattr(owner, name)))
    code: object = 1
    try:
        pretrain(
            f"--recipe quickstart --data {folder}/mixed --out {folder}/run --engine.kind plain --engine.precision fp32 "
            f"--model.vocabulary {vocabulary} --data.mono-rows 4 --data.para-rows 4 --data.micro-batch 4 "
            "--train.steps 1 --optimizer.warmup-steps 1 --model.width 16 --model.heads 2 --model.feed-forward 32 "
            "--model.discriminator-layers 2 --model.generator-layers 1 --model.max-positions 32".split()
        )
        code = 0
    except SystemExit as left:
        code = left.code
    finally:
        os._exit(0 if code in (0, None) else 1)
