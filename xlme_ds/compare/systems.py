"""The systems of a comparison: recipes, or several of them one after the other, cut to a budget of operations.

The budget is in the standard count of `flops`: everything a step computes, with the generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from ..cli import parse, program
from ..config import RunConfig
from ..counting import flops_per_step
from ..first_weights import SHAPE
from ..objectives import objective_of
from ..recipes import recipe
from ..trained import first_of
from ..validate import validate

_SEEDS_APART = 1000  # the runs of a chain read their rows from the start again, with other masks


@dataclass(frozen=True)
class Leg:
    """One run of a system; `arguments` are those of `xlme_ds.pretrain`, data and folders excepted."""

    config: RunConfig
    folder: Path
    arguments: tuple[str, ...]
    step_flops: float
    step_tokens: int


class ScoredPoint(NamedTuple):
    """A step at which a system is scored: operations and tokens of the whole system so far, folder of its scores."""

    leg: Leg
    step: int
    flops: float
    tokens: float
    folder: Path


@dataclass(frozen=True)
class System:
    """A name as the user gave it, `a` or `a+b`, and its runs with one seed."""

    name: str
    legs: tuple[Leg, ...]

    def points(self) -> list[ScoredPoint]:
        """The steps at which it is scored, by operations."""
        found: list[ScoredPoint] = []
        flops = tokens = 0.0
        for leg in self.legs:
            every, steps = leg.config.train.save_every, leg.config.train.steps
            for step in range(every, steps + 1, every):
                so_far = flops + step * leg.step_flops, tokens + step * leg.step_tokens
                found.append(ScoredPoint(leg, step, *so_far, leg.folder / "points" / f"{step:08d}"))
            flops, tokens = found[-1].flops, found[-1].tokens
        return found


class Budget(NamedTuple):
    """The same for every system: operations, how often it is scored, and the size of its batches."""

    flops: float
    points: int
    rows: int
    row_tokens: int


@dataclass(frozen=True)
class _LegSettings:
    run: Annotated[RunConfig, tyro.conf.arg(name="")]


def system(name: str, seed: int, budget: Budget, settings: Sequence[str], out: Path) -> System:
    """The runs of `name`, each with an equal share of the budget; one starts from the weights of the one before.

    Runs with the same past have the same folder, so that they are made once. Raises ValueError for an unknown recipe,
    for rows that do not divide as the recipe's do, and for a budget too small for a step.
    """
    parts = [(part, _rows(part, budget.rows)) for part in name.split("+")]
    share = budget._replace(flops=budget.flops / len(parts), points=max(budget.points // len(parts), 1))
    legs: list[Leg] = []
    for part, rows in parts:
        words = ["--recipe", part, *rows, *settings, "--seed", str(seed + _SEEDS_APART * len(legs))]
        legs.append(_leg(part, words, share, legs[-1] if legs else None, out / "runs", f"seed{seed}"))
    return System(name, tuple(legs))


def _rows(part: str, rows: int) -> list[str]:
    """Rows of a step, shared out between the tasks as the recipe does."""
    of = recipe(part).data
    mono, rest = divmod(rows * of.mono_rows, of.mono_rows + of.para_rows)
    if rest:
        raise ValueError(
            f"{part} reads {of.mono_rows} rows of text to {of.para_rows} of pairs: --rows {rows} does not divide so"
        )
    return ["--data.mono-rows", str(mono), "--data.para-rows", str(rows - mono)]


def _leg(part: str, words: list[str], share: Budget, before: Leg | None, out: Path, seed: str) -> Leg:
    run = validate(parse(program("compare"), _LegSettings, "", words).run)
    cost = flops_per_step(run, share.row_tokens)
    every = round(share.flops / share.points / cost)
    if every < 1:
        raise ValueError(
            f"{share.flops:g} operations are less than {share.points} steps of {part}, {cost:.3g} each: raise --budget"
        )
    steps, past = every * share.points, ""
    if before is not None:
        past = f"{before.folder.parent.name}+"
        for name in SHAPE:
            there, here = getattr(before.config.model, name), getattr(run.model, name)
            if there != here:
                raise ValueError(
                    f"{part} starts from {before.config.name}, whose model.{name} is {there} and its own {here}: "
                    "give both the same after --"
                )
        objective = before.config.objective
        take = "all" if objective.name == run.objective.name else first_of(objective_of(objective).encoders)
        words = [*words, "--start.folder", str(before.folder), "--start.take", take]
    for name, value in (("steps", steps), ("save-every", every), ("keep-every", every)):
        words = [*words, f"--train.{name}", str(value)]
    config = validate(parse(program("compare"), _LegSettings, "", words).run)
    return Leg(config, out / f"{past}{part}-{steps}" / seed, tuple(words), cost, share.rows * share.row_tokens)
