"""Systems under equal training: `python -m xlme_ds.compare --recipes A,B,C+D --budget FLOPS --data DIR --heldout DIR
--out DIR -- …`.

Trains every recipe to the same number of operations, scores it several times on the way, and writes compare.md,
compare.json and the plot. `C+D` is C for half the budget and D, started from its weights, for the other. Settings
behind `--` are those of `xlme_ds.pretrain` and go to all alike. Every run and test is a command that is printed first;
what is done is not done again.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..cli import fail
from ..data.schema import TASKS, write_json
from ..data.shards import RowStore
from ..engine.build import open_data
from ..evaluate.tables import write_text
from ..folders import lock
from ..run_commands import environment, launch, run
from .page import plot, tables
from .results import results
from .scores import Tests, require_labels
from .systems import Budget, System, system


@dataclass(frozen=True)
class Compare:
    """Arguments of the command."""

    recipes: str
    """Names with commas between them; the first is the one that the others are measured against."""
    budget: float
    """Floating-point operations of each system and seed, forward and backward, by the planner's count."""
    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `data_prep mix` wrote."""
    heldout: Path
    """The same of text kept out of training; its pairs are the test of retrieval."""
    out: Path
    rows: int = 4096
    """Rows of a step, shared out between text and pairs as each recipe does."""
    points: int = 4
    """How often every system is scored, at equal distances."""
    seeds: tuple[int, ...] = (1,)
    processes: int = 1
    """Training processes on this machine."""
    pairs: Path | None = None
    """Held-out pairs as text instead of those of --heldout."""
    tatoeba: Path | None = None
    align: Path | None = None
    ner: Path | None = None
    """Folders of the tests, as `xlme_ds.evaluate` and `xlme_ds.finetune` read them; those not named are left out."""
    ner_points: int = 1
    """Fine-tune the last so many points of each system."""
    tuning: str = ""
    """Settings of fine-tuning in one string, as `--tuning="--tuning.epochs 1 --tuning.batch 32"`."""


def main() -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    command = tyro.cli(Compare, description=__doc__, args=words[:cut])
    try:
        systems = planned(command, words[cut + 1 :])
        with lock(command.out):
            for one in systems:
                carry_out(one, command)
            deliver(systems, command)
    except (ValueError, OSError) as error:
        fail("xlme_ds.compare", error)


def planned(command: Compare, settings: list[str]) -> list[System]:
    """All systems and seeds. Raises ValueError before anything has run."""
    names = command.recipes.split(",")
    if len(set(names)) < len(names):
        raise ValueError(f"--recipes {command.recipes} names a system twice: name each once")
    for name in ("points", "rows", "processes"):
        if getattr(command, name) < 1:
            raise ValueError(f"--{name} is {getattr(command, name)}: it must be at least 1")
    if command.ner is not None:
        require_labels(command.ner)
    row_tokens = RowStore(command.data_folder / TASKS[0]).row_tokens  # training refuses pairs in rows of another length
    budget = Budget(command.budget, command.points, command.rows, row_tokens)
    systems = [system(name, seed, budget, settings, command.out) for seed in command.seeds for name in names]
    for config in (leg.config for one in systems for leg in one.legs):
        for folder in (command.data_folder, command.heldout):
            open_data(config, folder, world=command.processes)
    return systems


def carry_out(one: System, command: Compare) -> None:
    """Train what is not trained, and test what is not tested."""
    place = environment()
    for leg in one.legs:
        if not (leg.folder / "finished.json").exists():
            folders = ["--data", str(command.data_folder), "--heldout", str(command.heldout), "--out", str(leg.folder)]
            run(launch("xlme_ds.pretrain", command.processes, [*leg.arguments, *folders]), place)
            if not (leg.folder / "finished.json").exists():
                sys.exit(1)  # stopped: the same command goes on
    tests = Tests(command.pairs or command.heldout, command.tatoeba, command.align, command.ner, command.tuning)
    points = one.points()
    for number, point in enumerate(points):
        if not point.folder.exists():
            words = ["--run", str(point.leg.folder), "--step", str(point.step), "--out", str(point.folder)]
            point.folder.parent.mkdir(exist_ok=True)
            run(launch("xlme_ds.checkpoint", 1, ["weights", *words]), place, quiet=True)
        last = number == len(points) - 1
        for test in tests.commands(point.folder, untrained=last, tuned=number >= len(points) - command.ner_points):
            run(test, place, quiet=True)


def deliver(systems: list[System], command: Compare) -> None:
    """Print the tables and write the files."""
    found = results(systems)
    shown = tables(found, command.budget, len(command.seeds))
    plot(found, command.out / "compare")
    write_text(command.out / "compare.md", "\n".join(table.markdown() for table in shown))
    write_json(
        command.out / "compare.json", {"budget": command.budget, "systems": [asdict(result) for result in found]}
    )
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in shown:
        table.show(console)


if __name__ == "__main__":
    main()
