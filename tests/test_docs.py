"""The documents: every option of a command in them exists, and every setting has a sentence."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.launch import ROOT, python
from xlme_ds.launch import LAUNCHED

# The lab log has commands of earlier commits.
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "lab")]
WITH_COMMANDS = ("evaluate", "checkpoint", "report", "prep", "bench")
SETTINGS = re.compile(r"(Config|Settings|Options)$|^(Pretrain|Quickstart|Training)$")
MODULE = re.compile(r"(?:python -m |deepspeed .*--module |xlme )")


def commands(page: Path) -> list[list[str]]:
    """The commands of this package in a page's code blocks, from the module on, without the launcher before it."""
    found = []
    for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            started = MODULE.search(line)
            words = shlex.split(line[started.end() :] if started else "", comments=True)
            if not words:
                continue
            module = f"xlme_ds {words[0]}" if started and started[0] == "xlme " else words[0]
            if re.match(r"xlme_ds|data_prep|bench|tests\.", module):
                found += parts([*module.split(), *words[1:]])
    return found


def parts(words: list[str]) -> list[list[str]]:
    """The command, or what `xlme launch` launches as a command of its own."""
    place = next((place for place, word in enumerate(words) if word in LAUNCHED), None)
    if words[:2] != ["xlme_ds", "launch"] or place is None:
        return [words]
    return [words[:place], ["xlme_ds", *words[place:]]]


@cache
def help_of(*words: str) -> str:
    shown = python("-m", *words, "--help", COLUMNS=200)
    assert shown.returncode == 0, f"{' '.join(words)} --help: {shown.stderr[-500:]}"
    more = python("-m", *words, "--help-all", COLUMNS=200).stdout if "--help-all" in shown.stdout else ""
    return shown.stdout + more


def named(words: list[str]) -> tuple[str, ...]:
    """The module, and the command in it."""
    take = 1
    if words[0] == "xlme_ds":
        take = 3 if words[1] in WITH_COMMANDS else 2
    elif words[0] == "data_prep" or words[0].removeprefix("xlme_ds.") in WITH_COMMANDS:
        take = 2
    return tuple(word for word in words[:take] if not word.startswith("-"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_option_of_a_command_exists(page: Path) -> None:
    for words in commands(page):
        if "--" in words:
            words = words[: words.index("--")]
        for option in (word.split("=")[0] for word in words if word.startswith("--") and "$" not in word):
            if option not in ("--branch", "--version", "--help"):
                shown = help_of(*named(words))
                assert re.search(rf"{re.escape(option)}\b", shown), f"{' '.join(words)}: no {option}"


def test_there_are_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 50


def settings() -> list[tuple[str, ast.ClassDef]]:
    """The dataclasses whose fields are options of a command, or settings of a run."""
    found = []
    for path in sorted(path for package in ("xlme_ds", "data_prep") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.decorator_list and SETTINGS.search(node.name):
                found.append((str(path.relative_to(ROOT)), node))
    return found


def test_every_setting_has_a_sentence() -> None:
    found = settings()
    assert {"ModelConfig", "PlanSettings", "FinetuneSettings", "MixConfig", "LayerOptions"} <= {
        c.name for _, c in found
    }
    sections = {node.name for _, node in found}
    without = [
        f"{path}: {node.name}.{ast.unparse(field.target)}"
        for path, node in found
        for field, after in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and not sections & {word.id for word in ast.walk(field.annotation) if isinstance(word, ast.Name)}
        and not (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and len(str(after.value.value)) > 12
        )
    ]
    assert not without, f"no sentence: {', '.join(without)}"
