"""What a training step costs against layers, width, row length, vocabulary and number of processes, measured and
counted.

    python -m bench.scaling [--out runs/scaling] [--rounds 5] [--quick] [--json]

One axis at a time around a small model; all values of an axis take their steps by turns. Next to the measured time is
what the count of operations predicts from the middle value. With several processes (gloo, one thread each) the time of
a collective is that of the rank that came last to it, so that waiting is not in it; the prediction is the planner's
bytes over the rate of an all-reduce of 64 MiB on as many processes.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from bench.workers import Figures, Workers, answer, memory
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from xlme_ds.counting import count_parameters, flops_per_step
from xlme_ds.plan.layout import ParallelLayout
from xlme_ds.plan.speed import communication
from xlme_ds.validate import validate

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")
AXES = {
    "layers": (2, 4, 8, 16),
    "width": (128, 256, 512, 768),
    "tokens": (64, 256, 512, 1024),
    "vocabulary": (4_000, 16_000, 64_000, 250_000),
}
QUICK_AXES = {"layers": (2, 4), "width": (64, 128), "tokens": (32, 64), "vocabulary": (600, 1200)}
WORLDS = (1, 2, 4)
LARGE = 64 * 2**20  # bytes of the all-reduce that the network's rate is taken from
_LABELS = {"layers": "layers of the discriminator", "tokens": "tokens of a row"}


@dataclass(frozen=True)
class ScalingSettings:
    """What to measure."""

    out: Path | None = None  # folder for scaling.json and the plots
    rounds: int = 5  # of which the medians are taken
    quick: bool = False  # a tiny model, two values an axis, one round
    json: bool = False  # print JSON
    case: str = ""  # used by the command itself


@dataclass(frozen=True)
class ScalingCase:
    """A model and its rows: as many of text as of pairs."""

    layers: int = 4  # of the discriminator; the generator has a quarter of them
    width: int = 256
    tokens: int = 256  # of a row
    vocabulary: int = 16_000
    positions: int = 2048  # of a step and process
    world: int = 1

    @property
    def run(self) -> RunConfig:
        """Its configuration, ZeRO-1 in bf16."""
        model = ModelConfig(
            vocabulary=self.vocabulary, width=self.width, heads=max(self.width // 64, 1), feed_forward=4 * self.width,
            generator_layers=max(self.layers // 4, 1), discriminator_layers=self.layers, max_positions=self.tokens,
        )  # fmt: skip
        rows = self.positions // self.tokens // 2
        run = RunConfig(
            "scaling", model=model, data=DataConfig(rows * self.world, rows * self.world, micro_batch=rows),
            engine=EngineConfig(deepspeed="zero1", precision="bf16"), optimizer=OptimizerConfig(warmup_steps=1),
            train=TrainConfig(steps=10),
        )  # fmt: skip
        return validate(run)

    def workers(self) -> Workers:
        """Its processes; each takes a step when asked, or an all-reduce of so many bytes."""
        return Workers("bench.scaling", "--case", json.dumps(asdict(self)), world=self.world)


def rank_of(case: ScalingCase) -> Callable[[int | None], Figures]:
    """Build the engine in this process; the function answers with the seconds of the whole and of every collective in
    it, and the memory that the model took."""
    import torch
    import torch.distributed as dist

    from bench.synthetic import SyntheticSource
    from xlme_ds.engine.build import build_engine
    from xlme_ds.engine.ranks import start_process_group

    seconds: list[float] = []

    def timed(collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **settings: Any) -> Any:
            begin = time.perf_counter()
            result = collective(*arguments, **settings)
            seconds.append(time.perf_counter() - begin)
            return result

        return noted

    start_process_group(case.run.engine)
    before = memory("VmRSS")
    # All ranks read the same rows: which ones they are does not matter here.
    source: Any = SyntheticSource(replace(case, world=1).run, case.tokens)
    engine = build_engine(case.run, source, None)
    for name in COLLECTIVES:
        setattr(dist, name, timed(getattr(dist, name)))

    def respond(asked: int | None) -> Figures:
        seconds.clear()
        begin = time.perf_counter()
        if asked is None:
            engine.train_batch(0, 1e-4, detailed=False)
        else:
            dist.all_reduce(torch.zeros(asked // 2, dtype=torch.bfloat16))
        whole = time.perf_counter() - begin
        return {"s": whole, "collectives": list(seconds), "memory": memory("VmHWM") - before}

    return respond


def sending(answers: list[Figures]) -> float:
    """Seconds in collectives without waiting for each other: of each, those of the rank that came last."""
    calls = zip(*(answer["collectives"] for answer in answers), strict=True)
    return sum(min(seconds) for seconds in calls)


def axis(name: str, values: tuple[int, ...], middle: ScalingCase, rounds: int) -> list[Figures]:
    """Seconds, operations and memory of a step at every value; the first two steps of each do not count."""
    cases = [replace(middle, **{name: value}) for value in values]
    groups = [case.workers() for case in cases]
    turns = [[group.ask()[0] for group in groups] for _ in range(rounds + 2)][2:]
    for group in groups:
        group.close()
    figures = []
    for case, steps in zip(cases, zip(*turns, strict=True), strict=True):
        figures.append({
            name: getattr(case, name), "step_s": statistics.median(step["s"] for step in steps),
            "flops": flops_per_step(case.run, case.tokens), "positions": case.positions // case.tokens * case.tokens,
            "memory": steps[-1]["memory"], "parameters": count_parameters(case.run)["trained_total"],
        })  # fmt: skip
    at = next(one for one in figures if one[name] == getattr(middle, name))
    return [one | {"predicted_s": at["step_s"] * one["flops"] / at["flops"]} for one in figures]


def worlds(values: tuple[int, ...], middle: ScalingCase, rounds: int) -> list[Figures]:
    """A step of as many rows a process, and the time of its collectives next to the prediction."""
    figures = []
    for value in values:
        case = replace(middle, world=value)
        group = case.workers()
        steps = [group.ask() for _ in range(rounds + 2)][2:]
        large = [group.ask(LARGE) for _ in range(rounds + 2)][2:] if value > 1 else []
        group.close()
        sent = communication(ParallelLayout.of(case.run, value, "bf16", case.tokens))["total"]
        rate = 2 * LARGE * (value - 1) / value / statistics.median(map(sending, large)) if large else 0.0
        figures.append({
            "world": value, "step_s": statistics.median(max(one["s"] for one in step) for step in steps),
            "sending_s": statistics.median(map(sending, steps)), "sent_bytes": sent, "bytes_per_s": rate,
            "predicted_s": sent / rate if rate else 0.0,
        })  # fmt: skip
    return figures


def table(name: str, rows: list[Figures]) -> str:
    """One axis as Markdown."""
    if name == "world":
        head = "| processes | step, s | sending, s | predicted | sent, MB | rate, GB/s |"
        line = "| {world} | {step_s:.2f} | {sending_s:.3f} | {predicted_s:.3f} | {mb:.0f} | {gb_per_s:.2f} |"
        shown = [one | {"mb": one["sent_bytes"] / 1e6, "gb_per_s": one["bytes_per_s"] / 1e9} for one in rows]
    else:
        head = f"| {name} | parameters, M | step, s | predicted | GFLOP/s | memory, GiB |"
        line = "| {value:,} | {millions:.1f} | {step_s:.3f} | {predicted_s:.3f} | {gflops:.0f} | {gib:.2f} |"
        shown = [
            one | {"value": one[name], "millions": one["parameters"] / 1e6, "gib": one["memory"] / 2**30,
                   "gflops": one["flops"] / one["step_s"] / 1e9} for one in rows
        ]  # fmt: skip
    return "\n".join([head, "|---" * 6 + "|", *(line.format(**one) for one in shown)])


def draw(found: Figures, out: Path) -> None:
    """Write cost.svg, one panel an axis."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        for axes, name in zip(figure.subplots(2, 2).flatten(), AXES, strict=True):
            values = [one[name] for one in found[name]]
            for kind, label in (("step_s", "measured"), ("predicted_s", "in proportion to operations")):
                # Per token: rows of other lengths do not fill the step's positions alike.
                times = [1e6 * one[kind] / one["positions"] for one in found[name]]
                style = {"marker": "o"} if kind == "step_s" else {"linestyle": "--", "linewidth": 0.9, "color": "0.4"}
                axes.plot(values, times, markersize=4, label=label, **style)
            axes.set_ylim(bottom=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:,}" for value in values])
            axes.minorticks_off()
            axes.set(xlabel=_LABELS.get(name, name), ylabel="µs a token")
            axes.grid(axis="y", alpha=0.3)
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(out / "cost.svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure, print, and draw."""
    settings = tyro.cli(ScalingSettings, description=__doc__)
    if settings.case:
        answer(lambda: rank_of(ScalingCase(**json.loads(settings.case))))
        return
    quick = settings.quick
    middle = ScalingCase(layers=2, width=64, tokens=32, vocabulary=600, positions=128) if quick else ScalingCase()
    rounds = 1 if quick else settings.rounds
    found: Figures = {
        name: axis(name, values, middle, rounds) for name, values in (QUICK_AXES if quick else AXES).items()
    }
    found["world"] = worlds((1, 2) if quick else WORLDS, middle, rounds)
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / "scaling.json").write_text(json.dumps(found, indent=1))
        draw(found, settings.out)
    if settings.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n\n".join(table(name, found[name]) for name in (*AXES, "world")))


if __name__ == "__main__":
    main()
