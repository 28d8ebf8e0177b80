"""Copies docs/ to build/docs, which the site is built from, folds long commands there and adds the pages of the
reference that are made from the code: `python docs/generate.py`."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "build" / "docs"
_COLUMNS = 74  # of a command on a page, where more would be cut off; longer ones are folded before an option
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_PYTHON = """Errors that you can correct are ValueErrors, whose sentence says how. Dictionaries of scores are the
commands' [JSON](data-formats.md#result-files). Runs are [these folders](run-folder.md), recipes [these](recipes.md).
"""
_SIGNATURE = re.compile(r"def \w+(?P<parameters>\(.*?\)(?: -> .*?)?):\n", re.S)
_QUOTED = re.compile(r"(?<=: |> )\"([\w |.]+)\"")  # a type whose module is not imported
_EXAMPLE = re.compile(r"(from \w+ )?import |(\w+ = )?xlme\.")
_OPTION = re.compile(r" (?=--[a-z])(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)")  # before an option, outside of quotes


def main() -> None:
    """Write build/docs anew."""
    shutil.rmtree(DOCS, ignore_errors=True)
    shutil.copytree(ROOT / "docs", DOCS, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in DOCS.rglob("*.md"):
        page.write_text(fold_commands(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, content in (("commands", commands()), ("recipes", recipes()), ("python", python())):
        (DOCS / "reference" / f"{name}.md").write_text(content, encoding="utf-8")


def fold_commands(markdown: str) -> str:
    """`markdown` with the commands of its shell blocks folded by backslashes, each comment on a line before it."""

    def folded(block: re.Match[str]) -> str:
        if block["language"] not in ("", "bash", "sh"):
            return block[0]
        code = re.sub(r" *\\\n *", " ", block["code"])
        lines = [line for text in code.splitlines() for line in _fold(text)]
        fence = block["indent"] + "```"
        return "\n".join([fence + block["language"], *lines, fence])

    return _BLOCK.sub(folded, markdown)


def _fold(line: str) -> list[str]:
    if len(line) <= _COLUMNS:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    command, _, comment = line.partition("  # ")
    lines = [f"{indent}# {comment}"] if comment else []
    current, *options = _OPTION.split(command.strip())
    current = indent + current
    for option in options:
        if len(current) + len(option) + 3 > _COLUMNS:
            lines.append(f"{current} \\")
            current = f"{indent}    {option}"
        else:
            current += f" {option}"
    return [*lines, current]


def commands() -> str:
    """Every command with what its `--help` prints."""
    from data_prep.__main__ import STAGES
    from xlme_ds.__main__ import COMMANDS

    pages = ["# Commands\n\nEvery command, as `--help` prints it; of `pretrain` as `--help-all` does.\n"]
    calls = [("xlme", ["xlme_ds"])]
    calls += [(f"xlme {name}", ["xlme_ds", name]) for name in COMMANDS if name != "prep"]
    calls += [(f"xlme prep {name}", ["xlme_ds", "prep", name]) for name in STAGES]
    variables = os.environ | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    for title, words in calls:
        flag = "--help-all" if words[-1] == "pretrain" else "--help"
        command = [sys.executable, "-W", "ignore", "-m", *words, flag]
        help_text = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
        lines = [textwrap.fill(line, 80) if len(line) > 81 else line for line in help_text.splitlines()]
        pages.append("\n".join([f"## {title}\n\n```output", *lines, "```\n"]))
    return "\n".join(pages)


def recipes() -> str:
    """Every recipe with its sizes."""
    from xlme_ds.counting import count_parameters
    from xlme_ds.recipes import RECIPES, SUMMARIES

    lines = [
        "# Recipes\n\nA recipe is every setting of a run, in `xlme_ds/recipes/`. Layers are the generator's and the",
        "discriminator's; objectives with one encoder use the second number. In brackets: GPUs that its micro-batch",
        "fits without offloading.\n",
        "| recipe | | parameters in training, M | layers | width | objective | steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in RECIPES.items():
        millions, model = count_parameters(run)["trained_total"] / 1e6, run.model
        layers = f"{model.generator_layers} + {model.discriminator_layers}"
        sizes = f"{millions:,.0f} | {layers} | {model.width} | {run.objective.name} | {run.train.steps:,}"
        lines.append(f"| `{name}` | {SUMMARIES[name]} | {sizes} |")
    return "\n".join(lines) + "\n"


def python() -> str:
    """Every public object of `xlme_ds`, in the order of use, and the types of what its functions take and return."""
    import xlme_ds as xlme
    from xlme_ds.api import ScoredPiece
    from xlme_ds.config import EncoderName, ModelType, RunConfig

    pages = [f"# Python\n\n{_text(xlme)}", _PYTHON]
    for name in ("recipe", "plan", "pretrain", "load", "evaluate", "finetune", "export", "translate"):
        member = getattr(xlme, name)
        if not isinstance(member, ModuleType):
            pages.append(_function(f"xlme.{name}", member))
            continue
        pages.append(f"## xlme.{name}\n\n{_text(member)}")
        pages += [_function(f"xlme.{name}.{key}", getattr(member, key), "###") for key in member.__all__]
    pages += [f"## xlme.recipes\n\n{_text(xlme.recipes)}", *_attributes("xlme.recipes", xlme.recipes)]
    pages.append(f"## xlme.TextModel\n\n`xlme.load` returns one. {_text(xlme.TextModel)}")
    pages += _attributes("model", xlme.TextModel)
    pages += [_function(f"model.{name}", getattr(xlme.TextModel, name), "###") for name in ("encode", "fill", "judge")]
    pages.append(f"## xlme.ScoredPiece\n\nA named tuple ({', '.join(ScoredPiece._fields)}). {_text(ScoredPiece)}")
    choices = {"Models": "Path | str | Sequence[Path | str]", "EncoderName": EncoderName, "ModelType": ModelType}
    pages.append("## Types\n\n```python")
    pages += [f"{name} = {str(kind).replace('typing.', '')}" for name, kind in choices.items()]
    pages.append("```\n")
    pages.append(_settings(RunConfig(name="custom")))
    return "\n".join(pages)


def _function(name: str, function: Callable[..., Any], heading: str = "##") -> str:
    """A heading, the signature as the source has it, and the docstring."""
    signature = _SIGNATURE.search(inspect.getsource(function))
    assert signature is not None, name
    parameters = _QUOTED.sub(r"\1", textwrap.dedent(signature["parameters"])).replace("(self, ", "(")
    return f"{heading} {name}\n\n```python\n{name}{parameters}\n```\n\n{_text(function)}"


def _attributes(name: str, documented: Any) -> Iterator[str]:
    """A heading and the docstring of each attribute that has one in the source. `name`: of what has them."""
    from docstring_parser import parse_from_object

    for attribute in parse_from_object(documented).params:
        yield f"### {name}.{attribute.arg_name}\n\n{attribute.description}\n"


def _text(documented: Any) -> str:
    """A docstring as Markdown: paragraphs that are calls are code."""
    paragraphs = (inspect.getdoc(documented) or "").split("\n\n")
    shown = [f"```python\n{text}\n```" if _EXAMPLE.match(text) else text for text in paragraphs]
    return "\n\n".join(shown) + "\n"


def _settings(config: Any) -> str:
    """Every setting of a run with its default and help, a table for each section."""
    from xlme_ds.io.toml import help_of

    lines = [f"## xlme.RunConfig\n\n{_text(config)}\nThe tables have the class's defaults, which recipes change.\n"]
    for name, section in vars(config).items():
        if is_dataclass(section):
            rows = [
                f"| `{key}` | `{getattr(section, key)!r}` | {about.replace('|', chr(92) + '|')} |"
                for key, about in help_of(type(section)).items()
            ]
            lines += [f"### config.{name}\n", "| setting | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
