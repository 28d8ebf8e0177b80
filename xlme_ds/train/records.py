"""Writes a run's records: the JSON-lines files of `run_folder.RECORDS`, and TensorBoard events. A resumed run continues
them without gaps or repeats."""

import json
import math
import resource
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

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
        self.steps: list[int] = []  # step of each record: of those kept from an earlier start, then of each new one
        records: list[bytes] = []
        damaged: dict[int, bytes] = {}  # line number -> line
        # Line number -> line without a record, since the last kept record. If another kept record follows, the lines
        # are damaged.
        unreadable: dict[int, bytes] = {}
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
            self._move_away(damaged)
        with atomic_write(self.path) as file:
            file.write(b"".join(line + b"\n" for line in records))

    def _move_away(self, damaged: Mapping[int, bytes]) -> None:
        """Append the damaged lines, given by line number, to another file, and report them."""
        moved_to = self.path.with_suffix(".damaged")
        with errors_naming(moved_to), open(moved_to, "ab") as file:
            file.write(b"".join(line + b"\n" for line in damaged.values()))
        line_numbers = ", ".join(map(str, damaged))
        print(
            f"{self.path} is damaged: line {line_numbers} is moved to {moved_to}, and the other lines are kept",
            flush=True,
        )

    def sync(self) -> int:
        """Flush the file to the disk; returns the number of its lines."""
        with errors_naming(self.path):
            if self.path.exists():
                fsync(self.path)
        return len(self.steps)

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
        self.steps.append(values["step"])

    def close(self) -> None:
        """Write what is still in a buffer; here nothing, because `write` closes the file after every line."""


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


class LanguageLog(MetricsLog):
    """A log of held-out losses by the token's language: mean losses `terms[term][code]` and `unigram[task][code]`, and
    token counts `tokens[term][code]`. TensorBoard and the tracker get `terms`."""

    def _write(self, values: dict[str, Any]) -> None:
        StepLog._write(self, values)
        for term, losses in values["terms"].items():
            self._plot({f"{term}/{code}": value for code, value in losses.items()}, values["step"])


@cache  # once in a process, because each call wraps `threading.excepthook` again
def _silence_tensorboard_threads() -> None:
    """Print no tracebacks of TensorBoard's threads: the next write raises the same error, which the run reports."""
    print_traceback = threading.excepthook

    def print_others(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            print_traceback(failure)

    threading.excepthook = print_others


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
