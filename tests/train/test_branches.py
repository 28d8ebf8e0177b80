"""Runs that go on differently from what they were begun as: made longer, branched, with other data on the way."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from tests.launch import TIMED, run_ranks
from tests.rows import train_vocabulary, write_data
from tests.small import MODERN
from tests.train.test_folder import rewrite
from xlme_ds.api import dry_run, pretrain
from xlme_ds.audit import examine
from xlme_ds.audit import main as audit_command
from xlme_ds.checkpoint import __main__ as checkpoint
from xlme_ds.checkpoint.state_files import read_state
from xlme_ds.cli import format_number
from xlme_ds.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StartConfig,
    TrainConfig,
    Training,
    from_json,
)
from xlme_ds.counting import flops_by_phase, flops_per_step
from xlme_ds.data.collate import collate
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import TASKS, read_manifest, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.data.unigram import unigram_nll_by_language
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.build import build_engine, require_kernels
from xlme_ds.engine.ranks import SharedError
from xlme_ds.evaluate import report_data
from xlme_ds.evaluate.report_data import _data_of
from xlme_ds.export.export_run import export_run
from xlme_ds.first_weights import starting_weights
from xlme_ds.io.files import read_json, write_json
from xlme_ds.io.folders import lock_folder
from xlme_ds.models import tiles
from xlme_ds.models.init import initialise
from xlme_ds.objectives import objective_of
from xlme_ds.plan.planner import plan
from xlme_ds.pretrain import main as pretrain_command
from xlme_ds.train import resume
from xlme_ds.train.data import open_loader
from xlme_ds.train.opening import _phases
from xlme_ds.train.read_audit import audit_lines
from xlme_ds.train.run_folder import RunFolder, read_branch_config
from xlme_ds.train.stop import StopRequest
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.runs import load_run, pin_step
from xlme_ds.trained.weights import WEIGHTS_FILE, read_weights, save_weights

SHARES = (0.3, 0.15)
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of other rows and one vocabulary."""
    folder = tmp_path_factory.mktemp("phases")
    vocabulary = train_vocabulary(folder / "one" / "vocab")
    for seed, name in enumerate(("one", "two")):
        write_data(folder / name, rows=30, vocabulary=vocabulary.size, seed=seed, sha256=vocabulary.sha256)
    shutil.copytree(folder / "one" / "vocab", folder / "two" / "vocab")
    return folder / "one", folder / "two"


@pytest.fixture(scope="module")
def config(data: tuple[Path, Path]) -> RunConfig:
    size = read_json(data[0] / "mono" / "manifest.json", dict)["vocabulary_size"]
    model = ModelConfig(size, 32, 4, 64, 1, 2, max_positions=32)
    return RunConfig(
        "small",
        model=model,
        data=DataConfig(4, 4, 4, phase_steps=(5,), phase_mask_fractions=SHARES),
        optimizer=OptimizerConfig(1e-3, warmup_steps=2),
        schedule=ScheduleConfig("wsd"),
        engine=EngineConfig("plain"),
        train=TrainConfig(steps=8, log_every=1, eval_every=0, save_every=3, keep_every=1, audit=True),
    )


