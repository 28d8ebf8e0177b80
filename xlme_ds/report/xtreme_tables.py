"""The layouts of XLM-E's Tables 1, 5, 6 and 7 and of scores by language: published rows, then ours."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from .xtreme import Model, Result, spread

PUBLISHED = Path(__file__).with_name("xtreme_published.toml")

# Key -> its heading, and how many languages XTREME has for it.
TASKS = {
    "pos": ("POS", 33), "ner": ("NER", 40), "xquad": ("XQuAD", 11), "mlqa": ("MLQA", 7), "tydiqa": ("TyDiQA", 9),
    "xnli": ("XNLI", 15), "pawsx": ("PAWS-X", 7),
}  # fmt: skip
_METRICS = {"f1": "F1", "em": "EM", "accuracy": "Acc."}
_GAPS = ("xquad", "mlqa", "tydiqa", "xnli", "pawsx")
_PAIRS = ("en-de", "en-fr", "en-hi", "en-ro")
_SETS = {"14": 14, "36": 36}
_WAYS = ("en_xx", "xx_en")
_GROUPS = {
    False: "Pre-training on multilingual corpus",
    True: "Pre-training on both multilingual corpus and parallel corpus",
}
_MARKS = (
    "In brackets: languages (of all the task has), how many more have tests without labels, which are predicted and not scored, seeds "
    "if more than one, the split if it is not the test set, and of how many settings the one shown was the best on which dev sets."
)


@dataclass(frozen=True)
class Cell:
    """One or two numbers, what qualifies them, and their standard deviation over seeds."""

    values: tuple[float, ...] = ()
    marks: tuple[str, ...] = ()
    spreads: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Row:
    """A system; `source` is where its scores were published, empty for ours. Rows of one group stand under its name."""

    system: str
    source: str
    cells: dict[str, Cell]
    group: str = ""


@dataclass
class Table:
    """A layout: `columns` by key are (heading, headings of its numbers)."""

    name: str
    title: str
    columns: Mapping[str, tuple[str, tuple[str, ...]]]
    rows: list[Row]
    decimals: int = 1
    notes: list[str] = field(default_factory=list)


@cache
def published() -> dict[str, Any]:
    """The published scores; every table's rows hold system, source and scores."""
    return tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


def tables(models: list[Model]) -> list[Table]:
    """All tables; those of retrieval, alignment and single languages only where a model has such scores."""
    built = [_main_table(models), _gap_table(models)]
    if any(model.tatoeba for model in models):
        built.append(_retrieval_table(models))
    if any(model.align for model in models):
        built.append(_alignment_table(models))
    built += [_language_table(task, models) for task in published()["by_language"] if _having(models, task)]
    return built


def _having(models: list[Model], task: str) -> list[Model]:
    return [model for model in models if task in model.results and model.results[task].languages]


def _published_rows(name: str) -> list[Row]:
    rows = []
    for entry in published()[name]:
        cells = {column: Cell(tuple(values)) for column, values in entry["scores"].items()}
        if "average" in entry:
            cells["average"] = Cell((entry["average"],))
        group = _GROUPS[entry["parallel"]] if "parallel" in entry else ""
        rows.append(Row(entry["system"], entry["source"], cells, group))
    return rows


def _part(found: int, whole: int, unit: str) -> tuple[str, ...]:
    return () if found >= whole else (f"{found} of {whole} {unit}",)


def _marks(task: str, result: Result) -> tuple[str, ...]:
    whole = TASKS[task][1] if task in TASKS else len(published()["by_language"][task]["languages"])
    first = result.runs[0]
    if not first.languages:
        return ("no labels: predictions alone",)
    marks = _part(len(first.languages), whole, "languages")
    if first.unlabelled:
        marks += (f"{len(first.unlabelled)} without labels",)
    if len(result.runs) > 1:
        marks += (f"{len(result.runs)} seeds",)
    if first.split != "test":
        marks += (first.split,)
    of = str(result.settings) if result.found == result.settings else f"{result.found} of {result.settings}"
    if result.found > 1 and first.dev:
        return (*marks, f"best of {of} settings on {first.dev.name}")
    return marks if result.settings == 1 else (*marks, f"{of} settings")


def _over_seeds(columns: list[tuple[float, ...]], marks: tuple[str, ...]) -> Cell:
    """The mean and the spread over seeds; `columns` has the numbers of every seed."""
    by_number = list(zip(*columns, strict=True))
    return Cell(tuple(map(fmean, by_number)), marks, tuple(map(spread, by_number)))


def _main_table(models: list[Model]) -> Table:
    """Table 1. The average is over tasks, a task with two metrics counting their mean, as XTREME does."""
    columns = {
        "pos": ("POS", ("F1",)), "ner": ("NER", ("F1",)), "xquad": ("XQuAD", ("F1", "EM")), "mlqa": ("MLQA", ("F1", "EM")),
        "tydiqa": ("TyDiQA", ("F1", "EM")), "xnli": ("XNLI", ("Acc.",)), "pawsx": ("PAWS-X", ("Acc.",)), "average": ("Avg", ("",)),
    }  # fmt: skip
    rows = _published_rows("table1")
    for model in models:
        results = {task: result for task, result in model.results.items() if task in TASKS}
        if results:
            cells = {task: _over_seeds(result.means, _marks(task, result)) for task, result in results.items()}
            scored = [fmean(cell.values) for cell in cells.values() if cell.values]
            if scored:
                cells["average"] = Cell((fmean(scored),), _part(len(scored), len(TASKS), "tasks"))
            rows.append(Row(model.name, "", cells, "This implementation"))
    return Table(
        "table1", "XTREME: fine-tuned on English unless said, scored on every language (layout of XLM-E Table 1)", columns, rows,
        notes=[_MARKS, "± is the standard deviation over seeds. The average is over the tasks that are there."],
    )  # fmt: skip


