"""Read the scores of all runs of a comparison, and write them as JSON, tables and one plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Self
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..data.schema import TASKS, read_manifest
from ..evaluate.output import ResultTable, plot_label, save_figure
from ..evaluate.retrieval import mean_of_directions
from ..io.files import read_versioned, write_text, write_versioned
from ..recipes import RECIPES
from ..train.run_folder import fixed_settings
from .systems import System
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
# Held-out losses in nats; for XLM-E, those of the generator. Training losses cannot be compared, because systems mask
# different tokens.
LOSSES = ("mlm", "tlm")
_DIFFERS_BY_SEED = ("seed", "start.folder")  # settings in which the runs of a system differ if their seeds do
SCORES_FOLDER = "scores"  # subfolder of a run's folder
# Recipes in the order in which they get colours; the recipes named here have the colours of docs/results/.
_COLOUR_ORDER = list(dict.fromkeys(("xlme", "xlmr_tlm", "xlme_all_tokens", "xlmr", "ernie_m", "xlm", *RECIPES)))
_MARKERS = "osD^v<>pP*XhHd8"  # the first for ten systems, then the next, because there are ten colours
UNTRAINED_SUFFIX = "-untrained"  # suffix of the folder of a fine-tuning that starts from random weights


@dataclass(frozen=True)
class RunScores:
    """The cost and the scores of one trained system."""

    system: str
    budget: float
    seed: int
    flops: float  # operations that the runs of the system spent: the budget to the nearest step
    steps: int
    tokens: float  # number of token positions in the rows that the runs read
    passes: dict[str, float]  # task (mono, para) -> mean number of times that training read an example
    losses: dict[str, float]  # loss term (mlm, tlm) -> loss on held-out text
    languages: dict[str, dict[str, float]]  # loss term -> language -> loss on held-out text
    scores: dict[str, float]  # measure -> score
    untrained: dict[str, float]  # measure -> score of the untrained model; empty if this model was not tested
    # For each run of the system, the settings that do not depend on the seed.
    settings: list[dict[str, Any]] = field(default_factory=list, compare=False)

    @classmethod
    def read(cls, system: System, data: Path, tuning_seeds: int) -> Self:
        """Read the scores from the last run's folder, and the passes over the data from the manifests in `data`."""
        trained, untrained = read_scores(system.model_folder / SCORES_FOLDER, tuning_seeds)
        losses, by_language = read_losses(system.model_folder / SCORES_FOLDER)
        rows_read = {
            task: sum(round(run.config.train.steps * run.config.data.mean_rows[index]) for run in system.runs)
            for index, task in enumerate(TASKS)
        }
        return cls(
            system=system.name,
            budget=system.budget,
            seed=system.seed,
            flops=sum(run.config.train.steps * run.step_flops for run in system.runs),
            steps=sum(run.config.train.steps for run in system.runs),
            tokens=sum(run.config.train.steps * run.step_tokens for run in system.runs),
            passes={
                task: mean for task, rows in rows_read.items() if rows and (mean := mean_passes(data / task, rows))
            },
            losses=losses,
            languages=by_language,
            scores=trained,
            untrained=untrained,
            settings=[
                {key: value for key, value in fixed_settings(run.config).items() if key not in _DIFFERS_BY_SEED}
                for run in system.runs
            ],
        )


def mean_passes(folder: Path, rows: int) -> float | None:
    """The mean number of times, over the examples of all languages, that training reads an example if it reads `rows`
    rows of a mixed folder. None if the folder's manifest lacks the counts that `xlme prep mix` writes."""
    manifest = read_manifest(folder)
    if "examples" not in manifest.counts:
        return None
    used, available = (
        sum(counts[key] for counts in manifest.counts["by_language"].values()) for key in ("used", "available")
    )
    return rows / manifest.rows * used / available


def finetune_score_files(folder: Path, task: str, seeds: int) -> list[Path]:
    """The score files that `xlme finetune --out FOLDER/TASK --seeds 1 2 …` writes with this number of seeds."""
    return [folder / task / (f"seed{n}" if seeds > 1 else "") / "scores.json" for n in range(1, seeds + 1)]


