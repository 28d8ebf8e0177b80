"""Steps that are left out: counted over a resume, recorded with their rows, and ten in a row end the run."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.checkpoint.checkpoints import Checkpoints
from xlme_ds.config import RunConfig, TrainConfig
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import StepStats
from xlme_ds.engine.ranks import SharedError
from xlme_ds.engine.step import StepContext
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.train.console import Console
from xlme_ds.train.loop import BadStepGuard, Callback, Evaluate, Record, UpdateReport, fit
from xlme_ds.train.opening import pretraining_info
from xlme_ds.train.records import LanguageLog, MetricsLog, StepLog
from xlme_ds.train.run import Trainer
from xlme_ds.train.run_folder import RunFolder
from xlme_ds.train.stop import StopRequest, Watchdog
from xlme_ds.validate import validate

torch.set_num_threads(1)  # as in tests/small.py


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", rows=96)


def config(**changes: object) -> RunConfig:
    made = tiny(dict(kind="plain"), micro_batch=4)
    settings = dict(steps=12, log_every=1, save_every=4, max_bad_steps=3) | changes
    return validate(replace(made, train=replace(made.train, **settings)))


def run(data: Path, out: Path, config: RunConfig, bad: set[int], watch: bool = True) -> bool:
    """Train with an infinite loss in the second micro-batch of the steps `bad`."""
    loader = Loader(data, config.data, config.seed, 0.15)
    engine = build_engine(config, loader, None)
    sums, now = ElectraObjective.sums, {"step": -1, "call": 0}

    def follow(step: int, batches: list[object]) -> None:
        now.update(step=step, call=0)

    def spoilt(*arguments: object) -> torch.Tensor:
        now["call"] += 1
        return sums(*arguments) * (math.inf if now["step"] in bad and now["call"] == 2 else 1)

    if watch:
        loader.on_read, engine.objective.sums = follow, spoilt
    folder = RunFolder(out)
    try:
        work = pretraining_info(config, loader, None, root=True)
        return Trainer(engine, config, folder, work).train(StopRequest(), Watchdog(0, rank=0))
    finally:
        engine.objective.sums = sums


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bad_steps_are_counted_and_recorded_and_the_count_survives_a_resume(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(data, out, config(), bad={1, 5})
    faults = lines(out / "faults.jsonl")
    assert faults == [
        {"step": 2, "reason": "loss not finite", "rows": ["mono 12-15, para 12-15"]},
        {"step": 6, "reason": "loss not finite", "rows": ["mono 44-47, para 44-47"]},
    ]
    metrics = lines(out / "metrics.jsonl")
    assert [line["skipped_steps"] for line in metrics] == [0, 1, 1, 1, 1] + [2] * 7
    assert [line["step"] for line in metrics if "grad_norm" not in line] == [2, 6]
    for name in ("step_00000012", "step_00000008"):  # as if it had been killed behind step 4
        for path in (out / "checkpoints" / name).iterdir():
            path.unlink()
        (out / "checkpoints" / name).rmdir()
    assert run(data, out, config(), bad={5})
    assert [line["skipped_steps"] for line in lines(out / "metrics.jsonl")] == [0, 1, 1, 1, 1] + [2] * 7
    assert lines(out / "faults.jsonl") == faults


def test_bad_steps_in_a_row_end_the_run_and_name_their_rows(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(
        SharedError,
        match=r"3 steps in a row, up to step 8, were skipped\. .* rows are mono 60-63, para 60-63,.* `xlme prep show`"
        r"\), or start a run with a lower optimizer\.learning_rate \(in fine-tuning tuning\.learning_rate\)$",
    ):
        run(data, out, config(), bad={2, 3, 5, 6, 7})
    assert [fault["step"] for fault in lines(out / "faults.jsonl")] == [3, 4, 6, 7, 8]
    assert run(data, out, config(), bad={8, 9}), "it goes on behind them, and counts in a row anew"


def test_norms_that_an_engine_accepts(data: Path) -> None:
    """Up to the limit; DeepSpeed gives -1 for one that is not finite."""
    of = config()
    engine = build_engine(of, Loader(data, of.data, of.seed, 0.15), None)
    for limit, good, bad in (
        (math.inf, (0.0, 1e30), (-1.0, math.nan, math.inf)),
        (2.0, (0.0, 2.0), (-1.0, 2.1, math.nan)),
    ):
        context = StepContext(engine.objective, engine.objective.weights, limit, detailed=False)
        assert [engine._accepts(context, norm) for norm in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


class Last(Callback):
    """Writes a record when the run ends."""

    def __init__(self, log: StepLog):
        self.logs = (log,)

    def close(self, done: int) -> None:
        self.logs[0].write({"step": done})


def test_a_record_that_cannot_be_written_at_the_end_is_an_error(data: Path, tmp_path: Path) -> None:
    of, log = config(), StepLog(tmp_path, "last", 12)
    log.path.unlink()
    log.path.mkdir()
    engine = build_engine(of, Loader(data, of.data, of.seed, 0.15), None)
    with pytest.raises(SharedError, match=r"last\.jsonl: Is a directory"):
        fit(engine, of, guard(), [Last(log)], 12, StopRequest(), Watchdog(0, rank=0))


def stats(norm: float, applied: bool = True) -> StepStats:
    return StepStats({}, norm, 1e-3, applied)


def guard(state: dict | None = None, **settings: object) -> BadStepGuard:
    return BadStepGuard(TrainConfig(**settings), state or {}, lambda step: f"rows of {step}", None)


def test_limit_is_six_sigma_over_the_last_128_steps_and_comes_back_on_resume() -> None:
    ours = guard(spike_sigma=6)
    for step in range(300):
        limit = ours.norm_limit()
        assert math.isinf(limit) == (step < 64), step
        ours.after_step(step + 1, stats(1.0 + (step % 2)) if step != 100 else stats(math.nan, applied=False))
    # of 64 ones and 64 twos the mean is 1.5, the standard deviation of the sample 0.50196
    assert ours.norm_limit() == pytest.approx(1.5 + 6 * 0.50196, abs=1e-4)
    theirs = guard(json.loads(json.dumps(ours.state)), spike_sigma=6)
    assert theirs.norm_limit() == ours.norm_limit() and theirs.skipped == 1
    assert math.isinf(guard(ours.state).norm_limit()), "off by default"
    ours.after_step(301, stats(9.0, applied=False))  # too large, and a number: it counts, so that a new level is learnt
    assert ours.state["norms"][-2:] == [2.0, 9.0] and ours.norm_limit() > 5.3


def test_a_bad_step_is_recorded_with_its_reason_and_all_rows_of_the_step(tmp_path: Path) -> None:
    """Where no micro-batch's loss shows which. Of 32 ones and 32 twos the mean is 1.5, the deviation 0.50395."""
    ours = BadStepGuard(TrainConfig(spike_sigma=6), {}, lambda step: f"rows of {step}", StepLog(tmp_path, "faults", 0))
    for step in range(1, 65):
        ours.after_step(step, stats(1.0 + (step % 2)))
    ours.after_step(65, stats(math.nan, applied=False))
    ours.after_step(66, stats(9.0, applied=False))
    assert lines(tmp_path / "faults.jsonl") == [
        {"step": 65, "reason": "gradient not finite", "rows": ["rows of 64"]},
        {"step": 66, "reason": "gradient norm 9, 6 sigma allow 4.524", "rows": ["rows of 65"]},
    ]


