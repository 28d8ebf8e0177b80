"""Lines through scores and where they cross, against scipy and simulated experiments."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from matplotlib.figure import Figure

from tests.launch import ROOT
from xlme_ds.compare.results import RunScores, read_results
from xlme_ds.compare.summary import _panel, _points, _power, measures_of, plot, style_of
from xlme_ds.compare.trends import crossing, t_quantile, trends
from xlme_ds.recipes import RECIPES

FLOPS = [1e14, 1e14, 1e14, 3e14, 3e14, 1e15]


@pytest.mark.parametrize("freedom", [1, 2, 5, 11, 40])
def test_students_quantile_is_scipys(freedom: int) -> None:
    for level in (0.5, 0.9, 0.99):
        assert t_quantile(freedom, level) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, freedom), rel=1e-5)


def test_one_line_is_scipys_regression() -> None:
    scores = [10.0, 11.5, 10.4, 13.0, 14.2, 17.0]
    expected = scipy.stats.linregress(np.log10(FLOPS), scores)
    line = trends({"one": list(zip(FLOPS, scores, strict=True))})["one"]
    assert (line.slope, line.intercept) == pytest.approx((expected.slope, expected.intercept))
    quantile = scipy.stats.t.ppf(0.95, 4)
    assert line.slope_half_width == pytest.approx(quantile * expected.stderr, rel=1e-5)
    assert line.at(0.0)[1] == pytest.approx(quantile * expected.intercept_stderr, rel=1e-5)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random, x = np.random.default_rng(0), np.log10(FLOPS)
    inside = 0
    for _ in range(1000):
        first, other = (
            [*zip(FLOPS, at + slope * (x - 14) + random.normal(0, 0.5, len(x)), strict=True)]
            for at, slope in ((10, 9), (17.5, 4))  # they cross at 10^15.5
        )
        lines = trends({"first": first, "other": other})
        found = crossing(lines["first"], lines["other"])
        assert found is not None
        inside += found.low <= 15.5 <= found.high
    assert 0.87 < inside / 1000 < 0.93  # the deviation of such a share is 0.0095


def test_a_crossing_is_told_by_its_direction_or_not_at_all() -> None:
    exact = [(flops, 10 + 4 * (math.log10(flops) - 14)) for flops in FLOPS]
    steep = [(flops, score - 3 + 2 * (math.log10(flops) - 14)) for flops, score in exact]
    noise = [(flops, score + 0.01 * (-1) ** n) for n, (flops, score) in enumerate(exact)]
    lines = trends({"exact": noise, "steep": steep, "same": exact})
    passed = crossing(lines["steep"], lines["exact"])
    assert passed is not None and passed.overtakes and passed.log10_flops == pytest.approx(15.5, abs=0.02)
    back = crossing(lines["exact"], lines["steep"])
    assert back is not None and not back.overtakes and back.log10_flops == pytest.approx(passed.log10_flops)
    assert crossing(lines["exact"], lines["same"]) is None


def test_too_few_scores_give_no_line() -> None:
    assert trends({"one": [(1e14, 1.0), (3e14, 2.0)]}) == {}  # a line through two points fits always
    assert trends({"one": [(1e14, 1.0), (1.01e14, 2.0), (0.99e14, 3.0)], "none": []}) == {}
    assert trends({"one": [(1e14, 1.0), (3e14, 2.0)], "two": [(1e14, 1.0), (3e14, 2.0), (1e15, 2.0)]}).keys() == {
        "one",
        "two",
    }


def test_a_system_has_one_colour_in_all_pictures() -> None:
    """Of ten colours, so more systems than that have other markers; chains of recipes have hollow ones."""
    documents = [style_of(name) for name in ("xlme", "xlmr_tlm", "xlme_all_tokens")]
    assert [(style["color"], style["marker"]) for style in documents] == [("C0", "o"), ("C1", "o"), ("C2", "o")]
    names = [*RECIPES, *(f"{first}+{last}" for first in ("xlmr", "xlm") for last in RECIPES), "mine"]
    assert len({str(style_of(name)) for name in names}) == len(names)


def test_a_panel_has_the_means_the_runs_and_the_untrained_models() -> None:
    """Over the operations that were spent, the smallest budget first, in whichever order the runs are; and no further
    than scores can be."""

    def made(name: str, budget: float, seed: int, error: float, **untrained: float) -> RunScores:
        return RunScores(name, budget, seed, budget * (1 + seed / 100), 9, 1e6, {}, {}, {}, {"align": error}, untrained)

    runs = [
        made("xlme", 1e15, 1, 99.0),
        made("xlme", 1e14, 1, 10.0, align=70.0),
        made("xlme", 1e14, 2, 20.0, align=80.0),
    ]
    runs += [made("mine", 1e14, 1, 5.0)]
    assert _points(runs, "align")["xlme"] == [(1.01e15, 99.0), (1.01e14, 10.0), (1.02e14, 20.0)]
    axes = Figure().add_subplot()
    _panel(axes, runs, "align")
    lines = [
        (list(line.get_xdata()), list(line.get_ydata()), line.get_linestyle(), line.get_color()) for line in axes.lines
    ]
    assert lines[:2] == [
        ([1.01e14, 1.01e15], [15.0, 99.0], "-", "C0"), ([1.01e15, 1.01e14, 1.02e14], [99.0, 10.0, 20.0], "None", "C0"),
    ]  # fmt: skip
    trend, untrained, mean = lines[2:5]
    assert trend[2] == "--" and (trend[0][0], trend[0][-1]) == pytest.approx((1.01e14, 1.01e15))
    assert (untrained[1], untrained[2]) == ([75.0, 75.0], ":") and mean[:2] == ([1.01e14], [5.0])
    assert axes.get_title().endswith("(less is better)") and axes.get_xscale() == "log"
    low, high = axes.get_ylim()
    assert low >= -2 and high == 102
    assert measures_of([*runs, RunScores("a", 1.0, 1, 1.0, 1, 1.0, {}, {}, {}, {"ner": 1.0}, {})]) == ["ner", "align"]


def test_the_plots_legend_lists_what_is_drawn(tmp_path: Path) -> None:
    """A system that the first panel lacks, too; trends and untrained models where there are any."""

    def texts(runs: list[RunScores]) -> list[str]:
        plot(runs, tmp_path / "compare")
        found = re.findall("<!-- (.*?) -->", (tmp_path / "compare.svg").read_text())
        return found[found.index("xlme") :]

    def made(system: str, budget: float, **scores: float) -> RunScores:
        return RunScores(system, budget, 1, budget, 9, 1e6, {}, {}, {}, scores, {})

    runs = [made("xlme", 1e14, pos=1.0, align=2.0), made("mine", 1e14, align=3.0)]
    assert texts(runs) == ["xlme", "mine", "mean over seeds"]
    runs += [made("xlme", budget, pos=1.5, align=2.0) for budget in (3e14, 1e15)]
    runs[0].untrained["align"] = 70.0
    kinds = ["mean over seeds", "trend", "90% interval of the trend", "untrained model"]
    assert sorted(texts(runs)) == sorted(["xlme", "mine", *kinds])


def test_powers_of_ten_in_short() -> None:
    assert [_power(exponent) for exponent in (16.477, -3.0, 100.0, -100.0)] == [
        "3e16",
        "1e-03",
        "beyond all",
        "beyond all",
    ]


def test_the_documents_picture_is_of_their_numbers(tmp_path: Path) -> None:
    results = ROOT / "docs" / "results"
    runs = read_results(results / "compare.json")
    plot(runs, tmp_path / "compare")
    labels = [
        re.findall("<!-- (.*?) -->", path.read_text()) for path in (tmp_path / "compare.svg", results / "compare.svg")
    ]
    assert labels[0] == labels[1] and "xlme_all_tokens" in labels[0]
    picture = (results / "compare.svg").read_text()
    assert set(re.findall("#(?:1f77b4|ff7f0e|2ca02c|d62728|9467bd)", picture)) == {"#1f77b4", "#ff7f0e", "#2ca02c"}
