"""The XTREME tables: published rows agree with themselves, ours are averaged over seeds and languages, formats,
mistakes."""

import csv
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.launch import python
from xlme_ds.report.xtreme import read_models
from xlme_ds.report.xtreme_tables import XTREME_TASKS, Cell, XtremeTable, published, tables, write_xtreme

ROOT = Path(__file__).resolve().parents[2]
ROUNDED = 0.051  # the published averages are the rounded means of the published numbers


def rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["system"]: row for row in published()[name]}


def test_published_averages_are_the_means_of_their_tasks() -> None:
    averaged = [row for row in published()["table1"] if "average" in row]
    assert len(averaged) == 6 and all(row["scores"].keys() == XTREME_TASKS.keys() for row in averaged)
    for row in averaged:
        assert fmean(map(fmean, row["scores"].values())) == pytest.approx(row["average"], abs=ROUNDED), row["system"]


def test_published_error_rates_average_to_their_average() -> None:
    averaged = [row for row in published()["table6"] if "average" in row]
    assert len(averaged) == 4
    for row in averaged:
        assert fmean(values[0] for values in row["scores"].values()) == pytest.approx(row["average"], abs=0.0051), row[
            "system"
        ]


@pytest.mark.parametrize(
    ("task", "averages"),
    [
        ("xnli", {"XLM": [75.1], "XLM-R": [76.2], "InfoXLM": [76.2], "ERNIE-M": [77.3]}),
        (
            "mlqa",
            {
                "mBERT": [57.7, 41.6],
                "XLM": [61.6, 43.5],
                "XLM-R": [63.7, 46.3],
                "InfoXLM": [67.9, 49.7],
                "ERNIE-M": [68.7, 50.2],
            },
        ),
        ("pawsx", {"mBERT": [81.9], "XLM": [80.9]}),
        ("conll", {"mBERT": [78.52], "XLM-R": [79.11], "ERNIE-M": [79.56]}),
    ],
)
def test_published_languages_average_to_the_published_average(task: str, averages: dict[str, list[float]]) -> None:
    entry = published()["by_language"][task]
    assert entry["systems"].keys() == averages.keys()
    for system, expected in averages.items():
        values = [value if isinstance(value, list) else [value] for value in entry["systems"][system]]
        assert len(values) == len(entry["languages"])
        # PAWS-X of mBERT is the exception: 81.957 became 81.9.
        assert [fmean(column) for column in zip(*values, strict=True)] == pytest.approx(expected, abs=0.06), system


def test_published_gaps_of_ernie_m_follow_from_its_languages() -> None:
    for task, metric in (("xnli", 0), ("mlqa", 1)):
        values = published()["by_language"][task]["systems"]["ERNIE-M"]
        english, *others = [value[metric] if isinstance(value, list) else value for value in values]
        assert rows("table7")["ERNIE-M"]["scores"][task] == [pytest.approx(english - fmean(others), abs=ROUNDED)]


def test_one_published_number_a_table_is_in_the_others() -> None:
    assert rows("table1")["ERNIE-M"]["scores"] == {"mlqa": [68.7, 50.2], "xnli": [77.3]}
    assert all(row["source"] for name in ("table1", "table5", "table6", "table7") for row in published()[name])


