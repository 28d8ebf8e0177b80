"""The figure of published budgets and ours."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.budgets import BASE_SIZE, XTREME, draw, main
from xlme_ds.compare.results import RunScores
from xlme_ds.data.schema import write_json


def a_run(system: str, budget: float, seed: int, pos: float) -> RunScores:
    return RunScores(system, budget, seed, budget, 10, 1e6, {}, {}, {}, {"pos": pos}, {})


def test_a_system_without_a_score_is_left_out_of_its_panel() -> None:
    runs = [a_run("xlme", 1e14, 1, 40.0), replace(a_run("xlmr_tlm", 1e14, 1, 0.0), scores={"align": 70.0})]
    (panel,) = draw(runs).axes[2:]
    assert [text.get_text() for text in panel.texts] == ["xlme"]


def test_every_run_and_the_published_ones_are_on_one_axis(tmp_path: Path) -> None:
    runs = [
        a_run(name, budget, seed, 40 + seed)
        for name in ("xlme", "xlmr_tlm")
        for budget in (1e14, 1e15)
        for seed in (1, 2)
    ]
    figure = draw(runs)
    drawn = [
        sorted((x, y) for line in axes.lines if line.get_marker() == "o" for x, y in zip(*line.get_data(), strict=True))
        for axes in figure.axes
    ]
    assert drawn[0] == sorted([*((p.operations, p.score) for p in XTREME), (BASE_SIZE, 66.4)])
    assert drawn[-1] == sorted((run.budget, run.scores["pos"]) for run in runs)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert {"130 times: the paper's claim", "33 times: XLM-R as base size"} <= {
        text.get_text() for text in figure.axes[0].texts
    }
    write_json(tmp_path / "compare.json", {"runs": [run.__dict__ for run in runs]})
    main(["--compare", str(tmp_path / "compare.json"), "--out", str(tmp_path / "out")])
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".svg"}
    write_json(tmp_path / "compare.json", {})
    with pytest.raises(SystemExit, match="2"):
        main(["--compare", str(tmp_path / "compare.json"), "--out", str(tmp_path / "out")])
