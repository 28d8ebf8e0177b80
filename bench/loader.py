"""The loader beside its peers, beside a step of training, and on a resume into the middle of 100 GB.

    python -m bench.loader [--quick] [--json]

* Rows a second and the first batch, over a pass from opening the data to its last row, in one process without workers,
  one thread of torch and cached files. The contenders run in turns. `ratio_vs_best_peer` is against peers that were cut
  to the least work (`bench/loader_peers.py` has it all), `ratio_vs_best_customary` against the same as they are used. A
  peer that is not installed is left out, and named.
* fraction_of_step: our loader's time for 2 + 2 rows of 512 tokens over that of a whole step of Base on them (bf16
  weights, fp32 masters, on this machine's CPU, all cores).
* resume: a new process (imports not counted) from the manifest to the first batch at a row in the middle, with the
  check of the shards, which the system has first been told to forget (`resume_s`) and not (`resume_cached_s`). The data
  are 1, 10 and 100 GB: one shard of each task under so many names.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from bench.gpu_device import Device
from bench.gpu_steps import built, run_config
from bench.loader_peers import PEERS, Contender, Kind, Ours
from bench.loader_rows import SHARD_ROWS, Text, forget_pages, in_training_order, linked
from bench.tokenize_sides import Spent, measured
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import TASKS
from xlme_ds.data.shards import RowStore

ROOT = Path(__file__).resolve().parents[1]
A_TASK = 16  # rows of each task a micro-batch, as Base has them
OURS = "ours"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    rows: int = 16_384
    """Of each task."""
    rounds: int = 5
    gigabytes: tuple[float, ...] = (1, 10, 100)
    """Sizes that are resumed; the last one gives the figure."""
    resumes: int = 5
    """Of each size, cached and not."""
    model: str = "base_zero1"
    """Recipe of the step; `tiny` has its shape, and is for trying the command."""
    workers: bool = True
    """Measure the peers with one worker process too."""
    synthetic: bool = False
    """Rows of random ids, also where real text is there."""
    quick: bool = False
    """2,048 rows of each task, fewer rounds, no workers: two minutes, most of them the step of Base."""
    json: bool = False
    """Print JSON."""


def race(text: Text, settings: Settings) -> Figures:
    """Every contender that is there, in turns."""
    folder = text.write("race", settings.rows)
    tokens = in_training_order(folder, settings.rows, A_TASK)
    contenders: dict[str, Contender] = {OURS: Ours(folder, settings.rows, A_TASK)}
    missing = {name: why for name, peer in PEERS.items() if (why := peer.missing())}
    for name, peer in PEERS.items():
        if name not in missing:
            contenders[name] = peer(text.scratch / f"race.{name.split()[0]}", settings.rows, A_TASK)
            contenders[name].write(tokens)
    kinds: dict[str, tuple[Kind, int]] = {"lean": ("lean", 0), "bare": ("bare", 0), "customary": ("customary", 0)}
    if settings.workers:
        kinds["lean, one worker"] = ("lean", 1)
    turns: dict[str, dict[str, list[Figures]]] = {name: {kind: [] for kind in kinds} for name in contenders}
    for turn in range(settings.rounds + 1):
        for name, contender in contenders.items():
            for kind, (way, workers) in kinds.items():
                if name == OURS and kind not in ("lean", "bare"):
                    continue
                figures = one_pass(contender, way, workers)
                if (sum_of := figures.pop("sum")) != int(tokens.sum(dtype="int64")):
                    raise ValueError(f"{name} read other rows: their ids add up to {sum_of}")
                if turn:  # the first one warms caches
                    turns[name][kind].append(figures)
    return _raced(turns) | {"left_out": missing, "rows": 2 * settings.rows}


def one_pass(contender: Contender, kind: Kind, workers: int) -> Figures:
    """Rows a second on the clock and of CPU time, and milliseconds to the first batch."""
    total, rows, first, masked = 0, 0, 0.0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in contender.batches(kind, workers):
        first = first or time.perf_counter() - wall
        rows += len(batch[0])
        total += int(batch[0].sum())
        masked += batch[1].numel() if len(batch) > 1 else 0
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "rows_per_s": rows / wall,
        "rows_per_cpu_s": rows / cpu,
        "first_batch_ms": 1e3 * first,
        "masked_per_row": masked / rows,
        "sum": total,
    }


def _raced(turns: dict[str, dict[str, list[Figures]]]) -> Figures:
    def median(name: str, kind: str, figure: str) -> float:
        return statistics.median(one[figure] for one in turns[name][kind])

    def ratio(kind: str, figure: str, ours: str = "lean") -> float | None:
        """Ours over the best peer's, the median of the turns' ratios."""
        peers = [name for name in turns if name != OURS]
        if not peers:
            return None
        best = max(peers, key=lambda name: median(name, kind, figure))
        both = zip(turns[OURS][ours], turns[best][kind], strict=True)
        return statistics.median(one[figure] / other[figure] for one, other in both)

    table = {
        name: {
            kind: {figure: median(name, kind, figure) for figure in found[0]} for kind, found in kinds.items() if found
        }
        for name, kinds in turns.items()
    }
    return {
        "ratio_vs_best_peer": ratio("lean", "rows_per_s"),
        "ratio_vs_best_peer_in_cpu_time": ratio("lean", "rows_per_cpu_s"),
        "ratio_vs_best_customary": ratio("customary", "rows_per_s"),
        "ratio_vs_best_bare": ratio("bare", "rows_per_s", "bare"),
        "contenders": table,
    }


def beside_a_step(text: Text, settings: Settings) -> Figures:
    """The loader's time a step, and a step's."""
    tiny = settings.model == "tiny"
    rows = 2
    run = run_config("base_zero1" if tiny else settings.model, rows, rows, False, 64, quick=tiny)
    loader = Loader(text.write("step", 1024), run.data, 1, run.objective.mask_fraction)
    loader.step(0)
    loads = [measured(lambda n=n: loader.step(n))[0] for n in range(1, 101)]  # type: ignore[misc]
    torch.set_num_threads(os.cpu_count() or 1)
    with built(run, Device("cpu"), "plain") as engine:
        steps = [_timed_step(engine) for _ in range(2 if settings.quick else 4)][1:]
    torch.set_num_threads(1)
    load, step = (statistics.median(spent.wall for spent in group) for group in (loads, steps))
    return {"fraction_of_step": load / step, "load_s": load, "step_s": step, "model": settings.model}


def _timed_step(engine: Any) -> Spent:
    return measured(lambda: engine.train_batch(0, 1e-4, detailed=False))[0]


def resumes(text: Text, settings: Settings) -> Figures:
    """Medians for every size, from the disk and from the system's cache."""
    source = text.write("shard", SHARD_ROWS)
    stores = [RowStore(source / task) for task in TASKS]
    table: Figures = {}
    for size in settings.gigabytes:
        folder = linked(source, text.scratch / f"resume.{size:g}", size)
        kinds = {}
        for kind in ("from the disk", "cached"):
            found = []
            for _ in range(settings.resumes):
                if kind != "cached":
                    forget_pages(source)
                found.append(_resume(folder))
                records = np.arange(A_TASK) + found[-1]["step"] * A_TASK % SHARD_ROWS
                if found[-1].pop("tokens") != sum(int(store.read(records).tokens.sum()) for store in stores):
                    raise ValueError(f"the resume in {folder} read other rows")
            kinds[kind] = {name: statistics.median(one[name] for one in found) for name in found[0]}
        table[f"{size:g} GB"] = kinds
    last = table[f"{settings.gigabytes[-1]:g} GB"]
    disk, cached = last["from the disk"]["first_batch_s"], last["cached"]["first_batch_s"]
    return {"resume_s": disk, "resume_cached_s": cached, "resumes": table}


def _resume(folder: Path) -> Figures:
    command = [sys.executable, "-W", "ignore", "-m", "bench.loader_resume", str(folder), str(A_TASK)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the resume ended with code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the figures, or JSON."""
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    if settings.quick:
        rows, resumed = min(settings.rows, 2048), min(settings.resumes, 3)
        settings = replace(settings, rows=rows, rounds=3, resumes=resumed, workers=False)
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 2)
    try:
        with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
            text = Text(Path(scratch), settings.synthetic)
            figures = race(text, settings) | resumes(text, settings) | beside_a_step(text, settings)
            figures |= {"real_text": text.real, "load_before": load}
    except ValueError as error:
        sys.exit(f"bench.loader: error: {error}")
    print(json.dumps(figures, indent=1)) if settings.json else show(figures)


def show(figures: Figures, indent: str = "") -> None:
    """Print name by name."""
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(
                f"{indent}{name:<{40 - len(indent)}}{value if not isinstance(value, float) else format(value, ',.5g')}"
            )


if __name__ == "__main__":
    main()
