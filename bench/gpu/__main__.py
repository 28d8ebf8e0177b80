"""Measure one GPU, in sections.

    xlme bench gpu [--json] [--out runs/gpu] [--minutes 8] [--sections matmul parity ...] [--device cpu --quick]

    matmul   measures the speed of matrix products
    parity   compares model and kernels with float64 on the CPU
    steps    measures speed and memory of training steps on synthetic rows
    kernels  finds the fastest form of each attention kernel
    resume   compares runs that were killed and resumed with undisturbed runs
    peers    compares our speed with that of other implementations
    smoke    runs every GPU command on a small made-up text
    profile  shows where the time of a step goes

A section has one or more cases, for instance one recipe's training step. Each case runs in its own process (those of
matmul and parity share one, until a case fails), so that no case sees the memory or the faults of another.
The results are written to gpu.json and gpu.md after each case.

If a case fails, crashes, does not fit into memory or takes longer than --patience minutes, this is reported, and the
next case runs. After --minutes the bench stops, and reports the remaining cases as left out. The exit code is 1 if a
case failed or a kernel differs from its reference.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Any, Literal, get_args

from bench.measure import Figures, Worker, markdown, one_sentence, stamp
from xlme_ds.cli import fail
from xlme_ds.io.files import write_text
from xlme_ds.io.help import call_from_command_line

Section = Literal["matmul", "parity", "steps", "kernels", "resume", "peers", "smoke", "profile"]
SECTIONS: tuple[Section, ...] = get_args(Section)
SHARED = ("machine", "matmul", "parity")  # sections whose cases share a process
TIME_LIMITS = {"kernels": 110.0, "resume": 150.0, "smoke": 150.0}  # seconds that a section's case may use on a GPU
_NO_TIME = {"left_out": "the time given by --minutes is up"}


def _step(recipe: str, micro_batch: int, **settings: Any) -> Figures:
    """Labels of a case that trains a recipe: the rows of each task in a micro-batch, and the model settings that
    replace the recipe's."""
    return {"recipe": recipe, "micro_batch": micro_batch, "settings": settings}


STEPS = (
    _step("base_zero1", 64),
    _step("base_zero1", 32),
    _step("modern_base", 32),
    _step("large_zero2", 16),
    _step("xl_zero3", 16, activation_checkpointing=True),
)
LATER_STEPS = (
    _step("base_zero1", 32, compile="none"),
    _step("base_zero1", 16),
    _step("base_zero1", 32, kernels="torch"),
)
QUICK_STEPS = (
    _step("base_zero1", 1, compile="layers"),
    _step("modern_base", 1),
    _step("large_zero2", 2, activation_checkpointing=True),
)
PARITY = (
    "layer with gated bias and item mask", "token lookup", "masked head", "whole model", "whole model, modern",
)  # fmt: skip
PARITY_ON_A_GPU = ("layer in Triton kernels, twice", "masked head in Triton kernels, twice")


def cases(cuda: bool, quick: bool) -> Iterator[tuple[str, Figures]]:
    """Yield (section, labels) for every case. The labels are the case's parameters, and columns of its rows in the
    report. Short and informative cases come first."""
    yield "machine", {}
    yield from (("matmul", {"dtype": dtype}) for dtype in ("bf16", "fp32"))
    names = PARITY + (PARITY_ON_A_GPU if cuda else ())
    yield from (("parity", {"case": name, "dtype": dtype}) for name in names for dtype in ("bf16", "fp32"))
    yield from (("steps", step) for step in (QUICK_STEPS if quick else STEPS))
    if cuda:
        yield "kernels", {}
    yield "resume", {}
    yield "peers", {}
    yield "profile", _step("base_zero1", 1 if quick else 32)
    yield "smoke", {}
    yield from (("steps", step) for step in (() if quick else LATER_STEPS))
    if cuda and not quick:
        yield "profile", _step("xl_zero3", 16, activation_checkpointing=True)


class Report:
    """The figures measured so far. They are also written to the files gpu.json and gpu.md."""

    def __init__(self, folder: Path, settings: Figures):
        self.folder = folder
        self.figures: Figures = {"machine": {}, "settings": settings} | {name: [] for name in SECTIONS}

    def add(self, section: str, row: Figures) -> None:
        """Add a row to the figures, and write the files."""
        if section == "machine":
            self.figures["machine"] |= row
        else:
            self.figures[section].append(row)
        write_text(self.folder / "gpu.json", dumps(self.figures, indent=1) + "\n")
        write_text(self.folder / "gpu.md", self.markdown())
        columns = (f"{key} {_short(value)}" for key, value in row.items() if not isinstance(value, list))
        print(f"{section}: {', '.join(columns)}", file=sys.stderr, flush=True)

    def matmul_tflops(self) -> float:
        """The highest rate of a bf16 matrix product, in TFLOP/s; 0 if none was measured."""
        rates = [case["tflops"] for case in self.figures["matmul"] if case["dtype"] == "bf16" and "tflops" in case]
        return max(rates, default=0.0)

    @property
    def ok(self) -> bool:
        """True if no case failed and every comparison is within its bound."""
        rows = [self.figures["machine"], *(row for section in SECTIONS for row in self.figures[section])]
        return all("failed" not in row and row.get("ok", True) for row in rows)

    def markdown(self) -> str:
        """The figures as Markdown; each table names the device."""
        text = "# One GPU, measured\n\n"
        for section in ("machine", "settings"):
            text += ", ".join(f"{key} {_short(value)}" for key, value in self.figures[section].items()) + "\n\n"
        device = self.figures["machine"].get("device", "no device")
        for section in SECTIONS:
            text += f"## {section} ({device})\n\n{_table(self.figures[section])}\n" if self.figures[section] else ""
        return text


