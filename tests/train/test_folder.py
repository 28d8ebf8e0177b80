"""The run folder: one writer whatever the path, one run for good, nothing deleted that is somebody else's."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path

import pytest
import torch

from tests.engine.worker import tiny
from tests.rows import train_vocabulary, write_data
from tests.train.test_guard import config as short
from tests.train.test_guard import run
from xlme_ds import quickstart
from xlme_ds.checkpoint import __main__ as checkpoint
from xlme_ds.checkpoint.checkpoints import Checkpoints
from xlme_ds.checkpoint.state_files import StateWriter
from xlme_ds.checkpoint_names import checkpoints_of, run_and_step
from xlme_ds.config import EngineConfig, ModelConfig, RunConfig, ScheduleConfig, StartConfig, Training
from xlme_ds.engine.ranks import SharedError
from xlme_ds.finetune.settings import FinetuneConfig
from xlme_ds.io.folders import atomic_folder, is_locked, lock_folder
from xlme_ds.report import __main__ as report
from xlme_ds.report.run_page import write_report
from xlme_ds.train.records import StepLog
from xlme_ds.train.resume import _require_none_lost, _warn_of_changes, report_missing_records
from xlme_ds.train.run_folder import RunFolder, describe_missing_steps, first_step
from xlme_ds.trained.config_json import read_model_settings
from xlme_ds.trained.runs import find_complete_checkpoint, write_model

WSD = ScheduleConfig("wsd")
PLAIN = dict(engine=dict(kind="plain"), micro_batch=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", rows=96)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, with checkpoints after 4 and 8."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run(data, out, short(steps=8), bad=set(), watch=False)
    return out


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """Of that run as it was after step 4."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000008")
    return tmp_path / "run"


