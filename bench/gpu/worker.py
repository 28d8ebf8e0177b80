"""The code of a bench.gpu process: load the libraries, then measure each case that the main process sends."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._dynamo

from bench.gpu import steps
from bench.gpu.commands import RUNS, resume, smoke
from bench.gpu.kernels import autotune
from bench.gpu.parity import CASES, ON_A_GPU, parity
from bench.measure import Figures

# (M, K, N) of the matrix products. The last one is in the feed-forward part of Base, for 32 rows of 512 tokens.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 768, 3072))
ROWS = 64  # rows of each task in a step: one GPU's share if 32 GPUs split the published batch
# Modules that would otherwise be imported while a case is measured.
LOADED_EARLY = "xlme_ds.engine.zero", "torch._inductor.compile_fx", "triton"


def rows(case: Figures) -> Iterator[Figures]:
    """Measure a case, and yield its rows of figures. If the case fails, its last row says how (`failure`)."""
    try:
        yield from _rows(case, torch.device(case["device"]), case["quick"])
    except Exception as error:  # if one case fails, the other cases must still be measured
        yield steps.failure(error)


def _rows(case: Figures, device: torch.device, quick: bool) -> Iterator[Figures]:
    section, seconds, rounds, folder = case["section"], case["seconds"], 2 if quick else 5, Path(case["folder"])
    on_gpu = device.type == "cuda"
    if section == "machine":
        reason = "torch sees no GPU here: use --device cpu --quick to try the program"
        yield {"failed": reason} if on_gpu and not torch.cuda.is_available() else steps.machine(device)
    elif section == "matmul":
        for shape in ((128, 128, 128),) if quick else SHAPES:
            yield {"shape": "×".join(map(str, shape))} | steps.measure_matmul(device, case["dtype"], shape, rounds)
    elif section == "parity":
        yield parity((CASES | ON_A_GPU)[case["case"]], device, case["dtype"])
    elif section == "peers":
        yield from steps.compare_peers(device, rounds, quick, seconds)
    elif section == "kernels":
        yield from autotune(device, seconds, folder.parent / "tilings.json")
    elif section == "smoke":
        yield from smoke(folder, seconds, quick)
    elif section == "resume":
        yield from resume(folder, seconds, list(RUNS) if on_gpu else ["default"], quick)
    else:
        micro_batch = case["micro_batch"]
        step_rows = 2 if quick else 16 if case["recipe"].startswith("xl_") else ROWS
        run = steps.run_config(case["recipe"], max(step_rows, micro_batch), micro_batch, quick, **case["settings"])
        if section == "profile":
            yield steps.profile_step(run, device)
        else:
            yield {"rows": run.data.mono_rows} | steps.measure_step(run, device, rounds, case["matmul_tflops"])


def prepare() -> Callable[[Figures], Iterator[Figures]]:
    """Load the libraries; returns the function that measures a case."""
    for name in LOADED_EARLY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return rows