def write_scores(folder: Path, task: str, languages: dict[str, Any], **changes: Any) -> None:
    metrics = list(next(iter(languages.values()), {"f1": None}))
    content = {
        "format": 1,
        "task": task,
        "random": False,
        "seed": 1,
        "split": "test",
        "metric": metrics,
        "train_languages": ["en"],
        "model": "runs/ours",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.json").write_text(json.dumps(content | {"languages": languages} | changes), encoding="utf-8")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_scores(folder / "ner/1", "ner", {"en": {"f1": 80.0}, "de": {"f1": 60.0}, "sw": {"f1": 40.0}}, split="dev")
    write_scores(
        folder / "ner/2", "ner", {"sw": {"f1": 43.0}, "en": {"f1": 80.0}, "de": {"f1": 63.0}}, split="dev", seed=2
    )
    write_scores(folder / "xquad", "xquad", {"en": {"f1": 70.0, "em": 60.0}, "de": {"f1": 50.0, "em": 30.0}})
    write_scores(
        folder / "xnli", "xnli", {code: {"accuracy": 50.0} for code in published()["by_language"]["xnli"]["languages"]}
    )
    write_scores(folder / "all", "xnli", {"fr": {"accuracy": 71.0}}, train_languages=["fr", "en"])
    names = {"en_xx": [0.1, 0.2], "xx_en": [0.3, 0.45]}
    model = {"model": "ours", "depth": 1, "layer": 1, "overall": names}
    sets = {"14": names | {"found": 7, "of": 14}, "36": names | {"found": 36, "of": 36}}
    (folder / "tatoeba.json").write_text(json.dumps({"format": 1, "models": [model | {"sets": sets}]}))
    tests = {"de-en": {"aer": [0.6, 0.5]}, "en-fr": {"aer": [0.5, 0.25]}, "en-cs": {"aer": [0.1, 0.1]}}
    (folder / "align.json").write_text(json.dumps({"format": 1, "models": [model | {"tests": tests}]}))
    return folder


def ours(built: list[XtremeTable], name: str) -> dict[str, dict[str, Cell]]:
    (table,) = [table for table in built if table.name == name]
    return {row.system: row.cells for row in table.rows if not row.source}


def test_our_row_of_table_1(runs: Path) -> None:
    row = ours(tables(read_models([runs])), "table1")["ours"]
    assert row["ner"].values == (pytest.approx(61.0),)  # means of the seeds: 60 and 62
    assert row["ner"].spreads == (pytest.approx(stdev([60, 62])),)
    assert row["ner"].remarks == ("3 of 40 languages", "2 seeds", "dev")
    assert row["xquad"] == Cell((60.0, 45.0), ("2 of 11 languages",), (None, None))
    assert row["xnli"] == Cell((50.0,), (), (None,))  # all languages, one seed, the test set: nothing to qualify
    assert row["average"].values == (pytest.approx((61 + 52.5 + 50) / 3),) and row["average"].remarks == (
        "3 of 7 tasks",
    )
    assert row.keys() == {"ner", "xquad", "xnli", "average"}


def test_languages_that_xtreme_lacks_do_not_count(tmp_path: Path) -> None:
    """XTREME's script also fetches the languages that XTREME-R added, eight of entities and five of parts of speech;
    the published scores are means over XTREME's."""
    for task, added, count in (("ner", "az gu lt pa pl qu ro uk", 40), ("pos", "lt pl ro uk wo", 33)):
        languages = XTREME_TASKS[task][1].split()
        assert len(languages) == count and not set(languages) & set(added.split())
        scores = {code: {"f1": 60.0 if code in languages else 0.0} for code in (*languages, *added.split())}
        write_scores(tmp_path / "runs" / task, task, scores)
    matches = {code: {"f1": 9.0, "em": em} for code, em in (("en", 60.0), ("de", 40.0), ("ro", 0.0))}
    write_scores(tmp_path / "runs/xquad", "xquad", matches)
    built = tables(read_models([tmp_path / "runs"]))
    row = ours(built, "table1")["ours"]
    assert row["ner"] == row["pos"] == Cell((60.0,), (), (None,))
    assert row["xquad"] == Cell((9.0, 50.0), ("2 of 11 languages",), (None, None))
    assert ours(built, "table7")["ours"]["xquad"].values == (20.0,)


def test_our_rows_of_the_other_tables(runs: Path) -> None:
    built = tables(read_models([runs]))
    gaps = ours(built, "table7")["ours"]
    assert gaps["xquad"].values == (30.0,) and gaps["xnli"].values == (0.0,)  # exact match: 60 − 30
    assert "ner" not in gaps and "ours, fine-tuned on en fr" not in ours(built, "table7")  # no English among its scores
    assert ours(built, "table1")["ours, fine-tuned on en fr"]["xnli"].values == (71.0,)
    retrieval = ours(built, "table5")["ours, layer 1 of 1"]
    assert retrieval == {"14": Cell((20.0, 45.0), ("7 of 14 languages",)), "36": Cell((20.0, 45.0))}
    alignment = ours(built, "table6")["ours, layer 1 of 1"]
    assert alignment["en-de"].values == (50.0,) and alignment["en-cs"].values == (10.0,)
    assert alignment["average"] == Cell((37.5,), ("2 of 4 tests",))  # the paper's four, of which there are two
    by_language = next(table for table in built if table.name == "xnli_by_language")
    shared = {row.system: row.cells["shared"].values[0] for row in by_language.rows}
    assert shared == {
        "XLM": 78.7, "XLM-R": 79.7, "InfoXLM": 80.6, "ERNIE-M": 80.1, "ours": 50.0, "ours, fine-tuned on en fr": 71.0
    }  # fmt: skip


def test_of_several_settings_the_best_on_the_dev_sets_counts(tmp_path: Path) -> None:
    """Whatever the tests say: the setting that is worst there is the best on dev, as the mean over its seeds."""
    dev = {"a": (70.0, 72.0), "b": (80.0, 60.0), "c": (60.0, 75.0)}  # means 71, 70, 67.5
    test = {"a": (30.0, 34.0), "b": (50.0, 50.0), "c": (90.0, 90.0)}

    def write(settings: str, **more: Any) -> Path:
        folder = tmp_path / f"runs{settings}{len(more)}"
        for name in settings:
            for seed in (0, 1):
                of_dev = {
                    "languages": {"en": {"f1": dev[name][seed]}},
                    "mean": {"f1": dev[name][seed]},
                    "held_out": False,
                }
                changes = {"tuning": {"learning_rate": name, "micro_batch": seed}, "dev": of_dev, "settings": 3} | more
                languages = {"en": {"f1": test[name][seed]}, "de": {"f1": test[name][seed] - 10}}
                write_scores(folder / f"{name}{seed}", "ner", languages, seed=seed, **changes)
        return folder

    cell = ours(tables(read_models([write("abc")])), "table1")["ours"]["ner"]
    assert cell.values == (pytest.approx(27.0),) and cell.spreads == (pytest.approx(stdev([25, 29])),)
    assert cell.remarks == ("2 of 40 languages", "2 seeds", "best of 3 settings on dev en")
    for folders, mark in (("bc", "best of 2 of 3 settings on dev en"), ("c", "1 of 3 settings")):
        assert ours(tables(read_models([write(folders)])), "table1")["ours"]["ner"].remarks[-1] == mark

    def fault(folder: Path) -> str:
        with pytest.raises(ValueError) as caught:
            read_models([folder])
        return str(caught.value)

    assert "has no score on a dev set, by which one of 2 settings of ner must be" in fault(write("ac", dev=None))
    folder = write("ab")
    (folder / "b1/scores.json").unlink()
    assert "have different settings of ner, and different seeds: finish every seed" in fault(folder)
    folder = write("abc", split="dev")
    values = json.loads((folder / "c1/scores.json").read_text())
    (folder / "c1/scores.json").write_text(json.dumps(values | {"dev": values["dev"] | {"held_out": True}}))
    assert "has scores on held-out en," in fault(folder) and "score all settings on the same dev sets" in fault(folder)


def test_a_row_by_language_says_how_its_setting_was_chosen(tmp_path: Path) -> None:
    """A choice on a count of languages is no mark of missing languages, which the columns show. All and nothing right
    are scores, too."""
    for rate, accuracy in (("1e-5", 0.0), ("2e-5", 100.0)):
        score = {"accuracy": accuracy}
        dev = {"languages": dict.fromkeys(("ar", "bg", "de", "en", "fr")), "mean": score, "held_out": False}
        write_scores(tmp_path / rate, "xnli", {"en": score}, tuning={"learning_rate": rate}, dev=dev, settings=2)
    built = tables(read_models([tmp_path]))
    assert ours(built, "xnli_by_language").keys() == {"ours (best of 2 settings on dev of 5 languages)"}


def test_a_row_by_language_is_the_mean_over_seeds(tmp_path: Path) -> None:
    for seed, (english, german) in enumerate(((80.0, 60.0), (84.0, 70.0)), 1):
        languages = {"en": {"accuracy": english}, "de": {"accuracy": german}}
        write_scores(tmp_path / str(seed), "xnli", languages, seed=seed)
    row = ours(tables(read_models([tmp_path])), "xnli_by_language")["ours (2 seeds)"]
    assert (row["en"].values, row["de"].values, row["shared"].values) == ((82.0,), (65.0,), (73.5,))


def test_scores_of_a_checkpoint_are_not_the_runs(tmp_path: Path) -> None:
    write_scores(tmp_path / "end", "xnli", {"en": {"accuracy": 50.0}}, model="runs/base")
    write_scores(tmp_path / "early", "xnli", {"en": {"accuracy": 40.0}}, model="runs/base@50", seed=2)
    names = {"en_xx": [0.1, 0.2], "xx_en": [0.3, 0.45]}
    scored = {"model": "base", "folder": "runs/base", "step": 50, "depth": 1, "layer": 1, "overall": names, "sets": {}}
    (tmp_path / "tatoeba.json").write_text(json.dumps({"format": 1, "models": [scored]}))
    found = {model.name: (sorted(model.results), model.tatoeba is not None) for model in read_models([tmp_path])}
    assert found == {"base": (["xnli"], False), "base@50": (["xnli"], True)}
    scored |= {"model": "base@50", "folder": "runs/base@50"}  # as `evaluate --model runs/base@50` writes it
    (tmp_path / "tatoeba.json").write_text(json.dumps({"format": 1, "models": [scored]}))
    assert {model.name: model.tatoeba is not None for model in read_models([tmp_path])} == {
        "base": False,
        "base@50": True,
    }


def test_up_to_four_languages_are_named_and_more_are_counted(tmp_path: Path) -> None:
    for codes in (["de", "en", "fr", "sw"], ["de", "en", "es", "fr", "sw"]):
        dev = {
            "languages": dict.fromkeys(codes),
            "mean": {"em": 1.0, "f1": len(codes)},
            "held_out": len(codes) > 4,
        }
        scores = {"en": {"em": 5.0, "f1": 9.0}}  # F1 is the first metric, whatever the order in the file
        write_scores(tmp_path / str(len(codes)), "xquad", scores, train_languages=codes, dev=dev)
    found = {model.name: model.results["xquad"].runs[0] for model in read_models([tmp_path])}
    assert {name: (run.dev_score, run.dev_name, run.languages["en"]) for name, run in found.items()} == {
        "ours, fine-tuned on de en fr sw": (4.0, "dev de en fr sw", (9.0, 5.0)),
        "ours, fine-tuned on 5 languages": (5.0, "held-out of 5 languages", (9.0, 5.0)),
    }


def test_rows_are_in_the_order_of_their_names_and_settings_are_those_that_were_run(tmp_path: Path) -> None:
    """Two settings have scores of commands that each had one."""
    score = {"f1": 50.0}
    dev = {"languages": {"en": score}, "mean": score, "held_out": False}
    for folder, name, rate in (("1", "runs/b", "1e-5"), ("2", "runs/a", "1e-5"), ("3", "runs/b", "2e-5")):
        write_scores(tmp_path / folder, "ner", {"en": score}, model=name, tuning={"learning_rate": rate}, dev=dev)
    found = ours(tables(read_models([tmp_path])), "table1")
    assert list(found) == ["a", "b"] and found["b"]["ner"].remarks[-1] == "best of 2 settings on dev en"


def test_a_test_that_the_paper_lacks_has_a_column_of_its_own(runs: Path, tmp_path: Path) -> None:
    """The columns of a CSV file are named by the task and the direction or metric."""
    write_xtreme([runs], tmp_path)

    def record(table: str) -> dict[str, str]:
        with open(tmp_path / f"xtreme_{table}.csv", newline="") as file:
            (row,) = [row for row in csv.DictReader(file) if row["system"].startswith("ours, layer")]
        return row

    assert (record("table6")["en-cs"], record("table6")["average"]) == ("10.00", "37.50")
    found = record("table5")
    assert [found[key] for key in ("14_en_xx", "14_xx_en", "36_en_xx", "36_xx_en")] == ["20.0", "45.0"] * 2
    assert found["remarks"] == "14: 20.0 / 45.0 [7 of 14 languages]"


def test_a_model_tuned_from_random_weights_is_another_row(tmp_path: Path) -> None:
    write_scores(tmp_path / "ner/seed1", "ner", {"en": {"f1": 50.0}})
    write_scores(tmp_path / "ner-untrained/seed1", "ner", {"en": {"f1": 10.0}}, random=True)
    found = {model.name: model.results["ner"].runs[0].languages for model in read_models([tmp_path])}
    assert found == {"ours": {"en": (50.0,)}, "ours, untrained": {"en": (10.0,)}}


@pytest.mark.parametrize("of", ["weights", "training", "files"])
def test_only_scores_of_the_same_model_training_set_and_tests_are_averaged(tmp_path: Path, of: str) -> None:
    """A model trained anew in its folder, or another version of a test, has a row of its own."""

    def write(seed: int, f1: float, version: str) -> None:
        hashes = {"weights": "a" * 64, "training": {"train.txt": "a" * 64}, "files": {"test.txt": "a" * 64}}
        hashes[of] = version * 64 if of == "weights" else {**hashes[of], "more.txt": version * 64}  # type: ignore[dict-item]
        write_scores(tmp_path / f"ner/seed{seed}", "ner", {"en": {"f1": f1}}, seed=seed, **hashes)

    def found() -> dict[str, list[float]]:
        return {
            model.name: [run.languages["en"][0] for run in model.results["ner"].runs]
            for model in read_models([tmp_path])
        }

    for seed, f1 in ((1, 80.0), (2, 82.0), (3, 40.0)):
        write(seed, f1, "b")
    assert found() == {"ours": [80.0, 82.0, 40.0]}
    write(3, 40.0, "c")
    assert sorted(found().values()) == [[40.0], [80.0, 82.0]] and len(found()) == 2
    write(2, 82.0, "c")
    assert sorted(found().values()) == [[80.0], [82.0, 40.0]]
    scored = {"model": "ours", "folder": "runs/ours", "weights": "c" * 64, "depth": 1, "layer": 1, "overall": {}}
    (tmp_path / "tatoeba.json").write_text(json.dumps({"format": 1, "models": [scored]}))
    of_model = {model.name: model.tatoeba is not None for model in read_models([tmp_path])}
    assert of_model["ours, weights cccccccc"] and sum(of_model.values()) == 1
    with_seeds = {model.name: len(model.results["ner"].runs) for model in read_models([tmp_path]) if model.results}
    assert with_seeds.get("ours, weights cccccccc", 0) == (2 if of == "weights" else 0)


def test_tests_without_labels_have_no_score_and_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_scores(folder / "xnli", "xnli", {"en": {"accuracy": 80.0}}, unlabelled={"de": "p", "fr": "p"})
    write_scores(folder / "pawsx", "pawsx", {}, metric=["accuracy"], unlabelled={"de": "predictions/pawsx/test-de.tsv"})
    built = tables(read_models([folder]))
    row = ours(built, "table1")["ours"]
    assert row["xnli"].values == (80.0,) and row["xnli"].remarks == ("1 of 15 languages", "2 without labels")
    assert row["pawsx"].values == () and row["pawsx"].remarks == ("no labels: predictions alone",)
    assert row["average"].values == (80.0,) and row["average"].remarks == ("1 of 7 tasks",)
    assert [table.name for table in built] == ["table1", "table7", "xnli_by_language"]
    page = write_xtreme([folder], tmp_path / "out").read_text()
    assert "<td>[no labels: predictions alone]</td>" in page
    with open(tmp_path / "out/xtreme_table1.csv", newline="") as file:
        (record,) = [record for record in csv.DictReader(file) if record["system"] == "ours"]
    assert record["pawsx"] == "" and "pawsx: [no labels: predictions alone]" in record["remarks"]


def test_the_measure_of_pos_is_f1(tmp_path: Path) -> None:
    write_scores(tmp_path / "pos", "pos", {"en": {"f1": 70.0, "accuracy": 90.0}})
    assert ours(tables(read_models([tmp_path])), "table1")["ours"]["pos"].values == (70.0,)


def test_scores_of_another_format_are_refused(tmp_path: Path) -> None:
    write_scores(tmp_path / "pos", "pos", {"en": {"f1": 70.0, "accuracy": 90.0}}, format=2)
    with pytest.raises(ValueError, match=r"scores\.json has format 2, this version reads 1"):
        read_models([tmp_path])


def test_two_models_of_one_name_are_two_rows(tmp_path: Path) -> None:
    """Else the row of one would be filled up with the other's tasks."""
    write_scores(tmp_path / "a", "xnli", {"en": {"accuracy": 50.0}}, model="runs/a/base")
    write_scores(tmp_path / "b", "pawsx", {"en": {"accuracy": 60.0}}, model="./runs//b/base")
    names = {"en_xx": [0.1, 0.2], "xx_en": [0.3, 0.45]}
    model = {"model": "base", "folder": "runs/b/base", "depth": 1, "layer": 1, "overall": names, "sets": {}}
    untrained = model | {"model": "untrained, seed 1"}
    (tmp_path / "tatoeba.json").write_text(json.dumps({"format": 1, "models": [model, untrained]}))
    found = {model.name: (sorted(model.results), model.tatoeba is not None) for model in read_models([tmp_path])}
    assert found == {
        "runs/a/base": (["xnli"], False),
        "runs/b/base": (["pawsx"], True),
        "untrained, seed 1": ([], True),
    }
    assert [model.name for model in read_models([tmp_path / "a"])] == ["base"]
    (tmp_path / "more").mkdir()  # an untrained model of another shape has the same name
    large = untrained | {"folder": "runs/large"}
    (tmp_path / "more/tatoeba.json").write_text(
        json.dumps({"format": 1, "models": [large | {"model": "large"}, large]})
    )
    found = {model.name for model in read_models([tmp_path]) if model.tatoeba is not None}
    shapes = {"untrained, seed 1, as runs/b/base", "untrained, seed 1, as large"}
    assert found == {"runs/b/base", "large"} | shapes


def test_one_model_named_by_several_paths_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "runs/base").mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/base")
    write_scores(tmp_path / "a", "xnli", {"en": {"accuracy": 50.0}}, model=str(tmp_path / "link"))
    write_scores(tmp_path / "b", "pawsx", {"en": {"accuracy": 60.0}}, model=os.path.relpath(tmp_path / "runs/base"))
    (row,) = read_models([tmp_path])
    assert row.name == "link" and sorted(row.results) == ["pawsx", "xnli"]


