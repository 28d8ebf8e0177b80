"""The planner's command line: `python -m xlme_ds.plan --recipe NAME` prints the plan as tables or as JSON."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from ..cli import fail, parse, program
from ..config import RunConfig
from .planner import plan
from .speed import UTILISATION, gpu_of

DESCRIPTION = "Cost of a recipe on a number of GPUs, and the best ways to run it. Nothing is run."


@dataclass(frozen=True)
class PlanSettings:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    gpus: int | None = None
    """GPUs to plan for; by default as few as hold one copy of the model."""
    gpu: str = "a100-80g"
    """One of h200, h100-80g, a100-80g, a100-40g, v100-32g, a10-24g, or "memory_gib,tflops" of another."""
    utilisation: float = UTILISATION
    """Share of its peak that a GPU reaches while it computes: assumed; measure yours with `python -m bench.gpu`."""
    layouts: int = 10
    """Layouts to list, the fastest first."""
    json: bool = False
    """Print the same figures as JSON."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    try:
        settings = parse(program("plan"), PlanSettings, DESCRIPTION, sys.argv[1:] if arguments is None else arguments)
        if settings.gpus is not None and settings.gpus < 1:
            raise ValueError(f"--gpus {settings.gpus}: it must be at least 1")
        if settings.layouts < 1:
            raise ValueError(f"--layouts {settings.layouts}: it must be at least 1")
        if not 0 < settings.utilisation <= 1:
            raise ValueError(f"--utilisation {settings.utilisation}: it must be above 0 and at most 1")
        result = plan(settings.run, settings.gpus, gpu_of(settings.gpu), settings.utilisation, settings.layouts)
    except ValueError as error:
        fail("xlme_ds.plan", error)
    if settings.json:
        print(json.dumps(result, indent=1))
        return
    console = Console(markup=False, emoji=False)
    objective = result["objective"]
    terms = ", ".join(f"{name} ({objective['quantities'][name]['title']})" for name in objective["terms"])
    console.print(f"{result['recipe']}: {objective['description']}; loss = {terms}\n", highlight=False)
    for part in (_parameters, _operations, _own_layout, _layouts):
        table, note = part(result)
        console.print(table)
        console.print(note + "\n", highlight=False)


def _table(title: str, columns: Sequence[str], *sections: Iterable[Sequence[str]]) -> Table:
    """A table of text cells, its sections of rows with a line between them."""
    table = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _parameters(result: dict[str, Any]) -> tuple[Table, str]:
    parameters = dict(result["parameters"])
    parts = parameters.pop("components"), parameters
    sections = [[(name, f"{size:,}") for name, size in part.items()] for part in parts]
    return _table(f"{result['recipe']}: parameters", ("component", "parameters"), *sections), result["accounting"]


def _operations(result: dict[str, Any]) -> tuple[Table, str]:
    standard, paper = result["flops"]["standard"], result["flops"]["paper_convention"]
    rows = [
        ("standard", *(f"{standard[kind]:.3g}" for kind in ("mono", "both", "both_para_half"))),
        ("the paper's", f"{paper['mono']:.3g}", "", f"{paper['both']:.3g}"),
    ]
    columns = "count", "mono", "mono + para", "mono + para / 2"
    phases = [
        f"phase {number} from step {phase['first_step']:,}: {phase['tokens']:.3g} tokens in {phase['steps']:,} steps, "
        f"{phase['mask_fraction']:.0%} predicted\n"
        for number, phase in enumerate(result["phases"], 1)
    ]
    return _table(f"{result['recipe']}: FLOP of the whole run", columns, rows), "".join(phases[len(phases) == 1 :]) + (
        f"standard: {standard['accounting']}; {result['flops']['per_step']:.4g} a step\nthe paper's: "
        f"{paper['accounting']}; {paper['forward_per_token'] / 1e6:.2f} MFLOP forward a token"
    )


def _own_layout(result: dict[str, Any]) -> tuple[Table, str]:
    hardware, memory = result["hardware"], result["memory_per_gpu_gib"]
    title = f"{result['recipe']} on {hardware['gpus']} × {hardware['gpu']}: as the recipe is"
    table = _table(title, list(memory), [[f"{size:.2f}" for size in memory.values()]])
    table.columns[0].justify = "right"
    assumed, seconds = result["assumptions"], result["seconds_per_step"]
    parts = ", ".join(f"{name} {seconds[name]:.3g}" for name in ("compute", "bubble", "transfer", "offload"))
    return table, (
        f"GiB a GPU at the fullest moment ({result['fullest_at']}): {'fits' if result['fits'] else 'does not fit'} "
        f"into {hardware['memory_gib']:g} GiB with {assumed['memory_reserved']:.0%} of it set aside\n"
        f"{result['rows_per_micro_batch']} rows a micro-batch, {result['accumulation']} micro-batches a step; a GPU "
        f"sends {result['communication_bytes_per_step']['total'] / 1e9:.3g} GB a step\nestimated "
        f"{result['tokens_per_s']:,} tokens/s ({result['tokens_per_s_per_gpu']:,} a GPU), {result['days']:g} days; a "
        f"step {seconds['step']:.3g} s ({parts})\nassumed, not measured: {assumed['utilisation']:.0%} of "
        f"{hardware['peak_tflops']:g} TFLOP/s ({hardware['precision']}) while computing, "
        f"{assumed['link_efficiency']:.0%} of the links; over the whole step {result['of_peak']:.1%} of peak\n"
        f"{hardware['source']}"
    )


def _layouts(result: dict[str, Any]) -> tuple[Table, str]:
    title = f"layouts that fit, the fastest first ({len(result['layouts'])} of {result['layouts_that_fit']})"
    rows = [
        (
            layout["settings"],
            f"{layout['memory_per_gpu_gib']['total']:.1f}",
            f"{layout['tokens_per_s']:,}",
            f"{layout['days']:.2f}",
        )
        for layout in result["layouts"]
    ]
    table = _table(title, ("settings", "GiB", "tokens/s", "days"), rows)
    note = "the same assumptions; add the settings to the command line of the run"
    return table, note if result["layouts"] else "no layout fits: take more GPUs, larger ones, or offload"


if __name__ == "__main__":
    main()