def _gap_table(models: list[Model]) -> Table:
    """Table 7."""
    columns = {task: (TASKS[task][0], ("",)) for task in _GAPS}
    rows = _published_rows("table7")
    for model in models:
        cells = {}
        for task in _GAPS:
            if task in model.results:
                result = model.results[task]
                gaps = [gap for run in result.runs if (gap := run.gap()) is not None]
                if gaps:
                    cells[task] = _over_seeds([(gap,) for gap in gaps], _marks(task, result))
        if cells:
            rows.append(Row(model.name, "", cells))
    return Table(
        "table7", "Transfer gap: English minus the mean of the other languages, EM for questions (layout of XLM-E Table 7)",
        columns, rows, notes=["Lower is better.", _MARKS],
    )  # fmt: skip


def _retrieval_table(models: list[Model]) -> Table:
    """Table 5, at the layer that the test was run for."""
    columns = {name: (f"Tatoeba-{name}", ("en→xx", "xx→en")) for name in _SETS}
    rows = _published_rows("table5")
    for model in models:
        if model.tatoeba:
            layer, cells = model.tatoeba["layer"], {}
            for name, scores in model.tatoeba["sets"].items():
                values = tuple(100 * scores[way][layer] for way in _WAYS)
                cells[name] = Cell(values, _part(scores["found"], _SETS[name], "languages"))
            rows.append(Row(f"{model.name}, layer {layer} of {model.tatoeba['depth']}", "", cells))
    return Table("table5", "Sentence retrieval, accuracy@1 (layout of XLM-E Table 5)", columns, rows)


def _alignment_table(models: list[Model]) -> Table:
    """Table 6, at the layer that the test was run for; en-de and de-en are one test."""
    columns: dict[str, tuple[str, tuple[str, ...]]] = {name: (name, ("",)) for name in (*_PAIRS, "average")}
    columns["average"] = ("Avg", ("",))
    rows = _published_rows("table6")
    for model in models:
        if model.align:
            layer, cells = model.align["layer"], {}
            for name, scores in model.align["tests"].items():
                column = next((pair for pair in _PAIRS if set(pair.split("-")) == set(name.split("-"))), name)
                columns.setdefault(column, (column, ("",)))
                if column in cells:
                    raise ValueError(
                        f"{model.name} has alignments of {column} and of {name}, which are one test: keep one in --runs"
                    )
                cells[column] = Cell((100 * scores["aer"][layer],))
            known = [cells[pair].values[0] for pair in _PAIRS if pair in cells]
            if known:
                cells["average"] = Cell((fmean(known),), _part(len(known), len(_PAIRS), "tests"))
            rows.append(Row(f"{model.name}, layer {layer} of {model.align['depth']}", "", cells))
    return Table(
        "table6", "Word alignment, error rate: lower is better (layout of XLM-E Table 6)", columns, rows, decimals=2
    )


def _language_table(task: str, models: list[Model]) -> Table:
    """One task by language; the last column averages every row over the languages that all of our rows have."""
    entry: Mapping[str, Any] = published()["by_language"][task]
    ours = _having(models, task)
    heading = TASKS[task][0] if task in TASKS else "CoNLL"
    metrics = tuple(_METRICS[metric] for metric in ours[0].results[task].runs[0].metrics)
    shared = [
        code for code in entry["languages"] if all(code in model.results[task].runs[0].languages for model in ours)
    ]
    parts = metrics if len(metrics) > 1 else ("",)
    columns = {code: (code, parts) for code in entry["languages"]} | {"shared": (f"mean of {len(shared)}", parts)}

    def row(system: str, source: str, scores: Mapping[str, tuple[float, ...]]) -> Row:
        cells = {code: Cell(values) for code, values in scores.items() if code in columns}
        if shared:
            cells["shared"] = Cell(tuple(map(fmean, zip(*(scores[code] for code in shared), strict=True))))
        return Row(system, source, cells)

    rows = [
        row(system, entry["source"], dict(zip(entry["languages"], map(_tuple, values), strict=True)))
        for system, values in entry["systems"].items()
    ]
    for model in ours:
        result = model.results[task]
        marks = [mark for mark in _marks(task, result) if "languages" not in mark]
        rows.append(row(model.name + (f" ({', '.join(marks)})" if marks else ""), "", result.languages))
    note = f"The last column averages over {', '.join(shared) or 'nothing'}: the languages that all of our rows have."
    title = f"{heading} by language, fine-tuned on English unless said: {' and '.join(metrics)}"
    return Table(f"{task}_by_language", title, columns, rows, notes=[note])


def _tuple(value: float | list[float]) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list) else (value,)
