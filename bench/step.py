"""Compare one training step (forward, backward, optimizer) of ours, of a Hugging Face loop and of plain torch.

    xlme bench step [--json] [--quick] [--rounds 5] [--sizes base middle]

Each contender is a process that uses all cores. Ours and one peer take turns, step by step, so that other work on the
machine slows both alike. All contenders train a generator and a discriminator of the same shape on the same rows, in
bf16 with float32 master weights and AdamW. The rows are synthetic: two of text and two of packed pairs, each with 512
tokens.

The operations of a step are counted alike for all contenders (`xlme_ds.counting`). Their rate is compared with that of
a bf16 matrix product of 4096 x 4096 x 4096, measured between the steps. A contender's memory is the peak of its
process's resident set minus the size of the set before the model was built.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from bench.gpu.steps import run_config, step_tokens, synthetic_engine
from bench.measure import Figures, Worker, by_turns, markdown, memory, printed, ratio, run_bench, timed
from bench.peers.steps import RATE, HuggingFaceStep, PlainTorchStep
from xlme_ds.config import RunConfig
from xlme_ds.counting import flops_per_step

Size = Literal["base", "middle", "tiny"]
PEERS = {"huggingface": HuggingFaceStep, "plain_torch": PlainTorchStep}
PRODUCT_FLOPS = 2.0 * 4096**3
WARM_UP = 2  # rounds that do not count


def sized(size: Size) -> RunConfig:
    """The run of a size. A step has two rows of each task."""
    middle = dict(vocabulary=64_000, width=384, heads=6, feed_forward=1536, discriminator_layers=8)
    return run_config("base_zero1", 2, 2, size == "tiny", **(middle if size == "middle" else {}))


def prepare(name: str, size: Size) -> Callable[[object], list[Figures]]:
    """Build the contender `name`: ours (DeepSpeed's ZeRO-1 on one process), a peer, or matmul, the bf16 product whose
    rate serves as the peak. The returned function takes a step, and returns its times and, in bytes, the process's peak
    memory minus its memory before the build."""
    torch.manual_seed(0)
    before, run = memory("VmRSS"), sized(size)
    one_step: Callable[[], object]
    if name == "ours":
        one_step = partial(synthetic_engine(run).train_batch, 0, RATE, detailed=False)
    elif name == "matmul":
        one_step = partial(torch.mm, *(torch.randn(4096, 4096).bfloat16() for _ in range(2)))
    else:
        one_step = PEERS[name](run).step
    return lambda _: [timed(one_step) | {"memory": memory("VmHWM") - before}]


def measure(size: Size, rounds: int) -> Figures:
    """Measure ours with one peer at a time: all contenders together would not fit into 24 GB."""
    run = sized(size)
    flops, tokens = flops_per_step(run, run.model.max_positions), step_tokens(run)
    answers: dict[str, list[Figures]] = {name: [] for name in ("ours", "matmul", *PEERS)}
    ratios = {}
    for peer in PEERS:
        workers = {name: Worker("bench.step", name, size) for name in ("ours", peer, "matmul")}
        turns = by_turns({name: worker.ask for name, worker in workers.items()}, rounds, WARM_UP)
        for name, worker in workers.items():
            worker.close()
            answers[name] += [turn[name] for turn in turns]
        ratios[f"ratio_vs_{peer}"] = ratio(turns, peer, "ours", "wall")
    seconds = {name: statistics.median(row["wall"] for row in rows) for name, rows in answers.items()}
    peak = PRODUCT_FLOPS / seconds.pop("matmul")
    contenders = {
        name: {
            "tokens_per_s": tokens / s, "gflops": flops / s / 1e9, "step_s": s,
            "fraction_of_matmul_peak": flops / s / peak, "memory_gib": answers[name][-1]["memory"] / 2**30,
        }
        for name, s in seconds.items()
    }  # fmt: skip
    return {
        "contenders": contenders,
        "matmul_peak_gflops": peak / 1e9,
        **ratios,
        "fraction_of_matmul_peak": contenders["ours"]["fraction_of_matmul_peak"],
        "memory_vs_huggingface": contenders["ours"]["memory_gib"] / contenders["huggingface"]["memory_gib"],
    }


def measure_sizes(
    sizes: tuple[Size, ...] = ("base", "middle"), rounds: int = 5, quick: bool = False, json: bool = False
) -> str:
    """The figures of each size as Markdown tables or as JSON.

    Args:
        sizes: base: Base with XLM-R's 250,002 pieces; middle: a model of width 384 with 4 + 8 layers and 64,000 pieces;
            tiny: a model for tests.
        rounds: Rounds to measure; each figure is the median over the rounds.
        quick: Measure only the middle size, in three rounds.
        json: Print JSON.
    """
    if rounds < 1:  # before processes start
        raise ValueError(f"--rounds is {rounds}: it must be at least 1")
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}  # contenders inherit these
    if quick:
        sizes, rounds = ("middle",), 3
    figures = {size: measure(size, rounds) for size in sizes}
    text = "\n\n".join(table(size, found) for size, found in figures.items())
    return printed(figures["middle"] if quick else figures, json, text)  # JSON of one size has no name of the size


def table(size: str, figures: Figures) -> str:
    """Figures of one size as a Markdown table."""
    rows = [
        [name, f"{row['tokens_per_s']:,.0f}", f"{row['gflops']:,.0f}", f"{row['fraction_of_matmul_peak']:.0%}",
         f"{row['memory_gib']:.2f}", f"{figures.get(f'ratio_vs_{name}', 1.0):.2f}"]
        for name, row in figures["contenders"].items()
    ]  # fmt: skip
    columns = ["", "tokens/s", "GFLOP/s", "of the peak", "memory, GiB", "time"]
    return (
        f"{size}: bf16 matrix product {figures['matmul_peak_gflops']:,.0f} GFLOP/s\n\n{markdown(columns, rows)}\n"
        f"time: a multiple of ours, which is {figures['contenders']['ours']['step_s']:.2f} s a step"
    )


def main() -> None:
    """Measure, and print tables or JSON."""
    run_bench("xlme bench step", measure_sizes, __doc__)


if __name__ == "__main__":
    main()
