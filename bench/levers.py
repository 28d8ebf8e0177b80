"""What each memory lever takes off the peak of a training step, and what it costs in time, on one process of this
machine.

    python -m bench.levers [--json] [--width 512] [--layers 10] [--vocabulary 64000] [--nvme-folder DIR]

Every case is a process of its own: three steps under ZeRO-3 in bf16 on 4 + 4 synthetic rows of 512 tokens. The peak is
the kernel's, less what the process had before the model was built; the time is the shorter of the last two steps', as a
ratio to the first case of the same run. Offloading to the CPU moves nothing where the accelerator is the CPU, so NVMe
is what is shown, where a folder for it is named.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from bench.gpu_rows import SyntheticSource
from bench.head_memory import memory
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, RunConfig

ROOT = Path(__file__).resolve().parents[1]
ROW_TOKENS = 512
STEPS = 3


@dataclass(frozen=True)
class Settings:
    """The model, and where to offload to."""

    width: int = 512
    layers: int = 10
    """A fifth of them the generator's."""
    vocabulary: int = 64_000
    nvme_folder: str = ""
    case: str = ""
    """Used by the command itself."""
    json: bool = False
    """Print JSON."""


def cases(settings: Settings) -> dict[str, RunConfig]:
    """A run, and the same with one lever each."""
    generator = settings.layers // 5
    model = ModelConfig(
        vocabulary=settings.vocabulary,
        width=settings.width,
        heads=settings.width // 64,
        feed_forward=4 * settings.width,
        generator_layers=generator,
        discriminator_layers=settings.layers - generator,
        norm="pre",
        vocabulary_blocks=4,
    )
    engine = EngineConfig(deepspeed="zero3_offload", precision="bf16", gradient_precision="fp32")
    run = RunConfig("levers", model=model, data=DataConfig(4, 4, micro_batch=4), engine=engine)

    def with_model(**changes: Any) -> RunConfig:
        return replace(run, model=replace(model, **changes))

    def with_engine(**changes: Any) -> RunConfig:
        return replace(run, engine=replace(engine, **changes))

    found = {
        "as it is": run,
        "model.activation_checkpointing": with_model(activation_checkpointing=True),
        "model.head_chunk 1024": with_model(head_chunk=1024),
        "model.embedding_sharing gdes": with_model(embedding_sharing="gdes"),
        "engine.gradient_precision bf16": with_engine(gradient_precision="bf16"),
        "data.micro_batch 1": replace(run, data=replace(run.data, micro_batch=1)),
    }
    if settings.nvme_folder:
        # Not the parameters: the buffers for them, which zero3_offload has for XL, are larger than this model.
        found["engine.offload_optimizer nvme"] = with_engine(offload_optimizer="nvme", nvme_folder=settings.nvme_folder)
    return found


def measure(run: RunConfig) -> dict[str, float]:
    """Peak MiB, seconds of a step, and the last loss, in this process."""
    from xlme_ds.engine.build import build_engine
    from xlme_ds.engine.ranks import process_group

    with process_group(run.engine):
        source = SyntheticSource(run, ROW_TOKENS)
        before = memory("VmRSS")
        engine = build_engine(run.validate(), source, None)  # type: ignore[arg-type]
        seconds = []
        for step in range(STEPS):
            begin = time.perf_counter()
            stats = engine.train_batch(step, 1e-4, detailed=step == STEPS - 1)
            seconds.append(time.perf_counter() - begin)
    return {"peak_mib": (memory("VmHWM") - before) / 2**20, "step_s": min(seconds[1:]), "loss": stats.metrics["loss"]}


def main() -> None:
    """Run every case in a process of its own, and print the table."""
    settings = tyro.cli(Settings, description=__doc__)
    if settings.case:
        print(json.dumps(measure(cases(settings)[settings.case])), flush=True)
        return
    # Freed blocks go back to the system, so that the resident set is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu"}
    results: dict[str, dict[str, float]] = {}
    for case in cases(settings):
        command = [sys.executable, "-W", "ignore", "-m", "bench.levers", *sys.argv[1:], "--case", case]
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"bench.levers: error: {case} ended with code {done.returncode}")
        results[case] = json.loads(done.stdout.splitlines()[-1])
    first = next(iter(results.values()))
    seconds = first["step_s"]
    for figures in results.values():
        figures["step_ratio"] = figures.pop("step_s") / seconds
    if settings.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'':<46}{'peak, MiB':>10}{'change':>9}{'time':>7}{'loss':>11}")
    for case, figures in results.items():
        change = figures["peak_mib"] / first["peak_mib"] - 1
        print(
            f"{case:<46}{figures['peak_mib']:>10.0f}{change:>+9.0%}{figures['step_ratio']:>7.2f}{figures['loss']:>11.5f}"
        )


if __name__ == "__main__":
    main()
