"""Languages on the report page: their names, and their held-out losses compared with a unigram model."""

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# English names of CC-100's languages, by ISO 639-1 code.
_NAMES = """
af Afrikaans, am Amharic, ar Arabic, as Assamese, az Azerbaijani, be Belarusian, bg Bulgarian, bn Bangla, br Breton,
bs Bosnian, ca Catalan, cs Czech, cy Welsh, da Danish, de German, el Greek, en English, eo Esperanto, es Spanish,
et Estonian, eu Basque, fa Persian, fi Finnish, fr French, fy Western Frisian, ga Irish, gd Scottish Gaelic,
gl Galician, gu Gujarati, ha Hausa, he Hebrew, hi Hindi, hr Croatian, hu Hungarian, hy Armenian, id Indonesian,
is Icelandic, it Italian, ja Japanese, jv Javanese, ka Georgian, kk Kazakh, km Khmer, kn Kannada, ko Korean,
ku Kurdish, ky Kyrgyz, la Latin, lo Lao, lt Lithuanian, lv Latvian, mg Malagasy, mk Macedonian, ml Malayalam,
mn Mongolian, mr Marathi, ms Malay, my Burmese, ne Nepali, nl Dutch, no Norwegian, om Oromo, or Odia, pa Punjabi,
pl Polish, ps Pashto, pt Portuguese, ro Romanian, ru Russian, sa Sanskrit, sd Sindhi, si Sinhala, sk Slovak,
sl Slovenian, so Somali, sq Albanian, sr Serbian, su Sundanese, sv Swedish, sw Swahili, ta Tamil, te Telugu, th Thai,
tl Tagalog, tr Turkish, ug Uyghur, uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, xh Xhosa, yi Yiddish, zh Chinese
"""
LANGUAGE_NAMES: dict[str, str] = dict(entry.split(maxsplit=1) for entry in _NAMES.strip().split(","))
_VARIANTS = {"rom": "romanized", "zaw": "Zawgyi", "Hans": "simplified", "Hant": "traditional"}
_CHARTS_SHOWN = 24  # charts of the 12 best and the 12 worst languages; the page folds away all other charts


def language_name(code: str) -> str:
    """The English name of a CC-100 language, or both names of a pair (`en–de`, `en-de`); empty for an unknown code."""
    for dash in re.finditer("[–-]", code):  # a code, such as zh-Hans, may have a dash of its own
        names = language_name(code[: dash.start()]), language_name(code[dash.end() :])
        if all(names):
            return "–".join(names)
    language, _, variant = code.replace("-", "_").partition("_")
    if variant.islower() and variant not in _VARIANTS:  # no script or region: another language, in a pair
        return ""
    name = LANGUAGE_NAMES.get(language, "")
    return f"{name}, {_VARIANTS.get(variant, variant)}" if name and variant else name


def language_tag(code: str) -> str:
    """The BCP 47 tag of a CC-100 code, by which browsers choose font and hyphenation: `bn-Latn` for `bn_rom`, `my` for
    `my_zaw`."""
    language, _, variant = code.partition("_")
    return f"{language}-Latn" if variant == "rom" else language


