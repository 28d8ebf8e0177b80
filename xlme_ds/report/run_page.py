"""The report page of a run: the template `run_page.html` filled with figures and tables, one self-contained file."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from ..cli import duration, number
from ..io.files import replacing
from ..train.run_folder import first_step_of, flatten, missing_steps
from . import figures
from .by_language import heldout_languages, language_name, tag
from .figures import nats, percent, points
from .files import RunFiles, render

_TASKS = {"mono": "monolingual", "para": "parallel"}
_SPACE = "▁"  # SentencePiece's mark of a space before the piece
_SPECIAL = {"<s>", "</s>", "<pad>"}


def write_report(run: Path) -> Path:
    """Write the report page of a run; `xtreme --help` explains the XTREME tables.

    Args:
        run: Run folder: reads config.json, metrics.jsonl, heldout.jsonl, dimensions.jsonl,
            heldout_languages.jsonl, retrieval.json, samples.json and languages.json.

    Returns:
        The page, `report.html` in the folder.

    Raises:
        ValueError: a file of the run is damaged.
    """
    path = run / "report.html"
    page = _page_of(RunFiles(run))
    with replacing(path) as file:
        file.write(page.encode())
    return path


def _page_of(run: RunFiles) -> str:
    settings: dict[str, Any] = checked("config.json", lambda: {} | (run.config or {}).get("config", {}))
    quantities = checked("config.json", lambda: run.objective["quantities"])
    # Held-out losses that can be compared with a unigram model have a section of their own, before the other curves.
    with_unigram = {
        figures.panel_and_series(key, quantities)[0] for key, quantity in quantities.items() if quantity["unigram"]
    }
    losses = with_unigram if run.heldout else set()
    borders = [step for step, _ in _phases(settings)][1:]
    panels = checked(
        "metrics.jsonl or heldout.jsonl",
        lambda: figures.curves(run.metrics, run.heldout, quantities, borders, losses),
    )
    return render(
        "run_page.html",
        run=run,
        name=checked("config.json", lambda: settings.get("name")),
        started=checked("config.json", lambda: started(run.config or {})),
        going_on=checked("config.json or samples.json", lambda: _progress(run, settings.get("train", {}))),
        about=checked("config.json", lambda: run.objective["description"]),
        cards=checked("config.json, metrics.jsonl or heldout.jsonl", lambda: list(_cards(run))),
        losses={title: panel for title, panel in panels.items() if title in losses},
        panels={title: panel for title, panel in panels.items() if title not in losses},
        dimensions=checked(
            "dimensions.jsonl", lambda: figures.dimensions_by_layer(run.dimensions) if run.dimensions else None
        ),
        by_language=checked("heldout_languages.jsonl", lambda: heldout_languages(run.heldout_languages, quantities)),
        gaps=checked("config.json", lambda: _gaps(run, settings)),
        shares=checked("languages.json", lambda: _language_shares(run.languages or {})),
        retrieval=checked("retrieval.json", lambda: _retrieval(run.retrieval) if run.retrieval else None),
        samples=checked("samples.json", lambda: _sentences(run.samples, run.languages or {}) if run.samples else None),
        scores=checked("scores.json", lambda: _scores(run.scores) if run.scores else None),
        settings=flatten(
            {key: value for key, value in (run.config or {}).items() if key not in ("started", "command")}
        ),
        tasks=_TASKS,
        language_name=language_name,
        tag=tag,
        number=number,
        nats=nats,
        percent=percent,
    )


def started(config: Mapping[str, Any]) -> str:
    """When the run was started, and its command."""
    command = f": {config['command']}" if config.get("command") else ""
    return f"Started {config['started']} UTC{command}" if config.get("started") else ""


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of fine-tuning as a table: a row for each language, then the mean."""
    metrics = list(scores["metric"])
    rows = {code: [values[metric] for metric in metrics] for code, values in scores["languages"].items()}
    mean = [scores["mean"][metric] for metric in metrics] if rows else []
    return {"task": scores["task"], "metrics": metrics, "rows": rows, "mean": mean, "split": scores["split"]}


def checked(file: str, build: Callable[[], Any]) -> Any:
    """The result of `build`. Raises ValueError, naming `file`, if that lacks something or has another form."""
    try:
        return build()
    except KeyError as error:
        raise ValueError(f"{file} has no {error} where the report needs it: write it again or remove it") from None
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{file} has another form than the report needs ({error}): write it again or remove it"
        ) from None


def _progress(run: RunFiles, settings: Mapping[str, int]) -> dict[str, int] | None:
    """An unfinished run's step, number of steps, and step of the sentences on the page; None for a finished run."""
    step = run.metrics[-1]["step"] if run.metrics else 0
    if run.finished or step >= settings.get("steps", 0):
        return None
    shown = (run.samples or [{}])[0].get("step", 0)
    return {"step": max(step, shown), "steps": settings["steps"], "shown": shown}