def test_run_folder_refuses_other_settings(tmp_path: Path) -> None:
    config = tiny(**PLAIN)
    out = tmp_path / "run"
    with closing(claimed(out, config)) as folder:
        folder.write_config(config, {}, 1, {})
    claimed(out, dataclasses.replace(config, train=dataclasses.replace(config.train, save_every=7))).close()
    claimed(out, dataclasses.replace(config, engine=dataclasses.replace(config.engine, kind="deepspeed"))).close()
    claimed(out, dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary_blocks=2))).close()
    with pytest.raises(
        ValueError, match=r"started with engine\.precision fp32, this call has bf16: .* the processor choose it"
    ):
        claimed(out, dataclasses.replace(config, engine=EngineConfig(precision="bf16")))
    claimed(out, dataclasses.replace(config, model=dataclasses.replace(config.model, kernels="triton"))).close()
    for name, value, words in (("width", 64, "width 32"), ("attention_dropout", 0.1, r"attention_dropout 0\.0")):
        with pytest.raises(ValueError, match=rf"started with model\.{words}, this call has {value}"):
            claimed(out, dataclasses.replace(config, model=dataclasses.replace(config.model, **{name: value})))
    both = dataclasses.replace(config, seed=7, model=dataclasses.replace(config.model, width=64))
    with pytest.raises(
        ValueError, match=r"with model\.width 32, this call has 64; seed \d+, this call has 7: use the same"
    ):
        claimed(out, both)
    with pytest.raises(ValueError, match=r"started with model\.masked_head dense, this call has linear"):
        claimed(out, dataclasses.replace(config, model=dataclasses.replace(config.model, masked_head="linear")))
    assert read_model_settings(out).model == config.model
    written = json.loads((out / "config.json").read_text())
    del written["config"]["model"]["norm_epsilon"]
    (out / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"was started without model\.norm_epsilon, by another version"):
        claimed(out, config)
    with pytest.raises(
        ValueError, match=r"config\.json lacks a setting or has an unknown one: KeyError\('norm_epsilon'\)"
    ):
        read_model_settings(out)
    for damaged in ("{", '{"format": 1, "config": 3}'):
        (out / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            claimed(out, config)
    (out / "config.json").write_text('{"model_type": "xlme"}')
    with pytest.raises(ValueError, match=r"run is an export \(a Hugging Face folder\), not a run: choose another outp"):
        claimed(out, config)


MAY_CHANGE = """
train: log_every eval_every eval_rows save_every save_buffer_gib keep_last keep_every max_bad_steps spike_sigma
    watchdog_minutes audit wandb
model: kernels compile head_chunk vocabulary_blocks activation_checkpointing
data: micro_batch
tuning: micro_batch
engine: kind deepspeed gradient_precision pipeline_stages pipeline_schedule balance offload_optimizer
    offload_parameters nvme_folder
"""
OPEN_BEFORE_THE_FIRST_STEP = ("train.steps", "schedule.", "data.phase_")


@pytest.mark.parametrize("kind", [RunConfig, FinetuneConfig])
def test_what_may_change_on_a_resume_and_nothing_else(tmp_path: Path, kind: type[Training]) -> None:
    """Every setting of pre-training and of fine-tuning, one after the other."""
    config = kind("mine")
    RunFolder(tmp_path).write_config(config, {}, 1, {})
    sections = re.split(r"(\w+): ", " ".join(MAY_CHANGE.split()))[1:]
    may_change = {f"{name}.{key}" for name, keys in zip(*[iter(sections)] * 2, strict=True) for key in keys.split()}
    seen = set()

    def other(value: object) -> object:
        if isinstance(value, bool) or value is None:
            return not value
        return value + type(value)(1) if isinstance(value, int | float) else ("x",) if value == () else "x"

    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        keys = [key.name for key in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else [""]
        for key in keys:
            name = f"{field.name}.{key}".rstrip(".")
            shown = f"with {name} "
            if kind is FinetuneConfig:  # whose model and number of examples are not given as these settings
                in_words = {"base": "with another model (--model, --random)"}
                in_words |= dict.fromkeys(("train.steps", "optimizer.warmup_steps"), "on other training examples")
                shown = in_words.get(name, shown)
            values = {key: other(getattr(section, key))} if key else {}
            changed = dataclasses.replace(section, **values) if key else other(section)
            if not name.startswith(OPEN_BEFORE_THE_FIRST_STEP):
                seen.add(name)
                try:
                    RunFolder(tmp_path, writes=False).claim(dataclasses.replace(config, **{field.name: changed}))
                except ValueError as error:
                    assert name not in may_change and f"was started {shown}" in str(error)
                else:
                    assert name in may_change, name
    assert {name for name in may_change if hasattr(config, name.partition(".")[0])} <= seen


def test_what_to_do_instead_is_said(tmp_path: Path) -> None:
    config = tiny(**PLAIN)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=config.train.steps + 1))
    out = tmp_path / "run"
    with closing(claimed(out, config)) as folder:
        folder.write_config(config, {}, 1, {})
    (out / "checkpoints" / f"step_{config.train.steps:08d}").mkdir()
    weights = f"start.folder {out} with start.take all starts the new run from this run's weights"
    start = f"another output folder ({weights})"
    tuning = Training(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Training)})

    def refusal(changed: Training) -> str:
        try:
            claimed(out, changed).close()
        except ValueError as error:  # which keeps the folder locked where it is kept
            return str(error).partition(": ")[2]
        return ""

    schedule = "use the same settings to resume (with another, finished steps would have had another learning rate)"
    assert refusal(longer) == f"{schedule}, or {start}"
    folder.finish(config.train.steps)
    claimed(out, config).close()
    assert refusal(longer) == f"the run is finished and stays as it is; choose {start}"
    # Fine-tuning starts from --model.
    instead = "the run is finished and stays as it is; choose another output folder"
    assert refusal(dataclasses.replace(tuning, seed=7)) == instead


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


def test_a_link_to_the_folder_is_no_second_folder(tmp_path: Path) -> None:
    config = tiny(**PLAIN)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with closing(claimed(tmp_path / "run", config)):
        for path in (tmp_path / "link", tmp_path / "link/../run"):
            with pytest.raises(
                ValueError, match=rf"process is still working in .* \(process {os.getpid()} of \S+\): wait"
            ):
                claimed(path, config)
    claimed(tmp_path / "link", config).close()


