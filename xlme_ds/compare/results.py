"""Scores of all systems against operations, over their seeds, as tables and as one plot.

They are read from the files that the tests left in the folder of every point.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..data.schema import read_json
from ..evaluate.output import ResultTable, save_figure
from ..evaluate.retrieval import both_ways
from .systems import System


class Measure(NamedTuple):
    """A figure of a model, in per cent."""

    title: str
    higher_is_better: bool = True


MEASURES = {
    "pairs": Measure("retrieval of held-out pairs, accuracy@1"),
    "pairs_centred": Measure("the same, centred"),
    "tatoeba": Measure("Tatoeba, accuracy@1"),
    "tatoeba_centred": Measure("the same, centred"),
    "align": Measure("word alignment, error rate", higher_is_better=False),
    "ner": Measure("entities, F1 of other languages than English"),
}  # in the order of tables
FILES = {"pairs": "pairs.json", "tatoeba": "tatoeba.json", "align": "align.json", "ner": "ner/scores.json"}


class Value(NamedTuple):
    """A score over the seeds."""

    flops: float
    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class SystemScores:
    """One system, all seeds, which have the same points; its curves by measure, in the order of operations."""

    name: str
    steps: int
    tokens: float
    curves: dict[str, list[Value]]
    untrained: dict[str, float]


def results(systems: Sequence[System]) -> list[SystemScores]:
    """The scores in the folders of the systems' points."""
    by_name: dict[str, list[System]] = defaultdict(list)
    for system in systems:
        by_name[system.name].append(system)
    return [_of_seeds(name, seeds) for name, seeds in by_name.items()]


def scores(model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The measures of the model in `model`, and of the untrained one that was tested with it, if there was one."""
    trained: dict[str, float] = {}
    untrained: dict[str, float] = {}
    for test, file in FILES.items():
        path = model / file
        if not path.exists():
            continue
        content = read_json(path, dict)
        try:
            if test == "ner":
                trained[test] = float(np.mean([of["f1"] for code, of in content["languages"].items() if code != "en"]))
                continue
            for found, scored in zip((trained, untrained), content["models"], strict=False):
                if test == "align":
                    found[test] = 100 * scored["overall"]["aer"][scored["layer"]]
                    continue
                for suffix in ("", "_centred"):
                    found[test + suffix] = 100 * both_ways(scored, bool(suffix))[scored["layer"]]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} lacks {error} or has another form: delete it, and the test is done again"
            ) from None
    return trained, untrained


def _of_seeds(name: str, seeds: Sequence[System]) -> SystemScores:
    curves: dict[str, list[Value]] = defaultdict(list)
    untrained: dict[str, list[float]] = defaultdict(list)
    for points in zip(*(system.points() for system in seeds), strict=True):
        found = [scores(point.folder) for point in points]
        for measure in MEASURES:
            values = [trained[measure] for trained, _ in found if measure in trained]
            if values:
                curves[measure].append(Value(points[0].flops, fmean(values), min(values), max(values)))
            untrained[measure] += [start[measure] for _, start in found if measure in start]
    return SystemScores(
        name,
        steps=sum(leg.config.train.steps for leg in seeds[0].legs),
        tokens=seeds[0].points()[-1].tokens,
        curves=dict(curves),
        untrained={measure: fmean(values) for measure, values in untrained.items() if values},
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


def measured(found: Sequence[SystemScores]) -> list[str]:
    """The measures that any system has."""
    return [measure for measure in MEASURES if any(measure in result.curves for result in found)]


def tables(found: Sequence[SystemScores], budget: float, seeds: int) -> list[ResultTable]:
    """The scores at the end of the budget, and what share of it the first system needs for those of the others."""
    measures = measured(found)
    titles = [MEASURES[measure].title for measure in measures]
    spread = f"mean of {seeds} seeds, least to most" if seeds > 1 else "one seed"
    last = ResultTable(f"{budget:.3g} operations each, {spread}", ["system", "steps", "tokens, M", *titles])
    for result in found:
        cells = [_cell(result.curves[measure][-1]) if measure in result.curves else "" for measure in measures]
        last.rows.append([result.name, f"{result.steps:,}", f"{result.tokens / 1e6:.1f}", *cells])
        if result.untrained:
            cells = [f"{result.untrained[m]:.1f}" if m in result.untrained else "" for m in measures]
            last.rows.append([f"{result.name}, untrained", "0", "0", *cells])
    first, *others = found
    ahead = ResultTable(
        f"Share of the budget at which {first.name} has the final score of another", ["system", *titles]
    )
    for other in others:
        ahead.rows.append([other.name, *(_share(first, other, measure, budget) for measure in measures)])
    ahead.notes.append(
        "between the points on straight lines over the logarithm of the operations; ≤: at the first point already"
    )
    return [last, ahead] if others else [last]


def _cell(end: Value) -> str:
    return f"{end.mean:.1f}" + (f" ({end.least:.1f} to {end.most:.1f})" if end.least < end.most else "")


def _share(first: SystemScores, other: SystemScores, measure: str, budget: float) -> str:
    if measure not in first.curves or measure not in other.curves:
        return ""
    curve = first.curves[measure]
    reached = overtaken(curve, other.curves[measure][-1].mean, MEASURES[measure].higher_is_better)
    if reached is None:
        return "not reached"
    return ("≤ " if reached == curve[0].flops else "") + f"{100 * reached / budget:.0f}%"


def plot(found: Sequence[SystemScores], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg: a panel a measure, score over operations; bands from the least to the most
    seed."""
    measures = measured(found)
    sizes = {"axes.titlesize": 9, "axes.labelsize": 8}
    with matplotlib.rc_context(
        {"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False} | sizes
    ):
        rows = -(-len(measures) // 2)
        figure = Figure(figsize=(9.6, 3.2 * rows + 0.6), layout="constrained")
        panels = figure.subplots(rows, min(len(measures), 2), squeeze=False, sharex=True).flatten()
        for axes, measure in zip(panels, measures, strict=False):
            _panel(axes, found, measure)
        for axes in panels[len(measures) :]:
            axes.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        save_figure(figure, stem)


def _panel(axes: Axes, found: Sequence[SystemScores], measure: str) -> None:
    for number, result in enumerate(found):
        curve = result.curves.get(measure, [])
        flops = [value.flops for value in curve]
        axes.plot(flops, [value.mean for value in curve], "o-", color=f"C{number}", markersize=4, label=result.name)
        spread = [value.least for value in curve], [value.most for value in curve]
        if len(curve) == 1:
            axes.vlines(flops, *spread, color=f"C{number}", alpha=0.4)
        axes.fill_between(flops, *spread, color=f"C{number}", alpha=0.15, linewidth=0)
        if measure in result.untrained:
            axes.axhline(result.untrained[measure], color=f"C{number}", linestyle=":", linewidth=0.8)
    title, higher_is_better = MEASURES[measure]
    axes.set_title(title + ("" if higher_is_better else " (less is better)"))
    axes.set(xscale="log", xlabel="floating-point operations", ylabel="%")
    axes.tick_params(labelbottom=True)
    axes.grid(axis="y", alpha=0.3)
