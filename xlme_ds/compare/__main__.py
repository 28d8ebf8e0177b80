"""Systems under equal training: `xlme compare --recipes A,B,C+D --budgets FLOPS … --data DIR --heldout DIR
--out DIR -- …`.

Trains every recipe to the same numbers of operations, each with its whole schedule, scores the models, and writes
compare.md, compare.json and the plot. `C+D` is C for half of a budget and D, started from its weights, for the other.
Settings after `--` are those of `xlme_ds.pretrain` and go to all alike. Every run and test is a command, printed first;
finished ones are skipped.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..cli import fail, program
from ..config import refuse
from ..data.shards import RowStore
from ..engine.build import open_data
from ..finetune.downstream_tasks import TASKS
from ..finetune.settings import TuningConfig
from ..finetune.task_files import choose, find, labelled, read
from ..folders import lock
from ..objectives import objective_of
from ..run_commands import environment, launch, run
from .results import LOSSES, SCORES, UNTRAINED, RunScores, deliver, read_results, tuned
from .systems import Budget, System, own_settings, system


@dataclass(frozen=True)
class CompareSettings:
    """Arguments of the command."""

    recipes: str
    """Recipes with commas between them; the others are compared with the first. `a+b`: `a`, then `b` from its
    weights."""
    budgets: tuple[float, ...]
    """Floating-point operations of a run, forward and backward, by the planner's count; every system has a run for
    each, with a learning rate that ends with it."""
    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `data_prep mix` wrote."""
    heldout: Path
    """Folder that `data_prep mix` wrote of text kept out of training, for losses; its pairs test retrieval."""
    out: Path
    """Folder for runs, scores, tables and plot; give it again to continue."""
    rows: int = 4096
    """Rows of a step, divided between text and pairs as each recipe does."""
    seeds: tuple[int, ...] = (1,)
    """How many seeds each system is trained with, 1, 2, …: one number for all budgets, or one for each. Several show
    how far scores vary by chance."""
    own: tuple[str, ...] = ()
    """Settings of single recipes, as "xlme: --optimizer.learning-rate 1e-3": what each was found to need."""
    processes: int = 1
    """Training processes on this machine."""
    pairs: Path | None = None
    """Folder of held-out pairs as text, in place of the pairs of --heldout."""
    tatoeba: Path | None = None
    """Folder of Tatoeba's test, as `xlme evaluate tatoeba` reads it; without it that test is left out."""
    align: Path | None = None
    """Folder of word alignment tests, as `xlme evaluate align` reads it; without it that test is left out."""
    pos: Path | None = None
    """Folder of parts of speech, as `xlme finetune --task pos` reads it; without it that test is left out."""
    ner: Path | None = None
    """Folder of PAN-X, as `xlme finetune --task ner` reads it; without it that test is left out."""
    tuning: str = ""
    """Settings of fine-tuning in one string, as `--tuning="--tuning.epochs 1 --tuning.batch 32"`."""
    tuning_seeds: int = 1
    """How often each model is fine-tuned, with seeds 1, 2, …; the mean counts."""
    also: tuple[Path, ...] = ()
    """Files compare.json of other folders, whose runs are shown with these."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    settings = tyro.cli(CompareSettings, prog=program("compare"), description=__doc__, args=words[:cut])
    try:
        systems = planned(settings, words[cut + 1 :])
        others = [run for path in settings.also for run in read_results(path)]
        with lock(settings.out):
            for one in systems:
                _carry_out(one, settings)
            seeds = _tuning_seeds(settings)
            runs = [RunScores.read(one, settings.data_folder, seeds) for one in systems]
            console = Console(width=None if sys.stdout.isatty() else 160)
            for table in deliver([*runs, *others], settings.out):
                table.show(console)
    except (ValueError, OSError) as error:
        fail("xlme_ds.compare", error)


def planned(settings: CompareSettings, of_all: list[str]) -> list[System]:
    """All systems, budgets and seeds, with the settings `of_all` runs. Raises ValueError before anything has run."""
    names, budgets, seeds = settings.recipes.split(","), settings.budgets, settings.seeds
    fitting = len(seeds) in (1, len(budgets))
    refuse(
        [
            (len(set(names)) == len(names), f"--recipes {settings.recipes} names a system twice: name each once"),
            (len(set(budgets)) == len(budgets), "--budgets names an amount twice: name each once"),
            (fitting, f"--seeds has {len(seeds)} numbers for {len(budgets)} budgets: give one, or one for each"),
            *((count >= 1, f"--seeds has {count}: it must be at least 1") for count in seeds),
            *(
                (getattr(settings, name) >= 1, f"--{name.replace('_', '-')} is below 1: it must be at least 1")
                for name in ("rows", "processes", "tuning_seeds")
            ),
        ]
    )
    for task in ("pos", "ner"):
        if (folder := getattr(settings, task)) is not None:
            require_labels(folder, task)
    row_tokens = RowStore(settings.data_folder / "mono").row_tokens  # training refuses pairs in rows of other lengths
    own = own_settings(settings.own, names)
    systems = [
        system(name, seed, Budget(budget, settings.rows, row_tokens), of_all, own, settings.out)
        for budget, count in zip(budgets, seeds * (len(budgets) // len(seeds)), strict=True)
        for seed in range(1, count + 1)
        for name in names
    ]
    for config in (leg.config for one in systems for leg in one.legs):
        for folder in (settings.data_folder, settings.heldout):
            open_data(config, folder, world=settings.processes)
    return systems


def require_labels(folder: Path, task: str) -> None:
    """Raise ValueError where no test of `task` in another language than English has labels: the measure is the mean
    over those."""
    tests = choose(find(TASKS[task], [folder]), task, TuningConfig(), of_several=False).test
    if not any(labelled(read(source, TASKS[task])) for source in tests if source.language != "en"):
        raise ValueError(
            f"--{task} {folder} has no test with labels in a language other than English: name a folder that has some"
        )


def _tuning_seeds(settings: CompareSettings) -> list[int]:
    return list(range(1, settings.tuning_seeds + 1))


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
    for module, *words in left_to_test(one, settings):
        run(launch(module, 1, words), place, quiet=True)
    if left := next(left_to_test(one, settings), None):
        print(f"{one.model}: {left[0]} was stopped before its scores: the same command goes on", file=sys.stderr)
        sys.exit(1)


def left_to_test(one: System, settings: CompareSettings) -> Iterator[list[str]]:
    """The tests that the model has no scores of; untrained ones are tested with those of the smallest budget."""
    out = one.model / SCORES
    untrained = ["--random"] if one.budget == min(settings.budgets) else []
    masked = set(LOSSES) & set(objective_of(one.legs[-1].config.objective).terms)
    tests = {"losses": settings.heldout if masked else None, "pairs": settings.pairs or settings.heldout}
    for test, data in (tests | {"tatoeba": settings.tatoeba, "align": settings.align}).items():
        if data is not None and not (out / f"{test}.json").exists():
            words = ["--model", str(one.model), "--data", str(data), "--out", str(out)]
            yield ["xlme_ds.evaluate", test, *words, *(untrained if test != "losses" else [])]
    seeds = _tuning_seeds(settings)
    starts = [False, *([True] if untrained and one.seed == 1 else [])]  # one seed: fine-tuning costs most of all tests
    for task, start in ((task, start) for start in starts for task in ("pos", "ner")):
        data, name = getattr(settings, task), task + UNTRAINED * start
        if data is not None and not all(file.exists() for file in tuned(out, name, seeds)):
            words = ["--task", task, "--model", str(one.model), "--data", str(data), "--out", str(out / name)]
            words += ["--random"] * start
            yield ["xlme_ds.finetune", *words, "--seeds", *map(str, seeds), *shlex.split(settings.tuning)]


if __name__ == "__main__":
    main()
