"""Where our comparisons lie: published scores against operations, and ours below them on the same axis.

`python -m bench.budgets --compare COMPARE.json --out FOLDER` writes FOLDER/budgets.svg and budgets.png. Operations are
as each source counts them, but ELECTRA's, which are brought to the standard count (the backward pass is two forward
ones) by a factor of 1.5.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from xlme_ds.cli import fail
from xlme_ds.compare.results import MEASURES, RunScores, read_results
from xlme_ds.evaluate.output import save_figure

MASKED, JUDGED, OTHER = "C1", "C0", "C2"  # masked language modelling, replaced token detection, the rest


class Point(NamedTuple):
    """A published model."""

    name: str
    operations: float
    score: float
    colour: str


# Chi et al. (2022), Table 4. XLM-R's count there is three times that of a RoBERTa-large; base size is BASE_SIZE.
XTREME = (
    Point("mBERT", 6.4e19, 63.1, MASKED),
    Point("XLM-R", 9.6e21, 66.4, MASKED),
    Point("XLM-Align", 9.7e21, 68.9, MASKED),
    Point("XLM-E without TRTD", 6.3e19, 67.6, JUDGED),
    Point("XLM-E", 9.5e19, 69.3, JUDGED),
)
BASE_SIZE = 3.1e21
CLAIM = 130  # the paper's Figure 1, against an XLM-R + TLM of its own
STANDARD = 1.5  # ELECTRA's script counts a backward pass as one forward pass, not two
# Clark et al. (2020), Table 1.
GLUE = (
    Point("BERT-Small", STANDARD * 1.4e18, 75.1, MASKED),
    Point("ELECTRA-Small", STANDARD * 8.9e16, 74.1, JUDGED),
    Point("", STANDARD * 1.8e17, 76.0, JUDGED),
    Point("", STANDARD * 3.6e17, 77.7, JUDGED),
    Point("", STANDARD * 1.4e18, 79.9, JUDGED),
)
COLOURS = {"xlme": JUDGED, "xlmr_tlm": MASKED}


@dataclass(frozen=True)
class Settings:
    """What to draw."""

    compare: Path
    """A compare.json of `xlme compare`."""
    out: Path
    """Folder for budgets.svg and budgets.png."""


def main(arguments: list[str] | None = None) -> None:
    """Draw it; a user's mistake ends the command with one sentence and exit code 2."""
    settings = tyro.cli(Settings, args=arguments)
    try:
        runs = read_results(settings.compare)
        settings.out.mkdir(parents=True, exist_ok=True)
        save_figure(draw(runs), settings.out / "budgets")
    except (ValueError, OSError) as error:
        fail("bench.budgets", error)


def draw(runs: list[RunScores]) -> Figure:
    """Published scores above, then a panel for each of our fine-tuned measures."""
    measures = [name for name in ("pos", "ner") if any(name in run.scores for run in runs)]
    figure = Figure(figsize=(9.6, 2.4 * (2 + len(measures))), layout="constrained")
    panels = figure.subplots(2 + len(measures), 1, sharex=True)
    published(panels[0], "XTREME, mean (Chi et al., 2022)", XTREME)
    by_name = {point.name: point for point in XTREME}
    score, start = by_name["XLM-R"].score, by_name["XLM-E"].operations
    panels[0].plot(BASE_SIZE, score, "o", color=MASKED, fillstyle="none")
    panels[0].annotate("as base size", (BASE_SIZE, score), (-6, -4), textcoords="offset points", ha="right", fontsize=8)
    ratio(panels[0], start, CLAIM * start, 72.2, f"{CLAIM} times: the paper's claim")
    ratio(panels[0], start, BASE_SIZE, 70.8, f"{BASE_SIZE / start:.0f} times: XLM-R as base size")
    published(panels[1], "GLUE, mean (Clark et al., 2020)", GLUE)
    panels[1].plot([p.operations for p in GLUE[1:]], [p.score for p in GLUE[1:]], color=JUDGED, linewidth=1)
    for axes, measure in zip(panels[2:], measures, strict=True):
        ours(axes, measure, runs)
    panels[0].set_xscale("log")
    panels[-1].set_xlabel("floating-point operations of pre-training")
    return figure


def published(axes: Axes, title: str, points: tuple[Point, ...]) -> None:
    """Dots with their names."""
    for point in points:
        axes.plot(point.operations, point.score, "o", color=point.colour)
        axes.annotate(point.name, (point.operations, point.score), (6, -4), textcoords="offset points", fontsize=8)
    finish(axes, title)


def ratio(axes: Axes, start: float, end: float, height: float, words: str) -> None:
    """An arrow from one amount of operations to another."""
    axes.annotate("", (end, height), (start, height), arrowprops={"arrowstyle": "<->", "color": "grey"})
    axes.annotate(words, (start, height), (-6, -3), textcoords="offset points", ha="right", fontsize=8)
    axes.plot(end, height, alpha=0)  # an arrow does not widen the axis


def ours(axes: Axes, measure: str, runs: list[RunScores]) -> None:
    """Each system's runs, and a line through their means."""
    for name in dict.fromkeys(run.system for run in runs):
        own = [run for run in runs if run.system == name and measure in run.scores]
        if not own:
            continue
        colour, budgets = COLOURS.get(name, OTHER), sorted({run.budget for run in own})
        means = [fmean(run.scores[measure] for run in own if run.budget == budget) for budget in budgets]
        axes.plot([run.budget for run in own], [run.scores[measure] for run in own], "o", color=colour, markersize=4)
        axes.plot(budgets, means, color=colour, linewidth=1)
        axes.annotate(name, (budgets[-1], means[-1]), (6, -4), textcoords="offset points", fontsize=8)
    finish(axes, f"here: {MEASURES[measure].title}")


def finish(axes: Axes, title: str) -> None:
    """Title and grid."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