def test_a_step_is_named_whatever_the_runs_name(tmp_path: Path) -> None:
    assert run_and_step(tmp_path / "a\nb@c@7") == (tmp_path / "a\nb@c", 7)
    (tmp_path / "a@7").mkdir()
    assert run_and_step(tmp_path / "a@7") == (tmp_path / "a@7", None)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """Whatever their number of digits; other names are none."""
    steps = (100_000_000, 99_999_999, 20, 1_000_000_000)
    for name in (*(f"step_{step:08d}" for step in steps), "step_0000020", "step_00000020.partial", "xstep_00000021"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints/step_00000030").touch()
    assert [path.name for path in checkpoints_of(tmp_path)] == [f"step_{step:08d}" for step in sorted(steps)]
    assert checkpoints_of(tmp_path / "none") == checkpoints_of(tmp_path / "checkpoints/step_00000030") == []


@pytest.mark.parametrize(("last", "is_lost"), [(9, False), (10, True)])
def test_a_branch_that_has_not_saved_yet_begins_again(tmp_path: Path, last: int, is_lost: bool) -> None:
    """Its first three steps follow the parent's sixth; more without a checkpoint would be lost."""
    branch = dataclasses.replace(short(steps=20, save_every=3), start=StartConfig("parent@6", "state"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(7, last + 1)))
    folder, checkpoints = RunFolder(tmp_path), Checkpoints(tmp_path, 1, 0)
    with pytest.raises(ValueError, match="has records but no usable") if is_lost else contextlib.nullcontext():
        _require_none_lost(branch, folder, checkpoints)
    with pytest.raises(ValueError, match="has records but no usable"):
        _require_none_lost(branch, folder, checkpoints, damaged=True)


def test_a_run_that_was_killed_before_its_first_save_may_save_more_often(tmp_path: Path) -> None:
    """What it had to save is told by the interval that it had, not by the shorter one that it gets."""
    folder, checkpoints, seldom = RunFolder(tmp_path), Checkpoints(tmp_path, 1, 0), short(steps=20, save_every=10)
    folder.write_config(seldom, {}, 1, {})
    for last in (10, 11):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {last}}}\n')
        for config in (seldom, short(steps=20, save_every=2), short(steps=20, save_every=15)):
            lost = pytest.raises(ValueError, match="has records but no usable checkpoint")
            with lost if last > 10 else contextlib.nullcontext():
                _require_none_lost(config, folder, checkpoints)


