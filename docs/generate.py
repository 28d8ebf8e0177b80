"""Pages of the reference that are made from the code, as a hook of mkdocs."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Links to files of the tree, which is not part of the site.
TREE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:xlme_ds|data_prep|slurm|bench|tests|ds_configs|README|CHANGELOG|CITATION)[^)]*\)"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    for name, content in (("commands", commands()), ("recipes", recipes())):
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the tree become plain text."""
    return TREE.sub(r"\1", markdown)


def commands() -> str:
    """Every command with what its `--help` prints."""
    from data_prep.__main__ import STAGES
    from xlme_ds.__main__ import COMMANDS

    pages = ["# Commands\n\nEvery command, as `--help` prints it; of `pretrain` as `--help-all` does.\n"]
    calls = [("xlme", ["xlme_ds"])]
    calls += [(f"xlme {name}", ["xlme_ds", name]) for name in COMMANDS if name != "prep"]
    calls += [(f"data_prep {name}", ["data_prep", name]) for name in STAGES]
    variables = os.environ | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    for title, words in calls:
        asked = "--help-all" if words[-1] == "pretrain" else "--help"
        command = [sys.executable, "-W", "ignore", "-m", *words, asked]
        shown = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
        shown = "".join(
            textwrap.fill(line, 80) + "\n" if len(line) > 82 else line for line in shown.splitlines(keepends=True)
        )
        shown = shown.replace("python -m xlme_ds ", "xlme ")
        pages.append(f"## {title}\n\n```output\n{shown}```\n")
    return "\n".join(pages)


def recipes() -> str:
    """Every recipe with its sizes."""
    from xlme_ds.counting import count_parameters
    from xlme_ds.recipes import RECIPES

    lines = [
        "# Recipes\n\nA recipe is every setting of a run, in `xlme_ds/recipes/`. Layers are the generator's and the"
    ]
    lines += ["discriminator's; objectives with one encoder use the second number.\n"]
    lines += [
        "| recipe | parameters in training, M | layers | width | objective | steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in RECIPES.items():
        millions, model = count_parameters(run)["trained_total"] / 1e6, run.model
        layers = f"{model.generator_layers} + {model.discriminator_layers}"
        objective, steps = run.objective.name, run.train.steps
        lines.append(f"| `{name}` | {millions:,.0f} | {layers} | {model.width} | {objective} | {steps:,} |")
    return "\n".join(lines) + "\n"
