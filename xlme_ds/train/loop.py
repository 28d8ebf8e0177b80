"""The training loop and its callbacks: records, evaluation, checkpoints, the report page, and the guard against bad
steps. Every rank calls all of its callbacks after every step, because some are collective.

The loop depends on no model and on no kind of engine. The engine skips a step whose loss or gradient is not finite, or
whose gradient norm exceeds the guard's limit. Norm and limit are equal on all ranks, so all ranks decide alike.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from ..checkpoint.checkpoints import Checkpoints
from ..config import TrainConfig, Training
from ..engine.engine import Engine, StepStats
from ..engine.ranks import on_all_ranks, raise_on_all_ranks
from ..io.errors import in_words
from ..io.files import errors_naming, write_text
from ..run_commands import child_environment
from .console import Console
from .records import MetricsLog, StepLog, peak_memory
from .run_folder import flatten
from .schedule import learning_rate
from .stop import StopRequest, Watchdog


class Callback:
    """The loop calls the methods of a callback after every step and at the end, on each rank that has the callback."""

    logs: Sequence[StepLog] = ()  # the files of records that the callback writes

    def after_step(self, done: int, stats: StepStats) -> None:
        """Called after every step. `done`: number of finished steps; `stats`: the result of the last finished step."""

    def close(self, done: int) -> None:
        """Called at the end of the loop, when the run is finished or was stopped after `done` steps."""
        for log in self.logs:
            log.close()


class Record(Callback):
    """Writes a line to metrics.jsonl at every logged step, and shows it; only rank 0 has this callback."""

    def __init__(
        self,
        log: MetricsLog,
        config: Training,
        start: int,
        engine: Engine,
        tokens_until: Callable[[int], int],
        flops_of_step: Callable[[int], float],
        peak_flops_per_s: float | None,
        show: Callable[[dict[str, Any]], None],
        skipped_steps: Callable[[], int],
    ):
        """`tokens_until(n)`: tokens of the first n steps; `flops_of_step(n)`: floating-point operations of step n,
        counted from 0; `peak_flops_per_s`: FLOP/s that each process can reach. If it is None, the record has no
        `peak_fraction`."""
        settings = (f"    {key}: {value}" for key, value in flatten(asdict(config)).items())
        log.board.add_text("settings", "\n".join(settings), start)
        self.logs = (log,)
        self.skipped_steps = skipped_steps
        self.total_steps = config.train.steps
        self.engine = engine
        self.tokens_until = tokens_until
        self.tokens_per_step = tokens_until(start + 1) - tokens_until(start)
        self.flops_of_step = flops_of_step
        self.peak_flops_per_s = peak_flops_per_s
        self.show = show
        # At the last logged step: steps done, time, and seconds that were spent on reading data.
        self.last_logged = (start, time.perf_counter(), engine.seconds_reading)
        # (steps, seconds) of the last intervals between logged steps; their mean speed gives the remaining time.
        self.intervals: deque[tuple[int, float]] = deque(maxlen=50)

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        if not stats.metrics:  # this step is not logged
            return
        last_done, last_time, last_seconds_reading = self.last_logged
        now, seconds_reading = time.perf_counter(), self.engine.seconds_reading
        self.last_logged = (done, now, seconds_reading)
        steps, seconds = done - last_done, now - last_time
        steps_per_s = steps / seconds
        flops_per_s = sum(map(self.flops_of_step, range(last_done, done))) / seconds
        peak = self.peak_flops_per_s
        peak_fraction = {"peak_fraction": flops_per_s / (self.engine.world * peak)} if peak else {}
        self.intervals.append((steps, seconds))
        recent_steps, recent_seconds = map(sum, zip(*self.intervals, strict=True))
        values = {
            "step": done,
            **stats.metrics,
            "lr": stats.learning_rate,
            "grad_norm": stats.gradient_norm,
            "skipped_steps": self.skipped_steps(),
            "tokens": self.tokens_until(done),
            "tokens_per_s": steps_per_s * self.tokens_per_step,
            "flops_per_s": flops_per_s,
            **peak_fraction,
            "data_wait": (seconds_reading - last_seconds_reading) / seconds,
            "memory_gib": peak_memory(self.engine.device),
            "seconds_left": (self.total_steps - done) * recent_seconds / recent_steps,
        }
        self.logs[0].write(values)
        self.show(values)


@dataclass
class Evaluate(Callback):
    """Evaluates the model on the held-out rows, every `eval_every` steps and after the last step. Writes one line to
    heldout.jsonl and one to heldout_languages.jsonl. Collective."""

    engine: Engine
    config: TrainConfig
    summarise: Callable[..., tuple[dict[str, float], dict[str, Any]]]  # `RunInfo.summarise`
    console: Console | None  # None on all ranks but 0
    logs: Sequence[StepLog]  # of heldout.jsonl and heldout_languages.jsonl; empty on all ranks but 0

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        every, steps = self.config.eval_every, self.config.steps
        if done == steps or (every and done % every == 0):
            # The loss weights are those of the last finished step: `done - 1`, because steps count from 0.
            overall, by_language = self.summarise(done - 1, **self.engine.eval_batch())
            # Not strict: only rank 0 has logs.
            for log, values in zip(self.logs, (overall, by_language), strict=False):
                log.write({"step": done, **values})
            if self.console is not None:
                self.console.evaluation({"step": done, **overall})


@dataclass
class Dimensions(Callback):
    """Records the effective dimensions of each layer's token states (`Engine.effective_ranks`) after the run's first
    step and at every evaluation. Warns once if the last layer has lost most of its dimensions. Collective."""

    ROWS = 8  # held-out rows of each task
    COLLAPSED = 0.1  # warn below this fraction of the dimensions that the last layer had after the first step

    engine: Engine
    config: TrainConfig
    began_at: int  # the step at which the run began, 0 unless it is a branch
    console: Console | None  # None on all ranks but 0
    logs: Sequence[StepLog]  # of dimensions.jsonl; empty on all ranks but 0
    first_dimensions: float | None = None  # dimensions of the last layer, when first measured
    warned: bool = False

    def __post_init__(self) -> None:
        for log in self.logs:
            for line in log.path.read_bytes().splitlines():  # lines that were written before a resume
                values = json.loads(line)
                if not all(isinstance(value, int | float) for value in values.values()):
                    raise ValueError(
                        f"{log.path} has no dimensions of step {values['step']}: restore or remove that line"
                    )
                if len(values) > 1:  # a line has the step alone if no dimension was finite
                    self._new_warning(values)

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        every = self.config.eval_every
        if done in (self.began_at + 1, self.config.steps) or (every and done % every == 0):
            layers = enumerate(self.engine.effective_ranks(self.ROWS))
            values = {"step": done} | {f"layer_{index}": round(dimensions, 2) for index, dimensions in layers}
            if self.console is not None:
                self.logs[0].write(values)
                self.console.dimensions(values, self._new_warning(values))

    def _new_warning(self, values: Mapping[str, float]) -> str:
        """Return a warning the first time that the last layer has few dimensions, else an empty string.

        Must be called for every measurement, in the order of steps: the first finite one sets `first_dimensions`.
        """
        *_, last = values.values()
        if not math.isfinite(last):
            return ""
        if self.first_dimensions is None:
            self.first_dimensions = last
        if self.warned or last >= self.COLLAPSED * self.first_dimensions:
            return ""
        self.warned = True
        return (
            f"the layers collapse. The token states of the last layer vary in {last:.1f} dimensions; at the start they "
            f"varied in {self.first_dimensions:.0f}. Fine-tuning gains little from such a model: start again with a "
            "lower optimizer.learning_rate, with more optimizer.warmup_steps, or from an encoder (start.take encoder); "
            "docs/howto/gpus.md says more"
        )


class Profile(Callback):
    """Profiles `steps` steps, after the first three, and writes a trace and a table of the slowest operations."""

    def __init__(self, run: Path, steps: int, device: torch.device):
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.folder = run / "profile"
        self.sort_column = f"self_{device.type}_time_total"
        self.recorded = False
        self.profiler = profile(
            activities=activities,
            schedule=schedule(skip_first=2, wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self.profiler.start()

    def _write(self, finished: profile) -> None:
        if finished.step_num == 3:  # no step was profiled, because the run ended after its first three
            return
        self.recorded = True
        trace, partial = self.folder / "trace.json.gz", self.folder / ".trace.json.gz"
        try:
            with errors_naming(self.folder):
                self.folder.mkdir(exist_ok=True)
                finished.export_chrome_trace(str(partial))
                partial.replace(trace)
                table = finished.key_averages().table(sort_by=self.sort_column, row_limit=40, max_name_column_width=60)
                write_text(self.folder / "operations.txt", table)
        except OSError as error:
            print(f"no profile: {in_words(error)}; training continues", flush=True)
        else:
            print(f"{self.folder}: operations.txt, and trace.json.gz for https://ui.perfetto.dev", flush=True)

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        self.profiler.step()

    @override
    def close(self, done: int) -> None:
        self.profiler.stop()
        if not self.recorded:
            print("no profile: the run ended within its first three steps", flush=True)


@dataclass
class Save(Callback):
    """Saves a checkpoint every `every` steps and at the end; collective.

    A thread writes the files while training continues; a later call of `after_step` or `close` completes the
    checkpoint.
    """

    checkpoints: Checkpoints
    engine: Engine
    every: int
    state_after: Callable[[int], dict[str, Any]]  # finished steps -> the run's own state, stored with the engine's
    last_saved: int  # at first the step at which the run continues

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        self.checkpoints.poll(self.engine)
        if done % self.every == 0:
            self._save(done)

    @override
    def close(self, done: int) -> None:
        if done > self.last_saved:
            self._save(done)
        self.checkpoints.wait(self.engine)

    def _save(self, done: int) -> None:
        self.checkpoints.save(self.engine, done, on_all_ranks(lambda: self.state_after(done)))
        self.last_saved = done


# The program of the process that updates the report page.
_WRITE_REPORT = (
    "import sys; from xlme_ds.report.__main__ import write_report_in_child; write_report_in_child(*sys.argv[1:])"
)


@dataclass
class UpdateReport(Callback):
    """Starts a process that updates the report page from the newest checkpoint, every `eval_every` steps, at low
    priority, on one thread and without a GPU. Only rank 0 has this callback.

    Training neither waits for the process nor fails with it: its error is printed as one line on stderr.
    """

    run: Path
    config: TrainConfig
    checkpoints: Checkpoints
    due: bool = False  # whether an update waits for the end of a save, or of the update before it
    process: subprocess.Popen[bytes] | None = None
    last_reason: str = ""  # why the page was not updated, as last printed

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        if self.config.eval_every and done % self.config.eval_every == 0:
            self.due = True
        if self.process is not None and self.process.poll() is not None:
            lines = self.process.communicate()[1].decode(errors="replace").strip().splitlines()
            if self.process.returncode not in (0, -signal.SIGINT):  # SIGINT: Ctrl-C also stops the run
                self._print_reason(lines[-1] if lines else f"it ended with code {self.process.returncode}")
            self.process = None
        if self.due and self.process is None and not self.checkpoints.saving and done < self.config.steps:
            self.due = False
            try:
                self._start()
            except OSError as error:
                self._print_reason(in_words(error))

    @override
    def close(self, done: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _WRITE_REPORT, str(self.run), str(os.getpid())],
            env=child_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, 19)  # the lowest priority
            # When memory runs out, Linux kills the process with the highest value first.
            Path(f"/proc/{self.process.pid}/oom_score_adj").write_text("1000")

    def _print_reason(self, reason: str) -> None:
        """Print why the page is not updated, unless the last message had the same reason."""
        if reason != self.last_reason:
            self.last_reason = reason
            print(f"{self.run}: training continues, but the report page is not updated: {reason}", file=sys.stderr)


class BadStepGuard(Callback):
    """Counts skipped steps and limits the gradient norm. Checkpoints contain the guard's `state`, so that a resumed run
    skips the same steps as one that was never stopped."""

    def __init__(
        self, config: TrainConfig, state: Mapping[str, Any], describe_rows: Callable[[int], str], log: StepLog | None
    ):
        self.config = config
        self.skipped = int(state.get("skipped", 0))
        self.in_a_row = int(state.get("in_a_row", 0))
        self.norms: deque[float] = deque(state.get("norms", ()), maxlen=128)
        self.describe_rows = describe_rows
        self.logs = () if log is None else (log,)
        self.fault: str | None = None  # why the run cannot continue

    @property
    def state(self) -> dict[str, Any]:
        """The values that a resumed run needs. A run resumed after a `fault` counts bad steps in a row from 0."""
        return {
            "skipped": self.skipped,
            "in_a_row": self.in_a_row if self.fault is None else 0,
            "norms": list(self.norms),
        }

    def norm_limit(self) -> float:
        """The largest gradient norm that the next step may have; infinity if there is no limit.

        The rule is that of OLMo-core's SkipStepOptimizer: the limit is computed from the last 128 finite norms, and
        there is none as long as fewer than 64 norms are known.
        """
        if not self.config.spike_sigma or len(self.norms) < 64:
            return math.inf
        return statistics.fmean(self.norms) + self.config.spike_sigma * statistics.stdev(self.norms)

    @override
    def after_step(self, done: int, stats: StepStats) -> None:
        if stats.applied:
            self.in_a_row = 0
        else:
            self._count_skipped(done, stats)
        if math.isfinite(stats.gradient_norm):
            self.norms.append(stats.gradient_norm)

    def _count_skipped(self, done: int, stats: StepStats) -> None:
        self.skipped += 1
        self.in_a_row += 1
        # If every loss is finite, no micro-batch is suspect, and the log gets all rows of the step.
        rows = list(stats.suspects) or [self.describe_rows(done - 1)]
        norm = stats.gradient_norm
        if math.isfinite(norm):
            reason = f"gradient norm {norm:.4g}, {self.config.spike_sigma:g} sigma allow {self.norm_limit():.4g}"
        else:
            reason = "loss not finite" if stats.suspects else "gradient not finite"
        for log in self.logs:
            log.write({"step": done, "reason": reason, "rows": rows})
        if self.in_a_row >= self.config.max_bad_steps:
            self.fault = (
                f"{self.in_a_row} steps in a row, up to step {done}, were skipped. Reason of the last: {reason}; its "
                f"rows are {'; '.join(rows)}, and faults.jsonl has the rows of the others. Look at them (those of "
                "pre-training with `xlme prep show`), or start a run with a lower optimizer.learning_rate (in "
                "fine-tuning tuning.learning_rate)"
            )


def fit(
    engine: Engine,
    config: Training,
    guard: BadStepGuard,
    callbacks: Sequence[Callback],
    start: int,
    stop: StopRequest,
    watchdog: Watchdog,
) -> int:
    """Continue after `start` finished steps. Training ends with the last step, with a request to stop on any rank, or
    with a fault of `guard`. Returns the number of finished steps.

    Raises SharedError when the records of any rank cannot be written.
    """
    callbacks = [guard, *callbacks]  # the guard first, because records and checkpoints contain its counts
    done = start
    stop.has_work = True
    while done < config.train.steps and guard.fault is None:
        if engine.any_rank(stop.received is not None or _log_error(callbacks) is not None):
            break
        watchdog.beat(f"taking step {done + 1}")
        is_last = done + 1 == config.train.steps
        is_logged = is_last or (done + 1) % config.train.log_every == 0
        rate = learning_rate(done, config.train.steps, config.optimizer, config.schedule)
        next_step = None if is_last else done + 1
        stats = engine.train_batch(done, rate, is_logged, guard.norm_limit(), next_step)
        done += 1
        watchdog.beat(f"evaluating or saving after step {done}")
        for callback in callbacks:
            callback.after_step(done, stats)
    raise_on_all_ranks(_log_error(callbacks))
    watchdog.beat(f"saving after step {done}")
    for callback in callbacks:
        callback.close(done)
    raise_on_all_ranks(_log_error(callbacks))
    return done


def _log_error(callbacks: Sequence[Callback]) -> OSError | None:
    """The first error of writing records on this rank, or None; the caller tells the other ranks."""
    return next((log.error for callback in callbacks for log in callback.logs if log.error is not None), None)
