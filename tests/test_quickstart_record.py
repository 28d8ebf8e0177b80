"""What documents print of the quickstart is in docs/results/quickstart.json, which docs/record_quickstart.py writes."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from tests.launch import ROOT
from xlme_ds import quickstart

RECORD: dict[str, Any] = json.loads((ROOT / "docs/results/quickstart.json").read_text(encoding="utf-8"))


def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_quickstart", ROOT / "docs/record_quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_has_the_settings_of_this_version() -> None:
    theirs, ours = RECORD["settings"], json.loads(json.dumps(asdict(quickstart.RUN)))
    theirs["engine"]["precision"] = ours["engine"]["precision"]  # chosen by the processor
    assert theirs == ours
    assert RECORD["heldout"][-1]["step"] == quickstart.RUN.train.steps


@pytest.mark.parametrize("page", recorder().PAGES, ids=lambda page: page.name)
def test_pages_print_the_record(page: Path) -> None:
    """Character by character: lines are those of the recorded run, and figures in sentences are rounded from it."""
    markdown = page.read_text(encoding="utf-8")
    assert recorder().with_figures(markdown, RECORD) == markdown


def test_a_figure_of_another_run_is_found() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    last = RECORD["heldout"][-1]
    piece, probability = RECORD["judged"][-2]
    for figure in (f"mlm {last['mlm']:.3f}", RECORD["said"][0], f"{piece} {probability:.2f}"):
        changed = readme.replace(figure, figure[:-3] + "777")
        assert changed != readme and recorder().with_figures(changed, RECORD) == readme, figure
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    changed = tutorial.replace("  # ▁right 0.", "  # ▁right 1.")
    assert changed != tutorial and recorder().with_figures(changed, RECORD) == tutorial


def test_the_picture_shows_the_recorded_run() -> None:
    picture = Image.open(ROOT / "docs/report.png")
    assert json.loads(picture.info["quickstart"]) == RECORD["heldout"][-1]
    assert picture.size == (1100, 1022)


def test_the_sentence_is_drawn_from_the_record() -> None:
    drawn = (ROOT / "docs/judge.svg").read_text(encoding="utf-8")
    assert drawn == recorder().judged(RECORD)
    texts = re.findall(r"<text .*?>(.*?)</text>", drawn)
    assert "".join(texts).startswith("Everyonehastherighttolife,libertyandRechtofperson.")
    assert texts[-5:] == ["25%", "16%", "98%", "16%", "12%"]
