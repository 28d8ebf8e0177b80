"""The report page of a run, one self-contained file: the template `run_page.html`, filled with figures and tables."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from ..cli import format_duration, format_number
from ..io.files import write_text
from ..train.run_folder import describe_missing_steps, first_step, flatten
from . import figures
from .by_language import heldout_languages, language_name, language_tag
from .figures import nats, percent, points
from .run_files import RunFiles, render

_TASKS = {"mono": "monolingual", "para": "parallel"}
_SPACE = "▁"  # SentencePiece's mark of a space before the piece
_SPECIAL = {"<s>", "</s>", "<pad>"}


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report page of the run in `folder` to the file `out`, by default `report.html` in that folder.
    Returns the path of the page. Raises ValueError if a file of the run is damaged (see `RunFiles`)."""
    run = RunFiles(folder)
    settings: dict[str, Any] = build_from("config.json", lambda: {} | run.settings)  # raises TypeError for another type
    quantities = build_from("config.json", lambda: run.objective["quantities"])
    # Held-out losses that can be compared with a unigram model have a section of their own, before the other curves.
    loss_titles = build_from(
        "config.json",
        lambda: {
            figures.panel_and_series(key, quantities)[0]
            for key, quantity in quantities.items()
            if quantity["unigram"] and run.heldout
        },
    )
    borders = build_from("config.json", lambda: [step for step, _ in _phases(settings)][1:])
    panels = build_from(
        "metrics.jsonl or heldout.jsonl",
        lambda: figures.curves(run.metrics, run.heldout, quantities, borders, loss_titles),
    )
    page = render(
        "run_page.html",
        run=run,
        name=settings.get("name"),
        task=settings.get("task"),
        started=started_line(run.config_json),
        progress=build_from("config.json or samples.json", lambda: _progress(run, settings.get("train", {}))),
        about=run.objective["description"],
        cards=build_from("config.json, metrics.jsonl or heldout.jsonl", lambda: list(_cards(run))),
        losses={title: panel for title, panel in panels.items() if title in loss_titles},
        panels={title: panel for title, panel in panels.items() if title not in loss_titles},
        dimensions=build_from(
            "dimensions.jsonl",
            lambda: (  # None also if no dimension was finite: a line then has the step alone
                figures.dimensions_by_layer(run.dimensions) if any(len(line) > 1 for line in run.dimensions) else None
            ),
        ),
        by_language=build_from("heldout_languages.jsonl", lambda: heldout_languages(run.heldout_languages, quantities)),
        gaps=build_from("config.json", lambda: _gaps(run, settings)),
        shares=build_from("languages.json", lambda: _language_shares(run.languages)),
        retrieval=build_from("retrieval.json", lambda: _retrieval(run.retrieval) if run.retrieval else None),
        samples=build_from(
            "samples.json or languages.json", lambda: _sentences(run.samples, run.languages) if run.samples else None
        ),
        scores=build_from("scores.json", lambda: _scores(run.scores) if run.scores else None),
        settings=flatten({key: value for key, value in run.config_json.items() if key not in ("started", "command")}),
        tasks=_TASKS,
        language_name=language_name,
        tag=language_tag,
        format_number=format_number,
        nats=nats,
        percent=percent,
    )
    path = out or folder / "report.html"
    write_text(path, page)
    return path


def build_from(file: str, build: Callable[[], Any]) -> Any:
    """Returns what `build` returns. If `build` fails because of the content of `file`, raises ValueError that names the
    file."""
    try:
        return build()
    except KeyError as error:
        raise ValueError(f"{file} has no {error} where the report needs it: write it again or remove it") from None
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{file} has another form than the report needs ({error}): write it again or remove it"
        ) from None


def started_line(config: Mapping[str, Any]) -> str:
    """A line with the time at which the run was started, and its command; empty if `config` has no such time."""
    command = f": {config['command']}" if config.get("command") else ""
    return f"Started {config['started']} UTC{command}" if config.get("started") else ""


