"""Held-out rows are shared evenly among micro-batches and ranks, whatever their number."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.worker import tiny
from tests.launch import ROOT, environment
from tests.rows import train_vocabulary, write_data
from xlme_ds.data.loader import Loader
from xlme_ds.train.run import heldout_data

_TINY = (
    "--engine.kind plain --engine.precision fp32 --data.mono-rows 4 --data.para-rows 4 --data.micro-batch 4 "
    "--optimizer.warmup-steps 1 --model.width 16 --model.heads 2 --model.feed-forward 32 "
    "--model.discriminator-layers 2 --model.generator-layers 1 --model.max-positions 32"
)


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
            f"--recipe quickstart --data {folder}/mixed --out {folder}/run --model.vocabulary {vocabulary} "
            f"--train.steps 1 {_TINY}".split()
        )
        code = 0
    except SystemExit as left:
        code = left.code
    finally:
        os._exit(0 if code in (0, None) else 1)


def test_a_run_shows_itself_while_it_trains(tmp_path: Path) -> None:
    """Sentences, retrieval and page come from a process of their own, whose fault is a line, and which ends with the
    run, however that ends."""
    vocabulary = train_vocabulary(tmp_path / "data/vocab")
    for seed, name in enumerate(("data", "heldout")):
        write_data(tmp_path / name, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
    shutil.copytree(tmp_path / "data/vocab", tmp_path / "heldout/vocab")
    out, said = tmp_path / "run", tmp_path / "stderr"

    def start() -> subprocess.Popen[bytes]:
        words = f"--recipe quickstart --data {tmp_path}/data --heldout {tmp_path}/heldout --out {out} {_TINY} "
        words += f"--model.vocabulary {vocabulary.size} --train.steps 1000000 --train.eval-every 5 --train.save-every 5"
        command = [sys.executable, "-m", "xlme_ds.pretrain", *words.split()]
        with said.open("wb") as errors:
            return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=errors)

    def until(there: Callable[[], object], run: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + 300  # a hang must not hold the suite
        while not there():
            assert run.poll() is None and time.monotonic() < deadline, said.read_text()[-3000:]
            time.sleep(0.05)

    def shown() -> int:
        return json.loads((out / "samples.json").read_text())[0]["step"] if (out / "samples.json").exists() else 0

    def told() -> bool:
        return "the report page is not brought up to date, training goes on: " in said.read_text()

    run = start()
    until(lambda: _page_processes(out), run)
    run.send_signal(signal.SIGSTOP)  # leaves it the processor
    until(shown, run)
    until(lambda: not _page_processes(out), run)
    step = shown()
    assert step % 5 == 0 and json.loads((out / "retrieval.json").read_text())["step"] == step
    page = (out / "report.html").read_text()
    assert '<meta http-equiv="refresh"' in page and f"sentences and retrieval of step {step}." in " ".join(page.split())
    (out / "samples.json").unlink()
    (out / "samples.json").mkdir()
    run.send_signal(signal.SIGCONT)
    until(lambda: _page_processes(out) or told(), run)
    run.send_signal(signal.SIGSTOP)
    until(lambda: not _page_processes(out), run)
    run.send_signal(signal.SIGCONT)
    until(told, run)
    assert "samples.json: Is a directory" in said.read_text()
    until(lambda: _page_processes(out), run)
    run.kill()
    run.wait()
    while _page_processes(out):
        time.sleep(0.05)

    run = start()
    until(lambda: _page_processes(out), run)
    run.terminate()
    assert run.wait() == 0 and not _page_processes(out)
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]


def _page_processes(run: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(run).encode() in words and any(b"draw_for" in word for word in words):
                found.append(path.parent.name)
    return found
