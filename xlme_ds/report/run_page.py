"""The report page of a run: figures and tables of every section put into `run_page.html`, one self-contained file."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from ..train.run_folder import flatten, missing_steps
from . import figures
from .figures import number, percent, points
from .files import RunFiles, read_run, render, write_text
from .sentences import render_samples

PAGE = "report.html"
_TASKS = {"mono": "monolingual", "para": "parallel"}


def write_report(run: Path) -> Path:
    """Write `report.html` into the run folder and return its path; ValueError when a file of the run is damaged."""
    path = Path(run) / PAGE
    write_text(path, page_of(read_run(Path(run))))
    return path


def page_of(run: RunFiles) -> str:
    """The page of a run as HTML."""
    settings = (run.config or {}).get("config", {})
    return render(
        "run_page.html",
        run=run,
        title=_checked("config.json", lambda: settings.get("name")) or run.name,
        about=_checked("config.json", lambda: run.objective["description"]),
        cards=_checked("config.json, metrics.jsonl or heldout.jsonl", lambda: list(_cards(run))),
        panels=_checked(
            "metrics.jsonl or heldout.jsonl",
            lambda: figures.curves(run.metrics, run.heldout, run.objective["quantities"]),
        ),
        gaps=_checked("config.json", lambda: _gaps(run, settings.get("train", {}))),
        shares=_checked("languages.json", lambda: _language_shares(run.languages or {})),
        retrieval=_checked("retrieval.json", lambda: _retrieval(run.retrieval) if run.retrieval else None),
        samples=_checked("samples.json", lambda: _sentences(run.samples) if run.samples else None),
        settings=flatten(run.config or {}),
        tasks=_TASKS,
        number=number,
        percent=percent,
    )


def _checked(file: str, build: Callable[[], Any]) -> Any:
    """The result of `build`; where a file lacks something or has another form, an error that names the file."""
    try:
        return build()
    except KeyError as error:
        raise ValueError(f"{file} has no {error} where the report needs it: write it again or remove it") from None
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{file} has another form than the report needs ({error}): write it again or remove it"
        ) from None


def _gaps(run: RunFiles, settings: Mapping[str, int]) -> dict[str, str]:
    """By file the steps that should have a record by the settings, and have none."""
    files = {"metrics.jsonl": (run.metrics, "log_every"), "heldout.jsonl": (run.heldout, "eval_every")}
    last = max((record["step"] for records, _ in files.values() for record in records), default=0)
    found = {}
    for file, (records, key) in files.items():
        if records and (every := settings.get(key, 0)):
            found[file] = missing_steps((record["step"] for record in records), every, last)
    return {file: steps for file, steps in found.items() if steps}


def _cards(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """The key figures at the head of the page as (label, value, note), each only when the run logged what it needs."""
    for task, words in _TASKS.items():
        values = points(run.heldout, f"auc_{task}")[1]
        if len(values):
            note = f"held-out text; {values[0]:.3f} at the first evaluation, 0.5 is chance"
            yield f"AUC, {words}", f"{values[-1]:.3f}", note
    for key, quantity in run.objective["quantities"].items():
        values, unigram = (points(run.heldout, name)[1] for name in (key, f"unigram_nll_{quantity['task']}"))
        if quantity["unigram"] and len(values):
            label = quantity["title"] + (", pairs" if quantity["task"] == "para" else "")
            baseline = f"unigram model {unigram[-1]:.2f}" if len(unigram) else "no unigram value logged"
            yield label, f"{values[-1]:.2f} nats", f"held-out text; {baseline}"
    tokens, skipped, rate, flops = (
        points(run.metrics, key)[1] for key in ("tokens", "skipped_steps", "tokens_per_s", "flops_per_s")
    )
    if len(tokens):
        note = f"in {run.metrics[-1]['step']:,} steps" + (f"; {int(skipped[-1])} skipped" if len(skipped) else "")
        yield "Tokens seen", number(tokens[-1]), note
    if len(rate):
        note = "median of the logged steps" + (f"; {number(median_high(flops))}FLOP/s" if len(flops) else "")
        yield "Throughput", f"{number(median_high(rate))} tokens/s", note
    if len(rate) and len(rate) == len(tokens):
        spent = np.diff(tokens, prepend=0.0)
        seconds = float(np.sum(spent[rate > 0] / rate[rate > 0]))
        yield "Training time", duration(seconds), "tokens over throughput: from the first step to the last"
    parameters = dict((run.config or {}).get("parameters") or {})
    if "trained_total" in parameters:
        total = parameters.pop("trained_total")
        yield "Parameters", number(total), ", ".join(f"{name} {number(count)}" for name, count in parameters.items())


def _language_shares(languages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each task: the figure and the table of sampling shares, largest language first."""
    result = []
    for task in _TASKS:
        if table := languages.get(task):
            rows = sorted(table.items(), key=lambda item: (-item[1]["share_before"], item[0]))
            most = max(table, key=lambda name: table[name]["repeat"])
            facts = {"task": task, "rows": rows, "most": most, "repeat": table[most]["repeat"]}
            result.append(facts | {"svg": figures.shares(table)})
    return result


def _retrieval(values: Mapping[str, Any]) -> dict[str, Any]:
    """The retrieval section: both figures, and a row a language at the best layer before and the best layer after."""
    overall = {when: _both_ways(values[when]["overall"]) for when in ("before", "after") if values.get(when)}
    best = {when: int(np.argmax(by_layer)) for when, by_layer in overall.items()}
    means = {
        when: {name: _both_ways(scores)[layer] for name, scores in values[when]["languages"].items()}
        for when, layer in best.items()
    }
    rows = []
    for name, pairs in sorted(values["pairs"].items()):
        row = {"language": name, "pairs": pairs}
        for when, layer in best.items():
            scores = values[when]["languages"].get(name, {})
            row[when] = {way: scores[way][layer] for way in scores}
        rows.append(row)
    return {
        "by_layer": figures.retrieval_by_layer(values),
        "by_language": figures.retrieval_by_language(means.get("before", {}), means.get("after", {})),
        "rows": rows,
        "candidates": values["candidates"],
        "best": {when: values["layers"][layer] for when, layer in best.items()},
        "mean": {when: overall[when][layer] for when, layer in best.items()},
    }


def _both_ways(scores: Mapping[str, list[float]]) -> Any:
    """By layer the mean of both directions."""
    return (np.array(scores["en_xx"]) + np.array(scores["xx_en"])) / 2


def _sentences(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The sentences by task, their flag threshold, and the verdicts counted over all of them."""
    rendered, threshold = render_samples(samples)
    kinds = ("hit", "miss", "alarm", "passed", "restored")
    return {
        "by_task": {task: [sample for sample in rendered if sample.task == task] for task in _TASKS},
        "threshold": threshold if math.isfinite(threshold) else None,
        "totals": {kind: sum(sample.counts[kind] for sample in rendered) for kind in kinds},
        "judged": any(token["score"] is not None for sample in samples for token in sample["tokens"]),
    }


def duration(seconds: float) -> str:
    """Seconds in the largest two fitting units: `41 s`, `8 min 12 s`, `5 h 03 min`, `3 d 04 h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
