"""Systems under equal training: `xlme compare --recipes A,B,C+D --budget FLOPS --data DIR --heldout DIR
--out DIR -- …`.

Trains every recipe to the same number of operations, scores it several times on the way, and writes compare.md,
compare.json and the plot. `C+D` is C for half the budget and D, started from its weights, for the other. Settings
after `--` are those of `xlme_ds.pretrain` and go to all alike. Every run and test is a command, printed first;
finished ones are skipped.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..cli import fail, program
from ..data.schema import write_json
from ..data.shards import RowStore
from ..engine.build import open_data
from ..evaluate.output import write_text
from ..finetune.downstream_tasks import TASKS
from ..finetune.settings import TuningConfig
from ..finetune.task_files import choose, find, labelled, read
from ..folders import lock
from ..run_commands import environment, launch, run
from .results import FILES, plot, results, tables
from .systems import Budget, System, system


@dataclass(frozen=True)
class CompareSettings:
    """Arguments of the command."""

    recipes: str
    """Recipes with commas between them; the others are compared with the first. `a+b`: `a`, then `b` from its
    weights."""
    budget: float
    """Floating-point operations of each system and seed, forward and backward, by the planner's count."""
    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `data_prep mix` wrote."""
    heldout: Path
    """Folder that `data_prep mix` wrote of text kept out of training; its pairs test retrieval."""
    out: Path
    """Folder for runs, scores, tables and plot; give it again to continue."""
    rows: int = 4096
    """Rows of a step, divided between text and pairs as each recipe does."""
    points: int = 4
    """How many times each run is scored, at equal distances."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; every system is trained once with each. Several show how far scores vary by chance."""
    processes: int = 1
    """Training processes on this machine."""
    pairs: Path | None = None
    """Folder of held-out pairs as text, in place of the pairs of --heldout."""
    tatoeba: Path | None = None
    """Folder of Tatoeba's test, as `xlme evaluate tatoeba` reads it; without it that test is left out."""
    align: Path | None = None
    """Folder of word alignment tests, as `xlme evaluate align` reads it; without it that test is left out."""
    ner: Path | None = None
    """Folder of PAN-X, as `xlme finetune --task ner` reads it; without it that test is left out."""
    ner_points: int = 1
    """Fine-tune at this many points of each run, the last ones."""
    tuning: str = ""
    """Settings of fine-tuning in one string, as `--tuning="--tuning.epochs 1 --tuning.batch 32"`."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    settings = tyro.cli(CompareSettings, prog=program("compare"), description=__doc__, args=words[:cut])
    try:
        systems = planned(settings, words[cut + 1 :])
        with lock(settings.out):
            for one in systems:
                _carry_out(one, settings)
            deliver(systems, settings)
    except (ValueError, OSError) as error:
        fail("xlme_ds.compare", error)


def planned(settings: CompareSettings, of_all: list[str]) -> list[System]:
    """All systems and seeds, with the settings `of_all` runs. Raises ValueError before anything has run."""
    names = settings.recipes.split(",")
    if len(set(names)) < len(names):
        raise ValueError(f"--recipes {settings.recipes} names a system twice: name each once")
    for name in ("points", "rows", "processes"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} is {getattr(settings, name)}: it must be at least 1")
    if settings.ner is not None:
        require_labels(settings.ner)
    row_tokens = RowStore(settings.data_folder / "mono").row_tokens  # training refuses pairs in rows of other lengths
    budget = Budget(settings.budget, settings.points, settings.rows, row_tokens)
    systems = [system(name, seed, budget, of_all, settings.out) for seed in settings.seeds for name in names]
    for config in (leg.config for one in systems for leg in one.legs):
        for folder in (settings.data_folder, settings.heldout):
            open_data(config, folder, world=settings.processes)
    return systems


def require_labels(ner: Path) -> None:
    """Raise ValueError where no test of --ner in another language than English has labels: the measure is the mean over
    those."""
    tests = choose(find(TASKS["ner"], [ner]), "ner", TuningConfig(), of_several=False).test
    if not any(labelled(read(source, TASKS["ner"])) for source in tests if source.language != "en"):
        raise ValueError(
            f"--ner {ner} has no test with labels in a language other than English: name a folder that has some"
        )


def _carry_out(one: System, settings: CompareSettings) -> None:
    """Train what is not trained, and test what is not tested."""
    place = environment()
    for leg in one.legs:
        if not (leg.folder / "finished.json").exists():
            data = ["--data", str(settings.data_folder), "--heldout", str(settings.heldout)]
            words = [*leg.arguments, *data, "--out", str(leg.folder)]
            run(launch("xlme_ds.pretrain", settings.processes, words), place)
            if not (leg.folder / "finished.json").exists():
                sys.exit(1)  # stopped: the same command goes on
    points = one.points()
    for left, point in zip(reversed(range(len(points))), points, strict=True):
        if not point.folder.exists():
            words = ["--run", str(point.leg.folder), "--step", str(point.step), "--out", str(point.folder)]
            point.folder.parent.mkdir(exist_ok=True)
            run(launch("xlme_ds.checkpoint", 1, ["weights", *words]), place, quiet=True)
        for module, *words in _tests(settings, point.folder, left):
            run(launch(module, 1, words), place, quiet=True)


def _tests(settings: CompareSettings, model: Path, left: int) -> Iterator[list[str]]:
    """The tests of a point without scores so far; with the last one (`left` is 0) an untrained model is tested too."""
    for test, file in FILES.items():
        data = getattr(settings, test) or (settings.heldout if test == "pairs" else None)
        if data is None or (model / file).exists():
            continue
        words = ["--model", str(model), "--data", str(data), "--out", str((model / file).parent)]
        if test != "ner":
            yield ["xlme_ds.evaluate", test, *words, *([] if left else ["--random"])]
        elif left < settings.ner_points:
            yield ["xlme_ds.finetune", "--task", test, *words, *shlex.split(settings.tuning)]


def deliver(systems: list[System], settings: CompareSettings) -> None:
    """Print the tables and write the files."""
    found = results(systems)
    shown = tables(found, settings.budget, len(settings.seeds))
    plot(found, settings.out / "compare")
    write_text(settings.out / "compare.md", "\n".join(table.markdown() for table in shown))
    write_json(
        settings.out / "compare.json", {"budget": settings.budget, "systems": [asdict(result) for result in found]}
    )
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in shown:
        table.show(console)


if __name__ == "__main__":
    main()