def _progress(run: RunFiles, train_settings: Mapping[str, int]) -> dict[str, int] | None:
    """The progress of an unfinished run: `step`, the newest step; `steps`, the number of steps of the whole run; and
    `shown`, the step of the sentences on the page, 0 if there are none yet. None if the run is finished, has logged its
    last step, or has no `steps` in `train_settings` (the run's settings `train.*`)."""
    step = run.metrics[-1]["step"] if run.metrics else 0
    if run.finished or step >= train_settings.get("steps", 0):
        return None
    shown = run.samples[0].get("step", 0) if run.samples else 0
    return {"step": max(step, shown), "steps": train_settings["steps"], "shown": shown}


def _cards(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, note) for each key figure at the head of the page; figures that were not logged are left
    out."""
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
    layers = [name for name in max(run.dimensions, key=len, default={}) if name != "step"]
    if layers:
        values = points(run.dimensions, layers[-1])[1]
        note = f"in which states of the last layer vary; {values[0]:.0f} at the start; a few mean collapse"
        yield "Dimensions", f"{values[-1]:.0f}", note
    steps, tokens = points(run.metrics, "tokens")
    skipped, rate, flops = (points(run.metrics, key)[1] for key in ("skipped_steps", "tokens_per_s", "flops_per_s"))
    if len(tokens):
        note = f"in {run.metrics[-1]['step']:,} steps" + (f"; {int(skipped[-1])} skipped" if len(skipped) else "")
        yield "Tokens seen", format_number(tokens[-1]), note
    if len(rate):
        note = "median of the logged steps" + (f"; {_format_flops(median_high(flops))}" if len(flops) else "")
        yield "Tokens a second", format_number(median_high(rate)), note
    if len(rate) and len(rate) == len(tokens):
        # If there are two records, the tokens of a step are computed from the tokens between the first and the last,
        # because in a branch even the first record counts the parent's tokens.
        step_tokens = (tokens[-1] - tokens[0]) / (steps[-1] - steps[0]) if len(steps) > 1 else tokens[0] / steps[0]
        new_tokens = np.diff(steps, prepend=first_step(run.settings)) * step_tokens
        seconds = float(np.sum(new_tokens[rate > 0] / rate[rate > 0]))
        yield "Training time", format_duration(seconds), "from the first step to the last, with evaluations"
    phases = _phases(run.settings)
    if len(phases) > 1:
        descriptions = (f"from step {first:,} {percent(share)} predicted" for first, share in phases)
        yield "Phases of the data", str(len(phases)), "; ".join(descriptions)
    parameters = run.config_json.get("parameters") or {}
    if "trained_total" in parameters:
        parts = (f"{name} {format_number(count)}" for name, count in parameters.items() if name != "trained_total")
        yield "Parameters", format_number(parameters["trained_total"]), ", ".join(parts)


def _phases(settings: Mapping[str, Any]) -> list[tuple[int, float]]:
    """One (first step, share of the tokens that is predicted) for each phase of the data."""
    data, default = settings.get("data", {}), settings.get("objective", {}).get("mask_fraction", 0.0)
    starts = list(accumulate(data.get("phase_steps", []), initial=0))
    return list(zip(starts, data.get("phase_mask_fractions") or [default] * len(starts), strict=True))


def _format_flops(flops_per_s: float) -> str:
    """A rate of operations as text: `89 GFLOP/s`, `1.23 TFLOP/s`."""
    if flops_per_s >= 1e12:
        return f"{format_number(flops_per_s / 1e12)} TFLOP/s"
    return f"{format_number(flops_per_s / 1e9)} GFLOP/s"


def _gaps(run: RunFiles, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name of a file -> text that lists the steps whose record is missing, although the settings ask for it. Files that
    miss no record are left out."""
    last = max((record["step"] for record in (*run.metrics, *run.heldout)), default=0)
    gaps = {}
    for file, records, setting, until in (
        ("metrics.jsonl", run.metrics, "log_every", last),
        ("heldout.jsonl", run.heldout, "eval_every", last if run.finished else last - 1),  # `last` may be in evaluation
    ):
        if records and (every := settings.get("train", {}).get(setting, 0)):
            gaps[file] = describe_missing_steps(
                (record["step"] for record in records), every, until, first_step(settings)
            )
    return {file: steps for file, steps in gaps.items() if steps}


