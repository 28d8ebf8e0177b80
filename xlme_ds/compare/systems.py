"""The settings of a comparison, and its systems: recipes or chains of recipes, trained with a budget of operations.

`counting.py` counts the operations. A step's operations include those of the generator.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from ..cli import parse, program, without_flags
from ..config import RunConfig
from ..counting import flops_per_step
from ..engine.build import resolve_precision
from ..first_weights import SHAPE
from ..objectives import objective_of
from ..recipes import recipe
from ..trained.runs import main_encoder
from ..validate import validate

# Difference between the seeds of neighbouring runs in a chain. All runs of a chain read the same rows, from the first
# on; different seeds give them different masks.
_SEED_STEP = 1000
_SAVES = 10  # checkpoints of a run: a crash costs at most a tenth of the run


@dataclass(frozen=True)
class CompareSettings:
    """Arguments of the command."""

    recipes: tuple[str, ...]
    """Recipes; the first is compared with each of the others. `a+b` trains `a`, then `b` from the weights of `a`."""
    budgets: tuple[float, ...]
    """Floating-point operations of a training, forward and backward, by the planner's count. Every system is trained
    once for each budget, with a learning rate schedule that ends when the budget is spent."""
    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `xlme prep mix` wrote."""
    heldout: Path
    """Folder that `xlme prep mix` wrote from text kept out of training. Losses are measured on it, and its pairs test
    retrieval."""
    out: Path
    """Folder for runs, scores, tables and plot; give it again to continue."""
    rows: int = 4096
    """Number of rows in a step; each recipe divides them between text and pairs in its own proportion."""
    seeds: tuple[int, ...] = (1,)
    """How many seeds each system is trained with, one number for all budgets or one for each budget: 3 means the seeds
    1, 2 and 3. Several seeds show how much scores vary by chance."""
    own: tuple[str, ...] = ()
    """Settings that apply to one recipe only, such as "xlme: --optimizer.learning-rate 1e-3"."""
    processes: int = 1
    """Training processes on this machine."""
    pairs: Path | None = None
    """Folder of held-out pairs as text, in place of the pairs of --heldout."""
    tatoeba: Path | None = None
    """Folder of Tatoeba's test, as `xlme evaluate tatoeba` reads it; without the folder this test is left out."""
    align: Path | None = None
    """Folder of word alignment tests, as `xlme evaluate align` reads it; without the folder these tests are left
    out."""
    pos: Path | None = None
    """Folder of parts of speech, as `xlme finetune --task pos` reads it; without the folder this test is left out."""
    ner: Path | None = None
    """Folder of PAN-X, as `xlme finetune --task ner` reads it; without the folder this test is left out."""
    tuning: str = ""
    """Settings of fine-tuning in one string, such as `--tuning="--tuning.epochs 1 --tuning.batch 32"`."""
    tuning_seeds: int = 1
    """How many seeds each model is fine-tuned with; the scores are averaged."""
    also: tuple[Path, ...] = ()
    """compare.json files of other comparisons with the same data, test files and --tuning, whose runs are shown too."""


@dataclass(frozen=True)
class PlannedRun:
    """One run in the chain of a system."""

    config: RunConfig
    folder: Path
    arguments: tuple[str, ...]  # arguments of `xlme_ds.pretrain`, without --data, --heldout and --out
    step_flops: float
    step_tokens: int


@dataclass(frozen=True)
class System:
    """A recipe or a chain of recipes, trained with one budget and one seed."""

    name: str  # as on the command line: `a` or `a+b`
    budget: float
    seed: int
    runs: tuple[PlannedRun, ...]

    @property
    def model_folder(self) -> Path:
        """Folder of the trained model: the folder of the last run."""
        return self.runs[-1].folder


class Budget(NamedTuple):
    """The operations and the batch size of a training, equal for all systems of one budget."""

    flops: float
    rows: int  # rows per step
    row_tokens: int