def _table(rows: list[Figures]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    text = markdown(columns, [[_short(row.get(column, "")) for column in columns] for row in rows])
    return text + "".join(f"\n{_table(row[name])}" for row in rows for name in ("kernels", "pauses") if row.get(name))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(part)}" for key, part in value.items()) or "-"
    if not isinstance(value, float):
        return str(value).replace("\n", " ")
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


class Bench:
    """Runs the cases. Each case may take `patience` seconds, and no case runs past `deadline` (time.monotonic)."""

    def __init__(self, report: Report, common: Figures, deadline: float, patience: float):
        self.report, self.common, self.deadline, self.patience = report, common, deadline, patience
        # The process of this case, and one for the next case, which already loads its libraries.
        self.worker, self.next = Worker("bench.gpu.worker"), Worker("bench.gpu.worker")
        self.is_used = False  # whether `worker` has run a case

    def run(self, section: str, labels: Figures) -> None:
        """Measure one case, and add its rows to the report."""
        if time.monotonic() >= self.deadline:
            return self.report.add(section, labels | _NO_TIME)
        if self.is_used and section not in SHARED:
            self.renew()
        self.is_used = True
        self.worker.load(self.deadline - time.monotonic())
        if section not in SHARED:  # while the next process loads, a step takes 1.2 times as long (measured)
            self.next.load(self.deadline - time.monotonic())
        begin, limit = time.monotonic(), min(self.patience, self.deadline - time.monotonic())
        # After `limit` seconds the process is killed, so the case itself may use at most 2 s less.
        seconds = min(TIME_LIMITS.get(section, limit) if self.common["device"] == "cuda" else limit, limit - 2)
        case = self.common | {"section": section, "matmul_tflops": self.report.matmul_tflops(), "seconds": seconds}
        failed = False
        for row in self.worker.rows(case | labels, limit):
            failed = failed or "failed" in row
            row = _NO_TIME if "failed" in row and time.monotonic() >= self.deadline else row
            took = {} if section == "machine" else {"took_s": time.monotonic() - begin}
            self.report.add(section, labels | row | took)
            begin = time.monotonic()
        if failed or section not in SHARED:
            self.renew(kill=failed)

    def renew(self, kill: bool = False) -> None:
        """End the process of the last case; the one that has loaded takes its place."""
        self.worker.close(kill)
        self.worker, self.next, self.is_used = self.next, Worker("bench.gpu.worker"), False

    def end(self) -> None:
        """End both processes."""
        for worker in (self.worker, self.next):
            worker.close(kill=True)


def measure(
    sections: tuple[Section, ...] = SECTIONS,
    minutes: float = 8.0,
    patience: float = 3.0,
    device: Literal["cuda", "cpu"] = "cuda",
    quick: bool = False,
    out: Path = Path("runs/gpu"),
    json: bool = False,
) -> int:
    """Measure, and print Markdown or JSON.

    Args:
        sections: Sections to measure.
        minutes: The bench stops after this many minutes.
        patience: A case is stopped after this many minutes.
        device: Device to measure; on a CPU only --quick makes sense.
        quick: Try that everything runs, with tiny sizes.
        out: Folder of gpu.json and gpu.md.
        json: Print JSON.

    Returns:
        The exit code.
    """
    begin = time.monotonic()
    if not (minutes > 0 and patience > 0):
        fail("xlme bench gpu", ValueError("--minutes and --patience must be above 0"))
    if device == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # sizes are tiny
    with one_sentence("xlme bench gpu"):
        out.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="work-", dir=out.resolve()))  # a new one, because it is deleted at the end
    settings = {"rows": "synthetic, packed", "quick": quick, "minutes": minutes, "sections": list(sections)}
    report = Report(out, settings | stamp())
    common = {"device": device, "quick": quick, "folder": str(work)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below runs
    bench = Bench(report, common, begin + 60 * minutes, 60 * patience)
    try:
        for section, labels in cases(device == "cuda", quick):
            if section in ("machine", *sections):
                bench.run(section, labels)
            if "failed" in report.figures["machine"]:
                fail("xlme bench gpu", ValueError(report.figures["machine"]["failed"]))
    finally:
        bench.end()
        shutil.rmtree(work, ignore_errors=True)
    print(dumps(report.figures, indent=1) if json else report.markdown())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(call_from_command_line(measure, "xlme bench gpu", None, __doc__))