def test_bad_steps_in_a_row_are_counted_over_a_resume() -> None:
    """A run that is killed after every bad step ends as one that is left alone."""
    state: dict = {}
    for step, bad in enumerate((True, True, False, True, True, True), start=1):
        ours = guard(state, max_bad_steps=3)
        ours.after_step(step, stats(math.nan, applied=not bad))
        state = json.loads(json.dumps(ours.state))
        assert (ours.fault is not None) == (step == 6)
    assert ours.fault is not None and ours.fault.startswith("3 steps in a row, up to step 6,") and ours.skipped == 5


def test_the_second_interrupt_stops_at_once() -> None:
    """The first one, like another signal, asks for a stop after the step."""
    stop = StopRequest()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert stop.received == signal.Signals(number).name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.release()


def test_every_signal_to_stop_counts_unless_it_was_ignored() -> None:
    """As SIGHUP is under nohup. While the report is drawn a signal ends the process with code 0."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        for number in numbers:
            for at_once in (False, True):
                stop = StopRequest()
                stop.at_once = at_once
                with pytest.raises(SystemExit) if at_once else nullcontext() as left:
                    signal.raise_signal(number)
                stop.release()
                assert (left.value.code, stop.received) == (0, None) if left else stop.received == number.name
            signal.signal(number, signal.SIG_IGN)
            stop = StopRequest()
            signal.raise_signal(number)
            stop.release()
            assert stop.received is None and signal.getsignal(number) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_are_the_callers_again_afterwards() -> None:
    """A notebook has a handler for Ctrl-C and a descriptor to which numbers of signals are written."""
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    wakeup = signal.set_wakeup_fd(write_end)
    try:
        StopRequest().release()
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT] and os.read(read_end, 9) == bytes(received)
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, before)
        os.close(read_end)
        os.close(write_end)


def test_outside_the_main_thread_signals_are_the_callers() -> None:
    """As Python has it; a run there is stopped by other means."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with ThreadPoolExecutor(1) as thread:
        stop = thread.submit(StopRequest).result()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        thread.submit(stop.release).result()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Training takes the signals over; the next test has them as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_page_that_is_due_while_another_is_drawn_is_drawn_afterwards(tmp_path: Path) -> None:
    update = UpdateReport(tmp_path, TrainConfig(steps=100, eval_every=10), Checkpoints(tmp_path, 1, 0))
    busy = update.process = subprocess.Popen(["sleep", "600"], stderr=subprocess.PIPE)
    for done in (10, 11):
        update.after_step(done, StepStats({}, 1.0, 1e-3))
        assert update.process is busy
    busy.kill()
    busy.wait()
    update.after_step(12, StepStats({}, 1.0, 1e-3))
    assert update.process not in (None, busy)
    update.close(12)