def read_scores(folder: Path, tuning_seeds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (trained, untrained): by measure, the scores in `folder` of the trained and of the untrained model; the
    second dict is empty if the untrained model was not tested. Raises ValueError for a malformed file, and if the files
    of one fine-tuning task are from several models, training sets or tests."""
    trained: dict[str, float] = {}
    untrained: dict[str, float] = {}
    path = folder  # an error names the file that is being read; before the first file, it names `folder`
    try:
        for (model_scores, suffix), task in product(((trained, ""), (untrained, UNTRAINED_SUFFIX)), ("pos", "ner")):
            files = [path for path in finetune_score_files(folder, task + suffix, tuning_seeds) if path.exists()]
            first = read_versioned(files[0]) if files else {}
            means = []
            for path in files:
                content = read_versioned(path)
                for key in ("weights", "training", "files"):
                    if content.get(key) != first.get(key):
                        raise ValueError(
                            f"{path} and {files[0]} have scores of different {key}: score one model on the same test "
                            "files"
                        )
                means.append(fmean(metrics["f1"] for code, metrics in content["languages"].items() if code != "en"))
            if means:
                model_scores[task] = fmean(means)
        for test in ("align", "pairs", "tatoeba"):
            path = folder / f"{test}.json"
            for model_scores, result in zip((trained, untrained), _model_entries(path), strict=False):
                layer = result["layer"]
                if test == "align":
                    model_scores[test] = 100 * result["overall"]["aer"][layer]
                else:
                    model_scores[test] = 100 * mean_of_directions(result)[layer]
                    model_scores[f"{test}_centred"] = 100 * mean_of_directions(result, centred=True)[layer]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise _malformed(path, error) from None
    return trained, untrained


def read_losses(folder: Path) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Returns two dicts of the held-out losses in `folder`: by loss term, and by loss term and language. Both dicts are
    empty for a model that does not predict masked tokens."""
    path = folder / "losses.json"
    try:
        result = _model_entries(path)[0] if path.exists() else {"overall": {}, "languages": {}}
        terms = [term for term in LOSSES if term in result["languages"]]  # tlm needs held-out pairs
        return {term: result["overall"][term] for term in terms}, {term: result["languages"][term] for term in terms}
    except (KeyError, TypeError, IndexError) as error:
        raise _malformed(path, error) from None


def _malformed(path: Path, error: Exception) -> ValueError:
    """The error to raise for a score file that does not have the expected form."""
    return ValueError(f"{path} lacks {error} or has another form: delete it, and give the same command again")


def _model_entries(path: Path) -> list[dict[str, Any]]:
    """The models' entries in the file of a test, the trained model first; an empty list if there is no file."""
    return list(read_versioned(path)["models"]) if path.exists() else []


def read_results(path: Path) -> list[RunScores]:
    """The runs in a compare.json. Raises ValueError for a file of another form."""
    content = read_versioned(path)
    try:
        return [RunScores(**run) for run in content["runs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a compare.json of this version ({error}): write it again") from None


def join_runs(by_source: Mapping[str, Sequence[RunScores]]) -> list[RunScores]:
    """The runs of several sources (folders or files, by name) without duplicates. Raises ValueError for two different
    runs of one system, budget and seed, and if `require_equal_settings` does."""
    require_equal_settings(by_source)
    first_runs: dict[tuple[str, float, int], tuple[str, RunScores]] = {}
    for source, runs in by_source.items():
        for run in runs:
            first_source, first = first_runs.setdefault((run.system, run.budget, run.seed), (source, run))
            if run != first:
                raise ValueError(
                    f"{first_source} and {source} have different runs of {run.system} with {run.budget:.3g} operations "
                    f"and seed {run.seed}: leave one of them out"
                )
    return [run for _, run in first_runs.values()]


def require_equal_settings(by_source: Mapping[str, Sequence[RunScores]]) -> None:
    """Raise ValueError if two runs of one system and budget differ in a setting that does not depend on the seed, or in
    their steps or tokens. Scores do not matter."""
    first_seeds: dict[tuple[str, float], tuple[str, RunScores]] = {}
    for source, runs in by_source.items():
        for run in runs:
            first_source, first = first_seeds.setdefault((run.system, run.budget), (source, run))
            theirs, ours = _shared_by_seeds(first), _shared_by_seeds(run)
            for key in theirs:
                if key in ours and theirs[key] != ours[key]:
                    raise ValueError(
                        f"{first_source} and {source} have runs of {run.system} with {run.budget:.3g} operations, but "
                        f"with {key} {theirs[key]} and {ours[key]}: leave one of them out"
                    )


def _shared_by_seeds(run: RunScores) -> dict[str, Any]:
    """The settings and sizes that all seeds of a system and budget share, by name. In a chain, the names of a later
    run's settings begin with the run's number."""
    settings = {
        f"{f'{number}. run: ' if number > 1 else ''}{key}": value
        for number, of_run in enumerate(run.settings, start=1)
        for key, value in of_run.items()
    }
    return settings | {"steps": run.steps, "tokens": run.tokens}


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
