"""Writes a run's records (the JSON-lines files of `run_folder.RECORDS`, and TensorBoard events), the numbers of the
rows that every step read, and the output in the terminal. A resumed run continues the records without gaps or
repeats."""

import json
import math
import resource
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from torch.utils.tensorboard import SummaryWriter

from ..cli import format_duration, format_number
from ..data.loader import Loader
from ..data.masking import TaskRows
from ..data.rows import TASKS
from ..engine.ranks import broadcast, on_all_ranks
from ..io.files import atomic_write, errors_naming, fsync
from .run_folder import step_of


class StepLog:
    """Appends lines to a JSON-lines file. Only rank 0 has one.

    If a write fails, its error is stored in `error`, and nothing more is written. The training loop reads `error` and
    ends all ranks together.
    """

    def __init__(self, run: Path, name: str, steps_done: int):
        """Continue `run/name.jsonl` after `steps_done` steps. Records of later steps, which the run wrote before it was
        stopped, are dropped.

        Damaged lines (no records, or out of order) are moved to another file and reported. Lines after the last kept
        record that are no records are dropped without a report: the run was killed while it wrote them.
        """
        self.path = run / f"{name}.jsonl"
        self.error: OSError | None = None
        self.steps: list[int] = []  # step of each record that was kept from an earlier start
        records: list[bytes] = []
        damaged: dict[int, bytes] = {}  # line number -> line
        unreadable: dict[int, bytes] = {}  # line number -> line, since the last kept record; damaged if another follows
        with errors_naming(self.path):
            lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for line_number, line in enumerate(lines, start=1):
            step = step_of(line)
            if step is None:
                if line.strip():
                    unreadable[line_number] = line
            elif self.steps and step <= self.steps[-1]:
                damaged[line_number] = line  # a second record of its step, or a record out of order
            elif step <= steps_done:
                records.append(line)
                self.steps.append(step)
                damaged |= unreadable
                unreadable = {}
        if damaged:
            moved_to = self.path.with_suffix(".damaged")
            with errors_naming(moved_to), open(moved_to, "ab") as file:
                file.write(b"".join(line + b"\n" for line in damaged.values()))
            line_numbers = ", ".join(map(str, damaged))
            print(
                f"{self.path} is damaged: line {line_numbers} is moved to {moved_to}, and the other lines are kept",
                flush=True,
            )
        self.line_count = len(records)
        with atomic_write(self.path) as file:
            file.write(b"".join(line + b"\n" for line in records))

    def sync(self) -> int:
        """Flush the file to the disk; returns the number of its lines."""
        with errors_naming(self.path):
            if self.path.exists():
                fsync(self.path)
        return self.line_count

    def write(self, values: dict[str, Any]) -> None:
        """Append a line with `values`, one of which is `step`, unless an earlier write failed."""
        if self.error is None:
            try:
                with errors_naming(self.path):
                    self._write(values)
            except OSError as error:
                self.error = error

    def _write(self, values: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self.line_count += 1

    def close(self) -> None:
        """Write what is still in a buffer; here nothing, because `write` closes the file after every line."""


@cache
def _silence_tensorboard_threads() -> None:
    """Print no tracebacks of TensorBoard's threads: the next write raises the same error, which the run reports."""
    print_traceback = threading.excepthook

    def print_others(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            print_traceback(failure)

    threading.excepthook = print_others


class MetricsLog(StepLog):
    """A log of numbers, which TensorBoard and the tracker also get. Infinities and NaN are left out: JSON has none."""

    def __init__(self, run: Path, name: str, steps_done: int, tracker: "Tracker | None" = None):
        super().__init__(run, name, steps_done)
        _silence_tensorboard_threads()
        self.board = SummaryWriter(str(run / "tensorboard" / name), purge_step=steps_done + 1)
        self.tracker = tracker

    def _write(self, values: dict[str, Any]) -> None:
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        super()._write(finite)
        self._plot({key: value for key, value in finite.items() if key != "step"}, finite["step"])

    def _plot(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self.board.add_scalar(key, value, step)
        if self.tracker is not None:
            self.tracker.log({f"{self.path.stem}/{key}": value for key, value in values.items()}, step)

    def close(self) -> None:
        """Write what TensorBoard still has in its buffers."""
        try:
            with errors_naming(self.path.parent / "tensorboard"):
                self.board.close()
        except OSError as error:
            self.error = self.error or error


class Tracker:
    """Sends a run's numbers to Weights & Biases; a resumed run continues its record there. After the service's first
    error, which is printed, nothing more is sent; training continues."""

    def __init__(self, project: str, run: Path, identity: str, settings: dict[str, Any]):
        """Raises ValueError, which names a remedy, if the service cannot be used."""
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "train.wandb needs the package wandb: pip install wandb, or leave train.wandb empty"
            ) from None
        try:
            self.run = wandb.init(
                project=project,
                dir=run,
                id=identity,
                resume="allow",
                name=run.name,
                config=settings,
                settings=wandb.Settings(console="off"),
            )
        except Exception as error:  # the service raises many types of errors
            raise ValueError(
                f"train.wandb {project}: {error}: log in with `wandb login`, or set WANDB_MODE=offline and send "
                "the run later with `wandb sync`"
            ) from None
        self.failed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step. After a resume, the service ignores the numbers of a step that it already has."""
        self._try(lambda: self.run.log(dict(values), step=step))

    def close(self) -> None:
        """Send what is still in a buffer."""
        self._try(self.run.finish)

    def _try(self, call: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:  # the service raises many types of errors
            self.failed = True
            print(f"wandb: {error}; nothing more is sent there, training and its records continue", flush=True)


def measure_matmul_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s of the fastest of six products of large square matrices: the peak with which training is compared. None on
    a CPU, where the fraction of the peak means little, because other programs use the CPU too."""
    if device.type != "cuda":
        return None
    size = 8192
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # Random numbers, because a GPU multiplies constants faster: they take less power.
    matrix = torch.randn(size, size, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))
    fastest = math.inf
    for _ in range(6):
        begun = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the GPU
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * size**3 / fastest


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process in GiB: on a GPU the memory that torch allocated, on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class LanguageLog(MetricsLog):
    """A log of held-out losses by the token's language: mean losses `terms[term][code]` and `unigram[task][code]`, and
    token counts `tokens[term][code]`. TensorBoard and the tracker get `terms`."""

    def _write(self, values: dict[str, Any]) -> None:
        StepLog._write(self, values)
        for term, losses in values["terms"].items():
            self._plot({f"{term}/{code}": value for code, value in losses.items()}, values["step"])


class Console:
    """Shows logged steps and evaluations; only rank 0 has one. A terminal shows a bar, any other output gets a line for
    each logged step."""

    def __init__(self, steps: int, start: int, objective: Mapping[str, Any] | None):
        """`objective`: the result of `objectives.describe`; None in fine-tuning, whose loss has no terms."""
        self.steps = steps
        self.terms: Sequence[str] = objective["terms"] if objective else ()
        self.quantities: Mapping[str, Mapping[str, Any]] = objective["quantities"] if objective else {}
        self.progress: Progress | None = None
        self.show: Callable[[str], None] = print
        if sys.stdout.isatty():
            line_column = TextColumn(
                "{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            self.progress = Progress(line_column, BarColumn(10), TextColumn("{task.fields[left]}"), transient=True)
            self.task = self.progress.add_task("train", total=steps, completed=start, line="starting", left="")
            self.progress.start()
            self.show = self.progress.console.print

    def step(self, values: dict[str, Any]) -> None:
        """Show a logged step."""
        step = f"{values['step']}/{self.steps}"
        loss = f"loss {values['loss']:.3f}"
        speed = f"{format_number(values['tokens_per_s'])} tokens/s"
        peak = f"{values['peak_fraction']:.0%} of matmul" if "peak_fraction" in values else ""
        left = f"{format_duration(values['seconds_left'])} left"
        if self.progress is not None:
            line = "  ".join(filter(None, (step, loss, speed, peak)))
            self.progress.update(self.task, line=line, completed=values["step"], left=left)
            return
        parts = [f"step {step}", loss, self._terms(values), f"lr {values['lr']:.2e}", speed, peak]
        parts += [f"data {values['data_wait']:.1%}", f"{values['memory_gib']:.1f} GiB", left]
        print("  ".join(filter(None, parts)), flush=True)

    def evaluation(self, values: dict[str, Any]) -> None:
        """Show an evaluation on held-out text."""
        aucs = ", ".join(f"{key.removeprefix('auc_')} {values[key]:.3f}" for key in values if key.startswith("auc_"))
        aucs = f"AUC {aucs} (chance 0.5)" if aucs else ""
        line = f"step {values['step']}/{self.steps}  held-out text: {self._terms(values)}  {aucs}".rstrip()
        self.show(line)

    def dimensions(self, values: Mapping[str, float], warning: str) -> None:
        """Show the effective number of dimensions of each layer's token states, and the warning if there is one."""
        layers = [f"{value:.0f}" for name, value in values.items() if name != "step"]
        self.show(f"step {values['step']}/{self.steps}  dimensions by layer: {', '.join(layers)}")
        if warning:
            self.show(f"WARNING: step {values['step']}: {warning}")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.progress is not None:
            self.progress.stop()

    def _terms(self, values: dict[str, Any]) -> str:
        """The text of the terms in `values`. A unigram model's loss follows each term that can be compared with it."""
        shown = []
        for name in filter(values.__contains__, self.terms):
            unigram = values.get(f"unigram_nll_{self.quantities[name]['task']}")
            comparable = unigram is not None and self.quantities[name]["unigram"]
            shown.append(f"{name} {values[name]:.3f}" + (f" (unigram {unigram:.2f})" if comparable else ""))
        return "  ".join(shown)


# The folder that records the rows of every step, for `xlme audit`. Its files:
#
# `attempts.jsonl` has a line for every start of the run, except those before the first one with `train.audit`:
# {`start`: steps done by then, `world`, `audit`: whether `train.audit` was on}. The index of the attempt is the line's
# index, from 0, among the lines that `audit_lines` returns.
#
# `rank_RRRRR.jsonl` has a line for each step, {`attempt`, `step`, `rows`: {task: [[number of the first row, CRC-32 of
# the tokens of each row, ...], ...]}}. A task has an inner list for each micro-batch that has rows of the task. Lines
# are only added: a step that was repeated after a resume has a line for each attempt.
AUDIT_FOLDER = "audit"
ATTEMPTS = "attempts.jsonl"


def audit_reads(run: Path, loader: Loader, start: int, rank: int, world: int, audit: bool) -> Path | None:
    """Record this start of the run and make `loader` record the rows that it reads from now on. Without `audit`, record
    only the start, and only if an earlier start was recorded. Collective.

    Returns the file that gets this rank's rows, or None if there is none.
    """
    folder = run / AUDIT_FOLDER
    attempt = broadcast(on_all_ranks(lambda: _begin_attempt(folder, start, world, audit) if rank == 0 else 0))
    if not audit or rank >= loader.plan.world:  # a later pipeline stage reads the same rows as the first
        return None
    path = folder / f"rank_{rank:05d}.jsonl"
    loader.on_read = lambda step, micro_batches: _record_rows(path, attempt, step, micro_batches)
    return path


def audit_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file of the audit folder, without lines that a killed process left half-written."""
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(text))
        except (ValueError, RecursionError):
            continue  # empty, or half-written: the step of a half-written line was not finished, and is done again
    return lines


def row_checksums(tokens: np.ndarray) -> list[int]:
    """CRC-32 of every row of ids, int [B, T]; each id counts as int32."""
    return [zlib.crc32(row.tobytes()) for row in np.ascontiguousarray(tokens, dtype=np.int32)]


def _begin_attempt(folder: Path, start: int, world: int, audit: bool) -> int:
    """Record a start of the run, as `audit_reads` says; returns the index of the attempt."""
    path = folder / ATTEMPTS
    if not audit and not path.exists():
        return 0
    folder.mkdir(exist_ok=True)
    attempt = len(audit_lines(path)) if path.exists() else 0
    _append_line(path, {"start": start, "world": world, "audit": audit})
    return attempt


def _record_rows(path: Path, attempt: int, step: int, micro_batches: list[TaskRows]) -> None:
    by_task: dict[str, list[list[int]]] = {}
    for task_rows in micro_batches:
        for task, rows, row_numbers in task_rows:
            by_task.setdefault(TASKS[task], []).append([int(row_numbers[0]), *row_checksums(rows.tokens)])
    _append_line(path, {"attempt": attempt, "step": step, "rows": by_task})


def _append_line(path: Path, line: dict[str, Any]) -> None:
    with errors_naming(path), open(path, "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(line))  # the line break ends a line that a killed process left half-written
