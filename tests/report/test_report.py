"""The report page from synthetic run folders: whole, partial, damaged; text is escaped, numbers come from the input."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import python
from xlme_ds.config import ObjectiveConfig
from xlme_ds.objectives import describe
from xlme_ds.report import by_language, figures, run_page, runs_page
from xlme_ds.report.__main__ import main
from xlme_ds.report.run_files import RunFiles
from xlme_ds.report.run_page import write_report
from xlme_ds.report.runs_page import write_comparison

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
KNOWN = describe(ObjectiveConfig())["quantities"]


def token(piece: str, score: float, original: str | None = None, masked: bool = False) -> dict[str, Any]:
    original = piece if original is None else original
    replaced = piece != original
    return {"piece": piece, "original": original, "masked": masked or replaced, "replaced": replaced, "score": score}


FRENCH = [
    token("<s>", 0.99),
    token("▁Tous", 0.01),
    token("▁<script>alert(1)</script>", 0.9, original="▁les"),
    token("▁droits", 0.8),
    token("▁hom", 0.2, original="▁hum"),
    token("ains", 0.1, masked=True),
    token("</s>", 0.99),
]
ARABIC = [token("▁Everyone", 0.05), token("</s>", 0.0), token("▁لكل", 0.04), token("▁شخص", 0.03)]


def metric(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 60 - step / 2, "mlm": 9 - step / 20, "tlm": 8 - step / 20, "mrtd": 0.5, "trtd": 0.4,
            "auc_mono": 0.5 + step / 400, "lr": 1e-3, "grad_norm": 1.5, "tokens": step * 1000, "tokens_per_s": 500.0,
            "flops_per_s": 2.5e11, "skipped_steps": 3, "surprise_rate_mono": step / 7}  # fmt: skip


def heldout(step: int) -> dict[str, Any]:
    return {"step": step, "mlm": 6.037, "tlm": 5.518, "auc_mono": 0.5 + step / 250, "auc_para": 0.6,
            "unigram_nll_mono": 7.294, "unigram_nll_para": 7.118}  # fmt: skip


def dimensions(step: int) -> dict[str, Any]:
    return {"step": step, "layer_0": 60.0, "layer_1": 50.0 / step, "layer_2": 40.0 / step}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "trial"
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", [metric(step) for step in range(1, STEPS + 1)])
    write_lines(folder / "heldout.jsonl", [heldout(step) for step in (0, 20, STEPS)])
    write_lines(folder / "dimensions.jsonl", [dimensions(step) for step in (1, 20, STEPS)])
    share = {
        "fr": {"share": 0.6123, "share_before": 0.75, "repeat": 1.0},
        "sw": {"share": 0.3877, "share_before": 0.25, "repeat": 17.4},
    }
    scores = {"en_xx": [0.1, 0.2, 0.3], "xx_en": [0.1, 0.1, 0.2]}
    better = {"en_xx": [0.1, 0.5125, 0.4], "xx_en": [0.1, 0.4375, 0.3]}
    values = {
        "config.json": {
            "config": {"name": "tiny <b>", "model": {"width": 96}},
            "objective": describe(ObjectiveConfig()),
            "parameters": {"embedding": 700_000, "trained_total": 1_230_000},
            "world_size": 2,
        },
        "languages.json": {"mono": share, "para": {}},
        "retrieval.json": {
            "layers": [0, 1, 2],
            "before": {"overall": scores, "languages": {"fr": scores}},
            "after": {"overall": better, "languages": {"fr": better}},
            "pairs": {"fr": 77},
            "candidates": 80,
        },
        "samples.json": {
            "samples": [
                {"language": "fr", "task": "mono", "tokens": FRENCH},
                {"language": "ar", "task": "para", "tokens": ARABIC},
            ]
        },
    }
    for name, value in values.items():
        (folder / name).write_text(json.dumps({"format": 1, **value}), encoding="utf-8")
    return folder


class Page(HTMLParser):
    """Text outside of pictures, tags in order, and whether every element is closed."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if "svg" not in self.open and "style" not in self.open:
            self.text += data + " "


def test_page_is_whole_and_self_contained(run: Path) -> None:
    path = write_report(run)
    html = path.read_text(encoding="utf-8")
    parsed = Page(html)
    assert path == run / "report.html" and parsed.tags[0][0] == "html"
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in parsed.tags)
    assert not re.search(r'(?:src|href)="(?!#)', html), "the page refers to another file"
    assert not list(run.glob(".*.tmp"))
    assert sum(tag == "svg" for tag, _ in parsed.tags) == len(figures.curves([metric(1)], [heldout(1)], KNOWN)) + 2


