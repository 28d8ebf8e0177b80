"""The import floors: a file imports only from lower floors or its own folder; a few libraries have one importer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import STAGES

ROOT = Path(__file__).resolve().parents[1]

# The longest matching name counts. A module that matches no name fails the test: give it a floor here.
FLOORS = {
    "xlme_ds.io": -1,
    "xlme_ds.config": 0,
    "xlme_ds.checkpoint_names": 0,
    "xlme_ds.data.batch": 0,
    "xlme_ds.data.rows": 0,
    "xlme_ds.recipes": 1,
    "xlme_ds.data": 1,
    "xlme_ds.checkpoint.state_files": 2,
    "xlme_ds.models": 1,
    "xlme_ds.settings_file": 1,
    "xlme_ds.cli": 2,
    "xlme_ds.run_commands": 1,
    "xlme_ds.objectives": 2,
    "xlme_ds.counting": 3,
    "xlme_ds.trained": 3,
    "xlme_ds.validate": 3,
    "xlme_ds.engine_file": 2,
    "xlme_ds.engine": 4,
    "xlme_ds.checkpoint": 5,
    "xlme_ds.first_weights": 5,
    "xlme_ds.plan": 5,
    "xlme_ds.train": 6,
    "xlme_ds.audit": 7,
    "xlme_ds.evaluate": 7,
    "xlme_ds.report": 7,
    "xlme_ds.report.__main__": 8,
    "xlme_ds.finetune": 7,
    "xlme_ds.translate": 7,
    "xlme_ds.translate.decoder": 2,
    "xlme_ds.translate.model": 2,
    "xlme_ds.translate.objective": 3,
    "xlme_ds.translate.sentences": 2,
    "xlme_ds.translate.sides": 2,
    "xlme_ds.compare": 8,
    "xlme_ds.export": 8,
    "xlme_ds.api": 8,
    "xlme_ds.predict": 9,
    "xlme_ds.job_scripts": 8,
    "xlme_ds.print_config": 8,
    "xlme_ds.benchmarks": 8,
    "xlme_ds.pretrain": 9,
    "xlme_ds.quickstart": 10,
    "xlme_ds.launch": 10,
    "xlme_ds.__main__": 10,
}
SHARED_WITH_DATA_PREP = {
    f"xlme_ds.data.{name}" for name in ("schema", "vocabulary", "masking", "shards", "compiled")
} | {f"xlme_ds.io.{name}" for name in ("arguments", "errors", "files", "folders", "help", "stdout")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in ("xlme_ds", "data_prep") for path in (ROOT / package).rglob("*.py")}


def imports(module: str, path: Path) -> set[str]:
    """Dotted names that `module` imports anywhere, also in functions; a submodule is named rather than its package."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            stem = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*stem, *([node.module] if node.module else [])])
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in FILES else source for a in node.names}
    return found - {module}


GRAPH = {module: imports(module, path) for module, path in sorted(FILES.items())}


def floor(module: str) -> int:
    names = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    assert names, f"{module} stands on no floor: add it to the table in {Path(__file__).name}"
    return FLOORS[max(names, key=len)]


def folder(module: str) -> str:
    return ".".join(module.split(".")[:2])


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_files_are_found() -> None:
    assert {"xlme_ds", "xlme_ds.data.schema", "data_prep"} <= FILES.keys()
    assert "xlme_ds.data.schema" in GRAPH["xlme_ds.data.vocabulary"], "the import reader misses a known import"


@pytest.mark.parametrize("module", [m for m in GRAPH if under(m, "xlme_ds") and m != "xlme_ds"])
def test_floor(module: str) -> None:
    mine = floor(module)
    for target in sorted(GRAPH[module]):
        if not under(target, "xlme_ds") or target == "xlme_ds":
            continue
        allowed = floor(target) < mine or (floor(target) == mine and folder(target) == folder(module))
        assert allowed, f"{module} (floor {mine}) imports {target} (floor {floor(target)})"


def test_every_row_of_the_table_has_modules() -> None:
    stale = [name for name in FLOORS if not any(under(module, name) for module in FILES)]
    assert not stale, f"FLOORS names {stale}, which are no longer in the tree"


def test_package_imports_nothing_of_ours() -> None:
    """Before one of its functions is called."""
    code = "import sys, xlme_ds; sys.exit(any(name.startswith('xlme_ds.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_data_prep_and_training_meet_at_the_contract_only() -> None:
    for module, targets in GRAPH.items():
        ours = {t for t in targets if under(t, "xlme_ds")}
        if under(module, "data_prep"):
            assert ours <= SHARED_WITH_DATA_PREP, f"{module} imports {sorted(ours - SHARED_WITH_DATA_PREP)}"
            assert not any(under(t, "torch") for t in targets), f"{module} imports torch"
        else:
            assert not any(under(t, "data_prep") for t in targets), f"{module} imports data_prep"


def test_only_the_engine_imports_deepspeed() -> None:
    importers = {module for module, targets in GRAPH.items() if any(under(t, "deepspeed") for t in targets)}
    assert all(under(module, "xlme_ds.engine") for module in importers), sorted(importers)


def test_code_that_travels_imports_nothing_of_ours() -> None:
    remote = {module: targets for module, targets in GRAPH.items() if under(module, "xlme_ds.export.remote")}
    assert len(remote) == 4
    outside = {t.split(".")[0] for targets in remote.values() for t in targets if not under(t, "xlme_ds.export.remote")}
    assert outside == {"functools", "typing", "torch", "transformers"}


def test_no_import_cycle() -> None:
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", f"import cycle: {' -> '.join([*trail, module])}"
        if module in state:
            return
        state[module] = "open"
        for target in sorted(GRAPH[module] & FILES.keys()):
            visit(target, (*trail, module))
        state[module] = "done"

    for module in GRAPH:
        visit(module, ())


# --help of a command answers at once, because its module loads no torch.
COMMANDS = [f"xlme_ds.{name}.__main__" for name in ("evaluate", "export", "finetune", "plan", "report", "translate")]
LIGHT = [
    "xlme_ds",
    "xlme_ds.config",
    "xlme_ds.data.vocabulary",
    "xlme_ds.report.run_page",
    "xlme_ds.pretrain",
    "xlme_ds.print_config",
    *COMMANDS,
]


@pytest.mark.parametrize("module", LIGHT)
def test_import_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"import {module} loads torch {result.stderr}"


def test_data_prep_compiles_nothing_but_to_show_rows() -> None:
    """numba takes half a second to import, and 117 MiB of every process."""
    stages = [f"data_prep.{module}" for stage, (module, _) in STAGES.items() if stage != "show"]
    code = f"import sys, {', '.join(stages)}; sys.exit('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert len(stages) > 5 and result.returncode == 0, f"numba is imported {result.stderr}"
