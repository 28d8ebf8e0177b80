"""What documents print of the quickstart is in docs/results/quickstart.json, which a finished run wrote."""

import contextlib
import io
import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from PIL import Image

from tests.launch import ROOT
from xlme_ds import quickstart
from xlme_ds.objectives import objective_of
from xlme_ds.train.records import Console
from xlme_ds.train.run_folder import settled

RECORD: dict[str, Any] = json.loads((ROOT / "docs/results/quickstart.json").read_text(encoding="utf-8"))
PAGES = ["README.md", "docs/index.md", "docs/tutorial.md", "docs/howto/gpus.md"]
STEP = re.compile(rf"^step (\d+)/{quickstart.RUN.train.steps}  .*", re.M)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def printed(step: int) -> set[str]:
    """The lines that the run printed of a step; the time left is that of the recorded machine."""
    terms = objective_of(quickstart.RUN.objective).terms
    console = Console(quickstart.RUN.train.steps, 0, terms)
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        for line in (line for line in RECORD["metrics"] if line["step"] == step):
            console.step(line)
        for line in (line for line in RECORD["heldout"] if line["step"] == step):
            console.evaluation(line)
        for line in (line for line in RECORD["dimensions"] if line["step"] == step):
            console.dimensions(line, "")
    return set(lines.getvalue().splitlines())


def test_the_record_has_the_settings_of_this_version() -> None:
    theirs, ours = RECORD["settings"], json.loads(json.dumps(asdict(quickstart.RUN)))
    theirs["engine"]["precision"] = ours["engine"]["precision"]  # chosen by the processor
    assert theirs == ours, settled(quickstart.RUN)
    assert RECORD["heldout"][-1]["step"] == quickstart.RUN.train.steps


@pytest.mark.parametrize("page", PAGES)
def test_printed_lines_are_the_record_s(page: str) -> None:
    """Character by character: a line is copied from the recorded run."""
    for line in STEP.finditer(text(page)):
        assert line[0] in printed(int(line[1])), page


def test_pages_have_such_lines() -> None:
    assert {page for page in PAGES if STEP.search(text(page))} >= {"README.md", "docs/tutorial.md"}


@pytest.mark.parametrize("page", PAGES)
def test_figures_in_sentences(page: str) -> None:
    """AUCs in sentences are the last evaluation's; probabilities of the judged and the filled sentence are rounded."""
    last = RECORD["heldout"][-1]
    sentences = STEP.sub("", text(page))
    for auc in re.findall(r"AUC\D{1,40}?(0\.\d{2,3})\b", sentences):
        digits = len(auc) - 2
        assert auc in {f"{last[key]:.{digits}f}" for key in ("auc_mono", "auc_para")}, f"{page}: AUC {auc}"
    shown = dict(RECORD["judged"])
    for piece, value in re.findall(r"(▁\w+|\.) (\d(?:\.\d+)?)(?=[ \n])", sentences):
        assert float(value) == pytest.approx(shown[piece], abs=0.006), f"{page}: {piece}, of two decimals"


def test_the_picture_shows_the_recorded_run() -> None:
    picture = Image.open(ROOT / "docs/report.png")
    assert json.loads(picture.info["quickstart"]) == RECORD["heldout"][-1]
    assert picture.size == (1100, 1390)
