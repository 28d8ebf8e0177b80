"""Takes real steps of a model that is larger than the machine's memory: builds it, trains, saves, loads and continues.

    xlme bench xl_step --out DIR [--data DIR] [--recipe xl_zero3] [--section.key value ...]

Weights and optimizer state are on the disk (ZeRO-3 with NVMe offload), so XL's 2.4B parameters train in less than 20 GB
of memory. One process takes two steps, saves, and takes a third step. A new process loads the checkpoint, compares the
loss of the probe batch with the stored loss, and takes the same third step. The loss and the gradient norm of both
third steps must agree within 1e-3. Both processes print the time, the memory in use, its peak and the disk in use.

Without `--data` the rows come from the sample corpus. The corpus may have a smaller vocabulary than the model. This
does not make a step cheaper, because the softmax covers the model's whole vocabulary.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from bench.measure import memory, stamp
from xlme_ds.cli import fail, parse, take_flag
from xlme_ds.config import DataConfig, EngineConfig, RunConfig
from xlme_ds.counting import count_parameters
from xlme_ds.quickstart import preparation
from xlme_ds.run_commands import run as run_stage
from xlme_ds.validate import validate

STEPS = 3
SAVED_AFTER = 2
# Bytes on the disk: 18 in the swap folder (weights, master weights, moments, gradients), 12 in the checkpoint.
_BYTES_PER_PARAMETER = 18 + 12
_BLOCKS = 16  # fewest blocks of the embedding, so that XL's blocks fit into the buffers of zero3_offload.json
_TOLERANCE = 1e-3  # relative; the published steps agreed in all printed digits (docs/results/performance.md)
_LEARNING_RATE = 1e-5  # the learning rate of step 200 in the published warm-up


@dataclass(frozen=True)
class XlStepArguments:
    """Arguments of the command."""

    out: Path
    """Folder; swap files and checkpoint are in a folder below it, which is removed at the end."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    data_folder: Annotated[Path | None, tyro.conf.arg(name="data")] = None
    """Folder that `xlme prep mix` wrote; without it, rows of the sample corpus are made in --out."""


def smallest_config(run: RunConfig, folder: Path) -> RunConfig:
    """`run` with the smallest batch, and with weights and optimizer state on the disk below `folder`."""
    engine = EngineConfig(
        deepspeed="zero3_offload", precision="bf16", gradient_precision="bf16", offload_optimizer="nvme",
        offload_parameters="nvme", nvme_folder=str(folder / "swap"),
    )  # fmt: skip
    chunk, blocks = min(run.model.head_chunk, 4096), max(run.model.vocabulary_blocks, _BLOCKS)
    return replace(
        run,
        model=replace(run.model, head_chunk=chunk, vocabulary_blocks=blocks),
        data=DataConfig(1, 1, micro_batch=1),
        engine=engine,
        train=replace(run.train, steps=STEPS),
        optimizer=replace(run.optimizer, learning_rate=_LEARNING_RATE, warmup_steps=0),
    )


def sample_rows(folder: Path, row_tokens: int) -> Path:
    """Make rows of the sample corpus as the quickstart does; returns their folder."""
    rows = folder / "rows"
    encoded = f"--encoded {folder}/encoded/train --vocab {folder}/vocab --row-tokens {row_tokens}"
    mix = f"mix {encoded} --mono-rows 16 --para-rows 16 --out {rows}"
    for stage in [*preparation(folder, processes=2)[:3], mix.split()]:
        run_stage([sys.executable, "-m", "data_prep", *stage], dict(os.environ))
    return rows


