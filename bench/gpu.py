"""What one GPU gives: matrix-product peak, parity of the kernels, Base and Large training steps, where the time goes.

    python -m bench.gpu [--json] [--out runs/gpu] [--minutes 8] [--engine auto|deepspeed|plain]
                        [--sections matmul parity steps profile] [--device cpu --quick]

Needs torch, numpy and numba. Without DeepSpeed and what our engines around it import, the steps run in our plain loop:
weights in bf16, AdamW on float32 copies. Rows are synthetic. Everything goes to gpu.json and gpu.md as soon as it is
measured. A case that fails or does not fit says so, and the next one runs: in a fresh process after a fault that ends
this one's use of the GPU, or --patience minutes in one case. The exit code is 1 where a case failed or a kernel differs
from its reference.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_parity import CASES, ON_A_GPU, parity
from bench.gpu_steps import DTYPES, Device, matmul, run_config, step, where_time_goes

Figures = dict[str, Any]
SECTIONS = ("matmul", "parity", "steps", "profile")
NEEDED_BY_DEEPSPEED = ("deepspeed", "pyarrow", "sentencepiece")
# The last is the feed-forward product of Base on 32 rows of 512.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 768, 3072))
ROWS = 64  # of each task a step: the published batch on 32 GPUs
# Recipe, rows of each task in a micro-batch, activation checkpointing, ids of a tile of the softmax, model.kernels,
# model.compile.
STEPS = (
    ("base_zero1", 32, False, 8192, "triton", "none"),
    ("base_zero1", 32, False, 8192, "torch", "none"),
    ("base_zero1", 32, False, 8192, "triton", "layers"),
    ("base_zero1", 32, False, 8192, "triton", "graphs"),
    ("large_zero2", 16, False, 8192, "triton", "none"),
    ("base_zero1", 64, False, 8192, "triton", "none"),
    ("base_zero1", 16, False, 8192, "triton", "none"),
    ("base_zero1", 32, False, 32_768, "triton", "none"),
    ("large_zero2", 16, False, 8192, "torch", "none"),
    ("large_zero2", 16, False, 8192, "triton", "layers"),
    ("base_zero1", 8, False, 8192, "triton", "none"),
    ("base_zero1", 8, False, 8192, "triton", "layers"),
    ("base_zero1", 8, False, 8192, "triton", "graphs"),
    ("base_zero1", 64, False, 8192, "triton", "layers"),
    ("base_zero1", 32, False, 8192, "torch", "layers"),
    ("base_zero1", 64, True, 8192, "triton", "none"),
    ("large_zero2", 32, False, 8192, "triton", "none"),
    ("large_zero2", 8, False, 8192, "triton", "none"),
    ("large_zero2", 32, True, 8192, "triton", "none"),
    ("large_zero2", 32, False, 8192, "torch", "none"),
)
GOES_ON = "XLME_BENCH_GPU_DEADLINE"
QUICK_STEPS = (
    ("base_zero1", 1, False, 256, "torch", "none"),
    ("base_zero1", 1, False, 256, "torch", "layers"),
    ("large_zero2", 2, True, 256, "torch", "none"),
)
PROFILES = (("triton", "none"), ("torch", "none"), ("triton", "layers"))
"""model.kernels and model.compile; the CPU runs the first."""


class Report:
    """The figures so far, and their files; nothing starts after `deadline` (time.monotonic).

    A case after which the process cannot use the GPU any more, or that takes longer than `patience` seconds, is the
    last of its process: the same command goes on in a fresh one, with what was measured.
    """

    def __init__(
        self, folder: Path, device: Device, deadline: float, settings: Figures, patience: float = threading.TIMEOUT_MAX
    ):
        self.folder, self.device, self.patience = folder, device, patience
        self.first_environment = dict(os.environ)
        self.deadline = float(os.environ.get(GOES_ON, deadline))
        self.figures: Figures = {"machine": device.machine(), "settings": settings}
        self.figures |= {section: [] for section in SECTIONS}
        if GOES_ON in os.environ:
            self.figures = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, section: str, labels: Figures, measure: Callable[[], Figures]) -> None:
        """Add one case, or why it has no figures."""
        measured = any(labels.items() <= case.items() for case in self.figures[section])
        if measured or section not in self.figures["settings"]["sections"]:
            return
        self.device.release()
        started = time.monotonic()

        def give_up() -> None:
            self._add(section, labels, {"failed": f"no end after {self.patience:.0f} s"}, started)
            self._go_on()

        timer = threading.Timer(self.patience, give_up)
        timer.daemon = True
        timer.start()
        try:
            found = measure() if started < self.deadline else {"left_out": "the time given by --minutes is up"}
        except torch.cuda.OutOfMemoryError as error:
            found = {"out_of_memory": str(error).split(". ")[0]}
        except Exception as error:  # one broken case must not cost the others their figures
            found = {"failed": f"{type(error).__name__}: {error}"}
        timer.cancel()
        self._add(section, labels, found, started)
        if "failed" in found and not self.device.usable():
            self._go_on()

    def _add(self, section: str, labels: Figures, found: Figures, started: float) -> None:
        self.figures[section].append(labels | found | {"took_s": time.monotonic() - started})
        (self.folder / "gpu.json").write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")
        (self.folder / "gpu.md").write_text(self.markdown(), encoding="utf-8")
        print(f"{section}: {', '.join(str(value) for value in labels.values())}", file=sys.stderr, flush=True)

    def _go_on(self) -> None:
        environment = self.first_environment | {GOES_ON: str(self.deadline)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

    def matmul_tflops(self) -> float:
        """The highest bf16 rate measured; 0 where none was."""
        rates = [case["tflops"] for case in self.figures["matmul"] if case["dtype"] == "bf16" and "tflops" in case]
        return max(rates, default=0.0)

    @property
    def ok(self) -> bool:
        """No case failed, and every comparison is inside its bound."""
        cases = [case for section in SECTIONS for case in self.figures[section]]
        return all("failed" not in case and case.get("ok", True) for case in cases)

    def markdown(self) -> str:
        """The figures for people."""
        text = "# One GPU, measured\n\n"
        for section in ("machine", "settings"):
            text += ", ".join(f"{key} {_short(value)}" for key, value in self.figures[section].items()) + "\n\n"
        for section in SECTIONS:
            text += f"## {section}\n\n{_table(self.figures[section])}\n"
        return text


def _table(cases: list[Figures]) -> str:
    columns = list(dict.fromkeys(key for case in cases for key, value in case.items() if not isinstance(value, list)))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_short(case.get(column, "")) for column in columns] for case in cases]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "".join(f"\n{_table(case['kernels'])}" for case in cases if "kernels" in case)


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def measure_all(report: Report, device: Device, engine: str, quick: bool) -> None:
    """Every case, the cheap and telling ones first."""
    rounds = 2 if quick else 5
    for dtype in DTYPES:
        for shape in ((128, 128, 128),) if quick else SHAPES:
            labels = {"dtype": dtype, "shape": "×".join(map(str, shape))}
            report.run("matmul", labels, partial(matmul, device, dtype, shape, rounds))
    for name, case in (CASES | (ON_A_GPU if device.kind == "cuda" else {})).items():
        for dtype in DTYPES:
            report.run("parity", {"case": name, "dtype": dtype}, partial(parity, case, device, dtype))
    rows = 2 if quick else ROWS

    def train(steps: Sequence[tuple[str, int, bool, int, str, str]]) -> None:
        for name, micro_batch, checkpointing, chunk, kernels, compile in steps:
            run = run_config(name, rows, micro_batch, checkpointing, chunk, quick, kernels, compile)
            labels = {"recipe": name, "micro_batch": micro_batch, "checkpointing": checkpointing, "head_chunk": chunk}
            labels |= {"model_kernels": kernels, "compile": compile}
            report.run("steps", labels, partial(step, run, device, engine, rounds, report.matmul_tflops()))

    first = 6
    train(QUICK_STEPS if quick else STEPS[:first])
    micro_batch = 1 if quick else 32
    for kernels, compile in PROFILES if device.kind == "cuda" else PROFILES[:1]:
        run = run_config("base_zero1", rows, micro_batch, False, 256 if quick else 8192, quick, kernels, compile)
        labels = {"recipe": "base_zero1", "micro_batch": micro_batch, "model_kernels": kernels, "compile": compile}
        report.run("profile", labels, partial(where_time_goes, run, device, engine))
    train(() if quick else STEPS[first:])


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print Markdown or JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case starts later than this")
    parser.add_argument("--patience", type=float, default=3.0, help="minutes after which a case is given up")
    parser.add_argument("--engine", choices=("auto", "deepspeed", "plain"), default="auto")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to measure")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it all run?")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: use --device cpu --quick to try the program")
    if given.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    engine, present = given.engine, all(importlib.util.find_spec(name) for name in NEEDED_BY_DEEPSPEED)
    if engine == "auto":
        engine = "deepspeed" if present else "plain"
    settings = {"engine": engine, "rows": "synthetic, packed", "quick": given.quick, "minutes": given.minutes}
    settings["sections"] = list(given.sections)
    device = Device(given.device)
    report = Report(given.out, device, time.monotonic() + 60 * given.minutes, settings, 60 * given.patience)
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed's log goes too
        measure_all(report, device, engine, given.quick)
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps(report.figures, indent=1) if given.json else report.markdown())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