@pytest.fixture(scope="module")
def stable(config: RunConfig, data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps at the peak, of which five read the first folder."""
    return pretrain(config, data, tmp_path_factory.mktemp("runs") / "stable")


def weights(run: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(run / "model" / "model.safetensors").items()}


def records(run: Path) -> list[dict]:
    lines = list(audit_lines(run / "metrics.jsonl"))
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def forget(run: Path, *steps: int) -> None:
    """As if it had been stopped before these checkpoints, the last one's among them."""
    for step in steps:
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    for name in ("finished.json", "model/model.safetensors"):
        (run / name).unlink()


def longer(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, train=replace(config.train, steps=steps))


def test_a_branch_is_the_decay_of_the_run(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    """Bit for bit what a run does that was begun with this decay; the parent is left alone."""
    before = {path: path.stat().st_mtime_ns for path in stable.rglob("*") if path.name != ".lock"}
    whole = longer(replace(config, schedule=ScheduleConfig("wsd", 4)), 10)
    alone = pretrain(whole, data, stable.with_name("alone"))
    branch = replace(longer(read_branch_config(stable.with_name("stable@6")), 10), schedule=whole.schedule)
    out = pretrain(branch, data, stable.with_name("branch"))
    assert weights(out) == weights(alone) != weights(stable)
    assert records(out) == records(alone)[6:]
    guards = [read_state(run / "checkpoints" / "step_00000010")["guard"] for run in (out, alone)]
    assert guards[0] == guards[1] and len(guards[0]["norms"]) == 10, "it skips the steps that the run would skip"
    assert before == {path: path.stat().st_mtime_ns for path in stable.rglob("*") if path.name != ".lock"}
    assert examine(alone, data) == ([], "40 mono rows and 40 para rows of 10 steps")
    assert examine(out, data) == ([], "16 mono rows and 16 para rows of 4 steps")
    page = (out / "report.html").read_text()
    assert "no record of step" not in page, "the first six steps are the parent's"
    forget(out, 10)
    audited = out / "audit" / "rank_00000.jsonl"
    audited.write_bytes(audited.read_bytes()[:-20])  # as of a process that was killed in the middle of a line
    assert weights(pretrain(branch, data, out)) == weights(alone), "resumed from its own checkpoint of step 9"
    assert examine(out, data) == ([], "16 mono rows and 16 para rows of 4 steps")


@pytest.mark.parametrize(
    ("flags", "steps"),
    [("", 8), ("--schedule.decay-steps 1", 7), ("--schedule.decay_steps=4", 10),
     ("--schedule.decay-steps 2 --train.steps 11", 11), ("--train.steps=11 --schedule.decay-steps=2", 11)],
)  # fmt: skip
def test_a_branch_takes_the_steps_of_its_decay(
    data: tuple[Path, Path], stable: Path, tmp_path: Path, flags: str, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless their number is given."""
    command = f"--branch {stable}@6 --schedule.name wsd {flags} --data {data[0]} {data[1]} --out {tmp_path}/new"
    pretrain_command([*command.split(), "--dry-run"])
    assert f"new: resuming after step 6 of {steps}, 1 process, plain, fp32" in capsys.readouterr().out


def test_a_signal_before_the_first_step_saves_nothing(
    config: RunConfig, data: tuple[Path, Path], stable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """It comes after the model is built; a new run says so, and a branch, which has its parent's steps."""
    stop = StopRequest()
    request.addfinalizer(stop.release)
    load = resume.resume

    def interrupted(*arguments: Any) -> tuple[int, dict[str, Any]]:
        stop.received = "SIGTERM"
        return load(*arguments)

    monkeypatch.setattr("xlme_ds.train.run.resume", interrupted)
    for name, settings in (("new", config), ("branch", longer(read_branch_config(stable.with_name("stable@6")), 8))):
        assert pretrain(settings, data, tmp_path / name, stop=stop) is None
        assert capsys.readouterr().out.endswith(
            f"{tmp_path / name}: stopped before the first step; the same command starts again\n"
        )
        assert not [*(tmp_path / name / "checkpoints").iterdir()]
        stop.received = None
    stop.received = "SIGTERM"  # while a run with checkpoints reads its data
    assert pretrain(config, data, stable, stop=stop) is None
    assert capsys.readouterr().out == f"{stable}: stopped before the next step; the same command continues\n"


@pytest.mark.parametrize(("step", "later"), [(3, (6, 8)), (6, (8,))])
def test_a_state_that_gives_another_loss_is_refused(
    config: RunConfig, data: tuple[Path, Path], stable: Path, tmp_path: Path, step: int, later: tuple[int, ...]
) -> None:
    """By a thousandth, which no order of float32 sums makes, in the run itself and in a branch, in any phase."""
    run = tmp_path / "run"
    shutil.copytree(stable, run)
    forget(run, *later)
    state = run / f"checkpoints/step_{step:08d}/state.json"
    rewrite(state, probe=1.001 * read_json(state, dict)["probe"])
    for settings, out in ((config, run), (read_branch_config(tmp_path / f"run@{step}"), tmp_path / "branch")):
        with pytest.raises(SharedError, match=rf"the loss of the probe batch was \S+ when \S+step_{step:08d} was"):
            pretrain(settings, data, out)


def test_a_model_next_to_another_vocabulary_is_no_model_of_the_run(
    stable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stable, tmp_path / "run")
    save_weights({"large": torch.zeros(3 * 2**18)}, tmp_path / "run/model/large.safetensors")
    checkpoint.main(["check", "--run", str(tmp_path / "run")])
    assert "\nmodel/large.safetensors  3.0 MiB\nmodel/model.safetensors  " in capsys.readouterr().out
    shutil.copy(train_vocabulary(tmp_path / "other", size=110).path, tmp_path / "run/model")
    with pytest.raises(SystemExit) as ended:
        checkpoint.main(["check", "--run", str(tmp_path / "run")])
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and sum(line.endswith("MiB  saved by 1 process") for line in said) == 3
    assert said[-1].startswith("model/model.safetensors  not usable: ") and "is not the vocabulary that" in said[-1]


def test_the_model_of_a_checkpoint_is_written_like_that_of_a_finished_run(
    data: tuple[Path, Path], stable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a step or of the newest sound one; a run that has lost its vocabulary needs the one that it had."""
    run, other = tmp_path / "run", train_vocabulary(tmp_path / "other", size=110)
    shutil.copytree(stable, run)
    shutil.rmtree(run / "model")
    (run / "checkpoints/step_00000008/complete.json").unlink()
    for named, step in ((f"{run}@3", 3), (str(run), 6)):
        out = tmp_path / f"model{step}"
        command = ["weights", "--run", named, "--out", str(out)]
        for wrong in ([], ["--vocab", str(other.path)]):
            with pytest.raises(SystemExit):
                checkpoint.main([*command, *wrong])
        checkpoint.main([*command, "--vocab", str(data[0] / "vocab")])
        assert capsys.readouterr().out == f"{out}: the model of step_{step:08d}\n"
        found, wanted = load_run(out), load_run(Path(f"{stable}@{step}"))
        assert found.step is None and found.vocabulary.sha256 == wanted.vocabulary.sha256 != other.sha256
        assert found.state.keys() == wanted.state.keys()
        assert all(torch.equal(found.state[name], value) for name, value in wanted.state.items())


def test_a_run_goes_on_without_the_model_that_it_started_from(
    config: RunConfig, data: tuple[Path, Path], stable: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(stable, source)
    begun = replace(longer(config, 7), start=StartConfig(str(source)))
    out = pretrain(begun, data, tmp_path / "run")
    straight = weights(out), records(out)
    forget(out, 7)
    shutil.rmtree(source)
    dry_run(begun, data, out)
    pretrain(begun, data, out)
    assert (weights(out), records(out)) == straight


def test_data_and_first_weights_are_of_the_settings_of_the_run(config: RunConfig, data: tuple[Path, Path]) -> None:
    """Its seed, its share of masked tokens, its standard deviation; on the second of two processes."""
    of_one = replace(config, data=replace(config.data, phase_steps=(), phase_mask_fractions=()))
    masked, embeddings = list[str](), list[Tensor]()
    for seed, fraction, std in ((1, 0.15, 0.02), (7, 0.15, 0.02), (1, 0.4, 0.05)):
        run = replace(of_one, seed=seed, objective=ObjectiveConfig(mask_fraction=fraction))
        run = replace(run, model=replace(run.model, init_std=std))
        ours, theirs = open_loader(run, data[0], 1, 2), Loader(data[0], run.data, seed, fraction, 1, 2)
        for one, other in zip(ours.micro_batches(3), theirs.micro_batches(3), strict=True):
            assert all(map(torch.equal, one.tensors(), other.tensors()))
        masked.append(str(ours.micro_batches(3)[0].masked_M.tolist()))
        model = objective_of(run.objective).build(run.model)
        initialise(model, seed, std)
        found = build_engine(run, ours, None).full_state()
        assert all(torch.equal(found[name], value) for name, value in model.named_parameters())
        embeddings.append(found["embedding_0"])
    assert len(set(masked)) == 3 and not torch.equal(embeddings[0], embeddings[1])
    torch.testing.assert_close(embeddings[2], embeddings[0] * 2.5)


def test_a_run_keeps_its_kernels_tilings(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a benchmark has written others into the package in the meantime; a new run takes those."""
    begun = tiles.tiling_of("_forward", 64, 2)
    run = pretrain(config, data, tmp_path / "run")
    table = read_json(tiles.TILINGS_FILE, dict)
    table["default"]["64"]["_forward"] = [128, 32, 8, 3]
    (tmp_path / "tilings.json").write_text(json.dumps(table))
    monkeypatch.setattr(tiles, "TILINGS_FILE", tmp_path / "tilings.json")
    forget(run, 8)
    checked = []

    def require_kernels_here(config: Training) -> None:
        checked.append(tiles.tiling_of("_forward", 64, 2))
        require_kernels(config)

    monkeypatch.setattr(resume, "require_kernels", require_kernels_here)
    pretrain(config, data, run)
    assert tiles.tiling_of("_forward", 64, 2) == begun
    assert checked == [begun], "the kernels that the run goes on with, not those of the package"
    tiles.use_tilings({})
    pretrain(longer(read_branch_config(tmp_path / "run@6"), 7), data, tmp_path / "branch")
    assert tiles.tiling_of("_forward", 64, 2) == begun, "a branch is bit for bit what its parent would have done"
    assert read_state(tmp_path / "branch/checkpoints/step_00000007")["tilings"] != table
    pretrain(config, data, tmp_path / "new")
    assert tiles.tiling_of("_forward", 64, 2) == (128, 32, 8, 3)
    monkeypatch.undo()
    tiles.use_tilings({})


@pytest.mark.parametrize("option", ["--start.folder elsewhere@3", "--start.folder elsewhere", "--start.take all"])
def test_a_branch_has_one_start(stable: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would begin at another step, or with another run's state."""
    command = f"--branch {stable}@6 {option} --schedule.name wsd --schedule.decay-steps 4 --data d --out {tmp_path}/new"
    with pytest.raises(SystemExit, match="2"):
        pretrain_command(command.split())
    assert f"--branch {stable}@6 sets start.*: leave out" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_branch_may_compute_in_fp32(config: RunConfig, data: tuple[Path, Path], tmp_path: Path) -> None:
    """The parent's probe has a loss in bf16, which fp32 does not repeat within 1e-5."""
    in_bf16 = replace(config, engine=EngineConfig("deepspeed", precision="bf16"), data=DataConfig(4, 4, 4))
    parent = pretrain(in_bf16, data[0], tmp_path / "parent")
    branch = read_branch_config(Path(f"{parent}@6"))
    branch = replace(branch, engine=replace(branch.engine, precision="fp32"))
    assert records(pretrain(branch, data[0], tmp_path / "branch"))[-1]["step"] == 8


def test_what_a_run_shows_is_closed_after_an_error(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar that stays open leaves the terminal without a cursor; a folder that stays locked, as long as a notebook
    holds the error, keeps out the same call."""
    closed = []

    def full(*_: object) -> NoReturn:
        raise SharedError("the disk is full")

    monkeypatch.setattr("xlme_ds.train.run.fit", full)
    monkeypatch.setattr("xlme_ds.train.console.Console.close", lambda console: closed.append(console))
    with pytest.raises(SharedError, match="the disk is full") as held:
        pretrain(config, data, tmp_path / "run")
    assert len(closed) == 1 and held.tb is not None
    lock_folder(tmp_path / "run").close()


def test_a_dry_run_finds_that_the_parents_checkpoint_is_damaged(
    data: tuple[Path, Path], stable: Path, tmp_path: Path
) -> None:
    parent = shutil.copytree(stable, tmp_path / "parent")
    (file,) = (parent / "checkpoints" / "step_00000006").glob("*.safetensors")
    *kept, last = file.read_bytes()
    file.write_bytes(bytes([*kept, last ^ 1]))
    branch = longer(read_branch_config(tmp_path / "parent@6"), 8)
    for call in (dry_run, pretrain):
        with pytest.raises(SharedError, match="parent has no complete checkpoint of step 6"):
            call(branch, data, tmp_path / "branch")


def test_a_branch_outlives_its_parents_checkpoint(data: tuple[Path, Path], stable: Path) -> None:
    parent, out = stable.with_name("parent"), stable.with_name("orphan")
    shutil.copytree(stable, parent)
    pretrain(read_branch_config(Path(f"{parent}@6")), data, out)
    for other in (parent.with_name("stable@6"), parent.with_name("parent@3")):
        assert read_branch_config(other, out).start.folder == str(other), (
            "settings of another branch are those of its parent"
        )
    shutil.rmtree(parent / "checkpoints" / "step_00000006")
    (parent / "config.json").write_text("{}")
    again = read_branch_config(Path(f"{parent}@6"), out)
    assert again.start.folder == f"{parent}@6" and pretrain(again, data, out) == out


@pytest.mark.parametrize("change", ["seed", "share", "weight"])
def test_a_branch_has_masks_and_weights_of_its_own(data: tuple[Path, Path], stable: Path, change: str) -> None:
    """The loss of the probe, a masked row of the same data, cannot be compared then."""
    branch = read_branch_config(stable.with_name("stable@3"))
    changes: dict[str, Any] = {
        "seed": dict(seed=9),
        "share": dict(data=replace(branch.data, phase_mask_fractions=(0.5, 0.05))),
        "weight": dict(objective=replace(branch.objective, discriminator_weight=25.0)),
    }
    out = pretrain(longer(replace(branch, **changes[change]), 6), data, stable.with_name(change))
    assert [line["step"] for line in records(out)] == [4, 5, 6]


def test_a_finished_run_without_checkpoints_stays(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    out = stable.with_name("bare")
    shutil.copytree(stable, out)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(SharedError, match="the run is finished and stays as it is"):
        pretrain(longer(config, 10), data, out)
    assert weights(out) == weights(stable)


def test_a_branch_reads_other_data(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    branch = read_branch_config(stable.with_name("stable@6"))
    branch = longer(replace(branch, data=replace(branch.data, phase_steps=(), phase_mask_fractions=())), 7)
    out = pretrain(branch, data[0], stable.with_name("elsewhere"))
    assert records(out)[0]["loss"] != records(stable)[6]["loss"]
    assert examine(out, data[:1]) == ([], "4 mono rows and 4 para rows of 1 steps")


def test_tokens_of_a_branch_are_its_parents_and_its_own(data: tuple[Path, Path], stable: Path) -> None:
    """Rows of 32 tokens: eight a step in the six steps of the parent, twelve a step in the branch."""
    branch = read_branch_config(stable.with_name("stable@6"))
    branch = longer(replace(branch, data=DataConfig(8, 4, 4)), 7)
    out = pretrain(branch, data[0], stable.with_name("wider"))
    pretrain(longer(branch, 8), data[0], out)
    assert [line["tokens"] for line in records(out)] == [6 * 8 * 32 + steps * 12 * 32 for steps in (1, 2)]
    narrow = longer(replace(read_branch_config(out.with_name("wider@8")), data=DataConfig(4, 0, 4)), 9)
    last = pretrain(narrow, data[0], stable.with_name("narrow"))
    assert [line["tokens"] for line in records(last)] == [6 * 8 * 32 + 2 * 12 * 32 + 4 * 32]


def test_a_finished_run_is_made_longer(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    out = stable.with_name("longer")
    shutil.copytree(stable, out)
    (out / "finished.json").unlink()  # as if it had been stopped in its report, and then been made longer
    RunFolder(out).write_config(longer(config, 10), {}, 1, {})
    assert not (out / "model/model.safetensors").exists(), "weights of step 8 are not the model of a run of 10 steps"
    write_json(out / "config.json", read_json(stable / "config.json", dict) | {"started": "long ago"})
    pretrain(longer(config, 10), data, out)
    straight = pretrain(longer(config, 10), data, stable.with_name("straight"))
    assert weights(out) == weights(straight) and records(out) == records(straight)
    assert read_json(out / "finished.json", dict) == {"format": 1, "steps": 10}
    stored = read_json(out / "config.json", dict)
    assert from_json(RunConfig, stored["config"]).train.steps == 10 and stored["started"] == "long ago"


@pytest.mark.parametrize("steps", [6, 7])
def test_a_run_is_made_shorter_than_its_records(
    config: RunConfig, data: tuple[Path, Path], stable: Path, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a kill between two checkpoints: it ends at one, and has no records of later steps; not before it."""
    out = stable.with_name(f"shorter{steps}")
    shutil.copytree(stable, out)
    forget(out, 8)
    (out / "dimensions.jsonl").write_text('{"step": 1, "layer_0": 3.0}\n{"step": 8, "layer_0": 3.0}\n')
    if steps == 6:  # with train.log_every 8 the run would have logged nothing yet
        lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
        (out / "metrics.jsonl").write_text("".join(lines[:6]))
    pretrain(longer(config, steps), data, out)
    again = f"{out}: steps 7 to 7 are done again: the newest checkpoint is of step 6\n"
    assert (again in capsys.readouterr().out) == (steps == 7)
    assert steps == 7 or (out / "dimensions.jsonl").read_text() == '{"step": 1, "layer_0": 3.0}\n'
    assert [line["step"] for line in records(out)] == list(range(1, steps + 1))
    assert records(out) == records(stable)[:steps]
    with pytest.raises(SharedError, match="the run is finished and stays as it is"):
        pretrain(longer(replace(config, data=replace(config.data, phase_steps=(4,))), 5), data, out)


def test_a_resume_crosses_the_border(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    out = stable.with_name("again")
    shutil.copytree(stable, out)
    forget(out, 6, 8)
    pretrain(config, data, out)
    assert weights(out) == weights(stable) and records(out) == records(stable)


RANK = """
import json, sys
from pathlib import Path
import xlme_ds.train.run
xlme_ds.train.run.measure_matmul_peak = lambda device, precision: 1e9  # as if each process had a GPU
from xlme_ds.api import pretrain
from xlme_ds.config import RunConfig, from_json
pretrain(from_json(RunConfig, json.loads(sys.argv[1])), sys.argv[3:], Path(sys.argv[2]))
"""


def test_another_engine_crosses_the_border(config: RunConfig, data: tuple[Path, Path], tmp_path: Path) -> None:
    """Three steps under ZeRO-1 on two processes, the others in one: the curve and the rows of a run in one."""
    alone = replace(config, engine=EngineConfig("plain", precision="fp32"))
    two = replace(config, engine=EngineConfig(deepspeed="zero1", precision="fp32"))
    out = tmp_path / "out"
    for done in run_ranks(2, ["-c", RANK, json.dumps(asdict(two)), str(out), *map(str, data)]):
        assert done.returncode == 0, done.stderr
    peaks = [line["flops_per_s"] / line["peak_fraction"] for line in audit_lines(out / "metrics.jsonl")]
    assert peaks == pytest.approx([2e9] * 8), "of two processes"
    forget(out, 6, 8)
    pretrain(alone, data, out)
    found, wanted = ([line["loss"] for line in records(run)] for run in (out, pretrain(alone, data, tmp_path / "one")))
    assert len(found) == 8 and found == pytest.approx(wanted, rel=1e-5)
    assert examine(out, data) == ([], "32 mono rows and 32 para rows of 8 steps")


def test_a_phase_is_added(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    """Where the first phase ends after what is done; the rows of the past must stay."""
    of_one = replace(config, data=replace(config.data, phase_steps=(), phase_mask_fractions=()))
    of_one = replace(longer(of_one, 5), objective=replace(config.objective, mask_fraction=SHARES[0]))
    begun = pretrain(of_one, data[0], stable.with_name("added"))
    more = replace(config, objective=of_one.objective)
    assert weights(pretrain(more, data, begun)) == weights(stable)
    early = replace(more, data=replace(more.data, phase_steps=(4,)))
    with pytest.raises(SharedError, match=r"data.phase_steps \[5\], this call has \[4\]"):
        pretrain(early, data, begun)


def test_rows_become_longer(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows twice as long and a higher rotary base from step 5 on: the first step of that phase has the loss of the
    model of step 5 with that base, on the rows that follow; a resumed run and the models of steps know the base."""
    vocabulary = Vocabulary(data[0] / "vocab")
    longer = write_data(tmp_path / "longer", 30, row_tokens=64, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    shutil.copytree(data[0] / "vocab", longer / "vocab")
    phases = replace(config.data, phase_mask_fractions=(), phase_rotary_bases=(50.0,))
    model = replace(config.model, max_positions=64, rotary_base=5e3, init_std=0.3, **MODERN)
    modern = replace(config, model=model, data=phases, train=replace(config.train, eval_every=1))
    less = replace(modern, model=replace(model, max_positions=63))
    with pytest.raises(
        SharedError, match=rf"{longer} has rows of 64 tokens, but model\.max_positions is 63: raise .* to 64"
    ):
        dry_run(less, [data[0], longer], tmp_path / "run")
    run = pretrain(modern, [data[0], longer], tmp_path / "run", heldout=data[1])
    assert examine(run, (data[0], longer)) == ([], "26 mono rows and 26 para rows of 8 steps")
    bases = {step: load_run(Path(f"{run}@{step}")).model.rotary_base for step in (3, 6, 8)}
    assert bases == {3: 50.0, 6: 5e3, 8: 5e3} and load_run(run).model.rotary_base == 5e3
    for step, base in ((3, 50.0), (6, 5e3)):  # a folder with the model alone has the base of its checkpoint
        checkpoint.main(["weights", "--run", f"{run}@{step}", "--out", str(tmp_path / f"model{step}")])
        assert load_run(tmp_path / f"model{step}").model.rotary_base == base

    logged = {line["step"]: line for line in audit_lines(run / "metrics.jsonl")}
    assert {line["tokens"] // step for step, line in logged.items()} == {8 * 32}
    short, long = flops_by_phase(modern, (32, 64))
    for step, line in logged.items():
        step_flops = 8 * 32 * line["flops_per_s"] / line["tokens_per_s"]
        assert step_flops == pytest.approx(short if step <= 5 else long), "of the step's own phase"
    objective = objective_of(modern.objective)
    five = pretrain(replace(modern, train=replace(modern.train, save_every=5)), [data[0], longer], tmp_path / "five")
    assert weights(five) == weights(run) and load_run(Path(f"{five}@5")).model.rotary_base == 50.0
    checkpoint.main(["average", "--model", f"{run}@3", f"{five}@5", "--out", str(tmp_path / "mean")])
    assert load_run(tmp_path / "mean").model.rotary_base == 50.0
    uninterrupted = weights(five)
    for folder in (five / "checkpoints/step_00000008", five / "model"):
        shutil.rmtree(folder)
    pretrain(replace(modern, train=replace(modern.train, save_every=5)), [data[0], longer], five)
    assert weights(five) == uninterrupted, "resumed where the phase begins"
    losses = {}
    for base in (50.0, 5e3):
        whole = objective.build(replace(model, rotary_base=base)).eval()
        load_run(Path(f"{five}@5")).load_into(whole)
        rows = [(task, RowStore(longer / name), np.arange(20, 22)) for task, name in enumerate(TASKS)]
        batch = collate([(task, store.read(these), these) for task, store, these in rows], modern.seed, 0.15)
        with torch.no_grad():
            sums = objective.sums(whole(batch), batch)
        losses[base] = float((objective.weights * sums / objective.counts(batch)).sum())
    assert logged[6]["loss"] == pytest.approx(losses[5e3], rel=1e-6)
    assert abs(losses[50.0] / losses[5e3] - 1) > 1e-4, "bases that this model cannot tell apart"

    said = capsys.readouterr().out
    assert f"from step 0 {data[0]}, 15% predicted, rows of 32 tokens, rotary base 50; from step 5 {longer}" in said
    assert "15% predicted, rows of 64 tokens\n" in said
    bare = replace(modern, data=replace(phases, phase_steps=(), phase_rotary_bases=()))
    alone = pretrain(replace(bare, train=replace(bare.train, steps=5)), data[0], tmp_path / "alone")
    for base in (50.0, 5e3):  # a phase is added to steps that had model.rotary_base
        added = replace(modern, data=replace(phases, phase_rotary_bases=(base,)))
        if base == 50.0:
            with pytest.raises(SharedError, match=r"data.phase_"):
                pretrain(added, [data[0], longer], alone)
        else:
            assert pretrain(added, [data[0], longer], alone) == alone

    for steps in ((8,), (6, 8)):  # from the checkpoint of step 6, of the second phase, and of 3, of the first
        forget(run, *steps)
        assert weights(pretrain(modern, [data[0], longer], run, heldout=data[1])) == weights(five)
    forget(run, 6, 8)
    for name in ("samples.json", "retrieval.json"):
        (run / name).unlink(missing_ok=True)
    report_data.update_report_data(run)
    shown = read_json(run / "samples.json", dict)["samples"]
    of_three, places = load_run(Path(f"{run}@3")), ([data[0], longer], data[1])
    by_base = {
        base: report_data._contents(
            replace(modern, model=replace(model, rotary_base=base)),
            of_three.state, of_three.vocabulary, *places, 3, {},
        )["samples.json"]["samples"]
        for base in (50.0, 5e3)
    }  # fmt: skip
    assert shown == by_base[50.0] != by_base[5e3], "the report of a run in its first phase"
    with pytest.raises(SharedError, match=r"data.phase_rotary_bases is for rotary positions, and model.body xlme has"):
        pretrain(replace(config, data=phases), data, tmp_path / "none")
    two = replace(phases, phase_rotary_bases=(50.0, 60.0))
    with pytest.raises(SharedError, match=r"data.phase_rotary_bases has 2 numbers, but data.phase_steps has 1"):
        pretrain(replace(modern, data=two), [data[0], longer], tmp_path / "none")


def test_a_branch_may_raise_the_rotary_base(config: RunConfig, data: tuple[Path, Path], tmp_path: Path) -> None:
    """With which the parent's weights have another loss on the same rows."""
    model = replace(config.model, rotary_base=50.0, init_std=0.3, **MODERN)
    one = replace(config.data, phase_steps=(), phase_mask_fractions=())
    run = pretrain(longer(replace(config, model=model, data=one), 3), data[0], tmp_path / "run")
    branch = longer(read_branch_config(Path(f"{run}@3")), 4)
    raised = replace(branch, model=replace(model, rotary_base=5e5))
    found = [records(pretrain(each, data[0], tmp_path / str(n))) for n, each in enumerate((branch, raised))]
    assert [[line["step"] for line in lines] for lines in found] == [[4], [4]]
    assert found[0][0]["loss"] != found[1][0]["loss"]


def test_an_average_is_the_mean(stable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(stable.with_name(f"stable@{step}")) for step in (3, 6, 8)]
    out = stable.with_name("mean")
    models = [word for name in names for word in ("--model", name)]
    checkpoint.main(["average", *models, "--out", str(out)])
    notes = [line.partition(": reading")[0] for line in capsys.readouterr().err.splitlines() if "reading the" in line]
    assert notes == [model for model in models if "@" in model]
    states = [load_run(Path(name)).state for name in names]
    found = load_run(out).state
    assert found.keys() == states[0].keys()
    for name, value in found.items():
        wanted = np.mean([state[name].numpy().astype(np.float64) for state in states], axis=0)
        np.testing.assert_array_equal(value.numpy(), wanted.astype(np.float32))
    exports = [stable.with_name(f"export{step}") for step in (3, 8)]
    for path, name in zip(exports, (names[0], names[2]), strict=True):
        export_run(Path(name), path)
    checkpoint.main(["average", "--model", str(exports[0]), "--model", str(exports[1]), "--out", str(out) + "_export"])
    for which in ("discriminator", "generator"):
        both = [dict(load_encoder(folder, which).encoder.named_parameters()) for folder in exports]
        mean = load_encoder(stable.with_name("mean_export"), which).encoder
        for name, value in mean.named_parameters():
            torch.testing.assert_close(value, (both[0][name] + both[1][name]) / 2, rtol=1e-6, atol=1e-8)
    # A tensor of another shape, which would be broadcast.
    weights = stable.with_name("odd") / WEIGHTS_FILE
    shutil.copytree(exports[0], weights.parent)
    state = read_weights(weights)
    shortened = next(name for name in state if name.endswith("input_norm.weight"))
    weights.unlink()
    save_weights(state | {shortened: state[shortened][:1].clone()}, weights)
    capsys.readouterr()
    for arguments, words in (
        (["--model", str(exports[1]), "--model", str(weights.parent)], f"differs from {exports[1]}"),
        (["--model", names[0]], "two or more models, each once"),
        (["--model", names[0], "--model", names[0], "--model", names[1]], "two or more models, each once"),
        (["--model", names[0], "--model", str(exports[0])], "is an export, but other models are runs"),
        (["--model", names[0], "--model", str(stable.with_name("stable@7"))], "has no complete checkpoint of step 7"),
        (["--model", str(stable), "--model", names[0], "--model", names[2]], "have the same weights: name each model"),
    ):
        with pytest.raises(SystemExit) as ended:
            checkpoint.main(["average", *arguments, "--out", str(stable.with_name("none"))])
        assert ended.value.code == 2 and words in capsys.readouterr().err
    assert not stable.with_name("none").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: replace(c, schedule=ScheduleConfig("linear")), "schedule.name wsd, this call has linear"),
        (lambda c: longer(replace(c, schedule=ScheduleConfig("wsd", 4)), 9), "schedule.decay_steps 0, this call has 4"),
        (lambda c: longer(c, 7), "train.steps 8, this call has 7"),
        (lambda c: replace(c, data=replace(c.data, phase_mask_fractions=(0.2, 0.15))), "data.phase_mask_fractions"),
    ],
)  # fmt: skip
def test_the_past_stays(
    config: RunConfig, data: tuple[Path, Path], stable: Path, change: Callable[[RunConfig], RunConfig], words: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in stable.rglob("*") if path.name != ".lock"}
    with pytest.raises(SharedError, match=words):
        pretrain(change(config), data, stable)
    assert before == {path: path.stat().st_mtime_ns for path in stable.rglob("*") if path.name != ".lock"}


def test_phases_are_shown(config: RunConfig, data: tuple[Path, Path], stable: Path) -> None:
    loader = Loader(data, config.data, 1, 0.15)
    assert list(_phases(loader)) == [
        f"from step 0 {data[0]}, 30% predicted", f"from step 5 {data[1]}, 15% predicted"
    ]  # fmt: skip
    page = (stable / "report.html").read_text()
    assert "Phases of the data" in page and "from step 0 30% predicted; from step 5 15% predicted" in page
    found = plan(replace(config, engine=EngineConfig(deepspeed="zero1")), gpus=1)["phases"]
    assert [(phase["steps"], phase["mask_fraction"]) for phase in found] == [(5, 0.3), (3, 0.15)]
    assert found[0]["tokens"] == 5 * (4 + 4) * 32


def test_languages_are_shown_of_all_phases(config: RunConfig, data: tuple[Path, Path], tmp_path: Path) -> None:
    """Five of eight steps read a German folder, three an English one."""
    for folder, code in zip(data, ("de", "en"), strict=True):
        shutil.copytree(folder, tmp_path / folder.name)
        manifest = read_manifest(folder / "mono")
        counts = {code: {"share_after": 1.0, "share_before": 0.8, "repeat": 2.0}}
        write_manifest(tmp_path / folder.name / "mono", replace(manifest, counts={"by_language": counts}))
        shutil.rmtree(tmp_path / folder.name / "para")
    folders, unseen = [tmp_path / folder.name for folder in data], tmp_path / "unseen"
    of = read_manifest(data[0] / "mono")
    write_data(unseen, rows=30, vocabulary=of.vocabulary_size, seed=2, sha256=of.vocabulary_sha256)
    shutil.copytree(data[0] / "vocab", unseen / "vocab")
    config = replace(config, data=replace(config.data, para_rows=0))
    run = pretrain(config, folders, tmp_path / "run", heldout=unseen)
    found = read_json(run / "languages.json", dict)["mono"]
    assert found["de"] == pytest.approx({"share": 0.625, "share_before": 0.5, "repeat": 1.25})
    assert found["en"] == pytest.approx({"share": 0.375, "share_before": 0.3, "repeat": 0.75})
    line, heldout = list(audit_lines(run / "heldout.jsonl"))[-1], RowStore(unseen / "mono")
    both = dict(zip((RowStore(folder / "mono") for folder in folders), (5 / 8, 3 / 8), strict=True))
    sums, counts = unigram_nll_by_language(both, heldout, 0, 30)
    assert line["unigram_nll_mono"] == pytest.approx(sums.sum() / counts.sum())
    assert _data_of(run, read_json(run / "config.json", dict)["data"]) == (
        [run / "../one", run / "../two"],
        run / "../unseen",
    )


def test_languages_of_a_task_that_is_not_read_are_not_shown(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(data[0], tmp_path / "data")
    share = {"share_after": 1.0, "share_before": 1.0, "repeat": 1.0}
    for task, code in (("mono", "de"), ("para", "de-en")):
        manifest = read_manifest(tmp_path / "data" / task)
        write_manifest(tmp_path / "data" / task, replace(manifest, counts={"by_language": {code: share}}))
    for para_rows, tasks in ((4, {"mono", "para"}), (0, {"mono"})):
        of = replace(config, data=DataConfig(4, para_rows, 4))
        assert report_data._languages(of, [tmp_path / "data"]).keys() == tasks


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("how", ["folder", "rows", "text", "split"])
def test_held_out_text_is_that_of_no_phase(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path, phase: int, how: str
) -> None:
    """The folder itself, a shard of it, the same encoded text in other rows, or text that a split left in training."""
    parts = [tmp_path / name for name in ("one", "two")]
    for folder, copy in zip(data, parts, strict=True):
        shutil.copytree(folder, copy)
    unseen, of = tmp_path / "unseen", read_manifest(data[0] / "mono")
    write_data(unseen, rows=30, vocabulary=of.vocabulary_size, seed=2, sha256=of.vocabulary_sha256)
    shutil.copytree(data[0] / "vocab", unseen / "vocab")

    def change(folder: Path, **settings: object) -> None:
        manifest = read_manifest(folder / "mono")
        write_manifest(folder / "mono", replace(manifest, settings=manifest.settings | settings))

    if how == "folder":
        unseen = parts[phase]
    elif how == "rows":
        manifest, theirs = (read_manifest(folder / "mono") for folder in (unseen, parts[phase]))
        shutil.copy(parts[phase] / "mono" / theirs.shards[1].name, unseen / "mono" / manifest.shards[1].name)
        write_manifest(unseen / "mono", replace(manifest, shards=(manifest.shards[0], theirs.shards[1])))
        for folder, text in zip((*parts, unseen), "abc", strict=True):
            change(folder, encoded=text)
    elif how == "text":
        for folder, text in ((parts[1 - phase], "a"), (parts[phase], "b"), (unseen, "b")):
            change(folder, encoded=text)
    else:
        change(parts[1 - phase], split="train", heldout_share=0.1)
        change(parts[phase], split="all")
        change(unseen, split="heldout", heldout_share=0.1)
    name = parts[phase].name
    said = {
        "split": rf"mono .*{name} with --split all",
        "folder": rf"{name} is both the data and the held-out data",
    }.get(how, rf"mono .*{name} have the same text, so no text is held out")
    for call in (dry_run, pretrain):
        with pytest.raises(SharedError, match=said):
            call(config, parts, tmp_path / "run", unseen)


def test_operations_are_the_mean_of_the_phases(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weighed by their steps; each phase has its own too."""

    def of_one(fraction: float) -> float:
        bare = replace(config.data, phase_steps=(), phase_mask_fractions=())
        return flops_per_step(replace(config, data=bare, objective=ObjectiveConfig(mask_fraction=fraction)), 32)

    mean = (5 * of_one(0.3) + 3 * of_one(0.15)) / 8
    assert flops_per_step(config, 32) == pytest.approx(mean)
    dry_run(config, data, tmp_path / "run")
    printed = f"{format_number(mean)} FLOP a step, {format_number(8 * mean)} in all"
    assert printed in capsys.readouterr().out
    assert flops_by_phase(config, (32, 32)) == pytest.approx([of_one(0.3), of_one(0.15)])
    one_share = replace(config, data=replace(config.data, phase_mask_fractions=()))
    short, long = flops_per_step(one_share, 32), flops_per_step(one_share, 64) / 2  # of as many tokens
    assert long > short and flops_by_phase(one_share, (32, 64)) == pytest.approx([short, long])


def test_what_cannot_be(
    config: RunConfig, data: tuple[Path, Path], stable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SharedError, match=r"must have 0 numbers for 1 folder, not 1: .* or name 2 folders"):
        pretrain(config, data[0], tmp_path / "one")
    with pytest.raises(
        SharedError, match=r"data.phase_steps must have 2 numbers for 3 folders, not 1: give the number"
    ):
        pretrain(config, [*data, data[0]], tmp_path / "one")
    with pytest.raises(SharedError, match=r"^no data folder is named: name one"):
        pretrain(config, [], tmp_path / "one")
    with pytest.raises(SharedError, match=r"data.phase_mask_fractions has 2 numbers, but data.phase_steps is for 1"):
        pretrain(replace(config, data=replace(config.data, phase_steps=())), data[0], tmp_path / "one")
    with pytest.raises(ValueError, match=r"has no checkpoint of step 7 \(it has 3, 6, 8\): name one"):
        read_branch_config(stable.with_name("stable@7"))
    shutil.copytree(stable, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(ValueError, match=r"bare has no checkpoint of step 7, and no other: wait for its first"):
        read_branch_config(tmp_path / "bare@7")
    with pytest.raises(ValueError, match=r"nowhere does not exist: name a run of pre-training with --branch"):
        read_branch_config(tmp_path / "nowhere@7")
    with pytest.raises(ValueError, match=r"--branch .*stable names no step: write .*stable@STEP"):
        read_branch_config(stable)
    with pytest.raises(SharedError, match=r"train.steps is 8, but the run begins at step 8: raise train.steps"):
        pretrain(read_branch_config(stable.with_name("stable@8")), data, tmp_path / "one")
    with pytest.raises(ValueError, match=r"has no config.json: name a run of pre-training with --branch"):
        read_branch_config(tmp_path.with_name(f"{tmp_path.name}@3"))
    late = read_branch_config(stable.with_name("stable@6"))
    stepless = replace(late, start=StartConfig(str(stable), "state"))
    with pytest.raises(
        SharedError, match=r"start.take state continues from a step: name the step as .*stable@STEP, or give"
    ):
        pretrain(stepless, data, tmp_path / "one")
    dry_run(late, data, tmp_path / "one")
    assert "resuming after step 6 of 8" in capsys.readouterr().out
    dry_run(longer(config, 10), data, stable)  # which has checkpoints of steps 3, 6 and 8
    assert "resuming after step 8 of 10" in capsys.readouterr().out
    narrow = replace(late, model=replace(config.model, discriminator_layers=1))
    with pytest.raises(SharedError, match=r"has model.discriminator_layers 2, this run has 1"):
        pretrain(narrow, data, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_an_audit_needs_records_and_all_folders(data: tuple[Path, Path], stable: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(stable, out)
    with pytest.raises(ValueError, match=r"run read 2 folders, but --data names 1: name all folders"):
        examine(out, data[:1])
    for others in (data[::-1], (data[1], data[1]), (data[0], data[0])):
        with pytest.raises(ValueError, match=r"is not the data that .*run was trained on from step [05] on: name the"):
            examine(out, others)
    rows = out / "audit" / "rank_00000.jsonl"
    rows.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match=r"rank_00000.jsonl does not exist, which has the rows"):
        examine(out, data)
    (tmp_path / "aside").rename(rows)
    for lost, words in (("audit", "only a run with --train.audit can be"), ("checkpoints", "has no usable checkpoint")):
        shutil.rmtree(out / lost)
        with pytest.raises(ValueError, match=words):
            examine(out, data)


def test_an_audit_is_of_the_steps_that_were_recorded(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train.audit` is switched on late, and off for steps that had been recorded before they were done again."""
    out, one_folder = tmp_path / "run", replace(config, data=DataConfig(4, 4, 4))

    def train(steps: int, audit: bool) -> None:
        pretrain(replace(one_folder, train=replace(config.train, steps=steps, audit=audit)), data[0], out)

    train(4, audit=False)
    train(8, audit=True)
    assert examine(out, data[:1]) == ([], "16 mono rows and 16 para rows of 4 steps (--train.audit was off in 4 more)")
    forget(out, 6, 8)
    train(6, audit=False)
    with pytest.raises(ValueError, match=r"run has 6 steps, all without --train.audit: only steps with it can be"):
        examine(out, data[:1])
    train(9, audit=True)
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        audit_command(["--run", str(out), "--data", str(data[0])])
    assert left.value.code == 0
    assert capsys.readouterr().out == (
        "12 mono rows and 12 para rows of 3 steps (--train.audit was off in 6 more): each was read once, with the "
        "data's tokens\n"
    )


def test_a_damaged_line_of_the_starts_hides_no_start(
    config: RunConfig, data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two starts never have one number. The half-written line of a start that was killed before its first step is of no
    account, also after a resume; that of a start with steps is reported."""
    out, one_folder = tmp_path / "run", replace(config, data=DataConfig(4, 4, 4))
    starts = out / "audit" / "attempts.jsonl"
    passed = ([], "32 mono rows and 32 para rows of 8 steps")
    pretrain(one_folder, data[0], out)
    whole = starts.read_bytes()
    starts.write_bytes(whole + whole[:-20])
    forget(out, 6, 8)
    pretrain(one_folder, data[0], out)
    assert examine(out, data[:1]) == passed
    resumed = starts.read_bytes()
    starts.write_bytes(whole + b"garbage" + resumed.removeprefix(whole))
    with pytest.raises(ValueError, match=r"the line of start 1 in .*attempts.jsonl is damaged, so .*: restore the"):
        examine(out, data[:1])
    forget(out, 6, 8)
    pretrain(one_folder, data[0], out)
    starts.write_bytes(starts.read_bytes().replace(b"garbage", b""))
    assert examine(out, data[:1]) == passed


def test_a_branch_is_of_the_same_model(
    config: RunConfig, data: tuple[Path, Path], stable: Path, tmp_path: Path
) -> None:
    """One objective, one vocabulary and the parts that the parent has; settings that no tensor's shape would show."""
    late, vocabulary = read_branch_config(stable.with_name("stable@6")), Vocabulary(data[0] / "vocab")
    assert starting_weights(late, vocabulary) is None
    other = train_vocabulary(tmp_path / "other", size=vocabulary.size - 10)
    parent = tmp_path / "parent"
    shutil.copytree(stable, parent)

    def changed(task: str | None = None, **model: object) -> RunConfig:
        """A branch of a parent with these settings."""
        content = read_json(stable / "config.json", dict)
        content["config"]["model"] |= model
        content["config"] |= {"task": task} if task else {}
        write_json(parent / "config.json", content)
        return replace(late, start=StartConfig(f"{parent}@6", "state"))

    mlm = replace(late, objective=ObjectiveConfig("mlm"))
    for branch, read, words in (
        (lambda: mlm, vocabulary, "was trained for electra, whose state start.take state cannot take for mlm: set"),
        (lambda: changed("xnli"), vocabulary, "was trained for xnli, whose state"),
        (lambda: late, other, "has another vocabulary than the data, and start.take state cannot change it"),
        (lambda: changed(relative_bias="none"), vocabulary, "has model.relative_bias none, this run has gated"),
        (lambda: replace(late, model=replace(late.model, language_embeddings=("de", "en"))), vocabulary,
         r"has model.language_embeddings \(\), this run has"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            starting_weights(branch(), read)


def test_all_ranks_start_from_the_checkpoint_that_was_pinned(
    config: RunConfig, data: tuple[Path, Path], stable: Path
) -> None:
    """An unfinished run's newest one, though the run goes on meanwhile."""
    unfinished = stable.with_name("unfinished")
    shutil.copytree(stable, unfinished)
    assert pin_step(unfinished) == unfinished
    forget(unfinished, 8)
    pinned = pin_step(unfinished)
    assert pinned == Path(f"{unfinished}@6")
    tuned = stable.with_name("tuned")  # a fine-tuned run is read only at its end, so no checkpoint is named
    (tuned / "checkpoints/step_00000002").mkdir(parents=True)
    (tuned / "config.json").write_text('{"format": 1, "config": {"task": "ner"}}')
    assert pin_step(tuned) == tuned
    shutil.copytree(stable / "checkpoints/step_00000008", unfinished / "checkpoints/step_00000008")
    begun = replace(config, start=StartConfig(str(unfinished)))
    first = starting_weights(begun, Vocabulary(data[0] / "vocab"), [pinned])
    wanted, newer = (load_run(Path(f"{stable}@{step}")).state for step in (6, 8))
    assert first is not None and all(torch.equal(first(name), value) for name, value in wanted.items())
    assert not torch.equal(wanted["embedding_0"], newer["embedding_0"])


def test_settings_come_back(config: RunConfig) -> None:
    there = json.loads(json.dumps(asdict(config)))
    assert from_json(RunConfig, there) == config
    del there["model"]["norm"]
    with pytest.raises(KeyError, match="norm"):
        from_json(RunConfig, there)
