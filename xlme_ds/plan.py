"""What a recipe costs, before anything runs: parameters by component and floating-point operations.

    python -m xlme_ds.plan --recipe base_zero1 [--json] [--section.key value ...]

The model is built on the meta device, so the largest one takes no memory either.
"""

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from .cli import fail, parse
from .config import RunConfig
from .flops import flops_per_step, forward_per_token, paper_forward_per_token, paper_training_flops
from .parameters import count_parameters, parameter_sizes

ACCOUNTING = (
    "discriminator = its encoder and head with the token embeddings, the figure that the paper publishes (279M, 840M, 2.2B; "
    "a vocabulary of 500K is taken as 2^19 = 524,288); generator = its encoder and masked head without the embedding it "
    "shares; trained_total counts every parameter once"
)
PAPER = (
    "as in the paper's Table 4: matrix products, backward = forward, no vocabulary softmax, 2^20 tokens taken as 1.0e6, "
    "TRTD taken as half"
)
STANDARD = "matrix products, backward = 2 × forward, vocabulary softmax at the masked tokens, every token of every row"


@dataclass(frozen=True)
class Plan:
    """Arguments of the command."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    json: bool = False
    """Print JSON."""


def plan(run: RunConfig) -> dict[str, Any]:
    """Parameters and operations of `run` on rows of `model.max_positions` tokens."""
    row_tokens = run.model.max_positions
    tokens = [rows * row_tokens * run.train.steps for rows in (run.data.mono_rows, run.data.para_rows)]
    per_token = 3.0 * forward_per_token(run.model, row_tokens, run.objective.mask_fraction)
    mrtd, trtd = (per_token * count for count in tokens)
    return {
        "recipe": run.name,
        "accounting": ACCOUNTING,
        "parameters": count_parameters(run.model) | {"components": components(run)},
        "tokens": {"per_row": row_tokens, "mono": tokens[0], "para": tokens[1]},
        "flops": {
            "forward_per_token": forward_per_token(run.model, row_tokens, run.objective.mask_fraction),
            "per_step": flops_per_step(run, row_tokens),
            "standard": {"accounting": STANDARD, "mrtd": mrtd, "both": mrtd + trtd, "both_trtd_half": mrtd + trtd / 2},
            "paper_convention": {
                "accounting": PAPER,
                "forward_per_token": paper_forward_per_token(run.model, row_tokens),
                **paper_training_flops(run, row_tokens),
            },
        },
    }


def components(run: RunConfig) -> dict[str, int]:
    """Parameters of every part of the model, in the order of the model; they add up to all."""
    sums: dict[str, int] = {}
    for name, size in parameter_sizes(run.model).items():
        parts = name.split(".")
        if len(parts) == 1:
            key = parts[0].rsplit("_", 1)[0]  # the blocks of one table
        elif parts[0] in ("generator", "discriminator"):
            key = f"{parts[0]}.{parts[1]}"
        else:
            key = parts[0]
        sums[key] = sums.get(key, 0) + size
    return sums


def show(result: dict[str, Any], console: Console) -> None:
    """Print the plan as tables."""
    parameters, flops = result["parameters"], result["flops"]
    table = Table(title=f"{result['recipe']}: parameters", title_justify="left")
    table.add_column("component")
    table.add_column("parameters", justify="right")
    for name, size in parameters["components"].items():
        table.add_row(name, f"{size:,}")
    table.add_section()
    for name in ("discriminator", "generator", "embedding", "trained_total"):
        table.add_row(name, f"{parameters[name]:,}")
    console.print(table)
    console.print(result["accounting"] + "\n", highlight=False)
    table = Table(title=f"{result['recipe']}: FLOP of the whole run", title_justify="left")
    for column in ("count", "MRTD", "MRTD + TRTD", "MRTD + TRTD / 2"):
        table.add_column(column, justify="left" if column == "count" else "right")
    standard, paper = flops["standard"], flops["paper_convention"]
    table.add_row("standard", f"{standard['mrtd']:.3g}", f"{standard['both']:.3g}", f"{standard['both_trtd_half']:.3g}")
    table.add_row("the paper's", f"{paper['mrtd']:.3g}", "", f"{paper['both']:.3g}")
    console.print(table)
    console.print(
        f"standard: {standard['accounting']}; {flops['per_step']:.4g} a step\nthe paper's: {paper['accounting']}; "
        f"{paper['forward_per_token'] / 1e6:.2f} MFLOP forward a token",
        highlight=False,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    try:
        command = parse(Plan, __doc__ or "", sys.argv[1:] if arguments is None else arguments)
        result = plan(command.run)
    except ValueError as error:
        fail("xlme_ds.plan", error)
    if command.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
