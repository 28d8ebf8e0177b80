"""What one GPU gives: products, parity of the kernels, training steps, kernels against each other, runs killed and
resumed, every command in small, peers, and where a step's time goes.

    python -m bench.gpu [--json] [--out runs/gpu] [--minutes 8] [--sections matmul parity ...]
                        [--engine auto|deepspeed|plain] [--device cpu --quick]

Each case has a process of its own, but for products and comparisons, which share one while nothing fails in it: what
one case leaves in memory, or breaks, no other one sees. The next process loads torch before a case is measured. Rows
are synthetic, the text of commands is written here. Everything goes to gpu.json and gpu.md as soon as it is measured.

Needs torch, numpy and numba; what else a section needs and does not find is named in its place. Without DeepSpeed and
what our engines around it import, steps run in our plain loop: weights in bf16, AdamW on float32 copies. A case that
fails, crashes, does not fit or takes longer than --patience minutes says so, and the next one runs. Nothing runs longer
than --minutes. The exit code is 1 where a case failed or a kernel differs from its reference.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = ("deepspeed", "pyarrow", "sentencepiece")
NEEDED = {
    "kernels": ("triton",),
    "resume": (*DEEPSPEED, "tyro"),
    "peers": (*DEEPSPEED, "transformers", "tyro"),
    "smoke": (*DEEPSPEED, "tyro", "transformers"),
}
SECTIONS = ("matmul", "parity", "steps", "kernels", "resume", "peers", "smoke", "profile")
SHARED = ("machine", "matmul", "parity")  # sections whose cases share a process
# Recipe, rows of each task in a micro-batch, and settings of the model, or the engine, that are not the recipe's.
Step = tuple[str, int, Figures]
STEPS: tuple[Step, ...] = (
    ("base_zero1", 32, {}),
    ("base_zero1", 64, {}),
    ("base_zero1", 32, {"compile": "none"}),
    ("base_zero1", 64, {"compile": "graphs"}),
    ("large_zero2", 16, {}),
    ("base_zero1", 32, {"compile": "layers"}),
)
LATER_STEPS: tuple[Step, ...] = (
    ("xl_zero3", 16, {"activation_checkpointing": True}),
    ("base_zero1", 32, {"engine": "plain", "compile": "none"}),
    ("base_zero1", 16, {}),
    ("base_zero1", 32, {"kernels": "torch"}),
    ("large_zero2", 32, {}),
    ("base_zero1", 32, {"compile": "graphs"}),
    ("base_zero1", 32, {"head_chunk": 32_768}),
    ("base_zero1", 64, {"activation_checkpointing": True}),
)
QUICK_STEPS: tuple[Step, ...] = (
    ("base_zero1", 1, {"compile": "layers"}),
    ("large_zero2", 2, {"activation_checkpointing": True}),
)
PARITY = (
    "relative position table", "attention with gated bias and item mask", "token lookup", "masked head", "whole model",
)  # fmt: skip
PARITY_ON_A_GPU = ("attention in Triton kernels, twice", "masked head in Triton kernels, twice")
"""Cases that would compare the CPU with itself there."""
AT_MOST = {
    "kernels": 110.0,
    "resume": 110.0,
    "smoke": 110.0,
}  # seconds on a GPU


def cases(cuda: bool, quick: bool) -> Iterator[tuple[str, Figures]]:
    """Section and labels of every case, the cheap and telling ones first."""
    yield "machine", {}
    yield from (("matmul", {"dtype": dtype}) for dtype in ("bf16", "fp32"))
    names = PARITY + (PARITY_ON_A_GPU if cuda else ())
    yield from (("parity", {"case": name, "dtype": dtype}) for name in names for dtype in ("bf16", "fp32"))
    yield from (("steps", _labels(*step)) for step in (QUICK_STEPS if quick else STEPS))
    yield from ((section, {}) for section in ("kernels",) * cuda + ("resume", "peers"))
    yield "profile", _labels("base_zero1", 1 if quick else 32, {})
    yield "smoke", {}
    yield from (("steps", _labels(*step)) for step in (() if quick else LATER_STEPS))
    if cuda and not quick:
        yield "profile", _labels("xl_zero3", 16, {"activation_checkpointing": True})
        yield "profile", _labels("base_zero1", 64, {"compile": "graphs"})


def _labels(recipe: str, micro_batch: int, settings: Figures) -> Figures:
    return {"recipe": recipe, "micro_batch": micro_batch, "settings": settings}


class Worker:
    """A process of bench.gpu.worker, which has begun to load what it needs."""

    def __init__(self, common: Figures):
        words = [sys.executable, "-W", "ignore", "-m", "bench.gpu.worker", json.dumps(common)]
        self.process = subprocess.Popen(
            words, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.answers: queue.Queue[str] = queue.Queue()
        self.loaded = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def load(self, seconds: float) -> None:
        """Wait until it has loaded what it needs; `rows` says where it has not."""
        with contextlib.suppress(queue.Empty):
            self.loaded = self.loaded or self.answers.get(timeout=max(seconds, 0.01)) != ""

    def rows(self, case: Figures, seconds: float) -> Iterator[Figures]:
        """The rows of a case as they come; the last one says so where it had no good end."""
        assert self.process.stdin is not None
        if not self.loaded:
            yield {"failed": "the process of the case did not load"}
            return
        until = time.monotonic() + seconds
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            while line := self.answers.get(timeout=max(until - time.monotonic(), 0.01)):
                row: Figures = json.loads(line)
                if not row:
                    return
                yield row
            yield {"failed": f"the process ended with code {self.process.wait()}"}
        except queue.Empty:
            yield {"failed": f"no end after {seconds:.0f} s"}
        except BrokenPipeError:
            yield {"failed": f"the process ended with code {self.process.wait()} before this case"}

    def end(self, politely: bool = True) -> None:
        """End the process and what it started; returns once it holds no memory."""
        assert self.process.stdin is not None
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self.process.stdin.close()
            self.process.wait(10 if politely else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Report:
    """The figures so far, and their files."""

    def __init__(self, folder: Path, settings: Figures):
        self.folder = folder
        self.figures: Figures = {"machine": {}, "settings": settings} | {name: [] for name in SECTIONS}

    def add(self, section: str, row: Figures) -> None:
        """One row more, in the files too."""
        if section == "machine":
            self.figures["machine"] |= row
        else:
            self.figures[section].append(row)
        for name, text in (("gpu.json", json.dumps(self.figures, indent=1) + "\n"), ("gpu.md", self.markdown())):
            temporary = self.folder / f"{name}.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.folder / name)
        words = (f"{key} {_short(value)}" for key, value in row.items() if not isinstance(value, list))
        print(f"{section}: {', '.join(words)}", file=sys.stderr, flush=True)

    def matmul_tflops(self) -> float:
        """The highest bf16 rate measured; 0 where none was."""
        rates = [case["tflops"] for case in self.figures["matmul"] if case["dtype"] == "bf16" and "tflops" in case]
        return max(rates, default=0.0)

    @property
    def ok(self) -> bool:
        """No case failed, and every comparison is inside its bound."""
        rows = [self.figures["machine"], *(row for section in SECTIONS for row in self.figures[section])]
        return all("failed" not in row and row.get("ok", True) for row in rows)

    def markdown(self) -> str:
        """The figures for people; each table names the device."""
        text = "# One GPU, measured\n\n"
        for section in ("machine", "settings"):
            text += ", ".join(f"{key} {_short(value)}" for key, value in self.figures[section].items()) + "\n\n"
        for section in SECTIONS:
            device = self.figures["machine"].get("device", "no device")
            text += f"## {section} ({device})\n\n{_table(self.figures[section])}\n" if self.figures[section] else ""
        return text


def _table(rows: list[Figures]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_short(row.get(column, "")).replace("|", "\\|") for column in columns] for row in rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "".join(f"\n{_table(row['kernels'])}" for row in rows if "kernels" in row)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items()) or "-"
    if not isinstance(value, float):
        return str(value).replace("\n", " ")
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


class Bench:
    """Runs the cases, each with a time limit; nothing runs longer than `deadline` (time.monotonic)."""

    def __init__(self, report: Report, common: Figures, deadline: float, patience: float):
        self.report, self.common, self.deadline, self.patience = report, common, deadline, patience
        self.next = Worker(common)
        self.shared: Worker | None = None  # by the cases of `SHARED`

    def run(self, section: str, labels: Figures) -> None:
        """Measure one case, and add its rows."""
        missing = [name for name in NEEDED.get(section, ()) if importlib.util.find_spec(name) is None]
        if missing:
            return self.report.add(section, labels | {"left_out": f"not installed: {', '.join(missing)}"})
        if time.monotonic() >= self.deadline:
            return self.report.add(section, labels | {"left_out": "the time given by --minutes is up"})
        if self.shared is not None and section not in SHARED:
            self.shared.end()
            self.shared = None
        worker = self.shared or self._begin()
        worker.load(self.deadline - time.monotonic())
        if section not in SHARED:  # a step took 1.2 times as long while another process loaded
            self.next.load(self.deadline - time.monotonic())
        begin, limit = time.monotonic(), min(self.patience, self.deadline - time.monotonic())
        seconds = min(AT_MOST.get(section, limit) if self.common["device"] == "cuda" else limit, limit - 2)
        case = {"section": section, "matmul_tflops": self.report.matmul_tflops(), "seconds": seconds} | labels
        failed = False
        for row in worker.rows(case, limit):
            failed = failed or "failed" in row
            took = {} if section == "machine" else {"took_s": time.monotonic() - begin}
            self.report.add(section, labels | row | took)
            begin = time.monotonic()
        if section in SHARED and not failed:
            self.shared = worker
        else:
            worker.end(politely=not failed)
            self.shared = None

    def _begin(self) -> Worker:
        """The process that has loaded what it needs; another one begins to."""
        worker, self.next = self.next, Worker(self.common)
        return worker

    def end(self) -> None:
        """End every process."""
        for worker in (self.next, self.shared):
            if worker is not None:
                worker.end(politely=False)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print Markdown or JSON; returns the exit code."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing runs longer than this")
    parser.add_argument("--patience", type=float, default=3.0, help="minutes after which a case is given up")
    parser.add_argument("--engine", choices=("auto", "deepspeed", "plain"), default="auto")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to measure")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it all run?")
    given = parser.parse_args(arguments)
    if given.device == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # sizes are tiny
    engine = given.engine
    if engine == "auto":
        engine = "deepspeed" if all(map(importlib.util.find_spec, DEEPSPEED)) else "plain"
    settings = {"engine": engine, "rows": "synthetic, packed", "quick": given.quick, "minutes": given.minutes}
    settings["sections"] = list(given.sections)
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.out.resolve() / "work"
    shutil.rmtree(work, ignore_errors=True)
    common = {"device": given.device, "engine": engine, "quick": given.quick, "folder": str(work)}
    report = Report(given.out, settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`
    bench = Bench(report, common, begin + 60 * given.minutes, 60 * given.patience)
    try:
        for section, labels in cases(given.device == "cuda", given.quick):
            if section in ("machine", *given.sections):
                bench.run(section, labels)
            if "failed" in report.figures["machine"]:
                parser.error(report.figures["machine"]["failed"])
    finally:
        bench.end()
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(report.figures, indent=1) if given.json else report.markdown())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
