"""Records on a file system that is full: one error for the run to end with, no traceback of TensorBoard's thread."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launch import python
from xlme_ds.config import ObjectiveConfig
from xlme_ds.objectives import describe
from xlme_ds.train import records
from xlme_ds.train.console import Console
from xlme_ds.train.records import LanguageLog, MetricsLog, StepLog, Tracker, measure_matmul_peak

WRITE = """
import sys, time
from pathlib import Path
from xlme_ds.train.records import MetricsLog
run = Path(sys.argv[1])
log = MetricsLog(run, "metrics", 0)
log.write({"step": 1, "loss": 1.0})
log.board.flush()
try:
    (run / "filler").write_bytes(bytes(1 << 22))
except OSError:
    pass
for step in range(2, 4000):
    log.write({"step": step, "loss": 1.0})
log.close()
print("told:", log.error)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_once(small_disk: Path) -> None:
    done = python("-c", WRITE, str(small_disk))
    assert "told:" in done.stdout and "No space left on device" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_tensorboard_has_every_step_once_after_a_resume(tmp_path: Path) -> None:
    """The last one before the checkpoint too; those after it as they were done again. The file has no number that JSON
    has not."""
    for start, last in ((0, 4), (2, 5)):
        log = MetricsLog(tmp_path, "metrics", start)
        for step in range(start + 1, last + 1):
            log.write({"step": step, "loss": step + start / 10, "norm": (-1) ** step * math.inf, "auc": math.nan})
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "loss": step + 0.2 * (step > 2)} for step in range(1, 6)]
    events = EventAccumulator(str(tmp_path / "tensorboard/metrics"))
    events.Reload()
    assert [(event.step, round(event.value, 1)) for event in events.Scalars("loss")] == [
        (1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2), (5, 5.2)
    ]  # fmt: skip


WANDB = """
import sys, time
from pathlib import Path
from xlme_ds.train.records import LanguageLog, MetricsLog, Tracker
run, begun = Path(sys.argv[1]), ""
for start in (0, 2):  # the second time as after a kill at step 3, from the checkpoint of step 2
    while time.strftime("%X") == begun:  # the service names the folder of a try by the second
        time.sleep(0.05)
    tracker = Tracker("proof", run, "0123abcd", {"model": {"width": 8}})
    begun = time.strftime("%X")
    logs = MetricsLog(run, "metrics", start, tracker), LanguageLog(run, "heldout_languages", start, tracker)
    for step in range(start + 1, start + 4):
        logs[0].write({"step": step, "loss": step / 4, "auc": float("nan")})
    logs[1].write({"step": step, "terms": {"mlm": {"de": 6.5}}})
    for log in (*logs, tracker):
        log.close()
"""


def wandb_records(path: Path) -> Iterator[object]:
    """Of an offline run's file, a LevelDB log: a header of 7 bytes, then blocks of 32 KiB of (checksum, length, kind)
    and part of a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""


def test_weights_and_biases_has_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    done = python("-c", WANDB, str(tmp_path), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    paths = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in paths] == ["run-0123abcd.wandb"] * 2  # one run, sent twice
    found = []
    for path in paths:
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":  # type: ignore[attr-defined]
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}  # type: ignore[attr-defined]
                found.append({key: float(value) for key, value in items.items() if not key.startswith("_")})
    lines = [{"metrics/loss": step / 4} for step in (1, 2, 3)]
    assert found[:2] == lines[:2] and found[2] == lines[2] | {"heldout_languages/mlm/de": 6.5}
    assert found[3:5] == [{"metrics/loss": step / 4} for step in (3, 4)] and len(found) == 6


def test_lines_are_counted_over_a_resume(tmp_path: Path) -> None:
    """By what the checkpoint tells of a file; damaged lines of two resumes are all kept, blank ones are none."""
    path = tmp_path / "metrics.jsonl"
    for start, content, damaged in ((2, b'{"step": 1}\n\nx\n{"step": 2}\n', b"x\n"), (4, None, b"x\ny\n")):
        if content is None:
            content = path.read_bytes() + b'y\n{"step": true}\n{"step": 4}\n'
            damaged += b'{"step": true}\n'
        path.write_bytes(content)
        log = StepLog(tmp_path, "metrics", start)
        assert log.sync() == start and (tmp_path / "metrics.damaged").read_bytes() == damaged
        log.write({"step": start + 1})
        assert log.sync() == start + 1
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": step} for step in range(1, 6)]


def test_the_peak_is_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six, each of 2 · 8192³ operations; a CPU has none."""
    generator = torch.Generator()
    numbers = torch.ones(2, 2)
    monkeypatch.setattr(records.torch, "Generator", lambda device: generator)
    monkeypatch.setattr(records.torch, "randn", lambda *_, **__: numbers)
    clock = iter([0.0, 5, 10, 14, 20, 23, 30, 32, 40, 44, 50, 59])
    monkeypatch.setattr(records.time, "perf_counter", lambda: next(clock))
    assert measure_matmul_peak(torch.device("cuda"), "fp32") == 2 * 8192**3 / 2
    assert measure_matmul_peak(torch.device("cpu"), "fp32") is None


