"""A process of bench.gpu: loads what it needs, then measures the cases that its standard input names, a line each."""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from bench.gpu.parity import CASES, ON_A_GPU, parity
from bench.gpu.steps import Device, matmul, run_config, step, where_time_goes

Figures = dict[str, Any]
# The last is the feed-forward product of Base on 32 rows of 512.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 768, 3072))
ROWS = 64  # of each task a step: the published batch on 32 GPUs
LOADED_EARLY = (
    "xlme_ds.engine.build",
    "xlme_ds.engine.zero",
    "xlme_ds.plan.memory",
    "torch._inductor.compile_fx",
    "triton",
)


class Measurements:
    """A method a section; each takes the case and gives its rows."""

    def __init__(self, device: str, engine: str, quick: bool, folder: str):
        self.device, self.engine, self.quick, self.folder = Device(device), engine, quick, Path(folder)
        self.rounds = 2 if quick else 5

    def rows(self, case: Figures) -> Iterator[Figures]:
        """The rows of a case, or why there are no more."""
        try:
            yield from getattr(self, case["section"])(case)
        except torch.cuda.OutOfMemoryError as error:
            yield {"out_of_memory": str(error).split(". ")[0]}
        except Exception as error:  # one broken case must not cost the others their figures
            yield {"failed": f"{type(error).__name__}: {error}"[:2000]}

    def machine(self, case: Figures) -> Iterable[Figures]:
        """The device and what computes on it."""
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
        """Against the CPU in float64."""
        yield parity((CASES | ON_A_GPU)[case["case"]], self.device, case["dtype"])

    def steps(self, case: Figures) -> Iterable[Figures]:
        """Speed and memory of whole steps."""
        run = self._run(case)
        found = step(run, self.device, self._engine(case), self.rounds, case["matmul_tflops"])
        yield {"rows": run.data.mono_rows} | found

    def profile(self, case: Figures) -> Iterable[Figures]:
        """Where a step's time goes."""
        yield where_time_goes(self._run(case), self.device, self._engine(case))

    def kernels(self, case: Figures) -> Iterable[Figures]:
        """Every form of each kernel against the others and torch's."""
        table = self.folder.parent / "tilings.json"
        return importlib.import_module("bench.gpu.kernels").tournament(self.device.torch, case["seconds"], table)

    def peers(self, case: Figures) -> Iterable[Figures]:
        """Other libraries' steps and ours, in turns."""
        from bench.peers.gpu_step import peers

        return peers(self.device, self.engine, self.rounds, self.quick, case["seconds"])

    def resume(self, case: Figures) -> Iterable[Figures]:
        """Killed and resumed against left alone."""
        from bench.gpu.commands import resume

        modes = ("default", "graphs") if self.device.kind == "cuda" else ("default",)
        return resume(self.folder, case["seconds"], modes, self.quick)

    def smoke(self, case: Figures) -> Iterable[Figures]:
        """Every command."""
        from bench.gpu.commands import smoke

        return smoke(self.folder, case["seconds"], self.quick)

    def _run(self, case: Figures) -> Any:
        settings = {key: value for key, value in case["settings"].items() if key != "engine"}
        rows = 2 if self.quick else 16 if case["recipe"].startswith("xl_") else ROWS
        return run_config(case["recipe"], max(rows, case["micro_batch"]), case["micro_batch"], self.quick, **settings)

    def _engine(self, case: Figures) -> str:
        return str(case["settings"].get("engine", self.engine))


def main() -> None:
    """Say with an empty row that all is loaded; answer every line with rows, a line each, and an empty one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the standard error
    measurements = Measurements(**json.loads(sys.argv[1]))
    for name in LOADED_EARLY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        for row in measurements.rows(json.loads(line)):
            print(json.dumps(row), file=answers, flush=True)
        print("{}", file=answers, flush=True)
    answers.flush()
    os._exit(0)  # at once: the next case waits for the memory


if __name__ == "__main__":
    main()
