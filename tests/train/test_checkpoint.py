"""Checkpoints and the run folder, with the plain engine on one process."""

import dataclasses
import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.config import RunConfig
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.protocol import Engine
from xlme_ds.train.checkpoint import Checkpoints
from xlme_ds.train.folder import RunFolder
from xlme_ds.train.run import train

PLAIN = dict(kind="plain", deepspeed="zero1", micro_batch=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", rows=96)


def engine(data: Path, config: RunConfig | None = None) -> Engine:
    config = config or tiny(**PLAIN)
    return build_engine(config, Loader(data, config.data, config.seed, 0.15), None)


def test_resumed_run_continues_exactly(data: Path, tmp_path: Path) -> None:
    straight = engine(data)
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=0)
    for step in range(6):
        straight.train_batch(step, 1e-3, False)
        if step == 2:
            checkpoints.save(straight, 3, {"fingerprints": "f"})
    resumed = engine(data)
    newest, complaints = checkpoints.newest()
    assert newest is not None and not complaints
    assert checkpoints.load(resumed, newest, {"fingerprints": "f"}) == 3
    for step in range(3, 6):
        resumed.train_batch(step, 1e-3, False)
    ours, theirs = resumed.full_state(), straight.full_state()
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_keeps_the_last_and_every_nth(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 10):
        checkpoints.save(engine_once(data), step, {})
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        "latest.json",
        "step_00000004",
        "step_00000008",
        "step_00000009",
    ]


_ENGINE: dict[Path, Engine] = {}


def engine_once(data: Path) -> Engine:
    if data not in _ENGINE:
        _ENGINE[data] = engine(data)
    return _ENGINE[data]


@pytest.mark.parametrize("damage", ["marker", "truncated", "missing"])
def test_damaged_checkpoint_is_named_and_the_one_before_taken(data: Path, tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    for step in (1, 2):
        checkpoints.save(engine_once(data), step, {})
    last = checkpoints.folder / "step_00000002"
    if damage == "marker":
        (last / "complete.json").unlink()
    elif damage == "truncated":
        (last / "plain.pt").write_bytes((last / "plain.pt").read_bytes()[:-1])
    else:
        (last / "plain.pt").unlink()
    newest, complaints = checkpoints.newest()
    assert newest is not None and newest.name == "step_00000001"
    assert len(complaints) == 1 and "step_00000002" in complaints[0]


def test_half_written_checkpoint_is_not_seen(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    (checkpoints.folder / "step_00000002.partial").mkdir(parents=True)
    assert checkpoints.newest() == (None, [])
    checkpoints.save(engine_once(data), 1, {})
    assert not (checkpoints.folder / "step_00000002.partial").exists()


def test_other_data_or_world_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    checkpoints.save(engine_once(data), 1, {"fingerprints": {"mono": "a"}})
    newest, _ = checkpoints.newest()
    assert newest is not None
    with pytest.raises(ValueError, match="fingerprints"):
        checkpoints.load(engine_once(data), newest, {"fingerprints": {"mono": "b"}})
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps(state | {"world": 2}))
    with pytest.raises(ValueError, match="saved by 2 processes, there are 1"):
        checkpoints.load(engine_once(data), newest, {"fingerprints": {"mono": "a"}})


def test_a_damaged_newer_checkpoint_does_not_cost_the_good_ones(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_every=0)
    checkpoints.save(engine_once(data), 9, {})
    (checkpoints.folder / "step_00000009" / "complete.json").write_text("[]")
    assert checkpoints.newest()[0] is None
    checkpoints.save(engine_once(data), 6, {})
    assert checkpoints.newest()[0] == checkpoints.folder / "step_00000006"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest.json", "step_00000006"]


def test_run_folder_refuses_other_settings(tmp_path: Path) -> None:
    config = tiny(**PLAIN)
    out = tmp_path / "run"
    with closing(claimed(out, config)) as folder:
        folder.begin(config, {}, 1)
    claimed(out, dataclasses.replace(config, train=dataclasses.replace(config.train, save_every=7))).close()
    with pytest.raises(ValueError, match=r"started with model\.width 32, this call has 64"):
        claimed(out, dataclasses.replace(config, model=dataclasses.replace(config.model, width=64)))
    (out / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        claimed(out, config)


def test_run_folder_is_for_one_process(tmp_path: Path) -> None:
    config = tiny(**PLAIN)
    with (
        closing(claimed(tmp_path / "run", config)),
        pytest.raises(ValueError, match="another process is still working"),
    ):
        claimed(tmp_path / "run", config)
    claimed(tmp_path / "run", config).close()


def claimed(path: Path, config: RunConfig) -> RunFolder:
    folder = RunFolder(path)
    folder.claim(config)
    return folder


def test_records_without_a_usable_checkpoint_are_not_overwritten(data: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(
        tiny(**PLAIN), train=dataclasses.replace(tiny(**PLAIN).train, save_every=5, log_every=1)
    )
    loader = Loader(data, config.data, config.seed, 0.15)
    folder = RunFolder(tmp_path / "run")
    assert train(engine(data, config), config, folder, loader, None)
    shutil.rmtree(folder.path / "checkpoints")
    with pytest.raises(ValueError, match="has records but no usable checkpoint"):
        train(engine(data, config), config, folder, loader, None)
    assert folder.steps_logged() == config.train.steps
