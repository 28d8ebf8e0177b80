"""The report page: every section's figures and tables put into `template.html`, written as one self-contained file."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ..config import OBJECTIVE_DESCRIPTIONS
from ..train.run_folder import missing_steps
from . import figures
from .figures import number
from .folder import RunFolder, read_run
from .samples import render_samples

PAGE = "report.html"
_TASKS = {"mono": "monolingual", "para": "parallel"}


@dataclass(frozen=True)
class Card:
    """A key figure at the head of the page."""

    label: str
    value: str
    note: str


def write_report(run: Path) -> Path:
    """Write `report.html` into the run folder and return its path; ValueError when a file of the run is damaged."""
    path = Path(run) / PAGE
    html = render(read_run(Path(run)))
    temporary = path.with_name(f".{PAGE}.{os.getpid()}.tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, path)
    return path


def render(run: RunFolder) -> str:
    """The page of a run as HTML."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "percent": percent}
    return environment.get_template("template.html").render(
        run=run,
        title=_checked("config.json", lambda: (run.config or {}).get("config", {}).get("name")) or run.name,
        about=_checked("config.json", lambda: about(run)),
        cards=_checked("config.json, metrics.jsonl or heldout.jsonl", lambda: cards(run)),
        panels=_checked("metrics.jsonl or heldout.jsonl", lambda: figures.curves(run.metrics, run.heldout)),
        gaps=_checked("config.json", lambda: gaps(run)),
        shares=_checked("languages.json", lambda: language_shares(run.languages)),
        retrieval=_checked("retrieval.json", lambda: retrieval(run.retrieval)),
        samples=_checked("samples.json", lambda: sentences(run.samples)),
        settings=list(flatten(run.config)) if run.config else [],
        tasks=_TASKS,
    )


def about(run: RunFolder) -> str | None:
    """What the run was trained for."""
    return OBJECTIVE_DESCRIPTIONS.get((run.config or {}).get("config", {}).get("objective", {}).get("name", ""))


def gaps(run: RunFolder) -> dict[str, str]:
    """By file the steps that should have a record by the settings, and have none: lost, or logged less often before a
    resume."""
    settings = (run.config or {}).get("config", {}).get("train", {})
    files = {"metrics.jsonl": (run.metrics, "log_every"), "heldout.jsonl": (run.heldout, "eval_every")}
    last = max((record["step"] for records, _ in files.values() for record in records), default=0)
    found = {
        file: missing_steps((record["step"] for record in records), every, last)
        for file, (records, key) in files.items()
        if records and (every := settings.get(key, 0))
    }
    return {file: steps for file, steps in found.items() if steps}


def _checked(file: str, build: Callable[[], Any]) -> Any:
    """What `build` makes of a file; what it lacks, or has in another form, is an error that names the file."""
    try:
        return build()
    except KeyError as error:
        raise ValueError(f"{file} has no {error} where the report needs it: write it again or remove it") from None
    except (TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{file} has another form than the report needs ({error}): write it again or remove it"
        ) from None


def cards(run: RunFolder) -> list[Card]:
    """The key figures, each only when the run logged what it needs."""
    return [*heldout_cards(run.heldout), *training_cards(run.metrics), *parameter_cards(run.config or {})]


def heldout_cards(heldout: figures.Records) -> Iterator[Card]:
    """AUC and masked-token loss on text kept out of training, at the last evaluation."""
    for task, words in _TASKS.items():
        values = figures.points(heldout, f"auc_{task}")[1]
        if len(values):
            note = f"held-out text; {values[0]:.3f} at the first evaluation, 0.5 is chance"
            yield Card(f"AUC, {words}", f"{values[-1]:.3f}", note)
    for task, key, name in (("mono", "mlm", "Masked-token loss"), ("para", "tlm", "Masked-token loss, pairs")):
        values, unigram = figures.points(heldout, key)[1], figures.points(heldout, f"unigram_nll_{task}")[1]
        if len(values):
            baseline = f"unigram model {unigram[-1]:.2f}" if len(unigram) else "no unigram value logged"
            yield Card(name, f"{values[-1]:.2f} nats", f"held-out text; {baseline}")