def _language_shares(languages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each task, a chart of every language's share of the examples before and after the data were rebalanced. The
    axis is logarithmic, and the language with the largest share before is first."""
    charts = []
    for task in _TASKS:
        if table := languages.get(task):
            charted = {code: row for code, row in table.items() if row["share_before"] > 0 and row["share"] > 0}
            order = sorted(charted, key=lambda code: (-table[code]["share_before"], code))
            before, after = ({code: math.log(table[code][key]) for code in order} for key in ("share_before", "share"))
            texts = {
                code: f"{percent(row['share_before'])} → {percent(row['share'])}, ×{format_number(row['repeat'])}"
                for code, row in charted.items()
            }
            most_repeated = max(table, key=lambda code: table[code]["repeat"])
            values = [row[key] for row in charted.values() for key in ("share_before", "share")] or [0.0]
            charts.append(
                {
                    "task": task,
                    "rows": _dumbbells(before, after, texts),
                    "most": most_repeated,
                    "repeat": table[most_repeated]["repeat"],
                    "low": min(values),
                    "high": max(values),
                    "unused": sorted(table.keys() - charted),
                }
            )
    return charts


def _dumbbells(
    before: Mapping[str, float], after: Mapping[str, float], texts: Mapping[str, str], low: float | None = None
) -> list[dict[str, Any]]:
    """One row per language in `after`: its text, and the positions of its values in `before` and `after` on an axis
    from 0 to 100.

    The axis begins at the value `low` or, if `low` is None, at the smallest value. If a language has no value in
    `before`, that position is None.
    """
    values = [*before.values(), *after.values()]
    start = min(values, default=0.0) if low is None else low
    length = (max(values, default=0.0) - start) or 1.0  # of the axis; not 0, as it divides

    def position(by_code: Mapping[str, float], code: str) -> float | None:
        return round(100 * (by_code[code] - start) / length, 1) if code in by_code else None

    return [
        {"code": code, "before": position(before, code), "after": position(after, code), "text": texts[code]}
        for code in after
    ]


def _retrieval(values: Mapping[str, Any]) -> dict[str, Any]:
    """The section on retrieval from `values`, the content of retrieval.json: a figure by layer, a figure by language,
    and one row per language with its accuracies before and after training. Both times they are those of the layer that
    had the best mean accuracy at that time, so the two layers may differ."""
    overall = {when: _mean_of_directions(values[when]["overall"]) for when in ("before", "after") if values.get(when)}
    best_layers = {when: int(np.argmax(by_layer)) for when, by_layer in overall.items()}
    best_means = {when: overall[when][layer] for when, layer in best_layers.items()}
    by_language = {
        when: {code: _mean_of_directions(scores)[layer] for code, scores in values[when]["languages"].items()}
        for when, layer in best_layers.items()
    }
    after = dict(sorted(by_language.get("after", {}).items(), key=lambda item: (-item[1], item[0])))
    texts = {
        code: " → ".join(percent(means[code]) for means in by_language.values() if code in means) for code in after
    }
    rows = []
    for code, pair_count in sorted(values["pairs"].items()):
        row = {"language": code, "pairs": pair_count}
        for when, layer in best_layers.items():
            scores = values[when]["languages"].get(code, {})
            row[when] = {direction: by_layer[layer] for direction, by_layer in scores.items()}
        rows.append(row)
    return {
        "by_layer": figures.retrieval_by_layer(values),
        "by_language": _dumbbells(by_language.get("before", {}), after, texts, low=0.0),
        "rows": rows,
        "candidates": values["candidates"],
        "best": {when: values["layers"][layer] for when, layer in best_layers.items()},
        "mean": best_means,
        # Better than before training, and better than chance.
        "learnt": best_means.get("after", 0) > max(best_means.get("before", 0), 1 / values["candidates"]),
    }


def best_retrieval(values: Mapping[str, Any]) -> float:
    """The mean accuracy of both directions at the best layer after training, from the content of retrieval.json."""
    return float(max(_mean_of_directions(values["after"]["overall"])))


def _mean_of_directions(scores: Mapping[str, list[float]]) -> np.ndarray:
    """The mean accuracy of both directions at each layer, float64 [layers]."""
    return (np.array(scores["en_xx"]) + np.array(scores["xx_en"])) / 2


def _sentences(samples: Sequence[Mapping[str, Any]], languages: Mapping[str, Any]) -> dict[str, Any]:
    """The section of sentences: each has the model's tokens in the masked positions and, if the model judges tokens,
    its verdict on every token. English comes first, then German, then the other languages by their share in
    `languages`, the largest first.

    A token is flagged if its score is at least the `threshold`: the N-th highest score of all samples, where N is the
    count of replaced tokens. So every model, good or bad, flags as many tokens as were replaced (more if scores are
    equal). A threshold of 0.5 would flag almost none, because replaced tokens are rare. Tokens whose score is None were
    not judged.
    """
    tokens = [token for sample in samples for token in sample["tokens"]]
    judged = [token for token in tokens if token["score"] is not None and token["original"] not in _SPECIAL]
    replaced = sum(bool(token["replaced"]) for token in judged)
    threshold = sorted((token["score"] for token in judged), reverse=True)[replaced - 1] if replaced else math.inf
    in_order = sorted(samples, key=lambda sample: _sort_key(sample["language"], languages.get(sample["task"], {})))
    shown = [_with_verdicts(sample, threshold) for sample in in_order]
    return {
        "by_task": {task: [sample for sample in shown if sample["task"] == task] for task in _TASKS},
        "threshold": threshold if replaced else None,
        "totals": sum((sample["counts"] for sample in shown), Counter()),
        "judged": any(token["score"] is not None for token in tokens),
    }


def _sort_key(language: str, shares: Mapping[str, Any]) -> tuple[int, float]:
    """The sort key of a sentence on the page. A pair with English is sorted as its other language. `shares`: the entry
    of the sentence's task in languages.json."""
    sides = language.split("–")
    # languages.json names each pair in one order, but a row may begin with either side.
    names = "-".join(sides), "-".join(reversed(sides))
    share = next((shares[name]["share"] for name in names if name in shares), 0.0)
    main_language = next((code for code in sides if code != "en"), "en")
    return {"en": 0, "de": 1}.get(main_language, 2), -share


def _with_verdicts(sample: Mapping[str, Any], threshold: float) -> dict[str, Any]:
    """A sample for the page. `sides` has (writing direction, BCP 47 tag, tokens) for each sentence of a pair, or each
    document of a row. `counts` has the number of tokens with each verdict."""
    sides: list[list[dict[str, Any]]] = [[]]
    for token in sample["tokens"]:
        if token["original"] == "</s>":
            sides.append([])
        elif token["original"] not in _SPECIAL:
            texts = {key: token[key].replace(_SPACE, " ").strip() for key in ("piece", "original")}
            spaced = token["piece"].startswith(_SPACE) and sides[-1] != []
            sides[-1].append(token | texts | {"spaced": spaced, "verdict": _verdict(token, threshold)})
    sides = [side for side in sides if side]  # `</s>` may also begin an item, and two may divide its sides
    codes = sample["language"].split("–")
    if len(codes) == 1:  # a row of text, in which each `</s>` ends a document
        codes *= len(sides)
    return {
        "language": sample["language"],
        "task": sample["task"],
        "sides": [
            (_writing_direction(side), language_tag(code), side) for code, side in zip(codes, sides, strict=False)
        ],
        "counts": Counter(token["verdict"] for side in sides for token in side),
    }


def _verdict(token: Mapping[str, Any], threshold: float) -> str:
    """`hit` or `miss` for a replaced token, `alarm` or `passed` for an original one. Without a score: `miss` if
    replaced, `restored` if masked and predicted right, else `passed`."""
    score, replaced, masked = token["score"], token["replaced"], token["masked"]
    if score is not None and score >= threshold:
        return "hit" if replaced else "alarm"
    if replaced:
        return "miss"
    return "restored" if masked and score is None else "passed"


def _writing_direction(side: Sequence[Mapping[str, Any]]) -> str:
    """The writing direction of most letters in the original text: `rtl` or `ltr`."""
    classes = Counter(unicodedata.bidirectional(letter) for token in side for letter in token["original"])
    return "rtl" if classes["R"] + classes["AL"] > classes["L"] else "ltr"


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a fine-tuned model's scores: a row for each language, then the mean."""
    metrics = list(scores["metric"])
    rows = {code: [values[metric] for metric in metrics] for code, values in scores["languages"].items()}
    mean = [scores["mean"][metric] for metric in metrics] if rows else []
    return {"task": scores["task"], "metrics": metrics, "rows": rows, "mean": mean, "split": scores["split"]}
