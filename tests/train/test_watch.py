"""What a run shows while it trains, a dry run, and the profile, in this process."""

import contextlib
import fcntl
import gzip
import io
import itertools
import json
import os
import pty
import re
import resource
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launch import ROOT, environment
from tests.rows import train_vocabulary, write_data
from xlme_ds.api import dry_run, pretrain
from xlme_ds.cli import format_number
from xlme_ds.config import DataConfig, EngineConfig, RunConfig
from xlme_ds.counting import count_parameters, flops_of, flops_per_step
from xlme_ds.data.loader import Loader
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.engine import StepStats
from xlme_ds.engine.ranks import SharedError
from xlme_ds.io.folders import LOCK_FILE, lock_folder
from xlme_ds.recipes import recipe
from xlme_ds.train.loop import Profile
from xlme_ds.train.opening import _changed_from_recipe, opening_lines, pretraining_info, read_inputs
from xlme_ds.train.read_audit import audit_lines, audit_reads
from xlme_ds.train.run_folder import RunFolder

STEPS, EVERY = 9, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch")
    vocabulary = train_vocabulary(folder / "data" / "vocab")
    for seed, name in enumerate(("data", "heldout")):
        write_data(folder / name, rows=20, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
    shutil.copytree(vocabulary.path.parent, folder / "heldout" / "vocab")
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> RunConfig:
    usual = recipe("quickstart")
    size = json.loads((folder / "data/mono/manifest.json").read_text())["vocabulary_size"]
    return replace(
        usual,
        model=replace(usual.model, vocabulary=size, width=32, feed_forward=64, max_positions=32),
        data=DataConfig(4, 4, micro_batch=4),
        optimizer=replace(usual.optimizer, warmup_steps=2),
        engine=EngineConfig("plain"),
        train=replace(usual.train, steps=STEPS, log_every=EVERY),
    )


@pytest.fixture(scope="module")
def said(folder: Path, config: RunConfig) -> str:
    """What a run prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pretrain(config, folder / "data", folder / "plain")
    return out.getvalue()


@pytest.fixture
def plain(folder: Path, said: str) -> Path:
    return folder / "plain"


def test_records_by_formula(plain: Path, config: RunConfig) -> None:
    lines = [json.loads(line) for line in (plain / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [3, 6, 9]
    row_tokens, most = 32, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = 0.0
    for line in lines:
        steps_a_second = line["tokens_per_s"] / (8 * row_tokens)
        seconds += EVERY / steps_a_second
        assert line["seconds_left"] == pytest.approx((STEPS - line["step"]) * seconds / line["step"]), "by the mean"
        assert line["flops_per_s"] == pytest.approx(steps_a_second * flops_per_step(config, row_tokens))
        assert "peak_fraction" not in line, "which is for GPUs"
        assert 0 < line["data_wait"] < 1 and most / 20 < line["memory_gib"] <= most


def test_the_first_steps_after_a_resume_are_timed_alone(
    folder: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that moves a millisecond at each look, so equally far in every interval."""
    out, saving = folder / "resumed", replace(config, train=replace(config.train, save_every=EVERY, keep_every=1))
    pretrain(saving, folder / "data", out)
    for step in (6, 9):
        shutil.rmtree(out / f"checkpoints/step_{step:08d}")
    for name in ("finished.json", "model/model.safetensors"):
        (out / name).unlink()
    monkeypatch.setattr(time, "perf_counter", itertools.count(1, 0.001).__next__)
    pretrain(saving, folder / "data", out)
    _, first, second = audit_lines(out / "metrics.jsonl")
    for name in ("tokens_per_s", "flops_per_s", "data_wait"):
        assert first[name] == pytest.approx(second[name], rel=0.2), name
    assert first["seconds_left"] == pytest.approx(EVERY * 8 * 32 / second["tokens_per_s"], rel=0.2)
    for line in (first, second):  # a step reads its rows for a millisecond
        assert line["data_wait"] == pytest.approx(0.001 * line["tokens_per_s"] / (8 * 32), rel=1e-3)


def test_tokens_are_those_that_were_read(folder: Path, config: RunConfig) -> None:
    """Where tasks alternate a step reads rows of one of them; the last step is logged, whatever its number."""
    turns = replace(config, data=DataConfig(4, 4, 4, alternate=True), train=replace(config.train, log_every=3, steps=4))
    turns = replace(turns, train=replace(turns.train, audit=True))
    out = pretrain(turns, folder / "data", folder / "turns")
    read = [line["rows"] for line in audit_lines(out / "audit/rank_00000.jsonl") if "rows" in line]
    rows = [sum(len(part) - 1 for parts in of_step.values() for part in parts) for of_step in read]
    lines = list(audit_lines(out / "metrics.jsonl"))
    assert [line["tokens"] for line in lines] == [32 * sum(rows[:3]), 32 * sum(rows)] == [384, 512]


def test_the_log(said: str) -> None:
    assert "not as the recipe: model.vocabulary" in said and "train.steps 9" in said
    assert "a step: 4 + 4 rows of 32 tokens, 256 in all; a process takes 1 × 8 rows" in said
    assert "\n  the whole run reads mono rows 1.8 times, para rows 1.8 times\n" in said
    terms = "".join(rf"  {name} \d+\.\d{{3}}" for name in ("mlm", "tlm", "mrtd", "trtd"))
    form = rf"step \d/9  loss \d+\.\d{{3}}{terms}  lr \S+  \S+ tokens/s  data \S+%  \S+ GiB  .* left"
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS // EVERY and all(re.fullmatch(form, line) for line in lines), lines
    assert "stopped after" not in said and "plain: finished; open " in said


def test_a_profile_changes_nothing(folder: Path, config: RunConfig, plain: Path) -> None:
    out = pretrain(config, folder / "data", folder / "profiled", profiled=2)
    one, other = (load_file(run / "model/model.safetensors") for run in (plain, out))
    assert all(one[name].equal(other[name]) for name in one)
    with gzip.open(out / "profile/trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names and {f"ProfilerStep#{n}" for n in (3, 4)} <= names
    assert "aten::mm" in (out / "profile/operations.txt").read_text()
    assert not (plain / "profile").exists()


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 6])
def test_a_profile_is_of_the_steps_after_the_third(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    """Of a run that ends before there is none; a second one replaces the first."""
    for _ in range(2):
        profile = Profile(tmp_path, 2, torch.device("cpu"))
        for step in range(1, steps + 1):
            torch.ones(step, 1) @ torch.ones(1, 9)
            profile.after_step(step, StepStats({}, 1.0, 1e-3))
        profile.close(steps)
        said = capsys.readouterr().out
        assert ("no profile: the run ended within its first three steps\n" in said) == (steps <= 3)
        assert (f"{tmp_path}/profile: operations.txt, and trace.json.gz for" in said) == (steps > 3)
    assert (tmp_path / "profile").exists() == (steps > 3)
    if steps > 3:
        with gzip.open(tmp_path / "profile/trace.json.gz") as file:
            products = [e["args"] for e in json.load(file)["traceEvents"] if e.get("name") == "aten::mm"]
        assert sorted(each["Input Dims"][0][0] for each in products) == list(range(4, min(steps, 5) + 1))


def test_a_service_without_its_package_is_refused(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (dry_run, pretrain):
        with pytest.raises(SharedError, match=r"train\.wandb needs the package wandb: pip install wandb, or leave"):
            call(replace(config, train=replace(config.train, wandb="mine")), folder / "data", folder / "none")


def test_a_service_gets_the_records_of_a_run(
    config: RunConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the run's identity, so that a resume continues them."""
    begun: list[dict[str, Any]] = []
    sent: list[tuple[int, str]] = []

    class Service:
        def log(self, values: dict[str, float], step: int) -> None:
            sent.extend((step, key) for key in values)

        def finish(self) -> None:
            sent.append((0, "finished"))

    service = SimpleNamespace(init=lambda **given: begun.append(given) or Service(), Settings=dict, __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", service)
    named = replace(config, train=replace(config.train, wandb="mine", steps=3, eval_every=2))
    out = pretrain(named, folder / "data", tmp_path / "run", folder / "heldout")
    identity = json.loads((out / "config.json").read_text())["run"]
    assert [(each["project"], each["name"], each["id"], each["resume"]) for each in begun] == [
        ("mine", "run", identity, "allow")
    ]
    assert begun[0]["config"]["train"]["steps"] == 3
    steps = {name: [step for step, key in sent if key.startswith(name)] for name in ("metrics/loss", "heldout/loss")}
    assert steps == {"metrics/loss": [3], "heldout/loss": [2, 3]} and sent[-1] == (0, "finished")
    dimensions = [step for step, key in sent if key == "dimensions/layer_0"]
    assert dimensions == [1, 2, 3] and any(key.startswith("heldout_languages/mlm/") for _, key in sent)


@pytest.mark.parametrize(("rank", "name"), [(0, "rank_00000.jsonl"), (1, "rank_00001.jsonl"), (2, None), (3, None)])
def test_rows_of_a_pipeline_are_recorded_by_its_first_stage(
    folder: Path, tmp_path: Path, rank: int, name: str | None
) -> None:
    """Of two replicas on four processes."""
    (tmp_path / "audit").mkdir()
    loader = Loader(folder / "data", DataConfig(4, 4, 2), 1, 0.15, rank % 2, 2)
    path = audit_reads(tmp_path, loader, 0, rank, audit=True)
    loader.micro_batches(0)
    assert path == (name and tmp_path / "audit" / name)
    assert [each.name for each in (tmp_path / "audit").glob("rank_*")] == ([name] if name else [])


def test_a_dry_run_writes_nothing(folder: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    dry_run(config, folder / "data", folder / "new", folder / "heldout")
    said = capsys.readouterr().out
    assert "starting at step 0 of 9" in said and "nothing was written" in said
    assert "memory, by count: not counted (engine.kind plain" in said  # of others: tests/e2e/test_pipeline.py
    step = 3 * 8 * 32 * flops_of(config, 32).forward
    assert f"  operations: {format_number(step)} FLOP a step, {format_number(STEPS * step)} in all\n" in said
    assert sorted(folder.rglob("*")) == before


def test_one_process_says_that_other_gpus_are_idle(
    folder: Path, config: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlme_ds.train.opening.on_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    dry_run(config, folder / "data", folder / "new")
    assert "one of 8 GPUs is used: `xlme launch --gpus 8 …` uses them all" in capsys.readouterr().out


def test_the_opening_lines(folder: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run on two processes whose tasks alternate; precision is chosen at the start, in no recipe."""
    monkeypatch.setattr("xlme_ds.train.opening.on_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    turns = replace(config, data=DataConfig(4, 4, 2, alternate=True), engine=EngineConfig(precision="bf16"))
    turns = replace(turns, train=replace(config.train, steps=10))  # which read each of the 20 rows of a task once
    loader = Loader(folder / "data", turns.data, 1, 0.15, rank=1, world=2)
    info = pretraining_info(turns, loader, None, root=False)
    first, model, step, *others = opening_lines(turns, Path("runs/mine"), 0, loader, 2, info)
    assert first == "runs/mine: starting at step 0 of 10, 2 processes, deepspeed zero1, bf16"
    sizes = count_parameters(turns)
    total = sizes.pop("trained_total")
    said = ", ".join(f"{name} {format_number(size)}" for name, size in sizes.items())
    assert model == f"  model: {format_number(total)} parameters ({said})"
    assert step == "  a step: 4 or 4 rows of 32 tokens, 128 in all; a process takes 1 × 2 rows"
    (changed,) = (line for line in others if "not as the recipe" in line)
    assert "data.alternate True" in changed and "engine.precision" not in changed
    assert not any("GPUs" in line or "times" in line for line in others)
    monkeypatch.setattr("xlme_ds.train.opening.on_gpu", lambda: False)
    assert opening_lines(turns, Path("runs/mine"), 0, loader, 2, info)[0] == f"{first} on the CPU"


def test_what_differs_from_the_recipe_is_what_was_set() -> None:
    """Not what replaced `auto`; a run of another name has no recipe."""
    base, quickstart = recipe("base"), recipe("quickstart")
    assert base.engine.deepspeed == "auto" != quickstart.engine.deepspeed
    for run, changes in ((base, []), (quickstart, ["engine.deepspeed zero3", "engine.balance (1, 2)"])):
        engine = replace(run.engine, deepspeed="zero3", precision="bf16", balance=(1, 2) if changes else ())
        assert _changed_from_recipe(replace(run, engine=engine)) == changes
    assert _changed_from_recipe(replace(quickstart, name="mine", seed=7)) == []
    assert _changed_from_recipe(replace(quickstart, seed=7)) == ["seed 7"]


MISTAKES: dict[str, Callable[[RunConfig], RunConfig]] = {
    "model.vocabulary": lambda c: replace(c, model=replace(c.model, vocabulary=999)),
    "model.heads": lambda c: replace(c, model=replace(c.model, heads=5)),
    "nowhere": lambda c: replace(c, start=replace(c.start, folder="nowhere")),
    "was started with seed 1": lambda c: replace(c, seed=2),
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_dry_run_finds_what_a_run_would(folder: Path, config: RunConfig, plain: Path, sentence: str) -> None:
    wrong, said = MISTAKES[sentence](config), []
    for call in (dry_run, pretrain):
        with pytest.raises(SharedError, match=sentence) as caught:
            call(wrong, folder / "data", plain)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_dry_run_finds_kernels_that_cannot_run(
    folder: Path, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = replace(config.model, kernels="triton", heads=2)
    for call in (dry_run, pretrain):
        with pytest.raises(SharedError, match=r"interpreter has no bf16 products: set engine\.precision to fp32"):
            call(replace(config, model=model, engine=EngineConfig(precision="bf16")), folder / "data", tmp_path / "run")


def test_a_dry_run_of_a_run_that_is_there(
    folder: Path, config: RunConfig, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(config, folder / "data", plain)
    assert f"resuming after step {STEPS} of {STEPS}" in capsys.readouterr().out
    with lock_folder(plain):
        held = (plain / LOCK_FILE).read_bytes()
        with pytest.raises(SharedError, match="another process is still working in"):
            dry_run(config, folder / "data", plain)
        assert (plain / LOCK_FILE).read_bytes() == held
    for call in (dry_run, pretrain):
        with pytest.raises(SharedError, match="--profile -1 is no number of steps"):
            call(config, folder / "data", plain, profiled=-1)
    for call in (dry_run, pretrain):
        for place in (folder / "data", folder / "data/mono/run", folder / "heldout/vocab", folder / "heldout"):
            with pytest.raises(SharedError, match=rf"{place} is (in )?the data folder .*: choose another output"):
                call(config, folder / "data", place, folder / "heldout")
        with pytest.raises(SharedError, match=r"data is both the data and the held-out data: encode some with --split"):
            call(config, folder / "data", plain, folder / "data")
    below, warm = plain / "config.json/run", replace(config, start=replace(config.start, folder=plain))
    for call, settings in ((dry_run, config), (dry_run, warm), (pretrain, config), (pretrain, warm)):
        with pytest.raises(SharedError, match=r"config\.json is a file, not a folder: choose another output folder"):
            call(settings, folder / "data", below)


def test_a_dry_run_finds_that_a_run_cannot_go_on(folder: Path, config: RunConfig, plain: Path, tmp_path: Path) -> None:
    vocabulary = train_vocabulary(tmp_path / "other" / "vocab")
    write_data(tmp_path / "other", rows=20, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=5)
    mixed = shutil.copytree(folder / "data", tmp_path / "mixed")
    shutil.rmtree(mixed / "para")
    ours = Vocabulary(mixed / "vocab")
    write_data(tmp_path / "again", rows=20, vocabulary=ours.size, sha256=ours.sha256, seed=6)
    shutil.copytree(tmp_path / "again" / "para", mixed / "para")
    for n, call in enumerate((dry_run, pretrain)):
        names = ("one", "two", "bare", "hurt")
        one, two, bare, hurt = (shutil.copytree(plain, tmp_path / f"{name}{n}") for name in names)
        shutil.rmtree(bare / "checkpoints")
        for marker in hurt.glob("checkpoints/*/complete.json"):
            marker.unlink()
        with pytest.raises(SharedError, match=r"with another --data \(mono, para\): resume with the data of"):
            call(config, tmp_path / "other", one)
        with pytest.raises(SharedError, match=r"with another --data \(para\): resume with the data of"):
            call(config, mixed, one)
        with pytest.raises(SharedError, match=r"was saved with another --heldout \(mono, para\): resume"):
            call(config, folder / "data", two, folder / "heldout")
        for lacking in (bare, hurt):
            with pytest.raises(SharedError, match="has records but no usable checkpoint"):
                call(config, folder / "data", lacking)
    engine = EngineConfig("deepspeed", precision="fp32", gradient_precision="bf16")  # fp32 as `auto` has become
    place = RunFolder(tmp_path / "wide", writes=False)
    with pytest.raises(ValueError, match=r"engine\.gradient_precision bf16 is for .* computing in bf16"):
        read_inputs(replace(config, engine=engine), [folder / "data"], None, place, [], 0, 1)


BAR = """
from xlme_ds.config import ObjectiveConfig
from xlme_ds.objectives import describe
from xlme_ds.train.console import Console
console = Console(125000, 0, describe(ObjectiveConfig()))
values = {"loss": 61.234, "mlm": 6.1, "tlm": 6.2, "lr": 1e-4, "tokens_per_s": 301234.5, "peak_fraction": 0.314,
          "data_wait": 0.001, "memory_gib": 60.0, "seconds_left": 300000.0}
console.step({"step": 119990, **values})
console.progress.refresh()
console.close()
"""


@pytest.mark.parametrize("width", [80, 40])
def test_the_bar_fits(width: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    settings = environment(TERM="xterm-256color")
    settings.pop("COLUMNS", None)
    process = subprocess.Popen([sys.executable, "-c", BAR], cwd=ROOT, env=settings, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            said += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    lines = [line for line in re.split(r"[\r\n]+", text) if "119990" in line]
    assert lines and all(len(line) <= width for line in lines), text
    if width == 80:
        assert "loss 61.234" in lines[-1] and "31% of matmul" in lines[-1] and "3 d 11 h left" in lines[-1], lines


def test_tensorboard_has_settings_and_sentences(plain: Path) -> None:
    def texts(name: str) -> dict[str, str]:
        events = EventAccumulator(str(plain / "tensorboard" / name), size_guidance={"tensors": 0})
        events.Reload()
        tags = events.Tags()["tensors"]
        return {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags}

    assert "    train.steps: 9\n" in texts("metrics")["settings/text_summary"]
    sample = json.loads((plain / "samples.json").read_text())["samples"][0]
    (said,) = [
        text for tag, text in texts("samples").items() if tag.startswith(f"{sample['task']}/{sample['language']}/")
    ]
    for token in sample["tokens"]:
        piece = token["piece"].replace("▁", " ").strip()
        assert (f"**{piece}**" if token["masked"] else piece) in said
