"""What a training step costs against layers, width, row length, vocabulary and number of processes, measured and
counted.

    python -m bench.scaling [--out runs/scaling] [--rounds 5] [--quick] [--json] [--gpu-tflops 150] [--bandwidth 25]

One axis at a time around a small model; all values of an axis take their steps by turns. Beside the measured time
stands what the count of operations predicts from the middle value. With several processes (gloo, one thread each) the
time of a collective is that of the rank that came last to it, so that waiting is not in it; the prediction is the
planner's bytes over the rate of an all-reduce of 64 MiB on as many processes. For up to 512 GPUs the same is computed
for Base from a given rate of operations and of the network.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from bench.scaling_plots import draw
from bench.scaling_rank import Case
from xlme_ds.config import DataConfig
from xlme_ds.counting import count_parameters, flops_per_step
from xlme_ds.plan.communication import communication
from xlme_ds.plan.layout import Layout
from xlme_ds.recipes import recipe

ROOT = Path(__file__).resolve().parents[1]
AXES = {
    "layers": (2, 4, 8, 16),
    "width": (128, 256, 512, 768),
    "tokens": (64, 256, 512, 1024),
    "vocabulary": (4_000, 16_000, 64_000, 250_000),
}
WORLDS = (1, 2, 4)
LARGE = 64 * 2**20  # bytes of the all-reduce that the network's rate is taken from
GPUS = (8, 16, 32, 64, 128, 256, 512)
Figures = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    out: Path | None = None
    """Folder for scaling.json and the plots."""
    rounds: int = 5
    quick: bool = False
    """A tiny model, two values an axis, one round."""
    json: bool = False
    gpu_tflops: float = 150.0
    """Rate that a GPU reaches, for the computed curve."""
    bandwidth: float = 25.0
    """GB/s that a GPU sends."""


class Ranks:
    """The processes of a case."""

    def __init__(self, case: Case):
        self.case = case
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        threads = (os.cpu_count() or 1) if case.world == 1 else 1
        place = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads), "MASTER_PORT": port}
        place |= {"WORLD_SIZE": str(case.world), "MASTER_ADDR": "127.0.0.1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", *case.words()], cwd=ROOT, text=True,
                env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(case.world)
        ]  # fmt: skip
        self._answers()

    def take(self, asked: int | None = None) -> list[Figures]:
        """A step, or an all-reduce of so many bytes: what every rank answers."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Figures]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            sys.exit(f"bench.scaling: error: a process of {self.case} ended: see above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Let them end."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()


def sending(answers: list[Figures]) -> float:
    """Seconds in collectives without waiting for each other: of each, those of the rank that came last."""
    calls = zip(*(answer["collectives"] for answer in answers), strict=True)
    return sum(min(seconds) for seconds in calls)


def axis(name: str, values: tuple[int, ...], middle: Case, rounds: int) -> list[Figures]:
    """Seconds, operations and memory of a step at every value; the first two steps of each do not count."""
    cases = [replace(middle, **{name: value}) for value in values]
    groups = [Ranks(case) for case in cases]
    steps: list[list[Figures]] = [[] for _ in cases]
    for turn in range(rounds + 2):
        for found, group in zip(steps, groups, strict=True):
            answer = group.take()[0]
            if turn >= 2:
                found.append(answer)
    for group in groups:
        group.close()
    figures = []
    for case, found in zip(cases, steps, strict=True):
        positions = case.positions // case.tokens * case.tokens
        figures.append({
            name: getattr(case, name), "step_s": statistics.median(answer["s"] for answer in found),
            "flops": flops_per_step(case.run, case.tokens), "positions": positions, "memory": max(answer["memory"] for answer in found),
            "parameters": count_parameters(case.run)["trained_total"],
        })  # fmt: skip
    at = next(one for one in figures if one[name] == getattr(middle, name))
    for one in figures:
        one["predicted_s"] = at["step_s"] * one["flops"] / at["flops"]
    return figures


def worlds(values: tuple[int, ...], middle: Case, rounds: int) -> list[Figures]:
    """A step of as many rows a process, and the time of its collectives beside the prediction."""
    figures = []
    for value in values:
        case = replace(middle, world=value)
        group = Ranks(case)
        steps = [group.take() for _ in range(rounds + 2)][2:]
        large = [group.take(LARGE) for _ in range(rounds + 2)][2:] if value > 1 else []
        group.close()
        sent = communication(Layout.of(case.run, value, "bf16", case.tokens)).total
        rate = 2 * LARGE * (value - 1) / value / statistics.median(map(sending, large)) if large else 0.0
        whole, apart = (
            statistics.median(map(of, steps)) for of in (lambda step: max(one["s"] for one in step), sending)
        )
        figures.append({
            "world": value, "step_s": whole, "sending_s": apart, "sent_bytes": sent, "bytes_per_s": rate,
            "predicted_s": sent / rate if rate else 0.0,
        })  # fmt: skip
    return figures


def computed(settings: Settings) -> list[Figures]:
    """Base at 32 + 32 rows a GPU: share of a step that is not spent sending, from the given rates; nothing is
    overlapped."""
    figures = []
    for zero in ("zero1", "zero2", "zero3"):
        for gpus in GPUS:
            base = recipe("base_zero1")
            run = replace(base, data=DataConfig(32 * gpus, 32 * gpus, 32), engine=replace(base.engine, deepspeed=zero))
            compute = flops_per_step(run, 512) / gpus / (settings.gpu_tflops * 1e12)
            transfer = communication(Layout.of(run, gpus, "bf16", 512)).total / (settings.bandwidth * 1e9)
            efficiency = compute / (compute + transfer)
            figures.append(
                {"zero": zero, "gpus": gpus, "compute_s": compute, "transfer_s": transfer, "efficiency": efficiency}
            )
    return figures


def table(name: str, rows: list[Figures]) -> str:
    """One axis as Markdown."""
    if name == "world":
        lines = [
            "| processes | step, s | sending, s | predicted | sent, MB | rate, GB/s |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {one['world']} | {one['step_s']:.2f} | {one['sending_s']:.3f} | {one['predicted_s']:.3f} | {one['sent_bytes'] / 1e6:.0f} | "
            f"{one['bytes_per_s'] / 1e9:.2f} |" for one in rows
        ]  # fmt: skip
        return "\n".join(lines)
    lines = [f"| {name} | parameters, M | step, s | predicted | GFLOP/s | memory, GiB |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one[name]:,} | {one['parameters'] / 1e6:.1f} | {one['step_s']:.3f} | {one['predicted_s']:.3f} | "
        f"{one['flops'] / one['step_s'] / 1e9:.0f} | {one['memory'] / 2**30:.2f} |" for one in rows
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and draw."""
    settings = tyro.cli(Settings, description=__doc__)
    middle = Case(layers=2, width=64, tokens=32, vocabulary=600, positions=128) if settings.quick else Case()
    axes = (
        {"layers": (2, 4), "width": (64, 128), "tokens": (32, 64), "vocabulary": (600, 1200)}
        if settings.quick
        else AXES
    )
    rounds = 1 if settings.quick else settings.rounds
    found: Figures = {name: axis(name, values, middle, rounds) for name, values in axes.items()}
    found["world"] = worlds((1, 2) if settings.quick else WORLDS, middle, rounds)
    found["computed"] = computed(settings)
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / "scaling.json").write_text(json.dumps(found, indent=1))
        draw(found, settings.out)
    if settings.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n\n".join(table(name, found[name]) for name in (*axes, "world")))


if __name__ == "__main__":
    main()