def test_names_are_shown_as_they_are(run: Path) -> None:
    """Of the run in the page's title, and of a quantity that the page does not know in a figure's."""
    name, quantity = 'a <b> & "c" $x$', "new <i> $y$"
    config = json.loads((run / "config.json").read_text())
    config["config"]["name"] = name
    (run / "config.json").write_text(json.dumps(config))
    write_lines(run / "metrics.jsonl", [metric(step) | {quantity: 1.0 * step} for step in range(1, 5)])
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert f"{name}: pre-training" in page.text and f" {quantity} " in page.text
    assert quantity in [attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg"]


def test_the_run_is_named_by_its_folder_its_date_and_its_command(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    command = "xlme pretrain --recipe base --out 'c$x$ <i>'"
    (run / "config.json").write_text(json.dumps(config | {"started": "2026-11-26 21:04", "command": command}))
    folder = run.rename(run.with_name("c$\\x$ [b]"))
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "c$\\x$ [b] · XLM-E pre-training" in page.text and page.text.count(" c$\\x$ [b] ") >= 1
    assert f"Started 2026-11-26 21:04 UTC: {command}" in page.text and page.text.count(command) == 1


def test_sentences_lead_with_english_german_and_the_largest(run: Path) -> None:
    share = {"share_before": 0.2, "repeat": 1.0}
    languages = {
        "mono": {"fr": share | {"share": 0.2}, "sw": share | {"share": 0.5}},
        "para": {"en-sw": share | {"share": 0.3}, "en-tr": share | {"share": 0.6}, "de-en": share | {"share": 0.1}},
    }
    (run / "languages.json").write_text(json.dumps({"format": 1} | languages))
    pairs = [("ar–en", "para"), ("en–sw", "para"), ("tr–en", "para"), ("de–en", "para")]
    samples = [
        {"language": language, "task": task, "tokens": FRENCH}
        for language, task in [*((code, "mono") for code in ("ar", "fr", "sw", "de", "en")), *pairs]
    ]
    (run / "samples.json").write_text(json.dumps({"format": 1, "samples": samples}))
    html = write_report(run).read_text(encoding="utf-8")
    shown = re.findall(r"<article.*?<b>([^<]*)</b>", html, re.S)
    assert shown == ["en", "de", "sw", "fr", "ar", "de–en", "tr–en", "en–sw", "ar–en"]


def test_legends_list_what_is_shown(run: Path) -> None:
    """And time left, which is no result, has no chart; times and memory have units."""
    more = {"seconds_left": 7.0, "data_wait": 0.1, "memory_gib": 3.0}
    write_lines(run / "metrics.jsonl", [metric(step) | more for step in range(1, 4)])

    def legend(section: str) -> list[str]:
        html = write_report(run).read_text(encoding="utf-8")
        part = html[html.index(f'<section id="{section}">') :].partition("</section>")[0]
        return re.findall(r"</i>([^<]*)</span>", part.partition('<div class="grid">')[0])

    every = ["monolingual text", "translation pairs", "not by task", "each logged step", "held-out text"]
    assert legend("heldout") == [*every[:2], *every[3:], "unigram model"]
    assert legend("curves") == [*every, "chance"]
    text = Page((run / "report.html").read_text(encoding="utf-8")).text
    assert "seconds left" not in text and "Reading data (share of a step)" in text
    assert "Largest memory of a process (GiB)" in text
    (run / "heldout.jsonl").unlink()
    write_lines(run / "metrics.jsonl", [{"step": step, "loss": 3.0, "mlm": 2.0} for step in (1, 2)])
    assert legend("curves") == ["monolingual text", "not by task", "each logged step"]
    config = json.loads((run / "config.json").read_text())
    config["config"]["data"] = {"phase_steps": [1], "phase_mask_fractions": [0.15, 0.3]}
    (run / "config.json").write_text(json.dumps(config))
    assert legend("curves")[3:] == ["start of a phase"]


def test_scores_of_fine_tuning(run: Path) -> None:
    languages = {code: {"f1": value, "exact": value / 2} for code, value in (("de", 61.25), ("en", 80.0))}
    scores = {"format": 1, "task": "xquad", "split": "test", "metric": ["f1", "exact"], "languages": languages}
    (run / "scores.json").write_text(json.dumps(scores | {"mean": {"f1": 70.625, "exact": 35.3125}}))
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    assert "Scores of xquad, test sets (per cent)" in text and "fine-tuning" in text
    assert "language f1 exact de German 61.2 30.6 en English 80.0 40.0 mean of 2 70.6 35.3" in text
    assert "Sentences, as the" not in text
    (run / "scores.json").write_text(json.dumps(scores | {"languages": {}}))
    assert "No test set has labels" in Page(write_report(run).read_text(encoding="utf-8")).text


def test_a_fine_tuning_that_is_not_scored_yet(run: Path) -> None:
    """Its run writes neither sentences nor retrieval."""
    config = {"format": 1, "config": {"name": "32x3-ner", "task": "ner", "train": {"steps": 60}}}
    (run / "config.json").write_text(json.dumps(config))
    for name in ("samples.json", "retrieval.json", "languages.json", "heldout.jsonl"):
        (run / name).unlink()
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    assert "trial · XLM-E fine-tuning" in text and "32x3-ner: fine-tuning." in text and "Step 40 of 60." in text
    assert "Scores of ner" in text and "scored after the last step" in text
    assert "pre-training" not in text and "Sentences" not in text and "checkpoint" not in text


def test_corpus_text_is_escaped(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "<script" not in html
    assert "tiny &lt;b&gt;" in html and "tiny <b>" not in html


def test_key_figures_come_from_the_input(run: Path) -> None:
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    shown = ["0.660", "0.600", "6.04 nats", "unigram model 7.29", "5.52 nats", "unigram model 7.12"]
    shown += ["40K", "in 40 steps; 3 skipped", "Tokens a second 500", "250 GFLOP/s", "1 min 20 s"]
    shown += ["1.23M", "embedding 700K", "2 processes", "model.width", "61.2%", "17.4", "51.2%", "43.8%", "77"]
    shown += ["80 candidates", "Chance is 1.25%", "With random weights the best layer is 2, with 25%"]
    shown += ["After training the best layer is 1, with 47.5%", "Most repeated: Swahili, ×17.4"]
    assert [value for value in shown if value not in text] == []


def test_key_figures_of_phases_and_of_the_last_evaluation(run: Path) -> None:
    """A step without a rate counts for no time; the unigram model is that of the last evaluation; a phase begins where
    the steps before it end."""
    config = json.loads((run / "config.json").read_text())
    config["config"]["data"] = {"phase_steps": [20, 5], "phase_mask_fractions": [0.15, 0.3, 0.05]}
    (run / "config.json").write_text(json.dumps(config))
    write_lines(
        run / "metrics.jsonl", [metric(step) | {"tokens_per_s": 0.0 if step == 2 else 500.0} for step in (1, 2, 3)]
    )
    unigram = ({"unigram_nll_mono": 9.5, "unigram_nll_para": 8.5}, {"unigram_nll_mono": 3.25, "unigram_nll_para": 4.5})
    write_lines(run / "heldout.jsonl", [heldout(step) | more for step, more in zip((0, 40), unigram, strict=True)])
    cards = {label: (value, note) for label, value, note in run_page._cards(RunFiles(run))}
    assert cards["Training time"][0] == "4 s"
    assert cards["Dimensions"] == ("1", "in which states of the last layer vary; 40 at the start; a few mean collapse")
    assert cards["Masked-token loss"] == ("6.04 nats", "held-out text; unigram model 3.25")
    assert cards["Masked-token loss, pairs"] == ("5.52 nats", "held-out text; unigram model 4.50")
    phases = "from step 0 15% predicted; from step 20 30% predicted; from step 25 5% predicted"
    assert cards["Phases of the data"] == ("3", phases)
    write_lines(run / "metrics.jsonl", [metric(1) | {"skipped_steps": None, "flops_per_s": None}])
    cards = {label: (value, note) for label, value, note in run_page._cards(RunFiles(run))}
    assert cards["Tokens seen"] == ("1K", "in 1 steps")
    assert cards["Tokens a second"] == ("500", "median of the logged steps")
    (run / "config.json").write_text(json.dumps(config | {"parameters": None}))
    assert "Parameters" in cards and "Parameters" not in {label for label, *_ in run_page._cards(RunFiles(run))}


def test_which_record_a_key_figure_is_of(run: Path) -> None:
    """The first, the last, or the middle one."""
    changes = ((0, 100.0, 1e12), (1, 500.0, 2e12), (5, 400.0, 4e11))
    records = [
        metric(step) | {"skipped_steps": skipped, "tokens_per_s": rate, "flops_per_s": flops}
        for step, (skipped, rate, flops) in enumerate(changes, 1)
    ]
    write_lines(run / "metrics.jsonl", records)
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    shown = [
        "held-out text; 0.500 at the first evaluation, 0.5 is chance",
        "in 3 steps; 5 skipped",
        "Tokens a second 400",
    ]
    assert [value for value in [*shown, "of the logged steps; 1 TFLOP/s"] if value not in text] == []


def test_marks_lie_where_the_numbers_are(run: Path) -> None:
    """Shares on a logarithmic axis from the least, accuracies on one from 0, before and after; in hundredths of it."""
    html = write_report(run).read_text(encoding="utf-8")
    rows = re.findall(r'"ring" style="left:(.*?)%"></i><i class="dot" style="left:(.*?)%".*?figures">(.*?)<', html)
    assert rows == [
        ("100.0", "81.5", "75% → 61.2%, ×1"), ("0.0", "39.9", "25% → 38.8%, ×17.4"), ("52.6", "100.0", "25% → 47.5%")
    ]  # fmt: skip


def test_how_far_a_run_is(run: Path) -> None:
    """By its sentences where these are newer than its last logged step."""
    assert run_page._progress(RunFiles(run), {"steps": 41}) == {"step": 40, "steps": 41, "shown": 0}
    samples = json.loads((run / "samples.json").read_text())
    samples["samples"][0]["step"] = 42
    (run / "samples.json").write_text(json.dumps(samples))
    assert run_page._progress(RunFiles(run), {"steps": 60}) == {"step": 42, "steps": 60, "shown": 42}
    assert run_page._progress(RunFiles(run), {"steps": 40}) is None
    (run / "finished.json").write_text("{}")
    assert run_page._progress(RunFiles(run), {"steps": 60}) is None


def test_page_follows_the_input(run: Path) -> None:
    first = write_report(run).read_text(encoding="utf-8")
    assert first == write_report(run).read_text(encoding="utf-8"), "the same run gives the same bytes"
    write_lines(run / "heldout.jsonl", [heldout(0) | {"auc_mono": 0.5432}])
    second = write_report(run).read_text(encoding="utf-8")
    assert "0.543" in second and "0.660" not in second


def test_the_dimensions_of_the_layers_are_drawn(run: Path) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    figure = page[page.index('<section id="dimensions">') :].split("</section>")[0]
    assert 'aria-label="Dimensions of the token states by layer"' in figure
    assert figure.count("var(--mono)") >= 1 and figure.count("var(--para)") >= 1
    assert width_of(figure) == pytest.approx(figures._WIDE) and "narrow" not in figure, "alone in its section"
    (run / "dimensions.jsonl").unlink()
    assert '<section id="dimensions">' not in write_report(run).read_text(encoding="utf-8")


def test_dimensions_that_were_not_finite_are_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(run / "dimensions.jsonl", [{"step": 1}])
    assert '<section id="dimensions">' not in write_report(run).read_text(encoding="utf-8")
    write_lines(run / "dimensions.jsonl", [dimensions(1), {"step": STEPS}])
    assert '<section id="dimensions">' in write_report(run).read_text(encoding="utf-8")
    drawn: list[str] = []
    points = figures.points
    monkeypatch.setattr(figures, "points", lambda records, key: drawn.append(key) or points(records, key))
    figures.dimensions_by_layer([dimensions(1), {"step": 20, "layer_0": 60.0}])
    assert drawn[-1] == "layer_2", "the last layer's line, though the last record lacks it"


def test_sentences_lead_and_retrieval_opens_only_where_it_was_learnt(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    sections = [attributes["id"] for tag, attributes in Page(html).tags if tag == "section"]
    assert sections == ["sentences", "heldout", "curves", "dimensions", "languages", "retrieval", "settings"]
    assert "<details open>" in html[html.index('id="retrieval"') :] and "Not above the untrained model" not in html
    retrieval = json.loads((run / "retrieval.json").read_text())
    retrieval["candidates"] = 2  # chance is 50%, the best mean 47.5%
    (run / "retrieval.json").write_text(json.dumps(retrieval))
    html = write_report(run).read_text(encoding="utf-8")
    assert (
        "<details open>" not in html[html.index('id="retrieval"') :]
        and "Not above the untrained model and chance" in html
    )


def test_retrieval_by_language_is_at_the_best_layer_of_its_time() -> None:
    """Before training layer 7 is best, afterwards layer 5, of the layers 3, 5 and 7; the chart has the best language
    first, the table is in the order of the codes; and as good as the untrained model is not learnt."""

    def scores(*en_xx: float) -> dict[str, list[float]]:
        return {"en_xx": list(en_xx), "xx_en": [value + 0.02 for value in en_xx]}

    before = {"overall": scores(0.1, 0.2, 0.3), "languages": {c: scores(0.0, 0.5, n / 10) for n, c in enumerate("abc")}}
    after = {
        "overall": scores(0.2, 0.4, 0.1),
        "languages": {c: scores(0.9, n, 0.8) for c, n in zip("abcd", (0.2, 0.5, 0.4, 0.5), strict=True)},
    }
    values = {
        "layers": [3, 5, 7],
        "pairs": dict.fromkeys("dcba", 9),
        "candidates": 50,
        "before": before,
        "after": after,
    }
    found = run_page._retrieval(values)
    assert found["best"] == {"before": 7, "after": 5} and found["learnt"]
    assert found["mean"] == {"before": pytest.approx(0.31), "after": pytest.approx(0.41)}
    assert [row["code"] for row in found["by_language"]] == ["b", "d", "c", "a"]
    assert [row["text"] for row in found["by_language"]][2:] == ["21% → 41%", "1% → 21%"]
    assert [row["language"] for row in found["rows"]] == ["a", "b", "c", "d"]
    assert found["rows"][1]["before"] == {"en_xx": 0.1, "xx_en": pytest.approx(0.12)}
    assert found["rows"][1]["after"] == {"en_xx": 0.5, "xx_en": 0.52} and found["rows"][3]["before"] == {}
    for overall, learnt in ((scores(0.0, 0.31, 0.0), True), (before["overall"], False), (scores(0.2, 0.2, 0.2), False)):
        again = run_page._retrieval(values | {"after": after | {"overall": overall}})
        assert again["learnt"] == learnt, overall


def test_absent_files_are_said(tmp_path: Path) -> None:
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    for name in ("metrics.jsonl", "heldout.jsonl", "languages.json", "retrieval.json", "samples.json", "config.json"):
        assert name in text, name


def test_held_out_losses_by_language(run: Path) -> None:
    """Two languages whose gains are worked out by hand; nothing of it without the file, one sentence where damaged."""
    assert "Held-out text by language" not in Page(write_report(run).read_text(encoding="utf-8")).text
    unigram = {"mono": {"sw": 7.5, "de": 7.0}, "para": {}}
    lines = [
        {"step": step, "terms": {"mlm": {"de": de, "sw": sw}, "mrtd": {"de": 0.31, "sw": 0.29}}, "unigram": unigram,
         "tokens": {"mlm": {"de": 812, "sw": 1204}}}
        for step, de, sw in ((100, 7.25, 7.4), (200, 7.125, 6.25))
    ]  # fmt: skip
    write_lines(run / "heldout_languages.jsonl", lines)
    html = write_report(run).read_text(encoding="utf-8")
    text = " ".join(Page(html).text.split())
    # Gains 1.25 and -0.125, whose median is 0.5625.
    assert "is 0.56 nats below the unigram model in the median of 2 languages, and above it in 1" in text
    assert (
        "Most: Swahili 1.25. Least: German −0.12." in text
        and "Monolingual text: means over 812 to 1,204 tokens" in text
    )
    assert "sw Swahili 1,204 6.25 7.50 1.25 −1.15 0.29 de German 812 7.12 7.00 −0.12 −0.12 0.31" in text
    drawn = [line.split() for line in re.findall(r'<polyline\npoints="([^"]*)"', html)]
    # Less the unigram model's from 0.25 to -1.25: German 0.25, 0.125 and Swahili -0.1, -1.25, in 46 of 50 units.
    assert drawn == [["2.0,12.7", "98.0,48.0"], ["2.0,2.0", "98.0,5.8"]]
    lines[1]["terms"]["mrtd"]["sw"] = ""
    write_lines(run / "heldout_languages.jsonl", lines)
    with pytest.raises(ValueError, match=r"heldout_languages\.jsonl has .*\(mrtd of sw in step 200 is no number\)"):
        write_report(run)
    del lines[1]["tokens"]
    write_lines(run / "heldout_languages.jsonl", lines)
    with pytest.raises(ValueError, match=r"heldout_languages\.jsonl has no 'tokens' where the report needs it"):
        write_report(run)


def test_each_task_says_how_many_tokens_its_means_have(run: Path) -> None:
    losses = {"mlm": {"de": 7.0, "sw": 7.0}, "tlm": {"de": 6.0, "sw": 6.5}}
    tokens = {"mlm": {"de": 8120, "sw": 12040}, "tlm": {"de": 90, "sw": 50}}
    line = {"step": 100, "terms": losses, "unigram": {"mono": {}, "para": {}}, "tokens": tokens}
    write_lines(run / "heldout_languages.jsonl", [line])
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    assert "Monolingual text: means over 8,120 to 12,040 tokens a language. Parallel text: means over 50 to" in text
    assert "Parallel text: means over 50 to 90 tokens a language. So few tokens make differences between" in text


def test_change_and_languages_behind() -> None:
    """Since a language's own first evaluation; as good as the unigram model is not better."""
    unigram = {"mono": {"de": 7.0, "fr": 6.0, "sw": 5.0}}
    losses = ({"de": 7.0}, {"de": 6.5, "fr": 6.75}, {"de": 6.25, "fr": 6.5}, {"de": 6.0, "fr": 6.0, "sw": 5.5})
    records = [
        {"step": step, "terms": {"mlm": of_step}, "unigram": unigram, "tokens": {"mlm": dict.fromkeys(of_step, 9)}}
        for step, of_step in enumerate(losses)
    ]
    quantities = {"mlm": {"task": "mono", "unigram": True, "title": "loss"}}
    found = by_language.heldout_languages(records, quantities)
    assert found is not None
    rows = {row["code"]: (row["gain"], row["change"]) for row in found["tasks"]["mono"]["rows"]}
    assert rows == {"de": (1.0, -1.0), "fr": (0.0, -0.75), "sw": (-0.5, None)}
    assert found["tasks"]["mono"]["behind"] == 2


def test_charts_of_languages_have_one_axis_with_zero_in_it() -> None:
    """Where every loss is above the unigram model's, or below it; without a unigram loss there is no curve, and the row
    is the last; another quantity is named if any language has it."""
    quantities = {
        "mlm": {"task": "mono", "unigram": True, "title": "loss"},
        "mrtd": {"task": "mono", "unigram": False, "title": "replaced"},
        "auc": {"task": "mono", "unigram": False, "title": "AUC"},
    }

    def found(*gains: float) -> dict[str, Any]:
        records = []
        for step, gain in zip((10, 30, 50), gains, strict=True):
            terms = {"mlm": {"aa": 4.0, "de": 7.0 - gain}, "mrtd": {"de": 0.5}}
            unigram = {"mono": {"de": 7.0}} if step != 30 else {}
            records.append({"step": step, "terms": terms, "unigram": unigram, "tokens": {"mlm": {"aa": 3, "de": 5}}})
        shown = by_language.heldout_languages(records, quantities)
        assert shown is not None
        return shown

    below = found(1.0, 9.0, 4.0)
    assert [row["code"] for row in below["tasks"]["mono"]["rows"]] == ["de", "aa"]
    assert (below["tasks"]["mono"]["ranked"], below["tasks"]["mono"]["tokens"]) == (1, [3, 5])
    assert below["tasks"]["mono"]["others"] == {"mrtd": "replaced"}
    charts = below["charts"]
    assert (charts["low"], charts["high"], charts["first"], charts["last"]) == (-4.0, 0.0, 10, 50)
    (chart,) = charts["groups"][""]  # of 46 units of height zero is the highest
    assert (charts["zero"], chart["lines"]) == ("2.0", {"mono": ["2.0,13.5", "98.0,48.0"]})
    shown = found(-4.0, -9.0, -1.0)
    assert [row["code"] for row in shown["tasks"]["mono"]["rows"]] == ["de", "aa"]
    above = shown["charts"]
    assert (above["low"], above["high"], above["zero"]) == (0.0, 4.0, "48.0")


def test_many_languages_are_shown_from_both_ends() -> None:
    """By their gains on text, on pairs where they have no text: up to 24 charts together, of more the best 12 and the
    worst 12; and the text names at most three of each."""
    quantities = {
        term: {"task": task, "unigram": True, "title": "loss"} for term, task in (("mlm", "mono"), ("tlm", "para"))
    }

    def shown(mono: dict[str, float], para: dict[str, float]) -> dict[str, Any]:
        losses = {term: {code: 7 - gain for code, gain in of.items()} for term, of in (("mlm", mono), ("tlm", para))}
        tokens = {term: dict.fromkeys(of, 9) for term, of in losses.items()}
        unigram = {"mono": dict.fromkeys(mono, 7.0), "para": dict.fromkeys(para, 7.0)}
        record = {"step": 10, "terms": losses, "tokens": tokens, "unigram": unigram}
        found = by_language.heldout_languages([record], quantities)
        assert found is not None
        return found

    def charts(found: dict[str, Any]) -> dict[str, list[str]]:
        return {name: [chart["code"] for chart in group] for name, group in found["charts"]["groups"].items()}

    codes = [f"c{n:02}" for n in range(27)]
    gains = {code: n / 8 - 1 for n, code in enumerate(codes)}
    found = shown(gains, {"c00": 9.0, "pp": 0.0625})  # c08 has 0, c09 has 0.125
    order = [*codes[:8:-1], "pp", *codes[8::-1]]
    assert charts(found) == {"Best": order[:12], "Worst": order[::-1][:12], "All others": order[12:16]}
    text = found["tasks"]["mono"]
    assert [[row["code"] for row in text[end]] for end in ("best", "worst")] == [codes[:23:-1], codes[:3]]
    assert charts(shown(dict(list(gains.items())[:24]), {})) == {"": codes[23::-1]}
    few = shown(dict(list(gains.items())[:5]), {})["tasks"]["mono"]
    assert [[row["code"] for row in few[end]] for end in ("best", "worst")] == [["c04", "c03"], ["c00", "c01"]]


def test_a_language_without_rows_is_named_apart(run: Path) -> None:
    """Its share has no place on a logarithmic axis: `mix` may round a small one to no row."""
    shares = json.loads((run / "languages.json").read_text())
    shares["mono"]["gd"] = {"share": 0.0, "share_before": 0.001, "repeat": 0.0}
    shares["para"] = {"en-gd": {"share": 0.0, "share_before": 0.0, "repeat": 0.0}}
    (run / "languages.json").write_text(json.dumps(shares))
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    assert "Without a row in training: gd." in text and "Without a row in training: en-gd." in text
    assert "2 languages, on a logarithmic axis from 25% to 75%" in text


def test_names_are_those_of_cldr() -> None:
    babel = pytest.importorskip("babel", reason="babel is not installed")
    known = babel.Locale("en").languages
    ours = by_language.LANGUAGE_NAMES
    assert {code: known[code] for code in ours} == ours and len(ours) == 93
    names = [by_language.language_name(code) for code in ("en–de", "en-zh-Hans", "bn_rom", "qqq", "zh-Hans–en")]
    assert names[:4] == ["English–German", "English–Chinese, simplified", "Bangla, romanized", ""]
    assert names[4] == by_language.language_name("zh-Hans-en") == "Chinese, simplified–English"
    assert by_language.language_name("zh-Hans-zh-Hant") == "Chinese, simplified–Chinese, traditional"
    assert by_language.language_name("en-qu") == by_language.language_name("en–qu") == ""  # not English


SHOWN = {  # what only this file can tell
    "metrics.jsonl": "40K", "heldout.jsonl": "at the first evaluation, 0.5 is chance",
    "retrieval.json": "80 candidates", "samples.json": "hum",
    "languages.json": "61.2%", "config.json": "1.23M",
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_every_file_may_be_absent(run: Path, name: str) -> None:
    """The page says which file is absent, lacks what the file held, and still has all that the others hold."""
    whole = Page(write_report(run).read_text(encoding="utf-8")).text
    assert f"has no {name}" not in whole and [text for text in SHOWN.values() if text not in whole] == []
    (run / name).unlink()
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert f"has no {name}" in text
    assert [file for file, shown in SHOWN.items() if shown not in text] == [name]


def test_retrieval_without_a_test_before_training(run: Path) -> None:
    values = json.loads((run / "retrieval.json").read_text())
    del values["before"]
    (run / "retrieval.json").write_text(json.dumps(values))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "After training the best layer is 1" in text and "random weights" not in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "lo\n', ("metrics.jsonl line 2",)),
        ("heldout.jsonl", "[1]\n", ("heldout.jsonl line 1", "step")),
        ("metrics.jsonl", b'{"step": 1}\n\xff\n', ("metrics.jsonl line 2",)),
        ("retrieval.json", '{"layers":\n [0,\n', ("retrieval.json line 3",)),
        ("samples.json", "[]", ("samples.json", "not a dict")),
        ("samples.json", '{"samples": []}', ("samples.json has format None, this version reads 1",)),
        (
            "samples.json",
            '{"format": 1, "samples": [{"tokens": [{"piece": "a", "original": "a", "replaced": false}]}]}',
            ("samples.json", "score"),
        ),
        (
            "samples.json",
            '{"format": 1, "samples": [{"language": "fr", "task": "mono", "tokens": '
            '[{"piece": "a", "original": "a", "replaced": false, "score": 0.1}]}]}',
            ("samples.json", "masked"),
        ),
    ],
)
def test_damaged_file_is_one_sentence(run: Path, name: str, content: str | bytes, words: tuple[str, ...]) -> None:
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    result = python("-m", "xlme_ds.report", "--run", str(run))
    assert result.returncode == 2 and not (run / "report.html").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("xlme report: error: ") and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("retrieval.json", '{"format": 1, "pairs": 3, "layers": 1}'),
        ("config.json", '{"format": 1, "config": [1]}'),
        ("config.json", '{"format": 1, "config": {"data": [1]}}'),
        ("config.json", '{"format": 1, "config": {}, "objective": null}'),
    ],
)
def test_file_of_another_form_is_named(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} has (no '\w+' where|another form than) the report needs"):
        write_report(run)


@pytest.mark.parametrize("flags", [["--run"], ["--runs", "{run}"]])
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "theirs has no config.json: name the --out folder of a run"),
        ({"config.json": '{"model_type": "xlme"}'}, "theirs is an export (a Hugging Face folder), not a run: name the"),
    ],
)
def test_a_folder_that_is_no_run_gets_no_page(
    run: Path, tmp_path: Path, flags: list[str], files: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name, content in files.items():
        (theirs / name).write_text(content)
    with pytest.raises(SystemExit):
        main([*(flag.format(run=run) for flag in flags), str(theirs), "--out", str(tmp_path / "page.html")])
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in theirs.iterdir()) == sorted(files) and not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("flags", [["--run", "{run}"], ["--runs", "{run}", "{other}"]])
def test_only_a_page_is_replaced(
    run: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    settings, page = run / "config.json", tmp_path / "page.html"
    before = settings.read_bytes()
    words = [word.format(run=run, other=other) for word in flags]
    with pytest.raises(SystemExit):
        main([*words, "--out", str(settings)])
    assert "config.json is a file but no page: name another" in capsys.readouterr().err
    assert settings.read_bytes() == before
    for _ in range(2):
        main([*words, "--out", str(page)])


def test_the_page_of_a_run_may_be_written_elsewhere(run: Path, tmp_path: Path) -> None:
    main(["--run", str(run), "--out", str(tmp_path / "page.html")])
    assert not (run / "report.html").exists()
    assert (tmp_path / "page.html").read_bytes() == write_report(run).read_bytes()


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist: name the --out folder"):
        write_report(tmp_path / "nowhere")


def article(run: Path, language: str, task: str, tokens: list[dict[str, Any]]) -> str:
    """The sample of a run that has this one, as the page shows it."""
    samples = [{"language": language, "task": task, "tokens": tokens}]
    (run / "samples.json").write_text(json.dumps({"format": 1, "samples": samples}))
    html = write_report(run).read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


def test_all_documents_of_a_row_are_shown(run: Path) -> None:
    """Three of them, each ended by `</s>`, in one language."""
    end = token("</s>", 0.99)
    html = article(run, "fr", "mono", [*FRENCH[:-1], end, token("▁deux", 0.1), end, token("▁trois", 0.2), end])
    assert len(re.findall('<p[^>]*lang="fr"', html)) == 3 and "deux" in html and "trois" in html


def test_verdicts(run: Path) -> None:
    html = article(run, "fr", "mono", FRENCH)
    page = " ".join(Page((run / "report.html").read_text(encoding="utf-8")).text.split())
    # Two replaced tokens, so the second highest score that is not a special token's.
    assert "flags the 2 of 5 tokens with the highest probabilities of being replaced (0.8 or more); 2 were" in page
    assert "5 tokens, 2 replaced: 1 hit, 1 missed, 1 false alarm" in page
    assert re.findall(r'<span class="([a-z ]+)"', html) == ["passed", "hit", "alarm", "miss", "passed restored"]
    assert "<s>les</s>" in html and "original: les" in html
    read = (
        re.sub(r"<rt>.*?</rt>|<[^>]*>", "", html[html.index("<p") : html.index("</p>")])
        .replace("&lt;", "<")
        .replace("&gt;", ">")
    )
    assert read.strip() == "Tous <script>alert(1)</script> droits homains"


def test_verdicts_of_a_model_that_judges_no_token(run: Path) -> None:
    """Masked and right, masked and wrong, and not masked; counted over all samples, flagged by one threshold."""
    unjudged = [{**each, "score": None} for each in FRENCH]
    html = article(run, "fr", "mono", unjudged)
    assert re.findall(r'<span class="([a-z ]+)"', html) == ["passed", "miss", "passed", "miss", "restored"]
    assert "3 masked: 1 right" in " ".join(html.split())
    samples = [
        {"language": "fr", "task": "mono", "tokens": tokens} for tokens in (FRENCH, [token("▁a", 0.85)], unjudged)
    ]
    section = run_page._sentences(samples, {})
    # Two judged tokens were replaced: the second highest score of all samples is 0.85.
    assert (section["threshold"], section["judged"]) == (0.85, True)
    assert section["totals"] == {"hit": 1, "miss": 3, "alarm": 1, "passed": 5, "restored": 1}


def test_nothing_replaced_flags_nothing(run: Path) -> None:
    html = article(run, "ar", "para", ARABIC)
    assert re.findall(r'<span class="([a-z ]+)"', html) == ["passed"] * 3
    assert "No token was replaced in these sentences" in (run / "report.html").read_text(encoding="utf-8")


def test_direction_of_each_side(run: Path) -> None:
    assert re.findall(r'<p dir="(\w+)"', article(run, "ar", "para", ARABIC)) == ["ltr", "rtl"]
    xlm = [token(piece, 0.0) for piece in ("</s>", "▁Everyone", "</s>", "</s>", "▁لكل", "</s>")]
    hebrew = [token(piece, 0.0) for piece in ("▁Everyone", "</s>", "▁לכל", "▁אדם,", "</s>")]
    for language, tokens, sides in (
        ("en–he", hebrew, [("ltr", "en"), ("rtl", "he")]),
        ("en–ar", ARABIC[:3], [("ltr", "en"), ("rtl", "ar")]),
        ("en–ar", xlm, [("ltr", "en"), ("rtl", "ar")]),  # whose items begin with </s> and have two in the middle
        ("en", xlm[:3], [("ltr", "en")]),
    ):
        (shown,) = run_page._sentences([{"language": language, "task": "para", "tokens": tokens}], {})["by_task"][
            "para"
        ]
        assert [side[:2] for side in shown["sides"]] == sides
    for code, tag in (("bn_rom", "bn-Latn"), ("zh-Hans", "zh-Hans"), ("my_zaw", "my")):
        assert f'<p dir="ltr" lang="{tag}">' in article(run, code, "mono", FRENCH)


def test_lines_across_a_panel() -> None:
    """The unigram model's last loss, chance, and the steps at which the data change."""

    def panel(*losses: float, title: str = "Masked-token loss (nats a token)", borders: tuple[int, ...] = ()) -> str:
        evaluations = [
            {"step": step, "mlm": 6.0, "auc_mono": 0.7, "unigram_nll_mono": loss} for step, loss in enumerate(losses)
        ]
        return str(figures.curves([metric(1), metric(9)], evaluations, KNOWN, borders)[title].svg)

    assert panel(9.0, 7.0) == panel(7.0, 7.0) != panel(7.0, 9.0)
    paths = [panel(7.0, 7.0, borders=borders).count("stroke-dasharray") for borders in ((), (4,), (3, 5))]
    assert paths[1] - paths[0] == 1 and paths[2] - paths[0] == 2
    auc = "Discriminator: AUC, replaced against original tokens"
    assert panel(9.0, 7.0, title=auc) == panel(7.0, 9.0, title=auc)


def test_a_run_is_compared_by_its_evaluations_or_by_its_steps() -> None:
    """Each in its own colour: points of the evaluations, or a smoothed line through the logged steps."""
    logged, evaluated = [metric(step) for step in range(1, 101)], [heldout(step) for step in (0, 50, 100)]
    svg = str(figures.compared_curves({"t": ("mlm", [(logged, evaluated), (logged, [])])})["t"])
    curves = {
        colour: [
            len(re.findall("[ML] ", path))
            for path in re.findall(rf'<path d="([^"]*)"[^>]*stroke: var\(--{colour}\)', svg)
        ]
        for colour in ("run0", "run1", "run2")
    }
    assert 3 in curves["run0"] and curves["run1"] and max(curves["run1"]) > 30 and not curves["run2"]
    other = str(figures.compared_curves({"t": ("mlm", [([metric(1)], evaluated), (logged, [])])})["t"])
    assert other == svg, "what was logged in training is not shown beside evaluations"


def test_runs_whose_values_are_no_equals(run: Path) -> None:
    """One key, accuracy_mono, is of masked tokens in one run and of all tokens in the other. The last record of a run
    whose tasks alternate lacks the other task."""
    others = []
    for name, objective in (("masked", "mlm"), ("causal", "clm")):
        other = run.with_name(name)
        other.mkdir()
        config = {"format": 1, "config": {"name": name}, "objective": describe(ObjectiveConfig(name=objective))}
        (other / "config.json").write_text(json.dumps(config))
        write_lines(other / "metrics.jsonl", [{"step": 1, "mlm": 3.0}, {"step": 2, "tlm": 2.0}])
        write_lines(other / "heldout.jsonl", [{"step": 2, "accuracy_mono": 0.25}])
        others.append(RunFiles(other))
    titles = [runs_page._own_title("accuracy_mono", other) for other in others]
    assert len(set(titles)) == 2
    html = runs_page._page_of({"masked": others[0], "causal": others[1]})
    cells = {title: re.search(rf"{re.escape(title)}</t[hd]>\s*(<td.*?)</tr>", html, re.S) for title in titles}
    shown = [re.findall(r"<td[^>]*>([^<]*)</td>", found[1]) for found in cells.values() if found is not None]
    assert shown == [["0.250", "–"], ["–", "0.250"]]
    assert {"mlm", "tlm"} <= set(runs_page._drawn_keys(others[:1], others[0].objective["quantities"]))


def width_of(page: str) -> float:
    """Width of the first figure, in inches."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ', page)
    assert found is not None
    return float(found[1]) / 72


def test_a_chart_that_is_alone_is_wide() -> None:
    logged = [metric(1), metric(2)]
    widths = {}
    for titles in ({"a": "mlm"}, {"a": "mlm", "b": "tlm"}):
        drawn = figures.compared_curves({title: (key, [(logged, [])] * 2) for title, key in titles.items()})
        widths[len(titles)] = [width_of(svg) for svg in drawn.values()]
    assert widths == {1: [pytest.approx(figures._WIDE)], 2: [pytest.approx(figures._NARROW)] * 2}


def test_unknown_quantity_gets_a_panel() -> None:
    panels = list(figures.curves([metric(1), metric(2)], [], KNOWN))
    assert panels[:2] == ["Joint loss", "Masked-token loss (nats a token)"] and "surprise rate" in panels
    assert "Discriminator: replaced-token loss (nats a token)" in panels and "tokens" not in panels
    assert "Discriminator: AUC, replaced against original tokens" in panels and len(set(panels)) == len(panels)
    assert {"mlm", "tlm"} <= figures.curves([metric(1)], [], {}).keys(), "of an unknown objective"


def test_later_record_of_a_step_counts(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [metric(1), metric(2) | {"tokens": 7e6}, metric(3), metric(2) | {"loss": 0.0}])
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # by a run that was killed
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())
    assert "Tokens seen 3K in 3 steps" in text and "7M" not in text
    assert (
        "Training time 6 s" in text
    )  # 3,000 tokens at 500 a second; with the first record of step 2 it would be 3 h 53 min
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:4]]
    (run / "heldout.jsonl").write_text("\n\n".join(json.dumps(records[n]) for n in (2, 0, 1)) + "\n\n")
    assert [record["step"] for record in RunFiles(run).heldout] == [1, 2, 3], "in their order, past empty lines"
    (drawn,) = drawn_curves(run, "Joint loss")
    assert len(drawn) == 3 and drawn[1][1] > max(drawn[0][1], drawn[2][1])  # down on the page: zero is the least


def drawn_curves(run: Path, title: str) -> list[list[tuple[float, float]]]:
    """The thick curves of a panel of the page, each as the points that it joins or, with a gap, leaves apart."""
    html = write_report(run).read_text(encoding="utf-8")
    panel = html[html.index(f"<figcaption>{title}") :]
    paths = re.findall(r'<path d="([^"]*)"[^>]*stroke-width: 1.9', panel[: panel.index("</figure>")])
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for path in paths]


def test_not_a_number_is_left_out(run: Path) -> None:
    """Its point is not drawn, the others are, at the places that they have without it."""
    (run / "heldout.jsonl").unlink()
    write_lines(run / "metrics.jsonl", [metric(1), metric(2), metric(3)])
    titles = ("Joint loss", "Discriminator: AUC, replaced against original tokens")
    (loss,), (auc,) = (drawn_curves(run, title) for title in titles)
    assert len(loss) == len(auc) == 3
    write_lines(run / "metrics.jsonl", [metric(1) | {"auc_mono": None}, metric(2) | {"loss": float("nan")}, metric(3)])
    assert drawn_curves(run, titles[0]) == [[loss[0], loss[2]]]
    (left,) = drawn_curves(run, titles[1])
    assert len(left) == 2 and left[1][1] < left[0][1]
    text = Page((run / "report.html").read_text(encoding="utf-8")).text
    assert not re.search(r"\bnan\b|\bNone\b", text)


def test_a_branch_lacks_no_records_of_its_parents_steps(tmp_path: Path) -> None:
    settings = {"train": {"log_every": 1, "eval_every": 4}, "start": {"take": "state", "folder": "parent@6"}}
    for steps, gaps in (((7, 8, 9), {}), ((7, 9), {"metrics.jsonl": "8"})):
        write_lines(tmp_path / "metrics.jsonl", [metric(step) for step in steps])
        write_lines(tmp_path / "heldout.jsonl", [heldout(8)])
        assert run_page._gaps(RunFiles(tmp_path), settings) == gaps
    assert run_page._gaps(RunFiles(tmp_path), {"train": settings["train"]}) == {
        "metrics.jsonl": "1 to 6, 8", "heldout.jsonl": "4"
    }  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", [metric(step) for step in range(1, 14)])  # the last step of either file
    assert run_page._gaps(RunFiles(tmp_path), {"train": settings["train"]}) == {"heldout.jsonl": "4, 12"}
    write_lines(tmp_path / "metrics.jsonl", [metric(step) for step in range(1, 13)])  # step 12 may be in evaluation
    assert run_page._gaps(RunFiles(tmp_path), {"train": settings["train"]}) == {"heldout.jsonl": "4"}
    (tmp_path / "finished.json").touch()
    assert run_page._gaps(RunFiles(tmp_path), {"train": settings["train"]}) == {"heldout.jsonl": "4, 12"}
    write_lines(tmp_path / "metrics.jsonl", [metric(step) for step in range(1, 14)])
    write_lines(tmp_path / "heldout.jsonl", [heldout(step) for step in (4, 8, 12, 16)])
    assert run_page._gaps(RunFiles(tmp_path), {"train": settings["train"]}) == {"metrics.jsonl": "14 to 16"}


def test_the_training_time_of_a_branch_is_its_own(run: Path) -> None:
    """Steps 25 to 40 of 1,000 tokens at two seconds each, of a parent that did 24 of 250; every fifth is logged."""
    config = json.loads((run / "config.json").read_text())
    config["config"]["start"] = {"take": "state", "folder": "parent@24"}
    (run / "config.json").write_text(json.dumps(config))
    lines = [metric(step) for step in (25, 30, 35, 40)]
    write_lines(run / "metrics.jsonl", [line | {"tokens": line["tokens"] - 24 * 750} for line in lines])
    assert "Training time 32 s" in " ".join(Page(write_report(run).read_text(encoding="utf-8")).text.split())


def test_smoothing_keeps_straight_lines_and_ends() -> None:
    line = np.linspace(0, 5, 301)
    np.testing.assert_allclose(figures.smooth(line)[:-6], line[:-6], atol=1e-9)
    assert figures.smooth(line)[-1] == pytest.approx(line[-7:].mean())
    assert figures.smooth(np.array([1.0, np.nan, 3.0] * 50))[75] == pytest.approx(2.0, abs=0.5)
    steps, values = figures.downsample(np.arange(12_345.0), np.arange(12_345.0) * 2)
    assert len(steps) <= 500 and (np.diff(steps) > 0).all()
    np.testing.assert_allclose(values, 2 * steps)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12.34, "12.3"),
        (999.6, "1K"),
        (1234, "1.23K"),
        (49.2e6, "49.2M"),
        (2.5e11, "250G"),
        (1.23e-5, "1.23e-05"),
        (-0.5, "-0.5"),
        (0.001, "0.001"),
        (999.4, "999"),
        (-1234, "-1.23K"),
        (9.994e14, "999T"),
        (9.996e14, "1e+15"),
        (1e15, "1e+15"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert figures.format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (41, "41 s"), (492, "8 min 12 s"), (18180, "5 h 03 min"), (273600, "3 d 04 h"),
        (59.4, "59 s"), (59.6, "1 min 00 s"), (3600, "1 h 00 min"), (86399.6, "1 d 00 h"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert run_page.format_duration(seconds) == text


def test_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    """What differs, the last figures of each, and a curve of each in one panel."""
    other = tmp_path / "elsewhere" / "other [b] $x$ <i>"
    shutil.copytree(run, other)
    config = json.loads((run / "config.json").read_text())
    config |= {"started": "2026-11-26 21:04", "command": "xlme pretrain"}
    config["config"] |= {"seed": 2, "model": {"width": 128, "parts": [1, 2]}}
    (other / "config.json").write_text(json.dumps(config))
    write_lines(other / "heldout.jsonl", [heldout(step) | {"mlm": 5.25} for step in (0, STEPS)])
    (other / "retrieval.json").unlink()
    scores = {"format": 1, "task": "xquad", "metric": ["f1", "em"], "mean": {"f1": 70.625, "em": 35.0}}
    for folder, split, codes in ((run, "dev", ("de",)), (other, "test", ("en", "de"))):
        of_languages = {"split": split, "languages": {code: scores["mean"] for code in codes}}
        (folder / "scores.json").write_text(json.dumps(scores | of_languages))
    page = tmp_path / "both.html"
    main(["--runs", str(run), str(other), "--out", str(page)])
    html = page.read_text(encoding="utf-8")
    text = " ".join(Page(html).text.split())
    assert "trial other [b] $x$ <i>" in text and "2 runs side by side" in text
    assert "Masked-token loss (nats a token), monolingual 6.037 5.250" in text
    assert "Masked-token loss (nats a token), pairs 5.518 5.518" in text
    assert "retrieval, best layer 47.5% –" in text and "step 40 40" in text and "tokens 40K 40K" in text
    assert "xquad, f1, mean of dev sets de 70.6 – xquad, em, mean of dev sets de 35.0 –" in text
    assert "xquad, f1, mean of test sets de en – 70.6 xquad, em, mean of test sets de en – 35.0" in text
    assert " other [b] $x$ <i>: Started 2026-11-26 21:04 UTC: xlme pretrain " in text and text.count("Started") == 1
    drawn = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert drawn[0] == "Joint loss" and "Learning rate" in drawn and "Gradient norm" not in drawn
    assert (
        "model.width 96 128" in text and "seed – 2" in text and "model.parts – 1 2" in text and "name tiny" not in text
    )
    (panel,) = re.findall(
        r"<figcaption>Masked-token loss \(nats a token\), monolingual</figcaption>(.*?)</figure>", html, re.S
    )
    assert "var(--run0)" in panel and "var(--run1)" in panel and "var(--run2)" not in panel
    (panel,) = re.findall(r"<figcaption>Joint loss</figcaption>(.*?)</figure>", html, re.S)  # no evaluation has it
    assert "var(--run0)" in panel and "var(--run1)" in panel
    assert not re.search(r'(?:src|href)="(?!#)', html)
    write_comparison([run, other], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_runs_of_one_name_are_told_apart_by_their_folders(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "elsewhere" / "trial")
    text = Page(write_comparison([run, other], tmp_path / "both.html").read_text(encoding="utf-8")).text
    assert f" {run} " in text and f" {other} " in text and "None." in text


def test_a_setting_differs_wherever_one_run_has_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the first and the last run have the same; the page is runs.html in the current folder by default."""
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        (tmp_path / name).mkdir()
        content = {"format": 1, "config": {"seed": seed, "width": 9}}
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    main(["--runs", "a", "b", "c"])
    text = " ".join(Page((tmp_path / "runs.html").read_text(encoding="utf-8")).text.split())
    assert "seed 1 2 1" in text and "width" not in text


def test_runs_without_records(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"format": 1}')
    text = Page(
        write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text(encoding="utf-8")
    ).text
    assert "No run has logged an evaluation" in text and "No step has been logged" in text
    for out, fault in (("a", "a is a folder: name a file in it"), ("none/c.html", "is in no folder that exists")):
        with pytest.raises(ValueError, match=fault):
            write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name one run with --run, or several with --runs"),
        (["--run", "a", "--runs", "a", "b"], "name one run with --run, or several with --runs"),
        (["--runs", "a"], "the number of folders after --runs is 1: name 2 to 8"),
        (["--runs", *"abcdefgh"], "a does not exist"),
        (["--runs", *"abcdefghi"], "the number of folders after --runs is 9: name 2 to 8"),
        (["--runs", "a", "b/../a"], "--runs names a run twice: name each once"),
        (["xtrem"], "unexpected argument xtrem: did you mean --run xtrem, or `xlme report xtreme`?"),
        (["--runs", "a", "b"], "a does not exist"),
    ],
)
def test_which_runs(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err
