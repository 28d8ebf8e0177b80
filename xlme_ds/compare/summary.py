"""Writes the runs of a comparison as JSON, tables and one plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..data.schema import TASKS
from ..evaluate.output import ResultTable, plot_label, save_figure
from ..io.files import write_text, write_versioned
from ..recipes import RECIPES
from .results import LOSSES, RunScores
from .trends import CONFIDENCE_LEVEL, Trend, crossing, trends

MEASURES = {  # measure (a kind of score, in per cent) -> title; tables show the measures in this order
    "pos": "parts of speech, F1, non-English languages",
    "ner": "entities, F1, non-English languages",
    "align": "word alignment, error rate",
    "pairs_centred": "retrieval of held-out pairs, centred, accuracy@1",
    "tatoeba_centred": "Tatoeba, centred, accuracy@1",
    "pairs": "retrieval of held-out pairs, accuracy@1",
    "tatoeba": "Tatoeba, accuracy@1",
}
_LESS_IS_BETTER = ("align",)
# Recipes in the order in which they get colours; the recipes named here have the colours of docs/results/.
_COLOUR_ORDER = list(dict.fromkeys(("xlme", "xlmr_tlm", "xlme_all_tokens", "xlmr", "ernie_m", "xlm", *RECIPES)))
_MARKERS = "osD^v<>pP*XhHd8"  # the first for ten systems, then the next, because there are ten colours


def write_results(runs: Sequence[RunScores], out: Path) -> list[ResultTable]:
    """Write compare.json, compare.md and the plot into `out`, and return the tables."""
    write_versioned(out / "compare.json", {"runs": [asdict(run) for run in runs]})
    result_tables = [_scores_table(runs), *_trends_tables(runs)]
    write_text(out / "compare.md", "\n".join(table.markdown() for table in result_tables))
    plot(runs, out / "compare")
    return result_tables


def measures_of(runs: Sequence[RunScores]) -> list[str]:
    """The measures that any run has."""
    return [measure for measure in MEASURES if any(measure in run.scores for run in runs)]


def _scores_table(runs: Sequence[RunScores]) -> ResultTable:
    """The table of scores: for each budget and system a row, and one for the untrained model if it was tested."""
    measures = measures_of(runs)
    losses = [term for term in LOSSES if any(term in run.losses for run in runs)]
    columns = ["operations", "system", "seeds", "tokens, M", "passes over text, pairs"]
    columns += [f"{term}, nats" for term in losses] + [MEASURES[measure] for measure in measures]
    table = ResultTable("Scores by budget: means over seeds (minimum to maximum)", columns)
    for budget, name in product(sorted({run.budget for run in runs}), _systems(runs)):
        seed_runs = [run for run in runs if (run.system, run.budget) == (name, budget)]
        if not seed_runs:
            continue
        first = seed_runs[0]  # its tokens and passes are those of all seeds
        passes_read = ", ".join(f"{first.passes[task]:.2f}" for task in TASKS if task in first.passes)
        cells = [f"{budget:.3g}", name, str(len(seed_runs)), f"{first.tokens / 1e6:.1f}", passes_read]
        cells += _cells([run.losses for run in seed_runs], losses, decimals=2)
        table.rows.append(cells + _cells([run.scores for run in seed_runs], measures))
        if untrained := [run.untrained for run in seed_runs if run.untrained]:
            cells = ["", f"{name}, untrained", str(len(untrained)), "0", "", *[""] * len(losses)]
            table.rows.append(cells + _cells(untrained, measures))
    if any(measure in run.untrained for run in runs for measure in ("pos", "ner")):
        table.notes.append("Untrained models are fine-tuned for the first seed alone.")
    return table


def _trends_tables(runs: Sequence[RunScores]) -> list[ResultTable]:
    """A list with the table of the trends: how much each system gains from ten times the operations, and where the
    first system overtakes the others. The list is empty if there are too few budgets for any trend."""
    measures, names = measures_of(runs), _systems(runs)
    trends_by_measure = {measure: trends(_points(runs, measure)) for measure in measures}
    if not any(trends_by_measure.values()):
        return []
    table = ResultTable("How fast scores grow", ["", *(MEASURES[measure] for measure in measures)])
    for name in names:
        system_trends = [trends_by_measure[measure].get(name) for measure in measures]
        cells = [f"{trend.slope:+.1f} ± {trend.slope_half_width:.1f}" if trend else "" for trend in system_trends]
        table.rows.append([f"{name}, a tenfold of operations", *cells])
    first, *others = names
    for other in others:
        cells = [
            _overtaking(trends_by_measure[measure], first, other, measure not in _LESS_IS_BETTER)
            for measure in measures
        ]
        table.rows.append([f"{first} against {other}", *cells])
    table.notes.append(
        f"Straight lines over the logarithm of the operations, with {100 * CONFIDENCE_LEVEL:.0f}% intervals "
        "(Student's; Fieller's for a crossing). Beyond the largest budget the lines are extrapolated."
    )
    return [table]


def _overtaking(trend_of: Mapping[str, Trend], first: str, other: str, higher_is_better: bool) -> str:
    """A table cell with the number of operations beyond which the system `first` is ahead of `other`, or behind it."""
    if first not in trend_of or other not in trend_of:
        return ""
    point = crossing(trend_of[first], trend_of[other])
    if point is None:
        return "the slopes cannot be told apart"
    ahead = "ahead" if point.overtakes == higher_is_better else "behind"
    return f"{ahead} from {_power(point.log10_flops)} ({_power(point.low)} to {_power(point.high)})"


def _power(exponent: float) -> str:
    """10 to the power of `exponent`, such as `3e16`."""
    return f"{10**exponent:.0e}".replace("e+", "e") if abs(exponent) < 100 else "beyond all"


def _systems(runs: Sequence[RunScores]) -> list[str]:
    return list(dict.fromkeys(run.system for run in runs))


def _points(runs: Sequence[RunScores], measure: str) -> dict[str, list[tuple[float, float]]]:
    """By system, (operations, score) for each of its runs."""
    return {
        name: [(run.flops, run.scores[measure]) for run in runs if run.system == name and measure in run.scores]
        for name in _systems(runs)
    }


def _cells(results: Sequence[Mapping[str, float]], names: Sequence[str], decimals: int = 1) -> list[str]:
    """A table cell for each of `names`, with the mean and the range over seeds. `results` has one dict per seed, with
    the value of each name."""
    return [_mean_and_range([values[name] for values in results if name in values], decimals) for name in names]


def _mean_and_range(values: Sequence[float], decimals: int) -> str:
    """The mean of `values` and, if there are several, their range; an empty text if there are none."""
    if not values:
        return ""
    value_range = f" ({min(values):.{decimals}f} to {max(values):.{decimals}f})" if len(values) > 1 else ""
    return f"{fmean(values):.{decimals}f}{value_range}"


def plot(runs: Sequence[RunScores], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg: for each measure a panel of scores over operations. Dots are runs, solid lines
    connect the means over seeds, dashed lines with bands are the trends, and dotted lines the untrained models."""
    measures = measures_of(runs)
    style = {"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style | {"axes.titlesize": 9, "axes.labelsize": 8}):
        rows = -(-len(measures) // 2)
        figure = Figure(figsize=(9.6, 3.2 * rows + 0.6), layout="constrained")
        panels = figure.subplots(rows, min(len(measures), 2), squeeze=False, sharex=True).flatten()
        for axes, measure in zip(panels, measures, strict=False):
            _panel(axes, runs, measure)
        for axes in panels[len(measures) :]:
            axes.set_visible(False)
        figure.legend(handles=_legend(runs, measures), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        save_figure(figure, stem)


def style_of(name: str) -> dict[str, Any]:
    """The style of a system's dots, hollow for a chain of recipes or an unknown recipe. It follows from the name alone,
    so that the system looks the same in all pictures."""
    number = -1
    for recipe in name.split("+"):
        # A comparison of another version may name a recipe that this version does not have.
        index = _COLOUR_ORDER.index(recipe) if recipe in _COLOUR_ORDER else crc32(recipe.encode())
        number = (number + 1) * len(_COLOUR_ORDER) + index
    return {
        "color": f"C{number % 10}",
        "marker": _MARKERS[number // 10 % len(_MARKERS)],
        "fillstyle": "full" if name in _COLOUR_ORDER else "none",
        "linestyle": "",
        "markersize": 4,
    }


def _legend(runs: Sequence[RunScores], measures: Sequence[str]) -> list[Artist]:
    """An entry for each system and, in grey, for each kind of line that the panels of `measures` have."""
    has_trends = any(trends(_points(runs, measure)) for measure in measures)
    has_untrained = any(measure in run.untrained for run in runs for measure in measures)
    lines: list[tuple[bool, Artist]] = [  # whether the panels have this kind of line, and its entry
        (True, Line2D([], [], color="grey", linewidth=1.2, label="mean over seeds")),
        (has_trends, Line2D([], [], color="grey", linestyle="--", linewidth=0.8, label="trend")),
        (
            has_trends,
            Patch(color="grey", alpha=0.3, linewidth=0, label=f"{100 * CONFIDENCE_LEVEL:.0f}% interval of the trend"),
        ),
        (has_untrained, Line2D([], [], color="grey", linestyle=":", linewidth=0.8, label="untrained model")),
    ]
    systems = [Line2D([], [], label=plot_label(name), **style_of(name)) for name in _systems(runs)]
    return [*systems, *(entry for is_drawn, entry in lines if is_drawn)]


def _panel(axes: Axes, runs: Sequence[RunScores], measure: str) -> None:
    points = _points(runs, measure)
    trend_of = trends(points)
    for name, system_points in points.items():
        style = style_of(name)
        colour = style["color"]
        flops, values = [flops for flops, _ in system_points], [score for _, score in system_points]
        by_budget = {
            run.budget: [other for other in runs if (other.system, other.budget) == (name, run.budget)]
            for run in sorted(runs, key=lambda run: run.budget)
            if run.system == name and measure in run.scores
        }
        means = [
            fmean(run.scores[measure] for run in seed_runs if measure in run.scores) for seed_runs in by_budget.values()
        ]
        axes.plot([seed_runs[0].flops for seed_runs in by_budget.values()], means, color=colour, linewidth=1.2)
        axes.plot(flops, values, **style)
        if name in trend_of:
            logs = np.linspace(np.log10(min(flops)), np.log10(max(flops)), 60)
            middle, half = np.array([trend_of[name].at(log10_flops) for log10_flops in logs]).T
            axes.plot(10**logs, middle, "--", color=colour, linewidth=0.8)
            axes.fill_between(10**logs, middle - half, middle + half, color=colour, alpha=0.12, linewidth=0)
        if untrained := [run.untrained[measure] for run in runs if run.system == name and measure in run.untrained]:
            axes.axhline(fmean(untrained), color=colour, linestyle=":", linewidth=0.8)
    axes.set_title(MEASURES[measure] + (" (less is better)" if measure in _LESS_IS_BETTER else ""))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2), min(high, 102))  # a trend may leave the range of possible scores
    axes.set(xscale="log", xlabel="floating-point operations", ylabel="%")
    axes.tick_params(labelbottom=True)
    axes.grid(axis="y", alpha=0.3)
