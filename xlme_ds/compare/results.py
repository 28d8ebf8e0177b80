"""The scores of all runs of a comparison, as JSON, tables and one plot.

They are read from the score files in the run folders and from the runs' own records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..data.schema import read_manifest
from ..evaluate.output import ResultTable, plot_label, save_figure
from ..evaluate.retrieval import mean_of_directions
from ..io.files import read_object, write_object, write_text
from .systems import System
from .trends import LEVEL, Trend, crossing, trends


class Measure(NamedTuple):
    """A score of a model, in per cent."""

    title: str
    higher_is_better: bool = True


MEASURES = {
    "pos": Measure("parts of speech, F1, non-English languages"),
    "ner": Measure("entities, F1, non-English languages"),
    "align": Measure("word alignment, error rate", higher_is_better=False),
    "pairs_centred": Measure("retrieval of held-out pairs, centred, accuracy@1"),
    "tatoeba_centred": Measure("Tatoeba, centred, accuracy@1"),
    "pairs": Measure("retrieval of held-out pairs, accuracy@1"),
    "tatoeba": Measure("Tatoeba, accuracy@1"),
}  # in the order of tables
# Held-out losses in nats; XLM-E's are its generator's. Training losses cannot be compared: masks differ by system.
LOSSES = ("mlm", "tlm")
SCORES = "scores"  # subfolder of a run's folder
# The index of a system here determines its colour, as in docs/results/.
_COLOURED = ("xlme", "xlmr_tlm", "xlme_all_tokens", "xlmr", "ernie_m", "xlm")
UNTRAINED = "-untrained"  # suffix of the folder of a fine-tuning that starts from random weights


@dataclass(frozen=True)
class RunScores:
    """One trained system: its cost, its `scores` by measure, and those of the untrained model if that was tested.

    `passes`: how many times its rows read the text and the pairs; `languages`: held-out losses by term and language.
    """

    system: str
    budget: float
    seed: int
    flops: float
    steps: int
    tokens: float
    passes: dict[str, float]
    losses: dict[str, float]
    languages: dict[str, dict[str, float]]
    scores: dict[str, float]
    untrained: dict[str, float]

    @classmethod
    def read(cls, system: System, data: Path, tuning_seeds: Sequence[int]) -> Self:
        """Read the scores from the run's folder, and the passes over the data from the manifests of `xlme prep mix`."""
        trained, untrained = scores(system.model / SCORES, tuning_seeds)
        losses, by_language = heldout_losses(system.model / SCORES)
        tasks = {"mono": 0, "para": 0}
        for leg in system.legs:
            for task, rows in zip(tasks, leg.config.data.mean_rows, strict=True):
                tasks[task] += round(leg.config.train.steps * rows)
        return cls(
            system.name,
            system.budget,
            system.seed,
            system.flops,
            sum(leg.config.train.steps for leg in system.legs),
            system.tokens,
            {task: read for task, rows in tasks.items() if rows and (read := passes(data / task, rows))},
            losses,
            by_language,
            trained,
            untrained,
        )


def passes(folder: Path, rows: int) -> float | None:
    """The number of times that the first `rows` rows of a mixed folder read its examples, a mean over all languages;
    None if its manifest lacks the counts that `xlme prep mix` writes."""
    manifest = read_manifest(folder)
    if "examples" not in manifest.counts:
        return None
    used, available = (
        sum(counts[key] for counts in manifest.counts["by_language"].values()) for key in ("used", "available")
    )
    return rows / manifest.rows * used / available


def finetune_score_files(folder: Path, task: str, seeds: Sequence[int]) -> list[Path]:
    """The score files that `xlme finetune --out FOLDER/TASK --seeds …` writes."""
    return [folder / task / (f"seed{seed}" if len(seeds) > 1 else "") / "scores.json" for seed in seeds]


def scores(folder: Path, tuning_seeds: Sequence[int]) -> tuple[dict[str, float], dict[str, float]]:
    """The scores by measure of the model tested in `folder`, and of the untrained model; empty if it was not tested."""
    trained: dict[str, float] = {}
    untrained: dict[str, float] = {}
    path = folder
    try:
        for model_scores, task in product((trained, untrained), ("pos", "ner")):
            name = task + UNTRAINED * (model_scores is untrained)
            files = [path for path in finetune_score_files(folder, name, tuning_seeds) if path.exists()]
            means, first = [], read_object(files[0]) if files else {}
            for path in files:
                content = read_object(path)
                languages = content["languages"]
                for key in ("weights", "training", "files"):
                    if content.get(key) != first.get(key):
                        raise ValueError(
                            f"{path} has scores of other {key} than {files[0]}: score one model on the same test files"
                        )
                means.append(fmean(metrics["f1"] for code, metrics in languages.items() if code != "en"))
            if means:
                model_scores[task] = fmean(means)
        for test in ("align", "pairs", "tatoeba"):
            path = folder / f"{test}.json"
            for model_scores, result in zip((trained, untrained), _models(path), strict=False):
                if test == "align":
                    model_scores[test] = 100 * result["overall"]["aer"][result["layer"]]
                    continue
                for suffix in ("", "_centred"):
                    model_scores[test + suffix] = 100 * mean_of_directions(result, bool(suffix))[result["layer"]]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise _malformed(path, error) from None
    return trained, untrained


