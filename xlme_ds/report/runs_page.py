"""The page that compares several runs: results, settings that differ, and curves in shared charts."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli import format_number
from ..io.files import real_path, write_text
from ..train.run_folder import flatten
from . import figures
from .run_files import RunFiles, render, require_page, require_run
from .run_page import best_retrieval, build_from, started_line

_TASK_SUFFIXES = {"mono": ", monolingual", "para": ", pairs", "all": ""}


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares several run folders as the file `out`, and return `out`. Raises ValueError for a
    folder that is no run, for a damaged file, for a run named twice, for one run alone, and for more runs than there
    are colours."""
    most = len(figures.RUN_COLOURS)
    if not 2 <= len(runs) <= most:
        raise ValueError(f"the number of folders after --runs is {len(runs)}: name 2 to {most}")
    if len({real_path(run) for run in runs}) < len(runs):
        raise ValueError("--runs names a run twice: name each once")
    require_page(out)
    for run in runs:
        require_run(run)
    names = [real_path(run).name for run in runs]
    by_name = {
        name if names.count(name) == 1 else str(run): RunFiles(run) for run, name in zip(runs, names, strict=True)
    }
    write_text(out, build_from("a file of the runs", lambda: _page_of(by_name)))
    return out


def _page_of(by_name: Mapping[str, RunFiles]) -> str:
    """The HTML of the page. `by_name` has the files of each run by the run's name on the page, which is the name of its
    folder, or the folder's path if another run's folder has the same name."""
    runs = list(by_name.values())
    quantities = ChainMap(*(run.objective["quantities"] for run in runs))
    # A key may have different titles in different runs, such as accuracies of different tokens: one figure per title.
    panels = {
        title: (key, [(run.metrics, run.heldout) if _own_title(key, run) == title else ([], []) for run in runs])
        for key in _drawn_keys(runs, quantities)
        for title in dict.fromkeys(
            _own_title(key, run) for run in runs if key in _logged_keys(run.metrics, run.heldout)
        )
    }
    settings = _rows([flatten(run.settings) for run in runs])
    return render(
        "runs_page.html",
        names=list(by_name),
        started={name: line for name, run in by_name.items() if (line := started_line(run.config_json))},
        results=_rows([_results_of(run) for run in runs]),
        settings={name: row for name, row in settings.items() if any(cell != row[0] for cell in row)},
        panels=figures.compared_curves(panels),
    )


def _rows(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A row for each title or setting that any run has: its cells in the order of the runs, with a dash for a run that
    lacks it. `columns`: for each run, its values by title or setting."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "–") for column in columns] for name in names}


def _own_title(key: str, run: RunFiles) -> str:
    """The title of a logged key for this run, with the key's task."""
    title, series = figures.panel_and_series(key, run.objective["quantities"])
    return title + _TASK_SUFFIXES[series]


def _drawn_keys(runs: Sequence[RunFiles], quantities: figures.Quantities) -> list[str]:
    """The logged keys to draw: the loss, the learning rate, the keys of `quantities`, and all keys of the held-out
    records."""
    heldout = {key for run in runs for key in _logged_keys(run.heldout)}
    logged = dict.fromkeys(key for run in runs for key in _logged_keys(run.metrics, run.heldout))
    chosen = [key for key in logged if key in ("lr", *quantities) or key in heldout]
    return [key for key in ("loss", *chosen) if key in logged and figures.is_drawn(key)]


def _logged_keys(*record_lists: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    """The keys of all records, in the order in which they first appear. One record is not enough: a record lacks the
    tasks that its step did not read, and values that are not finite."""
    return dict.fromkeys(key for records in record_lists for record in records for key in record)


def _results_of(run: RunFiles) -> dict[str, str]:
    """The results of a run by title."""
    results = {}
    if run.metrics:
        last = run.metrics[-1]
        results = {"step": f"{last['step']:,}", "tokens": format_number(last.get("tokens", 0))}
    for key, value in (run.heldout[-1] if run.heldout else {}).items():
        if figures.is_drawn(key) and isinstance(value, int | float):
            results[_own_title(key, run)] = f"{value:.3f}"
    if run.retrieval:
        results["retrieval, best layer"] = figures.percent(best_retrieval(run.retrieval))
    if "mean" in run.scores:
        # Means over other sets are other results.
        sets = f"{run.scores['split']} sets {' '.join(sorted(run.scores['languages']))}"
        for metric in run.scores["metric"]:
            results[f"{run.scores['task']}, {metric}, mean of {sets}"] = f"{run.scores['mean'][metric]:.1f}"
    return results
