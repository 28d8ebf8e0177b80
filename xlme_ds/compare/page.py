"""The comparison as tables in Markdown and as one plot."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..evaluate.output import ResultTable, save_figure
from .results import Result, Value, overtaken
from .scores import MEASURES


def tables(found: Sequence[Result], budget: float, seeds: int) -> list[ResultTable]:
    """The scores at the end of the budget, and what share of it the first system needs for those of the others."""
    measures = [measure for measure in MEASURES if any(measure in result.curves for result in found)]
    spread = f"mean of {seeds} seeds, least to most" if seeds > 1 else "one seed"
    last = ResultTable(f"{budget:.3g} operations each, {spread}", ["system", "steps", "tokens, M"])
    last.columns += [MEASURES[measure].title for measure in measures]
    for result in found:
        cells = [_cell(result.curves.get(measure)) for measure in measures]
        last.rows.append([result.name, f"{result.steps:,}", f"{result.tokens / 1e6:.1f}", *cells])
        if result.untrained:
            cells = [f"{result.untrained[m]:.1f}" if m in result.untrained else "" for m in measures]
            last.rows.append([f"{result.name}, untrained", "0", "0", *cells])
    first, *others = found
    ahead = ResultTable(f"Share of the budget at which {first.name} has the final score of another", ["system"])
    ahead.columns += [MEASURES[measure].title for measure in measures]
    for other in others:
        ahead.rows.append([other.name, *(_share(first, other, measure, budget) for measure in measures)])
    ahead.notes.append(
        "between the points on straight lines over the logarithm of the operations; ≤: at the first point already"
    )
    return [last, ahead] if others else [last]


def _cell(curve: Sequence[Value] | None) -> str:
    if not curve:
        return ""
    end = curve[-1]
    return f"{end.mean:.1f}" + (f" ({end.least:.1f} to {end.most:.1f})" if end.least < end.most else "")


def _share(first: Result, other: Result, measure: str, budget: float) -> str:
    ours, theirs = first.curves.get(measure), other.curves.get(measure)
    if not ours or not theirs:
        return ""
    reached = overtaken(ours, theirs[-1].mean, MEASURES[measure].higher_is_better)
    if reached is None:
        return "not reached"
    return ("≤ " if reached == ours[0].flops else "") + f"{100 * reached / budget:.0f}%"


def plot(found: Sequence[Result], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg: a panel a measure, score over operations; bands from the least to the most
    seed."""
    measures = [measure for measure in MEASURES if any(measure in result.curves for result in found)]
    with matplotlib.rc_context({"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False}):
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


def _panel(axes: Axes, found: Sequence[Result], measure: str) -> None:
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
    axes.set_xscale("log")
    axes.tick_params(labelbottom=True)
    axes.set_title(
        MEASURES[measure].title + ("" if MEASURES[measure].higher_is_better else " (less is better)"), fontsize=9
    )
    axes.set_xlabel("floating-point operations", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
