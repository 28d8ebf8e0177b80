"""The planner's command line. `xlme plan --recipe NAME` prints time, memory and cost of a run on GPUs and the command
for it. With `--budget` it prints the size of the model that a sum of money can train."""

import json
import math
import shlex
import sys
from dataclasses import dataclass, fields
from typing import Annotated

import tyro

from ..cli import fail, parse, program, without_flags
from ..config import RunConfig

DESCRIPTION = """Estimate time, memory and cost of a recipe on GPUs, and list the fastest layouts. Nothing is run.

  xlme plan --recipe base --gpus 8 --gpu h100 --dollars-per-hour 2.5"""


@dataclass(frozen=True)
class PlanSettings:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    gpus: int | None = None
    """GPUs to plan for; by default 1, or one for each stage of a pipeline (8 with --budget)."""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = "a100-80g"
    """One of h200, h100-80g (or h100), a100-80g (or a100), a100-40g, v100-32g, a10-24g, or "memory_gib,tflops" of
    another."""
    utilisation: float = 0.4
    """Assumed fraction of its peak FLOP/s that a GPU reaches while it computes; measure yours with `xlme bench gpu`."""
    dollars_per_hour: float | None = None
    """Price of one GPU for one hour, in dollars. With it the plan also has the cost."""
    budget: Annotated[float | None, tyro.conf.arg(metavar="DOLLARS")] = None
    """Dollars to spend at --dollars-per-hour. Instead of a plan, print the size, tokens and steps of the model that
    they buy, with the data and the vocabulary of the recipe (by default base)."""
    layouts: int = 4
    """Number of layouts to list, the fastest first."""
    details: bool = False
    """Print parameters, operations and memory by part too."""
    json: bool = False
    """Print JSON: the plan of the settings as they are, and the fastest layouts."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command. The exit code is 1 if no layout fits; a user's mistake ends it with one sentence and exit code
    2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--budget" in flags and not flags & {"--recipe", "--config"}:
        arguments = ["--recipe", "base", *arguments]
    names = [field.name.replace("_", "-") for field in fields(PlanSettings)]
    planner_flags = [f"--{no}{name}" for name in names for no in ("", "no-")]
    recipe_arguments = without_flags(arguments, *planner_flags)  # the printed command repeats these
    try:
        settings = parse(program("plan"), PlanSettings, DESCRIPTION, arguments)
        from .budget import CHOSEN_BY_BUDGET, affordable_model  # these modules load torch, and --help should not
        from .planner import LAYOUT_FLAGS, check_numbers, plan
        from .printed import print_budget, print_details, print_plan
        from .speed import parse_gpu

        check_numbers(settings.gpus, settings.utilisation, settings.layouts)
        _check(settings)
        if settings.budget is not None and (chosen := sorted(flags.intersection(CHOSEN_BY_BUDGET))):
            raise ValueError(f"--budget chooses {', '.join(chosen)}: leave {'it' if len(chosen) == 1 else 'them'} out")
        gpu = parse_gpu(settings.gpu)
        recipe_flags = shlex.join(without_flags(recipe_arguments, *LAYOUT_FLAGS))
        base = parse(program("plan"), PlanSettings, DESCRIPTION, without_flags(arguments, *LAYOUT_FLAGS)).run
        if settings.budget is not None:
            assert settings.dollars_per_hour is not None
            result = affordable_model(
                settings.run,
                recipe_flags,
                base,
                settings.budget,
                settings.dollars_per_hour,
                settings.gpus or 8,
                gpu,
                settings.utilisation,
            )
        else:
            result = plan(settings.run, settings.gpus, gpu, settings.utilisation, settings.layouts, base)
            if settings.dollars_per_hour is not None:
                for costs in (result, *result["layouts"]):
                    costs["dollars"] = costs["gpu_hours"] * settings.dollars_per_hour
    except ValueError as error:
        fail("xlme plan", error)
    if settings.json:
        print(json.dumps(result, indent=1))
    elif settings.budget is not None:
        print_budget(result, settings.gpus or 8)
    else:
        print_plan(result, shlex.join(recipe_arguments), recipe_flags)
        if settings.details:
            print_details(result)
        else:
            print("\n--details prints parameters, operations and memory by part.")
    if not (result["layouts"] or result.get("fits")):
        sys.exit(1)


def _check(settings: PlanSettings) -> None:
    """Raise ValueError for a number out of range, and for options that do not go together."""
    price, budget = settings.dollars_per_hour, settings.budget
    if price is not None and not 0 < price < math.inf:
        raise ValueError(f"--dollars-per-hour {price}: it must be positive")
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"--budget {budget}: it must be positive")
    if settings.details and (budget is not None or settings.json):
        raise ValueError("--details is for a plan in words: leave it out with --budget and --json")
    if budget is not None and price is None:
        raise ValueError("--budget needs the price of a GPU: add --dollars-per-hour")


if __name__ == "__main__":
    main()
