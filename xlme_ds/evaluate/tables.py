"""Results as tables, on the terminal and as Markdown, and as a plot over layers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table as RichTable

from .align import MEASURES
from .retrieval import CENTRED, SMALLEST, WAYS

_WAYS = {"en_xx": "en→xx", "xx_en": "xx→en"}
_MEASURES = {"aer": "AER", "precision": "precision", "recall": "recall", "aer_cosine": "AER, cosines*"}
_OURS_ALONE = "* not the paper's"


@dataclass
class Table:
    """Text cells under a title; the first column names the row, notes stand below."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print it."""
        table = RichTable(title=self.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim", soft_wrap=True)
        console.print()

    def markdown(self) -> str:
        """It as Markdown."""
        rows = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([f"**{self.title}**", "", *lines, "", *[f"{note}  " for note in self.notes], ""])


def retrieval_tables(results: Mapping[str, Any]) -> list[Table]:
    """A table of languages for every model at its layer, and one of all layers."""
    tables = []
    ways = {way: _WAYS[way] for way in WAYS} | {way + CENTRED: f"{_WAYS[way]} centred*" for way in WAYS}
    for model in results["models"]:
        table = Table(
            f"{model['model']}, layer {model['layer']} of {model['depth']}: accuracy@1 (%)", ["language", "pairs"]
        )
        table.columns += ways.values()
        named = {language: (str(model["pairs"][language]), scores) for language, scores in model["languages"].items()}
        averages = {f"mean of {len(named)}": ("", model["overall"])}
        averages |= {f"mean of the papers' {name}": ("", scores) for name, scores in _complete(model).items()}
        for name, (pairs, scores) in (named | averages).items():
            table.rows.append([name, pairs, *(percent(scores[way][model["layer"]]) for way in ways)])
        table.notes.append(f"{_OURS_ALONE}: the mean vector of each side of a language taken off")
        if few := model.get("too_few"):
            named_few = ", ".join(f"{code} ({count})" for code, count in few.items())
            table.notes.append(f"left out, with fewer than {SMALLEST} pairs without repetitions: {named_few}")
        if model["cut"]:
            table.notes.append(f"{model['cut']} sentences were cut: they are longer than the model's longest item")
        tables.append(table)
    first = results["models"][0]
    over = "the papers' 36 languages" if "36" in _complete(first) else f"{len(first['languages'])} languages"
    tables.append(_by_layer(results, "mean of both directions (%)", both_ways, f"mean over {over}"))
    return tables


def _complete(model: Mapping[str, Any]) -> dict[str, Any]:
    """The papers' sets of languages that are all there."""
    return {name: scores for name, scores in model["sets"].items() if scores["found"] == scores["of"]}


def both_ways(model: Mapping[str, Any], centred: bool = False) -> list[float]:
    """By layer, the mean of both directions over the papers' 36 languages if they are all there, else over all there
    are."""
    scores = _complete(model).get("36", model["overall"])
    return [(a + b) / 2 for a, b in zip(*(scores[way + CENTRED * centred] for way in WAYS), strict=True)]


def error_rates(model: Mapping[str, Any]) -> list[float]:
    """By layer, the mean error rate over the tests."""
    return list(model["overall"]["aer"])


def alignment_tables(results: Mapping[str, Any]) -> list[Table]:
    """A table of tests for every model at its layer, and one of all layers."""
    tables = []
    for model in results["models"]:
        title = f"{model['model']}, layer {model['layer']} of {model['depth']}: word alignment (%), AER: less is better"
        table = Table(title, ["test", "pairs", *_MEASURES.values()])
        tests = {name: (str(model["pairs"][name]), scores) for name, scores in model["tests"].items()}
        for name, (pairs, scores) in (tests | {f"mean of {len(tests)}": ("", model["overall"])}).items():
            table.rows.append([name, pairs, *(percent(scores[measure][model["layer"]]) for measure in MEASURES)])
        table.notes.append(f"{_OURS_ALONE}: cosines in place of dot products; {results['reading']}")
        if model["cut"]:
            table.notes.append(f"{model['cut']} pairs were cut: words behind the model's longest item have no link")
        tables.append(table)
    names = ", ".join(results["models"][0]["tests"])
    tables.append(_by_layer(results, "mean AER (%)", error_rates, f"mean over {names}"))
    return tables


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal."""
    return f"{100 * fraction:.1f}"


def _by_layer(results: Mapping[str, Any], what: str, values: Any, note: str) -> Table:
    columns = {model["model"]: [percent(value) for value in values(model)] for model in results["models"]}
    table = Table(f"By layer: {what}", ["layer (0 = embeddings)", *columns], notes=[note])
    for layer in range(max(map(len, columns.values()))):
        table.rows.append([str(layer), *(column[layer] if layer < len(column) else "" for column in columns.values())])
    return table


def plot(curves: Sequence[tuple[str, Sequence[float], bool]], label: str, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg: fractions over layers, one colour a name; curves of the flag are thin and
    dashed."""
    colours: dict[str, str] = {}
    with matplotlib.rc_context({"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False}):
        axes = Figure(figsize=(6.4, 4.4), layout="constrained").add_subplot()
        for name, values, faint in curves:
            colour = colours.setdefault(name, f"C{len(colours)}")
            style: dict[str, Any] = {"linestyle": "--", "linewidth": 0.9} if faint else {"marker": "o", "markersize": 4}
            text = f"{name}, centred (not the paper's)" if faint else name
            axes.plot([100 * value for value in values], color=colour, label=text, **style)
        axes.set_xlabel("layer (0 = embeddings)")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
        figure = axes.get_figure(root=True)
        assert isinstance(figure, Figure)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        save_figure(figure, stem)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg under temporary names, then rename; the same figure gives the same bytes."""
    for suffix, facts in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        temporary = stem.with_name(f".{stem.name}.{os.getpid()}{suffix}")
        figure.savefig(temporary, dpi=150, metadata=facts)
        os.replace(temporary, stem.with_suffix(suffix))


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
