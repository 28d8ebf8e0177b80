"""Tables of published scores with our scores below, as HTML, Markdown and CSV. Four tables have the layouts of Tables
1, 5, 6 and 7 of the XLM-E paper; each further table gives one task's scores by language.

The published scores and the layouts are in xtreme_published.toml.
"""

import csv
import io
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..io.files import write_text
from ..io.folders import require_writable
from .run_files import render
from .xtreme import ENGLISH, METRICS, ModelScores, TaskRun, TaskScores, read_models

# Task -> its heading, and its languages in XTREME, over which the papers average. XTREME's script also fetches tests of
# XTREME-R, which has more languages for parts of speech and entities.
XTREME_TASKS = {
    "pos": (
        "POS", "af ar bg de el en es et eu fa fi fr he hi hu id it ja kk ko mr nl pt ru ta te th tl tr ur vi yo zh"
    ),
    "ner": (
        "NER", "af ar bg bn de el en es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr ms my nl pt ru sw ta te th "
        "tl tr ur vi yo zh"
    ),
    "xquad": ("XQuAD", "ar de el en es hi ru th tr vi zh"), "mlqa": ("MLQA", "ar de en es hi vi zh"),
    "tydiqa": ("TyDiQA", "ar bn en fi id ko ru sw te"),
    "xnli": ("XNLI", "ar bg de el en es fr hi ru sw th tr ur vi zh"), "pawsx": ("PAWS-X", "de en es fr ja ko zh"),
}  # fmt: skip
_GROUPS = {  # whether a system uses parallel text -> heading above the rows of such systems
    False: "Pre-training on multilingual corpus",
    True: "Pre-training on both multilingual corpus and parallel corpus",
}


@dataclass(frozen=True)
class Cell:
    """The scores in a cell: one for each metric or direction."""

    values: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()  # remarks that qualify the values, such as `3 seeds`
    spreads: tuple[float | None, ...] = ()  # standard deviation of each value over seeds


@dataclass(frozen=True)
class SystemRow:
    """A row of a table: the scores of one system."""

    system: str
    source: str  # where the scores were published; empty for our own scores
    cells: Mapping[str, Cell]  # key of a column -> cell
    group: str = ""  # heading above the rows of its group; empty if the table has no groups


@dataclass
class XtremeTable:
    """A table with a row for each system."""

    name: str
    title: str
    columns: dict[str, tuple[str, tuple[str, ...]]]  # key -> (heading, headings of a cell's values)
    rows: list[SystemRow] = field(default_factory=list)
    decimals: int = 1
    notes: list[str] = field(default_factory=list)


def write_xtreme(runs: list[Path], out: Path) -> Path:
    """Write the XTREME tables, our scores below published ones: xtreme.html, xtreme.md and a CSV file for every table.

    Args:
        runs: Folders with, at any depth, the scores.json of fine-tuning and the tatoeba.json and align.json of
            `xlme evaluate`.
        out: Folder to write into.

    Returns:
        The path of xtreme.html.

    Raises:
        ValueError: a result file is damaged, or several have scores for the same cells, or `out` cannot be made; then
            nothing is written.
    """
    require_writable(out)
    all_tables = tables(read_models(runs))
    files = {f"xtreme_{table.name}.csv": to_csv(table) for table in all_tables}
    for template in ("xtreme.md.jinja", "xtreme.html"):
        files[template.removesuffix(".jinja")] = render(template, tables=all_tables, show=cell_text, source=source_text)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(out / name, text)
    for name in (*published()["layouts"], *(f"{task}_by_language" for task in published()["by_language"])):
        if (file := f"xtreme_{name}.csv") not in files:  # an earlier call with other results may have left it
            (out / file).unlink(missing_ok=True)
    return out / "xtreme.html"


@cache
def published() -> dict[str, Any]:
    """The published scores and the layouts, as in xtreme_published.toml; each row has system, source and scores."""
    return tomllib.loads(Path(__file__).with_name("xtreme_published.toml").read_text(encoding="utf-8"))


def tables(models: list[ModelScores]) -> list[XtremeTable]:
    """All tables. Those of retrieval, of alignment and by language are left out if no model has such scores."""
    # Our rows: name of the table -> name of the system -> key of the column -> cell.
    rows: dict[str, dict[str, dict[str, Cell]]] = {"table1": {}, "table7": {}, "table5": {}, "table6": {}}
    for model in models:
        rows["table1"][model.name] = _task_cells(model)
        rows["table7"][model.name] = _gap_cells(model)
        if model.tatoeba:
            rows["table5"][_layer_row_name(model, model.tatoeba)] = _retrieval_cells(model.tatoeba)
        if model.align:
            rows["table6"][_layer_row_name(model, model.align)] = _alignment_cells(model.name, model.align)
    all_tables = [_table(name, ours) for name, ours in rows.items() if ours or name in ("table1", "table7")]
    for task in published()["by_language"]:
        results = {model.name: model.results[task] for model in models if task in model.results}
        if scored := {name: result for name, result in results.items() if result.runs[0].languages}:
            all_tables.append(_language_table(task, scored))
    return all_tables