def test_why_a_page_is_not_drawn_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the last line of its error, or the code; a page that Ctrl-C ended has none."""
    update = UpdateReport(tmp_path, TrainConfig(steps=100, eval_every=10), Checkpoints(tmp_path, 1, 0))
    told = []
    for code in (
        "echo a >&2; echo b >&2; exit 3", "echo b >&2; exit 4", "exit 3", "kill -INT $$", "echo c >&2",
        "echo b >&2; exit 1",
    ):  # fmt: skip
        update.process = subprocess.Popen(
            ["bash", "-c", code], stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip
        update.process.wait()
        update.after_step(9, StepStats({}, 1.0, 1e-3))
        assert update.process is None
        told.append(capsys.readouterr().err.rpartition(": ")[2])
    assert told == ["b\n", "", "it ended with code 3\n", "", "", "b\n"]


def test_a_page_waits_for_the_checkpoint_that_it_shows(data: Path, tmp_path: Path) -> None:
    of, checkpoints = config(), Checkpoints(tmp_path, 1, 0)
    engine = build_engine(of, Loader(data, of.data, of.seed, 0.15), None)
    update = UpdateReport(tmp_path, TrainConfig(steps=12, eval_every=4), checkpoints)
    checkpoints.save(engine, 4, {})
    update.after_step(4, stats(1.0))
    assert update.process is None
    checkpoints.wait(engine)
    update.after_step(5, stats(1.0))
    assert update.process is not None
    update.close(5)
    update.process = None
    for done in (12, 13):  # the last page is drawn by the run itself
        update.after_step(done, stats(1.0))
        assert update.process is None


def test_evaluations_are_of_the_step_that_was_taken(data: Path, tmp_path: Path) -> None:
    """Every two steps and after the last one; its weights are those of the step before."""
    of = config(steps=5, eval_every=2)
    engine = build_engine(of, *(Loader(data, of.data, of.seed, 0.15) for _ in range(2)), None)
    steps: list[int] = []

    def summarise(step: int, **totals: torch.Tensor) -> tuple[dict, dict]:
        steps.append(step)
        return {"loss": float(step)}, {"terms": {}}

    logs = [MetricsLog(tmp_path, "heldout", 0), LanguageLog(tmp_path, "heldout_languages", 0)]
    evaluate = Evaluate(engine, of.train, summarise, Console(5, 0, None), logs)
    for done in range(1, 6):
        evaluate.after_step(done, stats(1.0))
    evaluate.close(5)
    assert steps == [1, 3, 4]
    assert lines(tmp_path / "heldout.jsonl") == [{"step": step + 1, "loss": step} for step in steps]
    assert [line["step"] for line in lines(tmp_path / "heldout_languages.jsonl")] == [2, 4, 5]


def test_the_time_left_is_by_the_last_fifty_records(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that become three times as slow; two lie between records, and no step that is not logged counts."""
    of = config(steps=1000)
    engine = build_engine(of, Loader(data, of.data, of.seed, 0.15), None)
    now, shown = [0.0], list[dict]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    record = Record(
        MetricsLog(tmp_path, "metrics", 100),
        of,
        100,
        engine,
        (16 * 32).__mul__,
        lambda step: 6.0,
        4.0,
        shown.append,
        lambda: 7,
    )
    for done in range(101, 301):
        now[0] += 1 if done <= 200 else 3
        engine.seconds_reading += 0.25
        record.after_step(done, StepStats({"loss": 2.0} if done % 2 == 0 else {}, 1.0, 1e-3))
    assert len(shown) == 100 and shown[49]["seconds_left"] == 800 * 1
    assert shown[74]["seconds_left"] == pytest.approx(750 * (25 * 1 + 25 * 3) / 50)
    assert shown[99] == lines(tmp_path / "metrics.jsonl")[99]
    expected = dict(
        step=300, loss=2.0, lr=1e-3, grad_norm=1.0, skipped_steps=7, tokens=300 * 16 * 32, tokens_per_s=16 * 32 / 3,
        flops_per_s=2.0, peak_fraction=0.5, data_wait=0.25 / 3, memory_gib=shown[99]["memory_gib"], seconds_left=2100,
    )  # fmt: skip
    assert shown[99] == pytest.approx(expected)
    record.peak_flops_per_s, now[0] = None, now[0] + 1
    record.after_step(302, StepStats({"loss": 2.0}, 1.0, 1e-3))
    assert expected.keys() - shown[100].keys() == {"peak_fraction"}
