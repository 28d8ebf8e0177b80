"""The command: its arguments, and the plan as tables."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from ..cli import fail, parse
from ..config import RunConfig
from .hardware import gpu
from .report import plan
from .speed import UTILISATION
from .tables import show

DESCRIPTION = "What a recipe costs on a number of GPUs, and the best ways to run it. Nothing is run."


@dataclass(frozen=True)
class Plan:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    gpus: int | None = None
    """Default: as few as hold one copy of the model."""
    gpu: str = "a100-80g"
    """One of h200, h100-80g, a100-80g, a100-40g, v100-32g, a10-24g, or "memory_gib,tflops" of any other."""
    utilisation: float = UTILISATION
    """Share of the peak that a GPU reaches while it computes: assumed, unless you measured it."""
    layouts: int = 10
    """Layouts to list, of those that fit."""
    json: bool = False
    """Print JSON."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    try:
        command = parse(Plan, DESCRIPTION, sys.argv[1:] if arguments is None else arguments)
        if command.gpus is not None and command.gpus < 1:
            raise ValueError(f"--gpus {command.gpus}: it must be at least 1")
        if not 0 < command.utilisation <= 1:
            raise ValueError(f"--utilisation {command.utilisation}: it must be above 0 and at most 1")
        result = plan(command.run, command.gpus, gpu(command.gpu), command.utilisation, command.layouts)
    except ValueError as error:
        fail("xlme_ds.plan", error)
    if command.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, Console())