def _layer_row_name(model: ModelScores, scores: Mapping[str, Any]) -> str:
    """The name of a row whose scores are those of one layer."""
    return f"{model.name}, layer {scores['layer']} of {scores['depth']}"


def _table(name: str, ours: Mapping[str, dict[str, Cell]]) -> XtremeTable:
    """The table `name`: its published rows, then our rows. Columns that only our rows have come last."""
    layout = published()["layouts"][name]
    columns = {key: (heading, tuple(headings)) for key, (heading, *headings) in layout["columns"].items()}
    rows = []
    for entry in published()[name]:
        cells = {column: Cell(tuple(values)) for column, values in entry["scores"].items()}
        if "average" in entry:
            cells["average"] = Cell((entry["average"],))
        group = _GROUPS[entry["parallel"]] if "parallel" in entry else ""
        rows.append(SystemRow(entry["system"], entry["source"], cells, group))
    for system, cells in ours.items():
        if cells:
            columns |= {key: (key, ("",)) for key in cells if key not in columns}
            rows.append(SystemRow(system, "", cells, layout.get("ours", "")))
    return XtremeTable(name, layout["title"], columns, rows, layout.get("decimals", 1), layout.get("notes", []))


def _task_cells(model: ModelScores) -> dict[str, Cell]:
    """Our row of Table 1, means over XTREME's languages. The average is over tasks; a task with two metrics counts with
    their mean, as in XTREME."""
    cells = {
        task: _over_seeds(task, result, [_means(_in_xtreme(task, run).values()) for run in result.runs])
        for task, result in model.results.items()
        if task in XTREME_TASKS
    }
    scored = [fmean(cell.values) for cell in cells.values() if cell.values]
    if scored:
        cells["average"] = Cell((fmean(scored),), _shortfall(len(scored), len(XTREME_TASKS), "tasks"))
    return cells


def _gap_cells(model: ModelScores) -> dict[str, Cell]:
    """Our row of Table 7: the English score minus the mean score of the other languages. The score is exact match if
    the task has it, else the task's first metric."""
    cells = {}
    for task in published()["layouts"]["table7"]["columns"]:
        gaps = []
        for run in model.results[task].runs if task in model.results else ():
            metric = run.metrics.index("em") if "em" in run.metrics else 0
            scores = {language: values[metric] for language, values in _in_xtreme(task, run).items()}
            english = scores.pop(ENGLISH, None)
            if scores and english is not None:
                gaps.append((english - fmean(scores.values()),))
        if gaps:
            cells[task] = _over_seeds(task, model.results[task], gaps)
    return cells


def _in_xtreme(task: str, run: TaskRun) -> dict[str, tuple[float, ...]]:
    """The run's scores in the languages that the task has in XTREME."""
    return {language: scores for language, scores in run.languages.items() if language in XTREME_TASKS[task][1].split()}


def _retrieval_cells(test: Mapping[str, Any]) -> dict[str, Cell]:
    """Our row of Table 5, at the layer `test["layer"]`. The name of a column is its number of languages."""
    return {
        name: Cell(
            tuple(100 * scores[direction][test["layer"]] for direction in ("en_xx", "xx_en")),
            _shortfall(scores["found"], int(name), "languages"),
        )
        for name, scores in test["sets"].items()
    }


def _alignment_cells(model: str, test: Mapping[str, Any]) -> dict[str, Cell]:
    """Our row of Table 6, at the layer `test["layer"]`. en-de and de-en name one test; raises ValueError
    if both are given."""
    cells = {}
    pairs = [column for column in published()["layouts"]["table6"]["columns"] if column != "average"]
    for name, scores in test["tests"].items():
        column = next((pair for pair in pairs if set(pair.split("-")) == set(name.split("-"))), name)
        if column in cells:
            raise ValueError(
                f"{model} has alignments of {column} and of {name}, which are one test: keep one in --runs"
            )
        cells[column] = Cell((100 * scores["aer"][test["layer"]],))
    rates = [cells[pair].values[0] for pair in pairs if pair in cells]
    if rates:
        cells["average"] = Cell((fmean(rates),), _shortfall(len(rates), len(pairs), "tests"))
    return cells