@dataclass(frozen=True)
class _RunSettings:
    """The dataclass that tyro fills from the command line of a run. With the empty name, no setting has the prefix
    `run.`."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]


def own_settings(entries: Sequence[str], system_names: Sequence[str]) -> dict[str, list[str]]:
    """The settings of single recipes, by recipe, from entries of the form "RECIPE: SETTINGS". Raises ValueError for an
    entry of another form, for a recipe that no system has, and for a repeated recipe."""
    settings_of: dict[str, list[str]] = {}
    recipes = [part for name in system_names for part in name.split("+")]
    for entry in entries:
        recipe_name, colon, settings = entry.partition(":")
        if not colon:
            raise ValueError(f'--own {entry}: write "RECIPE: SETTINGS"')
        if recipe_name not in recipes:
            raise ValueError(f"--own names {recipe_name}, which is not in --recipes: name one of {', '.join(recipes)}")
        if recipe_name in settings_of:
            raise ValueError(f"--own names {recipe_name} twice: give all settings of {recipe_name} in one entry")
        try:
            settings_of[recipe_name] = shlex.split(settings)
        except ValueError as error:
            raise ValueError(f"--own {entry}: {error}") from None
    return settings_of


def plan_system(
    name: str, seed: int, budget: Budget, settings: Sequence[str], own: Mapping[str, Sequence[str]], out: Path
) -> System:
    """The system `name` with its runs. Each run has an equal part of the budget, and starts from the weights of the run
    before.

    `settings` apply to all recipes, `own` has settings of single recipes. Systems that begin with the same runs share
    these runs' folders, so that the runs are made once. Raises ValueError for an unknown recipe, for a number of rows
    that cannot be divided in the recipe's proportion, for settings that follow from budget or seed, for a budget that
    gives a run no step, and for a run whose model has another shape than the model of the run before.
    """
    for flag in ("--train.steps", "--train.save-every", "--seed"):
        if any(without_flags(options, flag) != list(options) for options in (settings, *own.values())):
            raise ValueError(f"{flag} follows from --budgets and --seeds: leave {flag} out")
    recipes = [(recipe_name, _row_options(recipe_name, budget.rows)) for recipe_name in name.split("+")]
    share = budget._replace(flops=budget.flops / len(recipes))
    runs: list[PlannedRun] = []
    for recipe_name, row_options in recipes:
        seed_options = ["--seed", str(seed + _SEED_STEP * len(runs))]
        options = ["--recipe", recipe_name, *row_options, *settings, *own.get(recipe_name, []), *seed_options]
        runs.append(_plan_run(recipe_name, options, share, runs[-1] if runs else None, out / "runs", f"seed{seed}"))
    return System(name, budget.flops, seed, tuple(runs))


def _row_options(recipe_name: str, rows: int) -> list[str]:
    """Options that divide the rows of a step between the tasks in the proportion of the recipe `recipe_name`. Raises
    ValueError if this does not give whole numbers."""
    data = recipe(recipe_name).data
    mono, rest = divmod(rows * data.mono_rows, data.mono_rows + data.para_rows)
    if rest:
        raise ValueError(
            f"{recipe_name} reads {data.mono_rows} rows of text for every {data.para_rows} rows of pairs, but --rows "
            f"{rows} cannot be divided in this proportion: choose another --rows"
        )
    return ["--data.mono-rows", str(mono), "--data.para-rows", str(rows - mono)]


def _plan_run(
    recipe_name: str, options: list[str], share: Budget, before: PlannedRun | None, runs_folder: Path, seed_folder: str
) -> PlannedRun:
    """The run of the recipe `recipe_name` that spends `share`. It starts from the weights of the run `before`, unless
    `before` is None. Raises ValueError if `share` rounds to 0 steps, or if the model of `before` has another shape."""
    run = validate(parse(program("compare"), _RunSettings, "", options).run)
    mono, para = run.data.mono_rows, run.data.para_rows
    if mono + para != share.rows:
        raise ValueError(
            f"{recipe_name} has {mono} + {para} rows in a step, but --rows says {share.rows}: leave "
            "--data.mono-rows and --data.para-rows out, or give both, with this sum"
        )
    step_flops = flops_per_step(run, share.row_tokens)
    steps = round(share.flops / step_flops)
    if steps < 1:
        raise ValueError(
            f"{share.flops:g} operations are less than a step of {recipe_name} ({step_flops:.3g}): raise --budgets"
        )
    prefix = ""
    if before is not None:
        prefix = f"{before.folder.parent.name}+"
        for setting in SHAPE:
            theirs, ours = getattr(before.config.model, setting), getattr(run.model, setting)
            if theirs != ours:
                raise ValueError(
                    f"{recipe_name} has model.{setting} {ours}, but starts from {before.config.name}, which has "
                    f"{theirs}: give both the same --model.{setting.replace('_', '-')} after --"
                )
        objective = before.config.objective
        take = "all" if objective.name == run.objective.name else main_encoder(objective_of(objective).encoders)
        options = [*options, "--start.folder", str(before.folder), "--start.take", take]
    options = [*options, "--train.steps", str(steps), "--train.save-every", str(-(-steps // _SAVES))]
    try:
        config = validate(parse(program("compare"), _RunSettings, "", options).run)
    except ValueError as error:  # the settings were valid with the recipe's number of steps, but not with this number
        bought = f"{share.flops:g} operations buy {steps:,} step{'s' * (steps > 1)} of {recipe_name}"
        raise ValueError(f"{bought}, and {error}, or raise --budgets") from None
    # As the run records it: other machines may choose another precision.
    config = replace(config, engine=replace(config.engine, precision=resolve_precision(config.engine)))
    folder = runs_folder / f"{prefix}{recipe_name}-{steps}" / seed_folder
    return PlannedRun(config, folder, tuple(options), step_flops, int(sum(config.data.mean_rows) * share.row_tokens))