def _gaps(run: RunFiles, settings: Mapping[str, Any]) -> dict[str, str]:
    """The steps without a record that the settings ask for, by file."""
    files = {"metrics.jsonl": (run.metrics, "log_every"), "heldout.jsonl": (run.heldout, "eval_every")}
    last = max((record["step"] for records, _ in files.values() for record in records), default=0)
    gaps = {}
    for file, (records, key) in files.items():
        if records and (every := settings.get("train", {}).get(key, 0)):
            gaps[file] = missing_steps((record["step"] for record in records), every, last, first_step_of(settings))
    return {file: steps for file, steps in gaps.items() if steps}


def _cards(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """The key figures at the head of the page as (label, value, note), as far as the run logged them."""
    for task, task_name in _TASKS.items():
        values = points(run.heldout, f"auc_{task}")[1]
        if len(values):
            note = f"held-out text; {values[0]:.3f} at the first evaluation, 0.5 is chance"
            yield f"AUC, {task_name}", f"{values[-1]:.3f}", note
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
        note = "median of the logged steps" + (f"; {_operations(median_high(flops))}" if len(flops) else "")
        yield "Throughput", f"{number(median_high(rate))} tokens/s", note
    if len(rate) and len(rate) == len(tokens):
        done = first_step_of((run.config or {}).get("config", {}))  # steps that the parent of a branch trained
        spent = np.diff(tokens, prepend=tokens[0] * done / run.metrics[0]["step"])
        seconds = float(np.sum(spent[rate > 0] / rate[rate > 0]))
        yield "Training time", duration(seconds), "tokens over throughput: from the first step to the last"
    phases = _phases((run.config or {}).get("config", {}))
    if len(phases) > 1:
        parts = (f"from step {first:,} {percent(share)} predicted" for first, share in phases)
        yield "Phases of the data", str(len(phases)), "; ".join(parts)
    parameters = dict((run.config or {}).get("parameters") or {})
    if "trained_total" in parameters:
        total = parameters.pop("trained_total")
        yield "Parameters", number(total), ", ".join(f"{name} {number(count)}" for name, count in parameters.items())


def _phases(settings: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(first step, share of tokens that is predicted) of every phase of the data."""
    data, default = settings.get("data", {}), settings.get("objective", {}).get("mask_fraction", 0.0)
    starts = list(accumulate(data.get("phase_steps", []), initial=0))
    return list(zip(starts, data.get("phase_mask_fractions") or [default] * len(starts), strict=True))


def _language_shares(languages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chart of sampling shares for each task: logarithmic axis, largest language first."""
    result = []
    for task in _TASKS:
        if table := languages.get(task):
            drawn = {name for name, row in table.items() if row["share_before"] > 0 and row["share"] > 0}
            order = sorted(drawn, key=lambda name: (-table[name]["share_before"], name))
            before, after = ({name: math.log(table[name][key]) for name in order} for key in ("share_before", "share"))
            rows = _dumbbells(before, after)
            for row in rows:
                share = table[row["code"]]
                row["text"] = (
                    f"{percent(share['share_before'])} → {percent(share['share'])}, ×{number(share['repeat'])}"
                )
            most = max(table, key=lambda name: table[name]["repeat"])
            shares = [table[name][key] for name in drawn for key in ("share_before", "share")] or [0.0]
            result.append(
                {"task": task, "rows": rows, "most": most, "repeat": table[most]["repeat"]}
                | {"low": min(shares), "high": max(shares), "unused": sorted(table.keys() - drawn)}
            )
    return result


def _dumbbells(
    before: Mapping[str, float], after: Mapping[str, float], low: float | None = None
) -> list[dict[str, Any]]:
    """A row for each name of `after`: the places of both values, 0 to 100, on an axis that begins at `low`, or at the
    least value."""
    values = [*before.values(), *after.values()]
    start = min(values, default=0.0) if low is None else low
    width = (max(values, default=0.0) - start) or 1.0

    def place(values: Mapping[str, float], name: str) -> float | None:
        return round(100 * (values[name] - start) / width, 1) if name in values else None

    return [{"code": name, "before": place(before, name), "after": place(after, name)} for name in after]


def _retrieval(values: Mapping[str, Any]) -> dict[str, Any]:
    """The retrieval section: both figures, and a row for each language with the accuracies before and after training,
    each at its best layer."""
    overall = {when: _both_ways(values[when]["overall"]) for when in ("before", "after") if values.get(when)}
    best = {when: int(np.argmax(by_layer)) for when, by_layer in overall.items()}
    means = {
        when: {name: _both_ways(scores)[layer] for name, scores in values[when]["languages"].items()}
        for when, layer in best.items()
    }
    means_by_time = {when: overall[when][layer] for when, layer in best.items()}
    trained = dict(sorted(means.get("after", {}).items(), key=lambda item: (-item[1], item[0])))
    by_language = _dumbbells(means.get("before", {}), trained, low=0.0)
    for row in by_language:
        row["text"] = " → ".join(percent(by_name[row["code"]]) for by_name in means.values() if row["code"] in by_name)
    rows = []
    for name, pairs in sorted(values["pairs"].items()):
        row = {"language": name, "pairs": pairs}
        for when, layer in best.items():
            scores = values[when]["languages"].get(name, {})
            row[when] = {way: scores[way][layer] for way in scores}
        rows.append(row)
    return {
        "by_layer": figures.retrieval_by_layer(values),
        "by_language": by_language,
        "rows": rows,
        "candidates": values["candidates"],
        "best": {when: values["layers"][layer] for when, layer in best.items()},
        "mean": means_by_time,
        "learnt": means_by_time.get("after", 0) > max(means_by_time.get("before", 0), 1 / values["candidates"]),
    }


def best_retrieval(values: Mapping[str, Any]) -> float:
    """The mean of both directions at the best layer after training."""
    return float(max(_both_ways(values["after"]["overall"])))


def _both_ways(scores: Mapping[str, list[float]]) -> Any:
    """The mean of both directions, by layer."""
    return (np.array(scores["en_xx"]) + np.array(scores["xx_en"])) / 2


def _sentences(samples: Sequence[Mapping[str, Any]], languages: Mapping[str, Any]) -> dict[str, Any]:
    """Real sentences with a model's tokens in the masked places and, where it judges tokens, its verdict on each.
    English comes first, then German, then the languages of the largest shares in `languages`.

    A token is flagged if its score is at least the `threshold`: the N-th highest score of all samples, where N is the
    number of replaced tokens. So every model, good or bad, flags the same number of tokens; a threshold of 0.5 would
    flag almost none, because replaced tokens are rare. Tokens without a score (null) were not judged.
    """
    tokens = [token for sample in samples for token in sample["tokens"]]
    judged = [token for token in tokens if token["score"] is not None and token["original"] not in _SPECIAL]
    replaced = sum(bool(token["replaced"]) for token in judged)
    threshold = sorted((token["score"] for token in judged), reverse=True)[replaced - 1] if replaced else math.inf
    ordered = sorted(samples, key=lambda sample: _sort_key(sample["language"], languages.get(sample["task"], {})))
    shown = [_with_verdicts(sample, threshold) for sample in ordered]
    return {
        # Pairs first: one side of each is English.
        "by_task": {task: [sample for sample in shown if sample["task"] == task] for task in reversed(_TASKS)},
        "threshold": threshold if replaced else None,
        "totals": sum((sample["counts"] for sample in shown), Counter()),
        "judged": any(token["score"] is not None for token in tokens),
    }


def _sort_key(language: str, shares: Mapping[str, Any]) -> tuple[int, float]:
    """The sort key of a sentence in `language` on the page; a pair with English sorts as its other language."""
    codes = [code for code in language.split("–") if code != "en"] or ["en"]
    share = next((shares[key]["share"] for key in (language, language.replace("–", "-")) if key in shares), 0.0)
    return {"en": 0, "de": 1}.get(codes[0], 2), -share


def _with_verdicts(sample: Mapping[str, Any], threshold: float) -> dict[str, Any]:
    """The sample for the page: its sides as (direction of writing, BCP 47 tag, tokens), and counts of the verdicts."""
    sides: list[list[dict[str, Any]]] = [[]]
    for token in sample["tokens"]:
        if token["original"] == "</s>":
            sides.append([])
        elif token["original"] not in _SPECIAL:
            texts = {key: token[key].replace(_SPACE, " ").strip() for key in ("piece", "original")}
            spaced = token["piece"].startswith(_SPACE) and sides[-1] != []
            sides[-1].append(token | texts | {"spaced": spaced, "verdict": _verdict(token, threshold)})
    codes = [*sample["language"].split("–"), ""]  # the last for a side without a code
    return {
        "language": sample["language"],
        "task": sample["task"],
        "sides": [(_direction(side), tag(code), side) for code, side in zip(codes, sides, strict=False) if side],
        "counts": Counter(token["verdict"] for side in sides for token in side),
    }


def _verdict(token: Mapping[str, Any], threshold: float) -> str:
    """`hit` or `miss` for a replaced token, `alarm` or `passed` for an original one. Without a score: `miss` if
    replaced, `restored` if masked and predicted right, else `passed`."""
    if token["score"] is None:
        return "miss" if token["replaced"] else "restored" if token["masked"] else "passed"
    if token["replaced"]:
        return "hit" if token["score"] >= threshold else "miss"
    return "alarm" if token["score"] >= threshold else "passed"


def _direction(side: Sequence[Mapping[str, Any]]) -> str:
    """The direction of writing of most letters in the original text: `rtl` or `ltr`."""
    classes = Counter(unicodedata.bidirectional(letter) for token in side for letter in token["original"])
    return "rtl" if classes["R"] + classes["AL"] > classes["L"] else "ltr"


def _operations(rate: float) -> str:
    """Operations a second as text: `89 GFLOP/s`, `1.23 TFLOP/s`."""
    return f"{number(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{number(rate / 1e9)} GFLOP/s"