def heldout_losses(folder: Path) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The held-out losses by term of the model tested in `folder`, overall and by language; empty for a model that does
    not predict masked tokens."""
    path = folder / "losses.json"
    try:
        result = _models(path)[0] if path.exists() else {"overall": {}, "languages": {}}
        terms = [term for term in LOSSES if term in result["languages"]]  # tlm needs held-out pairs
        return {term: result["overall"][term] for term in terms}, {term: result["languages"][term] for term in terms}
    except (KeyError, TypeError, IndexError) as error:
        raise _malformed(path, error) from None


def _malformed(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} lacks {error} or has another form: delete it, and the same command repeats the test")


def _models(path: Path) -> list[dict[str, Any]]:
    """The results by model in the file of a test, the trained model first; none if it was not run."""
    return list(read_object(path)["models"]) if path.exists() else []


def read_results(path: Path) -> list[RunScores]:
    """The runs in a compare.json. Raises ValueError for another file."""
    content = read_object(path)
    try:
        return [RunScores(**run) for run in content["runs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a compare.json of this version ({error}): make it again") from None


def join_runs(by_place: Mapping[str, Sequence[RunScores]]) -> list[RunScores]:
    """The runs of several places (folders or files, by name) without duplicates. Raises ValueError for two different
    runs of one system, budget and seed."""
    first_places: dict[tuple[str, float, int], tuple[str, RunScores]] = {}
    for place, runs in by_place.items():
        for run in runs:
            first_place, first = first_places.setdefault((run.system, run.budget, run.seed), (place, run))
            if run != first:
                raise ValueError(
                    f"{first_place} and {place} have different runs of {run.system} with {run.budget:.3g} operations "
                    f"and seed {run.seed}: leave one out"
                )
    return [run for _, run in first_places.values()]


def deliver(runs: Sequence[RunScores], out: Path) -> list[ResultTable]:
    """Write compare.json, compare.md and the plot; returns the tables."""
    write_object(out / "compare.json", {"runs": [asdict(run) for run in runs]})
    result_tables = tables(runs)
    write_text(out / "compare.md", "\n".join(table.markdown() for table in result_tables))
    plot(runs, out / "compare")
    return result_tables


def measures_of(runs: Sequence[RunScores]) -> list[str]:
    """The measures that any run has."""
    return [measure for measure in MEASURES if any(measure in run.scores for run in runs)]


def tables(runs: Sequence[RunScores]) -> list[ResultTable]:
    """A table of the scores by budget, and one of their growth and the budgets at which the first system overtakes
    others."""
    return [_scores_table(runs), *_trends_tables(runs)]


def _scores_table(runs: Sequence[RunScores]) -> ResultTable:
    measures = measures_of(runs)
    losses = [term for term in LOSSES if any(term in run.losses for run in runs)]
    columns = ["operations", "system", "seeds", "tokens, M", "passes over text, pairs", *(f"{t}, nats" for t in losses)]
    table = ResultTable("Scores by budget: means over seeds, least to most", columns)
    table.columns += [MEASURES[measure].title for measure in measures]
    for budget in sorted({run.budget for run in runs}):
        for name in _names(runs):
            seeds = [run for run in runs if (run.system, run.budget) == (name, budget)]
            if not seeds:
                continue
            first = seeds[0]
            passes_read = ", ".join(f"{first.passes[task]:.2f}" for task in ("mono", "para") if task in first.passes)
            cells = [f"{budget:.3g}", name, str(len(seeds)), f"{first.tokens / 1e6:.1f}", passes_read]
            cells += [_mean_and_range([run.losses[term] for run in seeds if term in run.losses], 2) for term in losses]
            cells += [_mean_and_range([run.scores[m] for run in seeds if m in run.scores]) for m in measures]
            table.rows.append(cells)
            if any(run.untrained for run in seeds):
                cells = ["", f"{name}, untrained", str(sum(bool(run.untrained) for run in seeds)), "0", ""]
                cells += [""] * len(losses)
                cells += [_mean_and_range([run.untrained[m] for run in seeds if m in run.untrained]) for m in measures]
                table.rows.append(cells)
    if any(measure in run.untrained for run in runs for measure in ("pos", "ner")):
        table.notes.append("Untrained models are fine-tuned for the first seed alone.")
    return table


def _trends_tables(runs: Sequence[RunScores]) -> list[ResultTable]:
    """The table of the trends; none if there are too few budgets for any."""
    measures, names = measures_of(runs), _names(runs)
    lines = {measure: trends(_points(runs, measure)) for measure in measures}
    if not any(lines.values()):
        return []
    share = f"{100 * LEVEL:.0f}%"
    table = ResultTable("How fast scores grow", ["", *(MEASURES[measure].title for measure in measures)])
    for name in names:
        trend_of = [lines[measure].get(name) for measure in measures]
        cells = [f"{line.slope:+.1f} ± {line.slope_half:.1f}" if line else "" for line in trend_of]
        table.rows.append([f"{name}, a tenfold of operations", *cells])
    first, *others = names
    for slower in others:
        cells = [_overtaking(lines[measure], first, slower, MEASURES[measure].higher_is_better) for measure in measures]
        table.rows.append([f"{first} against {slower}", *cells])
    table.notes.append(
        f"Straight lines over the logarithm of the operations, with {share} intervals (Student; a crossing's is "
        "Fieller's). Beyond the largest budget they are extrapolated."
    )
    return [table]


def _overtaking(lines: Mapping[str, Trend], first: str, other: str, higher_is_better: bool) -> str:
    if first not in lines or other not in lines:
        return ""
    at_crossing = crossing(lines[first], lines[other])
    if at_crossing is None:
        return "the slopes cannot be told apart"
    ahead = "ahead" if at_crossing.overtakes == higher_is_better else "behind"
    return f"{ahead} from {_power(at_crossing.at)} ({_power(at_crossing.least)} to {_power(at_crossing.most)})"


def _power(log: float) -> str:
    """10 to the power of `log`, such as `3e16`."""
    return f"{10**log:.0e}".replace("e+", "e") if abs(log) < 100 else "beyond all"


def _names(runs: Sequence[RunScores]) -> list[str]:
    return list(dict.fromkeys(run.system for run in runs))


def _points(runs: Sequence[RunScores], measure: str) -> dict[str, list[tuple[float, float]]]:
    """(operations, score) of every run, by system."""
    return {
        name: [(run.flops, run.scores[measure]) for run in runs if run.system == name and measure in run.scores]
        for name in _names(runs)
    }


def _mean_and_range(values: Sequence[float], places: int = 1) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.{places}f} to {max(values):.{places}f})" if len(values) > 1 else ""
    return f"{fmean(values):.{places}f}{spread}"


def plot(runs: Sequence[RunScores], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg: for each measure a panel of scores over operations. Dots are runs, solid lines
    connect their means by budget, dashed lines with bands are the trends, and dotted lines the untrained models."""
    measures = measures_of(runs)
    sizes = {"axes.titlesize": 9, "axes.labelsize": 8}
    with matplotlib.rc_context(
        {"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False} | sizes
    ):
        rows = -(-len(measures) // 2)
        figure = Figure(figsize=(9.6, 3.2 * rows + 0.6), layout="constrained")
        panels = figure.subplots(rows, min(len(measures), 2), squeeze=False, sharex=True).flatten()
        for axes, measure in zip(panels, measures, strict=False):
            _panel(axes, runs, measure)
        for axes in panels[len(measures) :]:
            axes.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        save_figure(figure, stem)


def colour_of(name: str, names: Iterable[str]) -> str:
    """The colour of a system: fixed for those of `_COLOURED`; the others follow in the order of `names`."""
    others = [other for other in names if other not in _COLOURED]
    return f"C{_COLOURED.index(name)}" if name in _COLOURED else f"C{len(_COLOURED) + others.index(name)}"


def _panel(axes: Axes, runs: Sequence[RunScores], measure: str) -> None:
    points = _points(runs, measure)
    lines = trends(points)
    for name, values in points.items():
        colour = colour_of(name, points)
        by_budget = {
            run.budget: [other for other in runs if (other.system, other.budget) == (name, run.budget)]
            for run in sorted(runs, key=lambda run: run.budget)
            if run.system == name and measure in run.scores
        }
        means = [fmean(run.scores[measure] for run in seeds if measure in run.scores) for seeds in by_budget.values()]
        axes.plot([seeds[0].flops for seeds in by_budget.values()], means, color=colour, linewidth=1.2)
        axes.plot(
            [flops for flops, _ in values],
            [y for _, y in values],
            "o",
            color=colour,
            markersize=4,
            label=plot_label(name),
        )
        if name in lines:
            flops = [flops for flops, _ in values]
            x = np.linspace(np.log10(min(flops)), np.log10(max(flops)), 60)
            middle, half = np.array([lines[name].at(at) for at in x]).T
            axes.plot(10**x, middle, "--", color=colour, linewidth=0.8)
            axes.fill_between(10**x, middle - half, middle + half, color=colour, alpha=0.12, linewidth=0)
        untrained = [run.untrained[measure] for run in runs if run.system == name and measure in run.untrained]
        if untrained:
            axes.axhline(fmean(untrained), color=colour, linestyle=":", linewidth=0.8)
    title, higher_is_better = MEASURES[measure]
    axes.set_title(title + ("" if higher_is_better else " (less is better)"))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2), min(high, 102))  # a trend may leave the range of possible scores
    axes.set(xscale="log", xlabel="floating-point operations", ylabel="%")
    axes.tick_params(labelbottom=True)
    axes.grid(axis="y", alpha=0.3)
