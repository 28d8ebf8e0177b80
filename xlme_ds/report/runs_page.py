"""The page that compares several runs: results, settings that differ, and curves in shared charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli import number
from ..io.files import replacing, require_regular
from ..train.run_folder import flatten
from . import figures
from .files import RunFiles, render, require_run
from .run_page import best_retrieval, checked, started

_TASK_SUFFIXES = {"mono": ", monolingual", "para": ", pairs", "all": ""}


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares several run folders as the file `out`, and return `out`. Raises ValueError for a
    folder that is no run, for a damaged file, for a run named twice, for one run alone, and for more runs than there
    are colours."""
    most = len(figures.RUN_COLOURS)
    if not 2 <= len(runs) <= most:
        raise ValueError(f"the number of folders after --runs is {len(runs)}: name 2 to {most}")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError("--runs names a run twice: name each once")
    require_regular(out, "--out")
    for run in runs:
        require_run(run)
    by_name = dict(zip(_names(runs), map(RunFiles, runs), strict=True))
    page = checked("a file of the runs", lambda: _page_of(by_name))
    with replacing(out) as file:
        file.write(page.encode())
    return out


def _names(runs: Sequence[Path]) -> list[str]:
    """The name of each folder, or its path if another folder has the same name."""
    names = [run.resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run) for run, name in zip(runs, names, strict=True)]


def _page_of(by_name: Mapping[str, RunFiles]) -> str:
    """The HTML of the page. `by_name` has the files of each run, by the run's name on the page."""
    runs = list(by_name.values())
    quantities: dict[str, Any] = {}
    for run in runs:
        quantities = run.objective["quantities"] | quantities
    records = [(run.metrics, run.heldout) for run in runs]
    titles = {key: _title(key, quantities) for key in _drawn_keys(runs, quantities)}
    return render(
        "runs_page.html",
        names=list(by_name),
        started={name: line for name, run in by_name.items() if (line := started(run.config or {}))},
        results=_results(runs, quantities),
        settings=_differing([flatten((run.config or {}).get("config", {})) for run in runs]),
        panels=figures.compared_curves(titles, records),
    )


def _title(key: str, quantities: figures.Quantities) -> str:
    """The title of a logged key on the page, with its task."""
    title, series = figures.panel_and_series(key, quantities)
    return title + _TASK_SUFFIXES[series]


def _drawn_keys(runs: Sequence[RunFiles], quantities: figures.Quantities) -> list[str]:
    """The logged keys to draw: the loss, the learning rate, the objective's quantities, and all held-out ones."""
    heldout = {key for run in runs for key in _last(run.heldout)}
    logged = dict.fromkeys(key for run in runs for key in (*_last(run.metrics), *_last(run.heldout)))
    chosen = [key for key in logged if key in ("lr", *quantities) or key in heldout]
    return [key for key in ("loss", *chosen) if key in logged and figures.is_drawn(key)]


def _last(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last record; empty if there is none."""
    return records[-1] if records else {}


def _results(runs: Sequence[RunFiles], quantities: figures.Quantities) -> dict[str, list[str]]:
    """A row for each result that any run has: title -> cells in the order of the runs, a dash for a run without it."""
    columns = [_results_of(run, quantities) for run in runs]
    titles = dict.fromkeys(title for column in columns for title in column)
    return {title: [column.get(title, "–") for column in columns] for title in titles}


def _results_of(run: RunFiles, quantities: figures.Quantities) -> dict[str, str]:
    """The results of a run by title."""
    results = {}
    if last := _last(run.metrics):
        results = {"step": f"{last['step']:,}", "tokens": number(last.get("tokens", 0))}
    for key, value in _last(run.heldout).items():
        if figures.is_drawn(key) and isinstance(value, int | float):
            results[_title(key, quantities)] = f"{value:.3f}"
    if run.retrieval:
        results["retrieval, best layer"] = figures.percent(best_retrieval(run.retrieval))
    if run.scores and "mean" in run.scores:
        for metric in run.scores["metric"]:
            results[f"{run.scores['task']}, {metric}, mean"] = f"{run.scores['mean'][metric]:.1f}"
    return results


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The settings in which the runs differ: name -> the value of each run."""
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    rows = {key: [run_settings.get(key, "–") for run_settings in settings] for key in keys}
    return {key: [_cell(cell) for cell in row] for key, row in rows.items() if any(cell != row[0] for cell in row)}


def _cell(value: Any) -> str:
    """A setting's value as text."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
