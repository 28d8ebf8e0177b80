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
    """A method for each section, from a case to its rows."""

    def __init__(self, device: str, engine: str, quick: bool, folder: str):
        self.device, self.engine, self.quick, self.folder = Device(device), engine, quick, Path(folder)
        self.rounds = 2 if quick else 5

    def rows(self, case: Figures) -> Iterator[Figures]:
        """The rows of a case; the last row has `out_of_memory` or `failed` if it did not end."""
        try:
            yield from getattr(self, case["section"])(case)
        except torch.cuda.OutOfMemoryError as error:
            yield {"out_of_memory": str(error).split(". ")[0]}
        except Exception as error:  # one broken case must not cost the others their figures
            yield {"failed": f"{type(error).__name__}: {error}"[:2000]}

    def machine(self, case: Figures) -> Iterable[Figures]:
        """The device."""
        if self.device.kind == "cuda" and not torch.cuda.is_available():
            yield {"failed": "torch sees no GPU here: use --device cpu --quick to try the program"}
            return
        yield self.device.machine()

    def matmul(self, case: Figures) -> Iterable[Figures]:
        """Rates of products."""
        for shape in ((128, 128, 128),) if self.quick else SHAPES:
            rate = matmul(self.device, case["dtype"], shape, self.rounds)
            yield {"shape": "×".join(map(str, shape))} | rate

    def parity(self, case: Figures) -> Iterable[Figures]:
        """A comparison with the CPU in float64."""
        yield parity((CASES | ON_A_GPU)[case["case"]], self.device, case["dtype"])

    def steps(self, case: Figures) -> Iterable[Figures]:
        """Speed and memory of whole steps."""
        run = self._run(case)
        figures = step(run, self.device, self._engine(case), self.rounds, case["matmul_tflops"])
        yield {"rows": run.data.mono_rows} | figures

    def profile(self, case: Figures) -> Iterable[Figures]:
        """Where the time of a step goes."""
        yield where_time_goes(self._run(case), self.device, self._engine(case))

    def kernels(self, case: Figures) -> Iterable[Figures]:
        """Every form of each attention kernel."""
        table = self.folder.parent / "tilings.json"
        return importlib.import_module("bench.gpu.kernels").tournament(self.device.torch, case["seconds"], table)

    def peers(self, case: Figures) -> Iterable[Figures]:
        """Steps of other libraries and ours, in turns."""
        return peers(self.device, self.engine, self.rounds, self.quick, case["seconds"])

    def resume(self, case: Figures) -> Iterable[Figures]:
        """Runs that are killed and resumed."""
        modes = ("default", "graphs") if self.device.kind == "cuda" else ("default",)
        return self._commands().resume(self.folder, case["seconds"], modes, self.quick)

    def smoke(self, case: Figures) -> Iterable[Figures]:
        """Every command."""
        return self._commands().smoke(self.folder, case["seconds"], self.quick)

    def _commands(self) -> Any:
        return importlib.import_module("bench.gpu.commands")

    def _run(self, case: Figures) -> Any:
        settings = {key: value for key, value in case["settings"].items() if key != "engine"}
        rows = 2 if self.quick else 16 if case["recipe"].startswith("xl_") else ROWS
        return run_config(case["recipe"], max(rows, case["micro_batch"]), case["micro_batch"], self.quick, **settings)

    def _engine(self, case: Figures) -> str:
        return str(case["settings"].get("engine", self.engine))


def prepare() -> Callable[[Figures], Iterator[Figures]]:
    """Load the libraries; the function measures a case."""
    measurements = Measurements(**json.loads(sys.argv[1]))
    for name in LOADED_EARLY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return measurements.rows


if __name__ == "__main__":
    answer(prepare)
