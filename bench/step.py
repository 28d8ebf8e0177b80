"""One training step (forward, backward, optimizer) of ours, of a Hugging Face loop and of plain torch, in one run.

    python -m bench.step [--json] [--quick] [--rounds 5] [--sizes base middle]

Each contender is a process of its own with all cores; ours and one peer take turns, step by step, so that what else the
machine does falls on both alike. Operations by the standard count (`xlme_ds.counting`), the same for all; the peak is a
bf16 matrix product of 4096 x 4096 x 4096, measured between the steps. Memory is the growth of a process's largest
resident set over what it had before the model was built. Rows are synthetic: two of text, two of packed pairs, 512
tokens each.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from bench.head_memory import memory
from xlme_ds.config import DataConfig, RunConfig
from xlme_ds.counting import flops_per_step, work_of
from xlme_ds.recipes import recipe
from xlme_ds.validate import validate

ROOT = Path(__file__).resolve().parents[1]
Size = Literal["base", "middle", "tiny"]
PRODUCT = 2.0 * 4096**3  # operations
PEERS = ("huggingface", "plain_torch")


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    sizes: tuple[Size, ...] = ("base", "middle")
    """base: Base with XLM-R's 250,002 pieces; middle: 4 + 8 layers of width 384, 64,000 pieces; tiny: for tests."""
    rounds: int = 5
    quick: bool = False
    """The middle size alone, three rounds."""
    json: bool = False
    """Print JSON."""
    contender: str = ""
    """Used by the command itself."""


def run_config(size: Size) -> RunConfig:
    """Base or a middle size, 4 rows of 512 a step."""
    run = recipe("base_zero1")
    if size == "middle":
        middle = replace(run.model, vocabulary=64_000, width=384, heads=6, feed_forward=1536, discriminator_layers=8)
        run = replace(run, model=middle)
    if size == "tiny":
        tiny = replace(
            run.model, vocabulary=600, width=32, heads=2, feed_forward=64, generator_layers=1, discriminator_layers=2
        )
        run = replace(run, model=replace(tiny, max_positions=64))
    engine = replace(run.engine, precision="bf16")
    return validate(replace(run, data=DataConfig(2, 2, micro_batch=2), engine=engine))


def serve(name: str, size: Size) -> None:
    """Take a step for every line of standard input, and print its seconds and the memory so far."""
    import torch

    from bench.step_contenders import CONTENDERS

    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes elsewhere
    os.dup2(2, 1)
    torch.manual_seed(0)
    before = memory("VmRSS")
    contender = CONTENDERS[name](run_config(size))
    print(json.dumps({}), file=answers, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        contender.step()
        seconds = time.perf_counter() - begin
        answer = {"s": seconds, "memory": memory("VmHWM") - before}
        if name == "ours":
            answer["generator"] = contender.generator_share
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A contender's process."""

    def __init__(self, name: str, size: Size):
        self.name = name
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(os.cpu_count())}
        command = [sys.executable, "-W", "ignore", "-m", "bench.step", "--contender", name, "--sizes", size]
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def step(self) -> dict[str, float]:
        """Seconds and memory of one more step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench.step: error: {self.name} ended with code {self.process.wait()}: see above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def race(names: Sequence[str], size: Size, rounds: int) -> tuple[dict[str, list[float]], dict[str, float], list[float]]:
    """Seconds of every step of the contenders, by turns, their memory, and the share of our passes that the generator
    takes; the first two steps of each do not count."""
    workers = [Worker(name, size) for name in names]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    memories: dict[str, float] = {}
    shares: list[float] = []
    for turn in range(rounds + 2):
        for worker in workers:
            answer = worker.step()
            memories[worker.name] = answer["memory"]
            if turn >= 2:
                seconds[worker.name].append(answer["s"])
                if worker.name == "ours":
                    shares.append(answer["generator"])
    for worker in workers:
        worker.close()
    return seconds, memories, shares


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Ours beside one peer after the other: all at once would not fit into 24 GB."""
    run = run_config(size)
    flops, work = flops_per_step(run, run.model.max_positions), work_of(run, run.model.max_positions)
    tokens = (run.data.mono_rows + run.data.para_rows) * run.model.max_positions
    seconds: dict[str, list[float]] = {}
    memories: dict[str, float] = {}
    shares: list[float] = []
    against = {}
    for peer in PEERS:
        found, held, generator = race(("ours", peer, "matmul"), size, rounds)
        # The ratio of each round, and their median: what disturbs a round falls on both.
        against[peer] = statistics.median(there / ours for there, ours in zip(found[peer], found["ours"], strict=True))
        for name, values in found.items():
            seconds.setdefault(name, []).extend(values)
        memories |= held
        shares += generator
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peak = PRODUCT / medians.pop("matmul")
    contenders = {
        name: {
            "tokens_per_s": tokens / median, "gflops": flops / median / 1e9, "step_s": median,
            "fraction_of_matmul_peak": flops / median / peak, "memory_gib": memories[name] / 2**30,
        }
        for name, median in medians.items()
    }  # fmt: skip
    return {
        "contenders": contenders,
        "matmul_peak_gflops": peak / 1e9,
        **{f"ratio_vs_{peer}": ratio for peer, ratio in against.items()},
        "fraction_of_matmul_peak": contenders["ours"]["fraction_of_matmul_peak"],
        "generator_share_of_passes": statistics.median(shares),
        "generator_share_of_operations": (work.before + work.softmax_first) / work.forward,
        "memory_vs_huggingface": memories["ours"] / memories["huggingface"],
    }


def show(size: str, figures: dict[str, Any]) -> str:
    """One size for people, as Markdown."""
    lines = [f"{size}: bf16 matrix product {figures['matmul_peak_gflops']:,.0f} GFLOP/s", ""]
    lines += ["| | tokens/s | GFLOP/s | of the peak | memory, GiB | time |", "|---|---|---|---|---|---|"]
    ours = figures["contenders"]["ours"]["step_s"]
    for name, one in figures["contenders"].items():
        times = 1.0 if name == "ours" else figures[f"ratio_vs_{name}"]
        lines.append(
            f"| {name} | {one['tokens_per_s']:,.0f} | {one['gflops']:,.0f} | {one['fraction_of_matmul_peak']:.0%} | "
            f"{one['memory_gib']:.2f} | {times:.2f} |"
        )
    takes, counts = figures["generator_share_of_passes"], figures["generator_share_of_operations"]
    lines += ["", f"time: as a multiple of ours, {ours:.2f} s a step"]
    return "\n".join(
        [*lines, f"our generator: {takes:.0%} of the time of forward and backward, {counts:.0%} of their operations"]
    )


def main() -> None:
    """Measure, and print tables or JSON; with `--quick` the JSON holds the figures of the middle size."""
    settings = tyro.cli(Settings, description=__doc__)
    if settings.contender:
        serve(settings.contender, settings.sizes[0])
        return
    sizes: tuple[Size, ...] = ("middle",) if settings.quick else settings.sizes
    found = {size: measure(size, 3 if settings.quick else settings.rounds) for size in sizes}
    if settings.json:
        print(json.dumps(found["middle"] if settings.quick else found, indent=1))
    else:
        print("\n\n".join(show(size, figures) for size, figures in found.items()))


if __name__ == "__main__":
    main()