def test_the_peak_memory_of_a_gpu_is_what_torch_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    assert records.peak_memory(torch.device("cuda", 0)) == 1.5


def test_an_evaluation_is_shown_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(9, 0, describe(ObjectiveConfig()))
    console.evaluation({"step": 6, "loss": 1.0, "mlm": 5.43219, "auc_mono": 0.71251, "auc_para": 0.5, "accuracy": 1})
    console.evaluation({"step": 9, "mrtd": 0.25})
    first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (first[1], second[1]) == ("6/9", "9/9")
    assert [word for word in first[2:] if any(c.isdigit() for c in word)] == ["5.432", "0.713,", "0.500", "0.5)"]
    assert second[4:] == ["mrtd", "0.250"], "without a discriminator nothing is said of it"


def test_an_evaluation_says_what_a_unigram_model_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    """After the losses of masked tokens alone; of a task without a baseline nothing is said."""
    console = Console(9, 0, describe(ObjectiveConfig()))
    losses = {"mlm": 6.14583, "tlm": 5.5, "mrtd": 0.25}
    console.evaluation({"step": 9, **losses, "unigram_nll_mono": 7.37285, "unigram_nll_para": 6.714})
    console.evaluation({"step": 9, **losses, "unigram_nll_para": 6.714})
    line = "step 9/9  held-out text: mlm 6.146{}  tlm 5.500 (unigram 6.71)  mrtd 0.250"
    assert capsys.readouterr().out.splitlines() == [line.format(" (unigram 7.37)"), line.format("")]


def test_a_logged_step_is_shown_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of the matrix product's rate is a GPU's alone; a term that this step did not read is left out."""
    values = dict(step=5, loss=1.23456, mlm=2.0, lr=1e-3, tokens_per_s=12345.6, data_wait=0.025, memory_gib=3.14,
                  seconds_left=492.0)  # fmt: skip
    shown = ["step 5/9", "loss 1.235", "mlm 2.000", "lr 1.00e-03", "12.3K tokens/s", "data 2.5%", "3.1 GiB"]
    for gpu in (False, True):
        Console(9, 0, describe(ObjectiveConfig())).step(values | ({"peak_fraction": 0.314} if gpu else {}))
        parts = [*shown[:5], *(["31% of matmul"] * gpu), *shown[5:], "8 min 12 s left"]
        assert capsys.readouterr().out == "  ".join(parts) + "\n"


def test_a_piped_run_shows_lines_although_errors_go_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `xlme pretrain … | tee log`: a bar would be drawn into the pipe, where rich shows none."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    values = dict(step=5, loss=1.0, mlm=2.0, lr=1e-3, tokens_per_s=1.0, data_wait=0.0, memory_gib=1.0, seconds_left=1.0)
    Console(9, 0, describe(ObjectiveConfig())).step(values)
    assert capsys.readouterr().out.startswith("step 5/9  loss 1.000  mlm 2.000")


def test_tensorboard_has_the_losses_of_every_language(tmp_path: Path) -> None:
    log = LanguageLog(tmp_path, "heldout_languages", 0)
    values = {"step": 3, "terms": {"mlm": {"de": 6.5, "en": 2.0}, "tlm": {"de": 1.0}}, "tokens": {"mlm": {"de": 9}}}
    log.write(values)
    log.close()
    assert json.loads((tmp_path / "heldout_languages.jsonl").read_text()) == values
    events = EventAccumulator(str(tmp_path / "tensorboard/heldout_languages")).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"mlm/de": [(3, 6.5)], "mlm/en": [(3, 2.0)], "tlm/de": [(3, 1.0)]}


def test_a_service_that_fails_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its first error nothing more is sent, which is told once; one that cannot be reached at all is named."""
    sent: list[tuple[dict, int]] = []

    def log(values: dict, step: int) -> None:
        sent.append((values, step))
        if step == 2:
            raise RuntimeError("no route")

    def refuse(**settings: object) -> None:
        raise RuntimeError("no key")

    def finish() -> None:
        raise AssertionError("nothing is sent after an error")

    service = SimpleNamespace(init=lambda **_: SimpleNamespace(log=log, finish=finish), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", service)
    metrics = MetricsLog(tmp_path, "metrics", 0, tracker := Tracker("proof", tmp_path, "1", {}))
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": 0.5})
    for each in (metrics, tracker):
        each.close()
    assert sent == [({"metrics/loss": 0.5}, step) for step in (1, 2)] and metrics.error is None
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().out.count("no route") == 1
    service.init = refuse
    with pytest.raises(ValueError, match=r"train\.wandb proof: no key: log in with"):
        Tracker("proof", tmp_path, "1", {})
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import raises ModuleNotFoundError
    with pytest.raises(ValueError, match=r"^train\.wandb needs the package wandb: pip install wandb, or leave"):
        Tracker("proof", tmp_path, "1", {})
