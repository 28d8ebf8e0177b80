"""Scores of all systems against operations: means over seeds, and the share of the budget at which one overtakes
another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from .scores import MEASURES, scores
from .systems import System


class Value(NamedTuple):
    """A score over the seeds."""

    flops: float
    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Result:
    """One system, all seeds; its seeds have the same points."""

    name: str
    steps: int
    tokens: float
    curves: dict[str, list[Value]]
    """By measure, in the order of operations."""
    untrained: dict[str, float]


def results(systems: Sequence[System]) -> list[Result]:
    """What stands in the folders of the systems' points."""
    names = list(dict.fromkeys(system.name for system in systems))
    return [_result(name, [system for system in systems if system.name == name]) for name in names]


def _result(name: str, seeds: Sequence[System]) -> Result:
    curves: dict[str, list[Value]] = {}
    untrained: dict[str, list[float]] = {}
    for points in zip(*(system.points() for system in seeds), strict=True):
        found = [scores(point.folder) for point in points]
        for measure in MEASURES:
            values = [ours[measure] for ours, _ in found if measure in ours]
            if values:
                curves.setdefault(measure, []).append(Value(points[0].flops, fmean(values), min(values), max(values)))
            untrained.setdefault(measure, []).extend(start[measure] for _, start in found if measure in start)
    steps = sum(leg.config.train.steps for leg in seeds[0].legs)
    tokens = seeds[0].points()[-1].tokens
    return Result(
        name, steps, tokens, curves, {measure: fmean(values) for measure, values in untrained.items() if values}
    )


def overtaken(curve: Sequence[Value], score: float, higher_is_better: bool) -> float | None:
    """Operations at which the mean reaches `score`, on straight lines over their logarithm; None where it never
    does."""
    sign = 1 if higher_is_better else -1
    before = None
    for value in curve:
        if sign * value.mean >= sign * score:
            if before is None:
                return value.flops
            part = (score - before.mean) / (value.mean - before.mean)
            return math.exp(math.log(before.flops) + part * (math.log(value.flops) - math.log(before.flops)))
        before = value
    return None