def training_cards(metrics: figures.Records) -> Iterator[Card]:
    """Tokens, throughput and time; the time is that of the training steps alone."""
    tokens = figures.points(metrics, "tokens")[1]
    if len(tokens):
        skipped = figures.points(metrics, "skipped_steps")[1]
        note = f"in {metrics[-1]['step']:,} steps" + (f"; {int(skipped[-1])} skipped" if len(skipped) else "")
        yield Card("Tokens seen", number(tokens[-1]), note)
    rate, flops = figures.points(metrics, "tokens_per_s")[1], figures.points(metrics, "flops_per_s")[1]
    if len(rate):
        note = "median of the logged steps" + (f"; {number(_median(flops))}FLOP/s" if len(flops) else "")
        yield Card("Throughput", f"{number(_median(rate))} tokens/s", note)
    if len(rate) and len(rate) == len(tokens):
        spent = [b - a for a, b in zip([0.0, *tokens[:-1]], tokens, strict=True)]
        seconds = sum(t / r for t, r in zip(spent, rate, strict=True) if r > 0)
        yield Card("Training time", duration(seconds), "tokens over throughput: from the first step to the last")


def parameter_cards(config: Mapping[str, Any]) -> Iterator[Card]:
    """Parameters in total and by component."""
    parameters = dict(config.get("parameters") or {})
    if "trained_total" in parameters:
        total = parameters.pop("trained_total")
        note = ", ".join(f"{name} {number(count)}" for name, count in parameters.items())
        yield Card("Parameters", number(total), note)


def language_shares(languages: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """For each task: the figure and the table of sampling shares, largest language first."""
    result = []
    for task in _TASKS:
        table = (languages or {}).get(task)
        if table:
            rows = sorted(table.items(), key=lambda item: (-item[1]["share_before"], item[0]))
            most = max(table, key=lambda name: table[name]["repeat"])
            figure = figures.shares(table)
            result.append({"task": task, "svg": figure, "rows": rows, "most": most, "repeat": table[most]["repeat"]})
    return result


def retrieval(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The retrieval section: both figures, and a row a language at the best layer before and the best layer after."""
    if not values:
        return None
    best = {when: best_layer(values[when]["overall"]) for when in ("before", "after") if values.get(when)}
    means = {
        when: {name: _mean_at(scores, layer) for name, scores in values[when]["languages"].items()}
        for when, layer in best.items()
    }
    rows = []
    for name, pairs in sorted(values["pairs"].items()):
        scores = {when: values[when]["languages"].get(name, {}) for when in best}
        at_best = {when: {way: scores[when][way][layer] for way in scores[when]} for when, layer in best.items()}
        rows.append({"language": name, "pairs": pairs} | at_best)
    return {
        "by_layer": figures.retrieval_by_layer(values),
        "by_language": figures.retrieval_by_language(means.get("before", {}), means.get("after", {})),
        "rows": rows,
        "candidates": values["candidates"],
        "chance": 1 / values["candidates"],
        "best": {when: values["layers"][layer] for when, layer in best.items()},
        "mean": {when: _mean_at(values[when]["overall"], layer) for when, layer in best.items()},
    }


def best_layer(scores: Mapping[str, list[float]]) -> int:
    """Index of the layer with the highest mean of both directions; the lowest such layer."""
    means = [_mean_at(scores, layer) for layer in range(len(scores["en_xx"]))]
    return means.index(max(means))


def _mean_at(scores: Mapping[str, list[float]], layer: int) -> float:
    return (scores["en_xx"][layer] + scores["xx_en"][layer]) / 2


def sentences(samples: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The sentences by task, their flag threshold, and the verdicts counted over all of them."""
    if not samples:
        return None
    rendered, threshold = render_samples(samples)
    totals = {
        kind: sum(sample.counts[kind] for sample in rendered) for kind in ("hit", "miss", "alarm", "passed", "restored")
    }
    by_task = {task: [sample for sample in rendered if sample.task == task] for task in _TASKS}
    judged = any(token["score"] is not None for sample in samples for token in sample["tokens"])
    flagged = threshold if math.isfinite(threshold) else None
    return {"by_task": by_task, "threshold": flagged, "totals": totals, "judged": judged}


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values of a nested JSON object, in its order."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)


def percent(fraction: float) -> str:
    """A fraction as a percentage of three figures."""
    return f"{number(100 * fraction)}%"


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


def _median(values: Any) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])
