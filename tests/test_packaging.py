"""The wheel carries every module, the DeepSpeed configs and the report's template; the pinned set fits the ranges."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("xlme_ds", "data_prep", "ds_configs", "slurm", "setup.py", "pyproject.toml", "LICENSE", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the tree stays clean."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    result = subprocess.run([*command, str(out), str(tree)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("xlme_ds-*.whl")
    return built


def test_wheel_carries_every_file(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = [path for package in ("xlme_ds", "data_prep") for path in (ROOT / package).rglob("*.py")]
    kinds = (
        ("ds_configs", "*.json"),
        ("xlme_ds", "*.html"),
        ("xlme_ds", "*.toml"),
        ("xlme_ds", "*.jinja"),
        ("data_prep", "*.jinja"),
    )
    found = [list((ROOT / folder).rglob(pattern)) for folder, pattern in kinds]
    assert all(found)
    data = [path for paths in found for path in paths]
    missing = {str(path.relative_to(ROOT)) for path in modules + data} - inside
    assert not missing
    assert {f"xlme_ds/slurm/{path.name}" for path in (ROOT / "slurm").glob("*.sh")} | {"xlme_ds/py.typed"} <= inside
    assert any(name.endswith("/LICENSE") for name in inside)


def test_configs_are_found_beside_the_installed_package(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from pathlib import Path; import xlme_ds; "
        "print(*sorted((Path(xlme_ds.__file__).parent.parent / 'ds_configs').glob('*')))"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [Path(name) for name in result.stdout.split()]
    assert [path.name for path in found] == sorted(path.name for path in (ROOT / "ds_configs").glob("*.json"))
    assert all(path.is_relative_to(tmp_path) for path in found)


def test_commands_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    """Outside of the checkout: the list of commands, the job scripts, and a plan with one of ds_configs."""
    environment = tmp_path / "venv"
    bare = ["--system-site-packages", "--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *bare, environment], check=True)
    there = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site,) = environment.glob("lib/*/site-packages")
    (site / "packages.pth").write_text(f"{there}\n")
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    subprocess.run([*pip, "install", "-q", "--no-deps", wheel], check=True)

    def xlme(*words: str) -> str:
        command = [environment / "bin/xlme", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = xlme()
    assert all(f"\n  {name}" in listed for name in ("quickstart", "pretrain", "export"))
    assert "env.sh" in xlme("slurm", "--out", ".") and (tmp_path / "slurm/pretrain_xl.sh").stat().st_size
    assert "2,398,715,713" in xlme("plan", "--recipe", "xl_zero3", "--details")


@pytest.mark.skipif("CI" not in os.environ, reason="it installs torch and all else anew: set CI=true")
def test_a_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Its requirements suffice: nothing conflicts, and a command that builds a model runs."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    pip = [tmp_path / "empty/bin/python", "-m", "pip"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in ([*pip, "install", "-q", "-c", ROOT / "constraints.txt", wheel], [*pip, "check"]):
        subprocess.run(command, check=True, cwd=tmp_path, env=alone)
    plan = [tmp_path / "empty/bin/xlme", "plan", "--recipe", "base", "--gpus", "8"]
    done = subprocess.run(plan, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.stdout.startswith("base on 8 ×"), done.stderr


def test_pinned_set_fits_the_ranges(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if line and line[0] != "#"}
    assert pins["torch"] == "2.13.0" and pins["deepspeed"] == "0.19.8"
    for requirement in requirements:
        version = pins.get(canonicalize_name(requirement.name))
        assert version and version in requirement.specifier, f"{requirement} against the pin {version}"