@pytest.mark.parametrize("command", ["weights", "convert"])
def test_an_existing_folder_is_refused_before_the_checkpoint_is_read(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        checkpoint.main([command, "--run", f"{tmp_path}/run", "--out", str(tmp_path)])
    assert f"{tmp_path} exists already: choose another output folder" in capsys.readouterr().err


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = claimed(tmp_path / "run", tiny(**PLAIN))
    waiting = os.open(tmp_path / "run/.lock", os.O_RDWR)  # of a process that has come as far as that
    folder.close()
    assert not list(tmp_path.iterdir())
    with closing(claimed(tmp_path / "run", tiny(**PLAIN))):
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is nobody's lock any more
        with pytest.raises(ValueError, match="another process is still working"):
            lock_folder(tmp_path / "run")
    os.close(waiting)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/.hidden").touch()
    claimed(tmp_path / "theirs", tiny(**PLAIN)).close()
    assert (tmp_path / "theirs").is_dir() and not capsys.readouterr().err
    (tmp_path / "theirs/text.txt").touch()
    RunFolder(tmp_path / "theirs", writes=False).claim(tiny(**PLAIN))
    assert "theirs has other files and no config.json: if they are not this run's, choose" in capsys.readouterr().err


def test_runs_that_offload_to_one_disk_have_places_of_their_own(tmp_path: Path) -> None:
    """DeepSpeed's files in two runs have the same names, unless their ranks differ."""
    engine = EngineConfig(offload_optimizer="nvme", nvme_folder=str(tmp_path / "swap"))
    with closing(RunFolder(tmp_path / "one", root=False)) as one:
        one.lock_nvme(engine, rank=0)
        with closing(RunFolder(tmp_path / "two", root=False)) as two:
            two.lock_nvme(engine, rank=1)
            with pytest.raises(
                ValueError, match=r"engine.nvme_folder: another process is still working in \S+/swap/rank0 \(process"
            ):
                two.lock_nvme(engine, rank=0)
            two.lock_nvme(EngineConfig(nvme_folder=str(tmp_path / "swap")), rank=0)
    RunFolder(tmp_path / "two").lock_nvme(engine, rank=0)


@pytest.mark.parametrize("planted", ["link", "dangling link", "pipe", "folder", "file"])
def test_what_is_planted_under_the_locks_name_is_not_touched(tmp_path: Path, planted: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run/.lock"
    path.parent.mkdir()
    if "link" in planted:
        path.symlink_to(victim)
    if planted == "link":
        victim.write_text("mine")
    elif planted == "pipe":
        os.mkfifo(path)
    elif planted == "folder":
        path.mkdir()
    elif planted == "file":
        path.write_text("mine")
    with pytest.raises(ValueError, match=r"run/\.lock is no lock of this package, which needs the name: move it away"):
        lock_folder(path.parent)
    assert victim.exists() == (planted == "link")
    assert planted not in ("link", "file") or path.read_text() == "mine"


def test_a_file_system_that_cannot_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        ValueError, match=r"\.lock cannot be locked \(No locks available\).* choose a folder on a file system with"
    ):
        lock_folder(tmp_path / "run")


def test_two_do_not_write_one_folder(tmp_path: Path) -> None:
    """That of an export or of a conversion."""
    with atomic_folder(tmp_path / "out") as partial:
        (partial / "half").write_text("x")
        with (
            pytest.raises(ValueError, match=r"another process is still working in \S+out\.partial"),
            atomic_folder(tmp_path / "out"),
        ):
            pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["half"]
    with (
        pytest.raises(ValueError, match=r"out exists already: choose another output folder"),
        atomic_folder(tmp_path / "out"),
    ):
        pass
    with pytest.raises(KeyError), atomic_folder(tmp_path / "failed") as partial:
        (partial / "half").write_text("x")
        raise KeyError
    (tmp_path / "theirs.partial").mkdir()
    (tmp_path / "theirs.partial/notes").write_text("theirs")
    with (
        pytest.raises(ValueError, match=r"theirs\.partial is in the way: move it"),
        atomic_folder(tmp_path / "theirs"),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "theirs.partial"]


def test_a_lock_that_its_holder_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `atomic_folder` does at its end, here while the next process has the file open and not yet locked."""
    flock = fcntl.flock

    def late(file: FileIO, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(ValueError, match="another process is still working in"):
            lock_folder(tmp_path)


@pytest.mark.parametrize("call", ["open", "unlink", "rename", "fsync"])
def test_a_folder_can_be_made_again_after_a_kill_at_any_call(tmp_path: Path, call: str) -> None:
    """Killed before each of its calls of one kind, in turn: the same command makes it whole, or it is whole."""
    kills = 0
    for number in range(1, 20):
        to = tmp_path / f"{call}.{number}"
        child = os.fork()
        if not child:
            _die_before(call, number)
            _write_a_folder(to)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        kills += 1
        if not to.exists():
            _write_a_folder(to)
        assert (to / "half").read_text() == "x" and not to.with_name(to.name + ".partial").exists()
    assert kills


def _write_a_folder(to: Path) -> None:
    with atomic_folder(to) as partial:
        (partial / "half").write_text("x")


def _die_before(call: str, number: int) -> None:
    """Have SIGKILL end this process before it calls `os.<call>` for the `number`th time."""
    real, left = getattr(os, call), iter(range(number - 1, -1, -1))

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(os, call, counted)


def test_fresh_deletes_what_the_quickstart_made_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "thesis", tmp_path / "ours"
    (theirs / "data").mkdir(parents=True)
    (theirs / "data/years of work").write_text("x")
    for fresh in (True, False):
        with pytest.raises(ValueError, match=f"{theirs} has files that the quickstart did not make"):
            quickstart.begin(theirs, fresh)
    monkeypatch.setattr(sys, "argv", ["quickstart", "--fresh", "--out", str(theirs)])
    with pytest.raises(SystemExit) as end:
        quickstart.main()
    assert end.value.code == 2 and f"{theirs} has files that the quickstart did not make" in capsys.readouterr().err
    assert (theirs / "data/years of work").read_text() == "x"
    ours.mkdir()
    quickstart.begin(ours, fresh=False)
    (ours / "data").mkdir()
    (ours / "data/shard").write_text("x")
    (ours / "link").symlink_to(theirs)
    for _ in range(2):
        quickstart.begin(ours, fresh=True)
        assert [path.name for path in ours.iterdir()] == [".quickstart"]
    assert (theirs / "data/years of work").read_text() == "x"


def again(data: Path, out: Path, config: RunConfig | None = None) -> bool:
    return run(data, out, config or short(steps=8), bad=set(), watch=False)


def test_without_its_configuration_a_run_goes_on_with_the_same_settings_alone(
    data: Path, copy: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = json.loads((copy / "config.json").read_text())["run"]
    (copy / "config.json").unlink()
    other = short(steps=8)
    for changed, words in (
        (
            dataclasses.replace(other, optimizer=dataclasses.replace(other.optimizer, learning_rate=2e-3)),
            r"rate 0\.001, this .* 0\.002",
        ),
        (
            dataclasses.replace(other, engine=dataclasses.replace(other.engine, precision="bf16")),
            "precision fp32, this call has bf16",
        ),
        (dataclasses.replace(other, seed=7), "seed 1, this call has 7"),
    ):
        with pytest.raises(SharedError, match=rf"step_00000004 was saved with .*{words}: use the same settings"):
            again(data, copy, changed)
    RunFolder(copy, writes=False).claim(other)
    assert not capsys.readouterr().err, "its files are no other's"
    assert again(data, copy, short(steps=8, save_every=3))
    assert json.loads((copy / "config.json").read_text())["run"] == identity
    ours, theirs = ((out / "metrics.jsonl").read_text().splitlines() for out in (copy, trained))
    assert [json.loads(line)["loss"] for line in ours] == [json.loads(line)["loss"] for line in theirs]


def test_another_runs_checkpoint_is_refused_and_kept(data: Path, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run(
        data, other, short(steps=8, save_every=6), bad=set(), watch=False
    )  # the same settings: another run all the same
    stray = copy / "checkpoints/step_00000006"
    shutil.copytree(other / "checkpoints/step_00000006", stray)
    with pytest.raises(SharedError, match=r"step_00000006 was saved by another run: move it out of this folder"):
        again(data, copy)
    for step in (None, 6):  # what evaluation, export, fine-tuning and branches read
        with pytest.raises(ValueError, match="step_00000006 was saved by another run: move it out of this folder"):
            find_complete_checkpoint(copy, step)
    stray.rename(copy / "checkpoints/step_00000001")
    assert again(data, copy, short(steps=8, keep_last=1, keep_every=0))
    assert sorted(path.name for path in (copy / "checkpoints").glob("step*")) == ["step_00000001", "step_00000008"]


def test_a_checkpoint_under_another_steps_name_is_none(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renamed up it would end the run, and cost the newer ones and their records; renamed down it would be a model of
    steps that it has not seen."""
    said = r"step_00000099 is left out: it holds step 4, so its name is wrong: rename it to step_00000004"
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    checkpoints, straight = out / "checkpoints", (trained / "metrics.jsonl").read_text()
    (checkpoints / "step_00000004").rename(checkpoints / "step_00000099")
    assert again(data, out, short(steps=8, keep_last=1, keep_every=0)) and said in capsys.readouterr().out
    assert (out / "metrics.jsonl").read_text() == straight and find_complete_checkpoint(out, 8).name == "step_00000008"
    branch = dataclasses.replace(short(steps=120), start=StartConfig(f"{out}@99", "state"))
    for call in (lambda: find_complete_checkpoint(out, 99), lambda: again(data, tmp_path / "branch", branch)):
        with pytest.raises(ValueError, match=r"has no complete checkpoint of step 99: it has those of step 8"):
            call()
    with pytest.raises(SystemExit):
        checkpoint.main(["check", "--run", str(out)])
    assert "step_00000099  not usable: it holds step 4" in capsys.readouterr().out
    shutil.rmtree(checkpoints / "step_00000008")
    (checkpoints / "step_00000099").rename(checkpoints / "step_00000001")
    with pytest.raises(SharedError, match="has records but no usable checkpoint"):
        again(data, out)
    (checkpoints / "step_00000001").rename(checkpoints / "step_00000004")
    (checkpoints / "step_00000002").mkdir()  # of another kind: without anything
    shutil.copytree(checkpoints / "step_00000004", checkpoints / "step_00000077")
    assert again(data, out, short(steps=8, keep_last=1, keep_every=0))
    assert (out / "metrics.jsonl").read_text().count("\n") == 8
    assert f"{out}: steps 5 to 8 are done again: the newest checkpoint is of step 4" in capsys.readouterr().out
    assert sorted(path.name for path in checkpoints.glob("step*")) == ["step_00000008", "step_00000077"], "it is kept"


def test_a_conversion_has_the_name_of_its_step_or_none(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--out step_00000099 names step 99, but .* step_00000004"):
        checkpoint.convert(Path(f"{trained}@4"), tmp_path / "step_00000099")
    with pytest.raises(ValueError, match=r"--out step_00000003 names step 3"):
        checkpoint.convert(Path(f"{trained}@4"), tmp_path / "step_00000003")
    checkpoint.convert(Path(f"{trained}@4"), tmp_path / "step_00000004")
    checkpoint.convert(Path(f"{trained}@4"), tmp_path / "whole")


def rewrite(path: Path, **changes: object) -> None:
    """Change the values of a JSON file of a checkpoint, or with None remove them, and have its marker list it as it
    is."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    if path.name == "state.json":
        content = path.read_bytes()
        rewrite(path.with_name("complete.json"), **{path.name: {"bytes": len(content), "crc32": zlib.crc32(content)}})


def test_damaged_and_missing_records_are_told_and_the_others_kept(
    data: Path, copy: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = b'{"step": 2, "lo\xff'
    del lines[2]
    path.write_bytes(b"\n".join(lines[:6]) + b'\n{"step": 7, "l')  # the last as of a kill
    assert again(data, copy)
    said = capsys.readouterr().out
    assert f"{path} is damaged: line 2 is moved to {copy / 'metrics.damaged'}, and the other lines are kept" in said
    assert f"{path} has 2 of the 4 lines that it had at step 4, and no record of step 2 to 3" in said
    assert (copy / "metrics.damaged").read_bytes() == b'{"step": 2, "lo\xff\n'
    records = [json.loads(line) for line in path.read_text().splitlines()]
    straight = {
        record["step"]: record for record in map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    }
    assert [record["step"] for record in records] == [1, 4, 5, 6, 7, 8]
    assert all(record["loss"] == straight[record["step"]]["loss"] for record in records)
    assert "metrics.jsonl has no record of step 2 to 3" in write_report(copy).read_text(encoding="utf-8")
    assert "has no record" not in write_report(trained).read_text(encoding="utf-8")


def test_checkpoints_that_were_kept_for_good_are_named_before_they_go(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that was forgotten when the run was started again costs them."""
    out, every = tmp_path / "run", short(steps=12, save_every=2, keep_every=2, keep_last=1)
    assert again(data, out, dataclasses.replace(every, train=dataclasses.replace(every.train, steps=8), schedule=WSD))
    longer = dataclasses.replace(every, schedule=WSD)
    again(data, out, longer)
    said = capsys.readouterr().out
    assert "train.keep_every" not in said and "train.eval_rows" not in said
    seldom = dataclasses.replace(longer.train, keep_every=8, keep_last=2, steps=14, eval_rows=7)
    again(data, out, dataclasses.replace(longer, train=seldom))
    names = "step_00000002, step_00000004, step_00000006, step_00000010"  # after the next save the last are 12 and 14
    said = capsys.readouterr().out
    assert f"train.keep_every was 2 and is 8: the next save deletes {names}. Copy" in said
    kept = [path.name for path in Checkpoints(out, 1, 0).all()]
    assert kept == ["step_00000008", "step_00000012", "step_00000014"], "as was told"
    rows = longer.train.eval_rows
    assert f"train.eval_rows was {rows} and is 7: held-out losses from now on are not comparable" in said
    for every, words in ((0, "train.keep_every was 8 and is 0: the next save deletes step_00000008. Copy"), (4, "")):
        folder, checkpoints = RunFolder(out), Checkpoints(out, keep_last=1, keep_every=every)
        _warn_of_changes(dataclasses.replace(seldom, keep_last=1, keep_every=every), folder, checkpoints)
        said = capsys.readouterr().out
        assert bool(said) == bool(words) and said.removeprefix(f"{out}: ").startswith(words)


def test_records_that_are_missing_of_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps that each file lacks by its own rhythm, after the first step of a branch; other files have none."""
    config = short(steps=20, log_every=3, eval_every=4)
    names = ("metrics", "heldout", "heldout_languages", "dimensions", "faults")
    saved = {"records": dict.fromkeys(names, 9)}
    for start, lacking in ((StartConfig(), ("3 to 6, 12", "4, 12")), (StartConfig("run@6", "state"), ("12", "12"))):
        for name in names:
            (tmp_path / f"{name}.jsonl").write_text('{"step": 8}\n{"step": 9}\n')
        logs = [StepLog(tmp_path, name, 12) for name in names]
        report_missing_records(logs, dataclasses.replace(config, start=start), 12, saved)
        steps = (lacking[0], lacking[1], lacking[1], "", "")
        assert capsys.readouterr().out.splitlines() == [
            f"{log.path} has 2 of the 9 lines that it had at step 12" + f", and no record of step {of}" * bool(of)
            for log, of in zip(logs, steps, strict=True)
        ]


def test_a_step_has_one_record(data: Path, copy: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was put together from copies; what is told twice is put aside."""
    path = copy / "metrics.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    assert again(data, copy)
    assert f"{path} is damaged: line 9, 10, 11, 12 is moved to" in capsys.readouterr().out
    ours, theirs = ((out / "metrics.jsonl").read_text().splitlines() for out in (copy, trained))
    assert [json.loads(line)["loss"] for line in ours] == [json.loads(line)["loss"] for line in theirs]


def test_a_record_that_cannot_be_read_is_named(data: Path, copy: Path) -> None:
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").mkdir()
    with pytest.raises(SharedError, match=r"metrics\.jsonl: Is a directory"):
        again(data, copy)


def test_a_branch_begins_at_the_step_in_its_parents_name(tmp_path: Path) -> None:
    """Also if `xlme checkpoint weights` has since made a folder of that name."""
    (tmp_path / "run@6").mkdir()
    assert first_step({"start": {"take": "state", "folder": f"{tmp_path}/run@6"}}) == 6


def test_missing_steps_in_words() -> None:
    assert describe_missing_steps([10, 30, 40], 10, 45) == "20"
    assert describe_missing_steps([1, 5, 9], 1, 10) == "2 to 4, 6 to 8, 10"
    assert describe_missing_steps(range(0, 100, 2), 1, 99).endswith("17, 19 and 40 more ranges")
    assert describe_missing_steps(range(0, 20, 2), 1, 19).endswith(", 17, 19"), "ten ranges are all said"
    assert describe_missing_steps([2, 4], 2, 5) == ""
    assert (
        describe_missing_steps([40], 10, 45, done=7) == "10 to 30"
        and describe_missing_steps([20], 10, 20, done=10) == ""
    )


class Synced(list[str]):
    """Names of the files that are put on the disk, in order; `sizes` in bytes then, by inode."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Synced]:
    names, fsync = Synced(), os.fsync

    def spy(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        status = os.fstat(descriptor)
        names.sizes[status.st_ino] = status.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    yield names


def test_all_that_a_marker_vouches_for_is_on_the_disk_before_it(data: Path, tmp_path: Path, synced: Synced) -> None:
    """Every file of a checkpoint and its folder; of a made folder every file, and its own name after it has it."""
    assert run(data, tmp_path / "run", short(steps=8), bad=set(), watch=False)
    markers = [n for n, name in enumerate(synced) if name == "complete.json"]
    for step, first, marker in zip((4, 8), [0, *markers], markers, strict=False):
        paths = list((tmp_path / f"run/checkpoints/step_{step:08d}").iterdir())
        assert all(synced.sizes[path.stat().st_ino] == path.stat().st_size for path in paths), "and all of its bytes"
        written = {path.name for path in paths} - {"complete.json"}
        before = {
            name.partition(".json.")[0].lstrip(".") + ".json" if ".tmp" in name else name
            for name in synced[first:marker]
        }
        assert written | {f"step_{step:08d}.partial"} <= before, synced[first:marker]
        after = synced[marker : synced.index("checkpoints", marker)]
        assert f"step_{step:08d}.partial" in after, "the marker's name, before the folder is renamed"
    assert synced[markers[-1] :].count("checkpoints") >= 1, "the new name of the folder"
    synced.clear()
    with atomic_folder(tmp_path / "made") as partial:
        (partial / "deep").mkdir()
        for name in ("one", "deep/two"):
            (partial / name).write_text("x")
    assert {"one", "two", "deep"} <= set(synced) and synced[-1] == tmp_path.name


def test_a_model_has_its_name_when_all_of_it_is_on_the_disk(tmp_path: Path, synced: Synced) -> None:
    vocabulary = train_vocabulary(tmp_path / "vocab")
    write_model(tmp_path / "model", ModelConfig(), {"weight": torch.ones(3)}, vocabulary.path)
    assert "model.safetensors.tmp" in synced and "model.safetensors" not in synced


def test_records_are_on_the_disk_before_the_checkpoint_is(
    data: Path, tmp_path: Path, synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the state that wait for the disk take the memory that is set."""
    begin, buffers = StateWriter.__init__, list[int]()

    def noted(writer: StateWriter, path: Path, buffer_bytes: int) -> None:
        buffers.append(buffer_bytes)
        begin(writer, path, buffer_bytes)

    monkeypatch.setattr(StateWriter, "__init__", noted)
    assert run(data, tmp_path / "run", short(steps=8, audit=True, save_buffer_gib=0.5), bad=set(), watch=False)
    assert buffers == [2**29] * 2
    for marker in [n for n, name in enumerate(synced) if name == "complete.json"]:
        before = synced[:marker]
        last = max((n for n, name in enumerate(before) if name == "complete.json"), default=0)
        assert {"metrics.jsonl", "faults.jsonl", "rank_00000.jsonl"} <= set(before[last:])
    assert synced.count("complete.json") == 2


def test_a_step_is_no_name_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    said = f"{tmp_path}/run@4 names a step, but here the whole run is read: name {tmp_path}/run\n"
    for command, call in ((["checkpoint", "list"], checkpoint.main), (["report"], report.main)):
        with pytest.raises(SystemExit):
            call([*command[1:], "--run", f"{tmp_path}/run@4"])
        assert capsys.readouterr().err == f"xlme {' '.join(command)}: error: {said}"