def heldout_languages(
    records: Sequence[Mapping[str, Any]], quantities: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The held-out losses by language: `tasks` has one table per task (`_summary`), `charts` has one small chart per
    language (`_charts`). None if no record has such a loss.

    `records`: the lines of heldout_languages.jsonl. The loss of a task is the one among its `quantities` that can be
    compared with a unigram model.
    """
    terms = {quantity["task"]: term for term, quantity in quantities.items() if quantity["unigram"]}  # task -> its loss
    tables = {}
    for task, term in terms.items():
        others = [name for name, quantity in quantities.items() if quantity["task"] == task and name != term]
        if rows := _rows(records, task, term, others):
            logged = [name for name in others if any(row["others"][name] is not None for row in rows)]
            tables[task] = _summary(rows) | {"others": {name: quantities[name]["title"] for name in logged}}
    return {"tasks": tables, "charts": _charts(records, terms, tables)} if tables else None


def _rows(records: Sequence[Mapping[str, Any]], task: str, term: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """One row per language in the last record that has the loss `term`.

    `gain`: the unigram model's loss minus the model's loss; `change`: the last loss of the language minus its first
    loss. The row with the largest gain is first; languages without a unigram loss are last. `others`: the task's other
    quantities.
    """
    records = [record for record in records if record["terms"].get(term)]
    if not records:
        return []
    last = records[-1]
    rows = []
    for code, loss in last["terms"][term].items():
        for name in (term, *others):
            if not isinstance(last["terms"].get(name, {}).get(code, 0.0), int | float):
                raise ValueError(f"{name} of {code} in step {last['step']} is no number")
        losses = [record["terms"][term][code] for record in records if code in record["terms"][term]]
        unigram = last["unigram"].get(task, {}).get(code)
        rows.append(
            {
                "code": code,
                "tokens": last["tokens"][term][code],
                "loss": loss,
                "unigram": unigram,
                "gain": None if unigram is None else unigram - loss,
                "change": loss - losses[0] if len(losses) > 1 else None,
                "others": {name: last["terms"].get(name, {}).get(code) for name in others},
            }
        )
    return sorted(rows, key=lambda row: (row["gain"] is None, -(row["gain"] or 0.0), row["code"]))


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of a table, and the values in the text above it. `ranked`: number of languages with a unigram loss."""
    ranked = [row for row in rows if row["gain"] is not None]
    count = min(3, len(ranked) // 2)
    return {
        "rows": rows,
        "best": ranked[:count],
        "worst": ranked[::-1][:count],
        "median": median(row["gain"] for row in ranked) if ranked else None,
        "behind": sum(row["gain"] <= 0 for row in ranked),  # languages in which the unigram model is as good or better
        "ranked": len(ranked),
        "tokens": sorted(row["tokens"] for row in rows),
    }


def _charts(
    records: Sequence[Mapping[str, Any]], terms: Mapping[str, str], tables: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One chart per language: the loss minus the unigram model's loss over the steps, as SVG points in a box of 100 by
    50. All charts have the same axes.

    Languages are sorted by their gain in the first task, the largest first. A language that has no gain in the first
    task is sorted by its gain in the next task.
    """
    gains = {
        task: {row["code"]: row["gain"] for row in table["rows"] if row["gain"] is not None}
        for task, table in tables.items()
    }
    first_gains = ChainMap(*gains.values())  # language -> its gain in the first task that has one
    curves = {
        code: {
            task: [
                (record["step"], record["terms"][terms[task]][code] - record["unigram"][task][code])
                for record in records
                if code in record["terms"].get(terms[task], {}) and code in record["unigram"].get(task, {})
            ]
            for task in tables
            if code in gains[task]
        }
        for code in sorted(first_gains, key=lambda code: (-first_gains[code], code))
    }
    points = [point for by_task in curves.values() for curve in by_task.values() for point in curve]
    steps, values = zip(*points or [(0, 0.0)], strict=True)
    first, last = min(steps), max(steps)
    low, high = min(*values, 0.0), max(*values, 0.0)
    loss_range, step_range = (high - low) or 1.0, (last - first) or 1

    # The box has a margin of 2 on every side, so the points lie in 96 by 46.
    def svg_point(step: float, value: float) -> str:
        return f"{2 + 96 * (step - first) / step_range:.1f},{2 + 46 * (high - value) / loss_range:.1f}"

    charts = [
        {
            "code": code,
            "lines": {task: [svg_point(*point) for point in curve] for task, curve in by_task.items()},
            "gains": {task: gains[task][code] for task in by_task},
        }
        for code, by_task in curves.items()
    ]
    groups = {"": charts}  # heading -> charts
    if len(charts) > _CHARTS_SHOWN:
        half = _CHARTS_SHOWN // 2
        groups = {"Best": charts[:half], "Worst": charts[::-1][:half], "All others": charts[half:-half]}
    zero = svg_point(first, 0.0).partition(",")[2]
    return {"groups": groups, "zero": zero, "low": low, "high": high, "first": first, "last": last}