class Cells(HTMLParser):
    """The text of every cell of every table, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.tables[-1][-1][-1] += data


def test_the_three_formats_say_the_same(runs: Path, tmp_path: Path) -> None:
    write_scores(runs / "evil", "pawsx", {"en": {"accuracy": 50.0}}, model="runs/a|b <i>")
    (tmp_path / "out").mkdir()
    users_own = tmp_path / "out/xtreme_table1_before.csv"
    for file in (tmp_path / "out/xtreme_conll_by_language.csv", users_own):
        file.write_text("of an earlier call")
    page = write_xtreme([runs], tmp_path / "out")
    users_own.unlink()  # raises an error if it was deleted
    assert page == tmp_path / "out/xtreme.html"
    html = Cells()
    html.feed(page.read_text())
    markdown: list[list[list[str]]] = []
    for line in (tmp_path / "out/xtreme.md").read_text().splitlines():
        if line.startswith("## "):
            markdown.append([])
        elif line.startswith("| ") and not line.startswith("| ---"):
            cells = line.replace("\\|", "\0").strip("| ").split(" | ")
            markdown[-1].append(
                [cell.replace("\0", "|").strip("* ") for cell in line.replace("\\|", "\0")[2:-2].split(" | ")]
            )
            assert cells
    assert len(html.tables) == len(markdown) == len(list((tmp_path / "out").glob("*.csv"))) == 6
    for shown, written in zip(html.tables, markdown, strict=True):
        assert [row if len(row) > 1 else row + [""] * (len(shown[0]) - 1) for row in shown] == written
    assert any("a|b <i>" in row[0] for row in html.tables[0])
    with open(tmp_path / "out/xtreme_table1.csv", newline="") as file:
        records = {record["system"]: record for record in csv.DictReader(file)}
    assert records["XLM-E"]["xquad_em"] == "60.2" and records["XLM-E"]["average"] == "69.3"
    assert records["XLM-E"]["source"] == "published: XLM-E Table 1" and records["ours"]["source"] == "ours"
    assert records["ours"]["ner"] == "61.0" and records["ours"]["pos"] == ""
    assert "ner: 61.0 ± 1.4 [3 of 40 languages, 2 seeds, dev]" in records["ours"]["remarks"]


def test_several_folders_and_the_same_twice_are_read_once(runs: Path) -> None:
    assert read_models([runs, runs / "ner", runs / "xquad"]) == read_models([runs])


def test_mistakes_are_named_and_nothing_is_written(runs: Path, tmp_path: Path) -> None:
    def fault(*folders: Path) -> str:
        with pytest.raises(ValueError) as caught:
            write_xtreme(list(folders), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file, not a folder: choose another output folder"):
        write_xtreme([tmp_path / "absent"], tmp_path / "file/out")
    assert "absent does not exist: --runs takes folders that hold" in fault(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "empty holds no scores.json" in fault(runs, tmp_path / "empty")
    extra = tmp_path / "extra"
    same = {"en": {"f1": 80.0}, "de": {"f1": 60.0}, "sw": {"f1": 40.0}}
    write_scores(extra, "ner", same, seed=2, split="dev")
    assert "are both ner with seed 2" in fault(runs, extra)
    write_scores(extra, "ner", {"en": {"f1": 1.0}}, seed=3, split="dev")
    assert "scores of other languages" in fault(runs, extra)
    write_scores(extra, "ner", same, seed=3, split="dev", unlabelled={"fr": "p"})
    assert "scores of other languages" in fault(runs, extra)
    write_scores(extra, "ner", same, seed=3)
    assert "another split" in fault(runs, extra)
    more = {code: {"em": 1.0, "f1": 2.0} for code in ("en", "de")}
    write_scores(extra, "xquad", more | {"en": {"em": 1.0}, "de": {"em": 1.0}}, seed=3)
    assert "another metrics than" in fault(runs, extra)
    write_scores(extra, "ner", {})
    assert "scores of no language" in fault(extra)
    for wrong in (float("nan"), -1.0, 500.0):
        write_scores(extra, "ner", same | {"de": {"f1": wrong}})
        assert "extra/scores.json has a score that is no percentage" in fault(extra)
    (extra / "scores.json").write_text('{"format": 1, "task": "ner"}')
    assert "extra/scores.json has another form than the tables need (KeyError('metric'))" in fault(extra)
    write_scores(extra, "ner", same)
    content = json.loads((extra / "scores.json").read_text())
    (extra / "scores.json").write_text(json.dumps({key: content[key] for key in content if key != "random"}))
    assert "another form than the tables need (KeyError('random'))" in fault(extra)
    (extra / "scores.json").write_text("{")
    assert "scores.json line 1 is not JSON" in fault(extra)
    (extra / "scores.json").unlink()
    (extra / "align.json").write_text((runs / "align.json").read_text())
    assert "has scores of ours, as another file in --runs has" in fault(runs, extra)
    (extra / "align.json").write_text('{"format": 1, "models": 3}')
    assert "extra/align.json has another form than the tables need" in fault(extra)


def test_alignments_of_sentences_read_alone_are_another_row(runs: Path) -> None:
    align = json.loads((runs / "align.json").read_text()) | {"reading": "each sentence read alone"}
    align["models"][0]["tests"] = {"de-en": {"aer": [0.2, 0.2]}}
    (runs / "apart").mkdir()
    (runs / "apart" / "align.json").write_text(json.dumps(align))
    rows = ours(tables(read_models([runs])), "table6")
    assert {name: cells["en-de"].values for name, cells in rows.items()} == {
        "ours, layer 1 of 1": (50.0,),
        "ours, each sentence read alone, layer 1 of 1": (20.0,),
    }


def test_the_two_directions_of_an_alignment_do_not_share_a_cell(runs: Path) -> None:
    align = json.loads((runs / "align.json").read_text())
    align["models"][0]["tests"]["en-de"] = {"aer": [0.2, 0.2]}
    (runs / "align.json").write_text(json.dumps(align))
    with pytest.raises(ValueError, match="ours has alignments of en-de and of en-de"):
        tables(read_models([runs]))


def test_command(runs: Path, tmp_path: Path) -> None:
    command = ["-m", "xlme_ds.report", "xtreme", "--runs", str(runs / "ner"), str(runs / "xquad")]
    result = python(*command, "--out", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out/xtreme.html") and (tmp_path / "out/xtreme.md").exists()
    result = python(*command[:-2], str(tmp_path), "--out", str(tmp_path / "o"))
    assert result.returncode == 0, result.stderr  # the folder of all runs
    result = python(*command[:-2], str(tmp_path / "no"), "--out", "o")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
