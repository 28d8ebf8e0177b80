"""The page that compares several runs: results, settings that differ, and curves in shared charts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli import number
from ..io.files import replacing, require_regular
from ..train.run_folder import flatten
from . import figures
from .files import RunFiles, render
from .run_page import best_retrieval, checked, started

_TASK_SUFFIXES = {"mono": ", monolingual", "para": ", pairs", "all": ""}


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page of several run folders as the file `out`, and return `out`. Raises ValueError for a damaged file,
    and for more runs than there are colours."""
    most = len(figures.RUNS)
    if not 2 <= len(runs) <= most:
        raise ValueError(f"--runs names {len(runs)} of the runs to set side by side: name 2 to {most}")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError("--runs names a run twice: name each once")
    require_regular(out, "--out")
    files = dict(zip(_names(runs), map(RunFiles, runs), strict=True))
    page = checked("a file of the runs", lambda: _page_of(files))
    with replacing(out) as file:
        file.write(page.encode())
    return out


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders; the path of a folder that shares its name with another."""
    counts = Counter(run.resolve().name for run in runs)
    return [run.resolve().name if counts[run.resolve().name] == 1 else str(run) for run in runs]


def _page_of(runs: Mapping[str, RunFiles]) -> str:
    quantities: dict[str, Any] = {}
    for run in runs.values():
        quantities = run.objective["quantities"] | quantities
    return render(
        "runs_page.html",
        names=list(runs),
        started={name: line for name, run in runs.items() if (line := started(run.config or {}))},
        results=_results(list(runs.values()), quantities),
        settings=_differing([flatten((run.config or {}).get("config", {})) for run in runs.values()]),
        panels={
            _title(key, quantities): figures.compared_curves(
                key, [(run.metrics, run.heldout) for run in runs.values()], _title(key, quantities)
            )
            for key in _keys(list(runs.values()), quantities)
        },
    )


def _title(key: str, quantities: figures.Quantities) -> str:
    title, series = figures.panel_and_series(key, quantities)
    return title + _TASK_SUFFIXES[series]


def _keys(runs: Sequence[RunFiles], quantities: figures.Quantities) -> list[str]:
    """The quantities to draw: the loss, and every quantity that a run logged of its objective or evaluated."""
    logged = {key: None for run in runs for record in (*run.metrics[-1:], *run.heldout[-1:]) for key in record}
    evaluated = {key for run in runs for record in run.heldout[-1:] for key in record}
    chosen = [key for key in logged if key in ("lr", *quantities) or key in evaluated]
    return [key for key in ("loss", *chosen) if key in logged and figures.is_drawn(key)]


def _results(runs: Sequence[RunFiles], quantities: figures.Quantities) -> dict[str, list[str]]:
    """A row for each result that any run has: cells in the order of the runs, a dash for a run without it."""
    columns = [_results_of(run, quantities) for run in runs]
    titles = dict.fromkeys(title for column in columns for title in column)
    return {title: [column.get(title, "–") for column in columns] for title in titles}


def _results_of(run: RunFiles, quantities: figures.Quantities) -> dict[str, str]:
    """The results of a run by title."""
    results = {}
    if run.metrics:
        last = run.metrics[-1]
        results = {"step": f"{last['step']:,}", "tokens": number(last.get("tokens", 0))}
    for key, value in (run.heldout[-1] if run.heldout else {}).items():
        if figures.is_drawn(key) and isinstance(value, int | float):
            results[_title(key, quantities)] = f"{value:.3f}"
    if run.retrieval:
        results["retrieval, best layer"] = figures.percent(best_retrieval(run.retrieval))
    if run.scores and "mean" in run.scores:
        for metric in run.scores["metric"]:
            results[f"{run.scores['task']}, {metric}, mean"] = f"{run.scores['mean'][metric]:.1f}"
    return results


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The settings in which the runs differ, with the value of each run."""
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    rows = {key: [of_run.get(key, "–") for of_run in settings] for key in keys}
    return {key: [_cell(cell) for cell in row] for key, row in rows.items() if any(cell != row[0] for cell in row)}


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
