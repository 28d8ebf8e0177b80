"""A process of bench.gpu: loads the libraries, then measures the cases that it is asked for."""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from bench.gpu.parity import CASES, ON_A_GPU, parity
from bench.gpu.steps import Device, matmul, peers, run_config, step, where_time_goes
from bench.measure import Figures
from bench.workers import answer

# The last is the feed-forward product of Base on 32 rows of 512.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 768, 3072))
ROWS = 64  # of each task a step: the published batch on 32 GPUs
LOADED_EARLY = (
    "xlme_ds.engine.build", "xlme_ds.engine.zero", "xlme_ds.plan.memory", "torch._inductor.compile_fx", "triton",
)  # fmt: skip


class Measurements:
    """Measures cases on one device with one engine."""

    def __init__(self, device: str, engine: str, quick: bool, folder: str):
        self.device, self.engine, self.quick, self.folder = Device(device), engine, quick, Path(folder)
        self.rounds = 2 if quick else 5

    def rows(self, case: Figures) -> Iterator[Figures]:
        """The rows of a case; the last row has `out_of_memory` or `failed` if it did not end."""
        try:
            yield from self._command(case) if case["section"] in ("kernels", "resume", "smoke") else self._rows(case)
        except torch.cuda.OutOfMemoryError as error:
            yield {"out_of_memory": str(error).split(". ")[0]}
        except Exception as error:  # one broken case must not cost the others their figures
            yield {"failed": f"{type(error).__name__}: {error}"[:2000]}

    def _rows(self, case: Figures) -> Iterator[Figures]:
        device, section = self.device, case["section"]
        if section == "machine":
            absent = device.kind == "cuda" and not torch.cuda.is_available()
            reason = "torch sees no GPU here: use --device cpu --quick to try the program"
            yield {"failed": reason} if absent else device.machine()
        elif section == "matmul":
            for shape in ((128, 128, 128),) if self.quick else SHAPES:
                yield {"shape": "×".join(map(str, shape))} | matmul(device, case["dtype"], shape, self.rounds)
        elif section == "parity":
            yield parity((CASES | ON_A_GPU)[case["case"]], device, case["dtype"])
        elif section == "peers":
            yield from peers(device, self.engine, self.rounds, self.quick, case["seconds"])
        else:
            run, engine = self._run(case), str(case["settings"].get("engine", self.engine))
            if section == "profile":
                yield where_time_goes(run, device, engine)
            else:
                yield {"rows": run.data.mono_rows} | step(run, device, engine, self.rounds, case["matmul_tflops"])

    def _command(self, case: Figures) -> Iterable[Figures]:
        """Sections whose modules need more libraries."""
        section, seconds = case["section"], case["seconds"]
        if section == "kernels":
            table = self.folder.parent / "tilings.json"
            return importlib.import_module("bench.gpu.kernels").tournament(self.device.torch, seconds, table)
        commands = importlib.import_module("bench.gpu.commands")
        if section == "smoke":
            return commands.smoke(self.folder, seconds, self.quick)
        names = list(commands.RUNS) if self.device.kind == "cuda" else ["default"]
        return commands.resume(self.folder, seconds, names, self.quick)

    def _run(self, case: Figures) -> Any:
        settings = {key: value for key, value in case["settings"].items() if key != "engine"}
        rows = 2 if self.quick else 16 if case["recipe"].startswith("xl_") else ROWS
        return run_config(case["recipe"], max(rows, case["micro_batch"]), case["micro_batch"], self.quick, **settings)


def prepare() -> Callable[[Figures], Iterator[Figures]]:
    """Load the libraries; the function measures a case."""
    measurements = Measurements(**json.loads(sys.argv[1]))
    for name in LOADED_EARLY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return measurements.rows


if __name__ == "__main__":
    answer(prepare)
