"""The documents: every option of a command in them exists, and every setting has a sentence."""

import ast
import importlib.util
import inspect
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import xlme_ds as xlme
from tests.launch import ROOT, python
from xlme_ds.run_commands import LAUNCHED

# The lab log has commands of earlier commits.
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "lab")]
WITH_COMMANDS = ("evaluate", "checkpoint", "report", "prep", "bench")
SETTINGS = re.compile(r"(Config|Settings|Options)$|^(Pretrain|Quickstart|Training)$")
MODULE = re.compile(r"(?:python -m |deepspeed .*--module |xlme )")


def commands(page: Path) -> list[list[str]]:
    """The commands of this package in a page's code blocks, from the module on, without the launcher before it."""
    return commands_of(page.read_text(encoding="utf-8"))


def commands_of(markdown: str) -> list[list[str]]:
    found = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", markdown, re.M | re.S):
        if language not in ("", "bash", "sh"):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            line = re.split(r"(?:^|\s)# ", line)[0]  # a comment may name commands
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
            if option not in ("--version", "--help"):
                shown = help_of(*named(words))
                # The help of a recipe that has a flag names the form that turns it off; the help of all names the flag.
                forms = {option, re.sub(r"^--(\w+\.)no-", r"--\1", option)}
                found = any(re.search(rf"{re.escape(form)}\b", shown) for form in forms)
                assert found, f"{' '.join(words)}: no {option}"


def test_the_tests_without_which_are_named() -> None:
    (line,) = re.findall("^- `--which .*", (ROOT / "docs/howto/evaluate.md").read_text(encoding="utf-8"), re.M)
    without = [name for name in xlme.evaluate.__all__ if f"`{name}`" in line]
    assert without == [name for name in xlme.evaluate.__all__ if "--which" not in help_of("xlme_ds", "evaluate", name)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_the_readme_starts_every_command_by_xlme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "xlme " in readme and not re.search(r"python -m (xlme_ds|data_prep)|deepspeed --", readme)


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_cost_of_base(gpus: int) -> None:
    """Of the README: what the planner's first line says."""
    words = f"plan --recipe base --gpus {gpus} --gpu h100 --dollars-per-hour 2.5"
    first = python("-m", "xlme_ds", *words.split()).stdout.splitlines()[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {gpus} H100 \| (.*) \|$", readme, re.M)
    at_a_tenth = python("-m", "xlme_ds", *words.split(), "--utilisation", "0.1").stdout.splitlines()[0]
    for cell, line in zip(row.split(" | "), (first, at_a_tenth), strict=True):
        time, _, dollars = cell.partition(", ")
        assert f": {time}, " in line and f", {dollars} " in line, line


def test_the_run_on_one_gpu() -> None:
    """Of the README: its settings are in a variable of the shell. The plans take as long as the page says, and a step
    reads as many tokens as ELECTRA-Base's (256 rows of 512)."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"^settings=\((.*)\)$", text, re.M)
    ((time, time_of_base),) = re.findall(r"(\d+ h \d+ min) on an H100 \(XLM-E: (\d+ h \d+ min)\)", text)
    (recipe,) = re.findall(r"^recipe=(\w+) ", text, re.M)
    for name, told in ((recipe, time), ("base", time_of_base)):
        words = f"plan --recipe {name} {settings} --gpus 1 --gpu h100"
        plan = python("-m", "xlme_ds", *words.split()).stdout
        assert plan.startswith(f"{name} on 1 × h100-80g: {told}, ")
    rows = {key: int(value) for key, value in re.findall(r"--(\S+) (\d+)(?= |$)", settings)}
    assert rows["data.mono-rows"] + rows["data.para-rows"] == 256
    mixed = rows["data.mono-rows"] * rows["train.steps"]
    assert text.count(f"--mono-rows {mixed} --para-rows {mixed} ") == 1


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_rows_are_mixed_as_often_as_training_reads_them(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")
    flags = r"--data.mono-rows (\d+) --data.para-rows (\d+) +--train.steps (\d+)"
    ((rows, para_rows, steps),) = re.findall(flags, text)
    mixed = int(rows) * int(steps)
    assert rows == para_rows and text.count(f"--mono-rows {mixed} --para-rows {mixed} ") == 1


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


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    return generate


def test_the_reference_has_every_public_object() -> None:
    """Each with a sentence; and every setting. In a process that has not imported the module `xlme_ds.pretrain`, which
    would take the place of the function `xlme.pretrain`."""
    folder = str(ROOT / "docs")
    code = f"import sys; sys.path.insert(0, {folder!r}); import generate; print(generate.python())"
    sections = dict(re.findall(r"^#+ (\S+)\n\n(.*?)(?=^#|\Z)", python("-c", code).stdout, re.M | re.S))
    assert "config: RunConfig, data: Path" in sections["xlme.pretrain"]
    models = [
        f"model.{name}" for name, value in vars(xlme.TextModel).items() if inspect.isfunction(value) and name[0] != "_"
    ]
    tests = [f"xlme.evaluate.{name}" for name in xlme.evaluate.__all__]
    attributes = ["xlme.recipes.RECIPES", "xlme.recipes.SUMMARIES", "model.folder", "model.device"]
    functions = [*models, *tests, "xlme.plan.run", "xlme.export.from_hf"]
    for name in (*(f"xlme.{name}" for name in xlme.__all__), *functions, *attributes):
        signature, _, sentence = sections[name].rpartition("```\n\n")
        assert len(sentence or signature) > 30 and "self" not in signature, name
    assert f"`learning_rate` | `{xlme.recipe('base').optimizer.learning_rate}`" in sections["config.optimizer"]
    micro_batches = xlme.RunConfig("x").data.micro_batch, xlme.recipe("base").data.micro_batch
    assert f"`micro_batch` | `{micro_batches[0]}`" in sections["config.data"] and micro_batches[0] != micro_batches[1]
    assert "the class's defaults, which recipes change" in sections["xlme.RunConfig"]


def test_folded_commands_are_the_same_commands(generate: ModuleType) -> None:
    """The site folds long commands; a copied one still runs, and none is cut inside of an option."""
    folded_lines = 0
    for page in PAGES:
        markdown = page.read_text(encoding="utf-8")
        folded = generate.fold_commands(markdown)
        assert commands_of(folded) == commands_of(markdown), page
        folded_lines += folded.count("\n") - markdown.count("\n")
    assert folded_lines > 20
    said = generate.fold_commands(f'```\nxlme plan --one {"a" * 90} "--two --three"  # why\n```\n')
    assert said == f'```\n# why\nxlme plan \\\n    --one {"a" * 90} "--two --three"\n```\n'