def _language_table(task: str, results: Mapping[str, TaskScores]) -> XtremeTable:
    """The table of one task by language, with our `results` by model. Its last column averages over the languages that
    all of our rows have."""
    entry = published()["by_language"][task]
    runs = [result.runs[0] for result in results.values()]  # the other seeds have the same languages
    metrics = tuple(METRICS[metric] for metric in runs[0].metrics)
    shared = [code for code in entry["languages"] if all(code in run.languages for run in runs)]
    headings = metrics if len(metrics) > 1 else ("",)
    columns = {code: (code, headings) for code in entry["languages"]}
    columns["shared"] = (f"mean of {len(shared)}", headings)
    rows = []

    def add_row(system: str, source: str, scores: Mapping[str, tuple[float, ...]]) -> None:
        cells = {code: Cell(values) for code, values in scores.items() if code in columns}
        rows.append(SystemRow(system, source, cells | {"shared": Cell(_means(scores[code] for code in shared))}))

    for system, scores in entry["systems"].items():
        values = [tuple(score) if isinstance(score, list) else (score,) for score in scores]
        add_row(system, entry["source"], dict(zip(entry["languages"], values, strict=True)))
    for name, result in results.items():
        remarks = ", ".join(_run_remarks(result))  # the columns show which languages are missing
        means = {code: _means(run.languages[code] for run in result.runs) for code in result.runs[0].languages}
        add_row(name + (f" ({remarks})" if remarks else ""), "", means)
    heading = XTREME_TASKS[task][0] if task in XTREME_TASKS else "CoNLL"
    title = f"{heading} by language, fine-tuned on English unless said: {' and '.join(metrics)}"
    note = f"The last column averages over {', '.join(shared) or 'nothing'}: the languages that all of our rows have."
    return XtremeTable(f"{task}_by_language", title, columns, rows, notes=[note])


def _means(tuples: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """The mean of each metric over `tuples`, each of which has one value per metric."""
    return tuple(map(fmean, zip(*tuples, strict=True)))


def _over_seeds(task: str, result: TaskScores, seeds: Sequence[tuple[float, ...]]) -> Cell:
    """The mean and the standard deviation of each metric over `seeds`, which has one tuple of metrics per seed."""
    spreads = tuple(stdev(values) if len(values) > 1 else None for values in zip(*seeds, strict=True))
    return Cell(_means(seeds), _task_remarks(task, result), spreads)


def _shortfall(count: int, total: int, unit: str) -> tuple[str, ...]:
    """The remark on a mean over `count` of `total` units, such as `5 of 40 languages`; empty for a mean over all."""
    return () if count >= total else (f"{count} of {total} {unit}",)


def _task_remarks(task: str, result: TaskScores) -> tuple[str, ...]:
    """The remarks on a task's scores: first on missing languages or labels, then on the runs (`_run_remarks`)."""
    first = result.runs[0]
    if not first.languages:
        return ("no labels: predictions alone",)
    languages = XTREME_TASKS[task][1].split()
    return _shortfall(len(_in_xtreme(task, first)), len(languages), "languages") + _run_remarks(result)


def _run_remarks(result: TaskScores) -> tuple[str, ...]:
    """The remarks on a task's runs: on missing labels, seeds, split, and the choice of a setting."""
    first = result.runs[0]
    remarks = (
        f"{len(first.unlabelled)} without labels" if first.unlabelled else "",
        f"{len(result.runs)} seeds" if len(result.runs) > 1 else "",
        first.split if first.split != "test" else "",
        result.choice,
    )
    return tuple(filter(None, remarks))


def cell_text(cell: Cell | None, decimals: int) -> str:
    """A cell as text, such as `68.7 / 50.2` or `61.20 ± 0.40 [5 of 40 languages, 3 seeds]`; empty for None."""
    if cell is None:
        return ""
    values = [
        f"{value:.{decimals}f}" + (f" ± {spread:.{decimals}f}" if spread is not None else "")
        for value, spread in zip_longest(cell.values, cell.spreads)
    ]
    return (" / ".join(values) + (f" [{', '.join(cell.remarks)}]" if cell.remarks else "")).lstrip()


def source_text(row: SystemRow) -> str:
    """The text of a row's source: `published: …` or `ours`."""
    return f"published: {row.source}" if row.source else "ours"


def to_csv(table: XtremeTable) -> str:
    """The table as CSV. Each value has a column of its own; spreads and remarks are in the column `remarks`."""
    columns = {
        key: [f"{key}_{heading}".lower().replace("→", "_") if len(headings) > 1 else key for heading in headings]
        for key, (_, headings) in table.columns.items()
    }
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["system", *chain(*columns.values()), "source", "remarks"], lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        remarks = [
            f"{key}: {cell_text(cell, table.decimals)}"
            for key, cell in row.cells.items()
            if cell.remarks or any(cell.spreads)
        ]
        record = {"system": row.system, "source": source_text(row), "remarks": "; ".join(remarks)}
        for key, cell in row.cells.items():
            texts = [f"{value:.{table.decimals}f}" for value in cell.values]
            record |= zip(columns[key], texts, strict=False)  # not strict: a task without labels has no values
        writer.writerow(record)
    return buffer.getvalue()