def take_steps(config: RunConfig, data: Path, out: Path, first: bool) -> tuple[float, float]:
    """Take the steps of one process. The `first` process takes all steps and saves; the second loads and takes the last
    step. Returns (loss, gradient norm) of the last step."""
    from xlme_ds.checkpoint.checkpoints import PROBE_TOLERANCE, Checkpoints
    from xlme_ds.data.loader import Loader
    from xlme_ds.engine.build import build_engine, resolve_precision
    from xlme_ds.engine.ranks import process_group
    from xlme_ds.train.schedule import learning_rate

    begin = time.perf_counter()

    def say(message: str) -> None:
        now, peak = (memory(key) / 2**30 for key in ("VmRSS", "VmHWM"))
        disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**30
        seconds = time.perf_counter() - begin
        print(f"{seconds:7.1f} s  {now:5.2f} GiB, peak {peak:5.2f}  disk {disk:5.1f} GiB  {message}", flush=True)

    with process_group(config.engine) as (rank, world):
        assert (rank, world) == (0, 1)
        loader = Loader(data, config.data, config.seed, config.objective.mask_fraction)
        engine = build_engine(config, loader, None)
        checkpoints = Checkpoints(out, keep_last=1, keep_every=0, buffer_bytes=1 << 28)
        state, start = {"fingerprints": loader.fingerprints}, 0
        say("the model is built")
        if not first:
            newest, complaints = checkpoints.newest()
            assert newest is not None, complaints
            start = checkpoints.load(engine, newest, state, PROBE_TOLERANCE[resolve_precision(config.engine)])
            say(f"loaded after step {start}, the probe's loss is the stored one")
        loss = norm = 0.0
        for step in range(start, STEPS):
            stats = engine.train_batch(step, learning_rate(step, STEPS + 1, config.optimizer), detailed=True)
            loss, norm = stats.metrics["loss"], stats.gradient_norm
            say(f"step {step + 1}: loss {loss:.6f}, gradient norm {norm:.4f}")
            if step + 1 == SAVED_AFTER and first:
                checkpoints.save(engine, step + 1, state)
                checkpoints.wait(engine)
                say("saved")
    return loss, norm


def run_processes(run: RunConfig, data: Path, out: Path) -> list[tuple[float, float]]:
    """Run the two processes one after the other. Returns one (loss, gradient norm) per process: those of the last
    step, which both processes take."""
    parameters = count_parameters(run)["trained_total"]
    needed, free = parameters * _BYTES_PER_PARAMETER, shutil.disk_usage(out).free
    disk = f"{needed / 1e9:.0f} GB of disk needed, {free / 1e9:.0f} free"
    print(f"{parameters / 1e9:.3f}B parameters; {disk}; {', '.join(stamp().values())}", flush=True)
    if free < needed:
        raise ValueError(f"{out} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} are needed: name another --out")
    results = []
    for first in (True, False):
        shutil.rmtree(out / "swap", ignore_errors=True)
        (out / "swap").mkdir()
        print(f"-- {'first' if first else 'second'} process", flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            results.append(pool.submit(take_steps, run, data, out, first).result())
    return results


def main() -> None:
    """Take the steps, and compare the last step of both processes."""
    rest, name = take_flag(sys.argv[1:], "--recipe")
    os.environ |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}  # both processes inherit these
    try:
        command = parse("xlme bench xl_step", XlStepArguments, __doc__ or "", ["--recipe", name or "xl_zero3", *rest])
        command.out.mkdir(parents=True, exist_ok=True)
        data = command.data_folder or sample_rows(command.out / "data", command.run.model.max_positions)
        with tempfile.TemporaryDirectory(dir=command.out) as scratch:
            results = run_processes(validate(smallest_config(command.run, Path(scratch))), data, Path(scratch))
    except (ValueError, BrokenProcessPool) as error:
        fail("bench.xl_step", error)
    for name, first, second in zip(("loss", "gradient norm"), *results, strict=True):
        print(f"step {STEPS}: {name} {first:.6f} without a stop, {second:.6f} after loading")
        if not abs(second - first) <= _TOLERANCE * abs(first):  # `not`, so that NaN fails
            difference = abs(second - first) / abs(first)
            sys.exit(f"bench.xl_step: error: the {name} of step {STEPS} differs by {difference:.1e} after loading")


if __name__ == "__main__":
    main()
