"""The systems of a comparison: recipes, or chains of recipes, each trained to a budget of operations.

The budget is in operations by the standard count (`counting.py`): all that a step computes, with the generator.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from ..cli import parse, program, without
from ..config import RunConfig
from ..counting import flops_per_step
from ..first_weights import SHAPE
from ..objectives import objective_of
from ..recipes import recipe
from ..trained.runs import main_encoder
from ..validate import validate

_SEEDS_APART = 1000  # between the seeds of a system's runs: each reads the rows from the start, with other masks
_SAVES = 10  # checkpoints of a run: a crash costs at most a tenth of it


@dataclass(frozen=True)
class Leg:
    """One run in the chain of a system; `arguments` are those of `xlme_ds.pretrain`, except data and folders."""

    config: RunConfig
    folder: Path
    arguments: tuple[str, ...]
    step_flops: float
    step_tokens: int


@dataclass(frozen=True)
class System:
    """A system by its name on the command line (`a` or `a+b`), trained with one budget and one seed; its model is that
    of its last run."""

    name: str
    budget: float
    seed: int
    legs: tuple[Leg, ...]

    @property
    def model(self) -> Path:
        """Folder of the trained model."""
        return self.legs[-1].folder

    @property
    def flops(self) -> float:
        """Operations of all its runs: the budget to the nearest step."""
        return sum(leg.config.train.steps * leg.step_flops for leg in self.legs)

    @property
    def tokens(self) -> int:
        """Row positions that its runs read."""
        return sum(leg.config.train.steps * leg.step_tokens for leg in self.legs)


class Budget(NamedTuple):
    """Operations and batch sizes, equal for all systems."""

    flops: float
    rows: int
    row_tokens: int


@dataclass(frozen=True)
class _LegSettings:
    run: Annotated[RunConfig, tyro.conf.arg(name="")]


def own_settings(words: Sequence[str], recipes: Sequence[str]) -> dict[str, list[str]]:
    """Settings of single recipes by their names, from words of the form "NAME: SETTINGS". Raises ValueError."""
    settings_of: dict[str, list[str]] = {}
    parts = [part for name in recipes for part in name.split("+")]
    for word in words:
        name, colon, settings = word.partition(":")
        if not colon:
            raise ValueError(f'--own {word}: write "RECIPE: SETTINGS"')
        if name not in parts:
            raise ValueError(f"--own names {name}, which is not in --recipes: name one of {', '.join(parts)}")
        if name in settings_of:
            raise ValueError(f"--own names {name} twice: give all of its settings in one")
        settings_of[name] = shlex.split(settings)
    return settings_of


def system(
    name: str, seed: int, budget: Budget, settings: Sequence[str], own: Mapping[str, Sequence[str]], out: Path
) -> System:
    """The runs of `name`, each with an equal share of the budget; later ones start from the weights of the one before.

    `settings` are those of all recipes, `own` those of single ones. Systems that begin with the same runs share their
    folders, so that these runs are made once. Raises ValueError for an unknown recipe, for rows that do not divide as
    the recipe's do, for settings that follow from the budget, and for a budget too small for a step.
    """
    for flag in ("--train.steps", "--train.save-every", "--seed"):
        if any(without(words, flag) != list(words) for words in (settings, *own.values())):
            raise ValueError(f"{flag} follows from --budgets and --seeds: leave it out")
    parts = [(part, _rows(part, budget.rows)) for part in name.split("+")]
    share = budget._replace(flops=budget.flops / len(parts))
    legs: list[Leg] = []
    for part, rows in parts:
        seeded = ["--seed", str(seed + _SEEDS_APART * len(legs))]
        options = ["--recipe", part, *rows, *settings, *own.get(part, []), *seeded]
        legs.append(_leg(part, options, share, legs[-1] if legs else None, out / "runs", f"seed{seed}"))
    return System(name, budget.flops, seed, tuple(legs))


def _rows(part: str, rows: int) -> list[str]:
    """Options for the rows of a step, divided between the tasks as in the recipe."""
    data = recipe(part).data
    mono, rest = divmod(rows * data.mono_rows, data.mono_rows + data.para_rows)
    if rest:
        raise ValueError(
            f"{part} reads {data.mono_rows} rows of text to {data.para_rows} of pairs: --rows {rows} does not divide so"
        )
    return ["--data.mono-rows", str(mono), "--data.para-rows", str(rows - mono)]


def _leg(part: str, options: list[str], share: Budget, before: Leg | None, out: Path, seed: str) -> Leg:
    run = validate(parse(program("compare"), _LegSettings, "", options).run)
    cost = flops_per_step(run, share.row_tokens)
    steps, prefix = round(share.flops / cost), ""
    if steps < 1:
        raise ValueError(f"{share.flops:g} operations are less than a step of {part}, {cost:.3g}: raise --budgets")
    if before is not None:
        prefix = f"{before.folder.parent.name}+"
        for name in SHAPE:
            earlier, own = getattr(before.config.model, name), getattr(run.model, name)
            if earlier != own:
                raise ValueError(
                    f"{part} starts from {before.config.name}, whose model.{name} is {earlier} and its own {own}: "
                    "give both the same after --"
                )
        objective = before.config.objective
        take = "all" if objective.name == run.objective.name else main_encoder(objective_of(objective).encoders)
        options = [*options, "--start.folder", str(before.folder), "--start.take", take]
    options = [*options, "--train.steps", str(steps), "--train.save-every", str(-(-steps // _SAVES))]
    config = validate(parse(program("compare"), _LegSettings, "", options).run)
    return Leg(config, out / f"{prefix}{part}-{steps}" / seed, tuple(options), cost, share.rows * share.row_tokens)
