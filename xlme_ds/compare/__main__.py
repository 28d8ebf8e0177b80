"""Compare recipes at equal compute: train, score and plot them.

xlme compare --recipes xlme xlmr+ernie_m --budgets 1e19 3e19 --data mixed --heldout heldout --out runs/compare

For each budget, trains every recipe for this number of operations, with a learning rate schedule that ends when the
budget is spent. Then scores the models and writes compare.md, compare.json and the plot. `A+B` trains A for half of a
budget, then B from A's weights for the other half. Settings of `xlme pretrain` after `--` apply to all recipes. Every
run and every test is a command, which is printed before it starts. Finished runs and tests are skipped if their
settings and data have not changed.
"""

import math
import re
import sys
from pathlib import Path

from ..checkpoint_names import FINISHED
from ..cli import fail, program
from ..data.shards import RowStore
from ..evaluate.output import terminal
from ..io.files import read_versioned
from ..io.folders import lock_folder
from ..io.help import call_from_command_line
from ..models.text_encoder import language_index
from ..recipes import recipe
from ..run_commands import check_visible_gpus, child_environment, launch_command, run
from ..train.opening import read_inputs
from ..train.run_folder import RunFolder
from .results import RunScores, join_runs, read_results, require_comparable
from .scoring import data_of, pending_tests, record_if_scored, require_tests
from .summary import write_results
from .systems import Budget, CompareSettings, PlannedRun, System, own_settings, plan_system


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A user's mistake ends it with one sentence and exit code 2."""
    prog = program("compare")
    options = sys.argv[1:] if arguments is None else arguments
    separator = options.index("--") if "--" in options else len(options)
    if setting := next(
        (word for word in options[:separator] if re.match(r"--(?!tuning\.)[a-z]+\.[\w.-]+(=|$)", word)), None
    ):
        fail(prog, ValueError(f"{setting} is a setting of xlme pretrain: write such settings last, after --"))
    settings = call_from_command_line(CompareSettings, prog, options[:separator], __doc__)
    try:
        systems = plan_systems(settings, options[separator + 1 :])
        other_runs = [(str(path), run) for path in settings.also for run in read_results(path)]
        if other_runs:
            require_comparable([*_own_runs(systems, settings), *other_runs])
        with lock_folder(settings.out):
            for system in systems:
                _train_and_test(system, settings)
            for table in write_results(join_runs([*_own_runs(systems, settings), *other_runs]), settings.out):
                table.show(terminal(160))
    except (ValueError, OSError) as error:
        fail(prog, error)


def plan_systems(settings: CompareSettings, shared_settings: list[str]) -> list[System]:
    """Check all that can be checked before training, and return the systems to train, for all budgets and seeds.
    `shared_settings` apply to every recipe. Raises ValueError if a check fails."""
    names, budgets = settings.recipes, settings.budgets
    seed_counts = settings.seeds * len(budgets) if len(settings.seeds) == 1 else settings.seeds
    for name in "+".join(names).split("+"):
        recipe(name)  # raises ValueError for an unknown recipe
    if len(set(names)) != len(names):
        raise ValueError(f"--recipes {' '.join(names)} names a system twice: name each once")
    if len(set(budgets)) != len(budgets):
        raise ValueError("--budgets names an amount twice: name each once")
    for budget in budgets:
        if not 0 < budget < math.inf:
            raise ValueError(f"--budgets has {budget:g}: it must be above 0 and finite")
    if len(seed_counts) != len(budgets):
        raise ValueError(
            f"--seeds has {len(seed_counts)} numbers for {len(budgets)} budgets: give one, or one for each"
        )
    counts = {
        "--seeds has": min(seed_counts, default=1),
        "--rows is": settings.rows,
        "--processes is": settings.processes,
        "--tuning-seeds is": settings.tuning_seeds,
    }
    for subject, count in counts.items():
        if count < 1:
            raise ValueError(f"{subject} {count}: it must be at least 1")
    if settings.processes > 1:
        check_visible_gpus("--processes", settings.processes)
    row_tokens = RowStore(settings.data_folder / "mono").row_tokens  # para/ must have rows of this length too
    languages = require_tests(settings)
    own_options = own_settings(settings.own, names)
    systems = [
        plan_system(name, seed, Budget(budget, settings.rows, row_tokens), shared_settings, own_options, settings.out)
        for budget, count in zip(budgets, seed_counts, strict=True)
        for seed in range(1, count + 1)
        for name in names
    ]
    budgets_by_folder: dict[Path, float] = {}
    for system in systems:
        other = budgets_by_folder.setdefault(system.model_folder, system.budget)
        if other != system.budget:
            raise ValueError(
                f"--budgets {other:g} and {system.budget:g} give {system.name} the same number of steps: leave one out"
            )
        for code in sorted(languages):
            language_index(system.runs[-1].config.model, code)  # raises ValueError if the model lacks the language
        for planned in system.runs:
            _require_matching(planned, settings)
    return systems


def _own_runs(systems: list[System], settings: CompareSettings) -> list[tuple[str, RunScores]]:
    """(source, run) for every run of this comparison, with the scores that it has so far in the tests of `settings`."""
    source, folder, seeds = f"--out {settings.out}", settings.data_folder, settings.tuning_seeds
    return [(source, RunScores.read(system, folder, seeds, data_of(system, settings))) for system in systems]


def _require_matching(planned: PlannedRun, settings: CompareSettings) -> None:
    """Raise ValueError if the data do not fit the run, or if the run's folder holds a run with other settings or
    data."""
    run_folder = RunFolder(planned.folder, writes=False)
    loader, heldout, _ = read_inputs(  # checks the data
        planned.config, [settings.data_folder], settings.heldout, run_folder, [], 0, settings.processes
    )
    if not (planned.folder / "config.json").exists():
        return
    recorded = read_versioned(planned.folder / "config.json")["data"]
    recorded_and_now = {
        "--data": (recorded["fingerprints"], loader.fingerprints_until(0)),  # fingerprints of the first phase
        "--heldout": (recorded.get("heldout_fingerprints"), heldout and heldout.fingerprints),
    }
    for option, (before, now) in recorded_and_now.items():
        if before != now:
            raise ValueError(
                f"{planned.folder} was started with another {option}: give the same {option} again, or choose another "
                "--out"
            )


def _train_and_test(system: System, settings: CompareSettings) -> None:
    """Do the training and the tests of a system that are not done yet."""
    variables = child_environment()
    for planned in system.runs:
        if not (planned.folder / FINISHED).exists():
            folders = ("--data", settings.data_folder, "--heldout", settings.heldout, "--out", planned.folder)
            options = [*planned.arguments, *map(str, folders)]
            run(launch_command("xlme_ds.pretrain", settings.processes, options), variables)
            if not (planned.folder / FINISHED).exists():
                sys.exit(1)  # the run was stopped; its user continues it with the same command
    for name, command in pending_tests(system, settings):
        module, *options = command
        run(launch_command(module, 1, options), variables, quiet=True)
        if not record_if_scored(system, name, command, settings):
            print(
                f"{system.model_folder}: {module} was stopped before it wrote its scores: give the same command again "
                "to continue",
                file=sys.stderr,
            )
            sys.exit(1)


if __name__ == "__main__":
    main()
