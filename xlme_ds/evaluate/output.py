"""Options that all tests share, and output of their results: JSON, tables (terminal, Markdown), plots over layers."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from ..config import EncoderName
from ..io.files import atomic_write, write_text, write_versioned
from ..io.folders import require_writable

_MAX_PRINTED_ROWS = 25  # if a longer table has means, and a file holds it whole, only its means are printed

# Model -> its curves in the plot, each with a fraction for every layer: the scores and, in some tests, the scores of
# centred vectors.
Curves = Mapping[str, Sequence[Sequence[float]]]
# End of a curve's name in the legend -> how the curve is drawn, in the order of the curves of a model.
_CURVE_STYLES: dict[str, dict[str, Any]] = {
    "": {"marker": "o", "markersize": 4},
    ", centred (not the paper's)": {"linestyle": "--", "linewidth": 0.9},
}


@dataclass
class ResultTable:
    """Cells of text, with a title above and notes below. The first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    means: int = 0  # how many of the last rows are means of the others

    def show(self, console: Console, file: Path | None = None) -> None:
        """Print the table. If it has means and more than 25 other rows, and `file` holds the whole table, only the
        means are printed."""
        rows, notes, rows_before_means = self.rows, self.notes, len(self.rows) - self.means
        if file is not None and self.means and rows_before_means > _MAX_PRINTED_ROWS:
            rows, notes = rows[rows_before_means:], [*notes, f"{rows_before_means} rows are in {file}"]
        table = Table(title=self.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index, name in enumerate(self.columns):
            table.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print("\n".join([*notes, ""]), style="dim", soft_wrap=True)

    def markdown(self) -> str:
        """The table as Markdown."""
        rows = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([f"**{self.title}**", "", *lines, "", *[f"{note}  " for note in self.notes], ""])


@dataclass(frozen=True)
class CommonOptions:
    """Options of all tests."""

    models: Annotated[list[Path], tyro.conf.arg(name="model")]
    """Folders of runs and exports; several are compared. RUN@STEP names a checkpoint of the run; for a run that is not
    finished, the newest checkpoint is taken. The models run on the GPU if there is one."""
    data: Path
    """Data of the test, described above."""
    random: bool = False
    """Compare with untrained models of the same shape and seed, to show what training gains."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the results as JSON instead of tables."""
    out: Path | None = None
    """Folder for <test>.json, <test>.md and, if the test scores layers, a plot over them: <test>.png and <test>.svg. Of
    long tables, only the means are then printed."""

    def __post_init__(self) -> None:
        """Raise ValueError, before the test begins, if its results could not be written."""
        if self.out is not None:
            require_writable(self.out)

    def arguments(self) -> dict[str, Any]:
        """The options that the test's function takes, by name: all but those about the output."""
        names = [option.name for option in fields(self) if option.name not in ("as_json", "out")]
        return {name: getattr(self, name) for name in names}

    def write_and_print(
        self,
        results: Mapping[str, Any],
        tables_of: Callable[[Mapping[str, Any]], list[ResultTable]],
        curves: Curves | None = None,
        measure: str = "",
        note: str = "",
    ) -> None:
        """Print the results or their tables. If `out` is set, first write both, and then the plot, into this folder.

        The plot shows all `curves`. One more table shows the first curve of each model, with `note` below it. `measure`
        is the label of the plot's vertical axis, and part of this table's title.
        """
        tables, test = tables_of(results), results["test"]
        if curves:
            columns = {name: [percent(value) for value in of_model[0]] for name, of_model in curves.items()}
            # models may have different depths
            rows = [[str(layer), *cells] for layer, cells in enumerate(zip_longest(*columns.values(), fillvalue=""))]
            tables.append(ResultTable(f"By layer: {measure}", ["layer (0 = embeddings)", *columns], rows, [note]))
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(self.out / f"{test}.md", "\n".join(table.markdown() for table in tables))
            write_versioned(self.out / f"{test}.json", results)
            if curves:
                _plot(curves, measure, self.out / test)
        if self.as_json:
            print(json.dumps(results, indent=1, ensure_ascii=False))
            return
        for table in tables:
            table.show(terminal(120), None if self.out is None else self.out / f"{test}.md")
        if self.out is not None:
            print(self.out / f"{test}.json")


@dataclass(frozen=True)
class EncoderOptions(CommonOptions):
    """Options of the tests that read an encoder's vectors."""

    which: EncoderName | None = None
    """Which encoder of a pre-training run; by default the main one, for XLM-E the discriminator."""


@dataclass(frozen=True)
class LayerOptions(EncoderOptions):
    """Options of the tests that score every layer."""

    layer: int | None = None
    """Layer whose scores the tables show, 0 for the embeddings; by default three quarters of the depth, as the paper's
    layer 9 of 12."""


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal."""
    return f"{100 * fraction:.1f}"


def table_at_layer(
    model: Mapping[str, Any],
    title: str,
    unit: str,
    measures: Mapping[str, str],
    means: Mapping[str, Any],
    note: str,
    cut_note: str,
) -> ResultTable:
    """A table of a model's scores at one layer. `model` is the model's entry in the results, and its `layer` is that
    layer. The table has a row for each `unit` ("language" or "test"), a row with the mean over them, and a row for each
    of `means` (name -> scores).

    `measures`: key of a score -> title of its column. An asterisk in a title marks a measure that the papers do not
    have; `note` explains these measures. If inputs were cut, a note has their count and then the words `cut_note`.
    """
    unit_scores, layer = model[f"{unit}s"], model["layer"]
    rows = unit_scores | {f"mean of {len(unit_scores)}": model["overall"]} | means
    return ResultTable(
        f"{model['model']}, layer {layer} of {model['depth']}: {title}",
        [unit, "pairs", *measures.values()],
        [
            [name, str(model["pairs"].get(name, "")), *(percent(scores[measure][layer]) for measure in measures)]
            for name, scores in rows.items()
        ],
        [f"* not the paper's: {note}", *([f"{model['cut']} {cut_note}"] if model["cut"] else [])],
        means=len(rows) - len(unit_scores),
    )


def _plot(curves: Curves, measure: str, stem: Path) -> None:
    """Write the plot as `stem`.png and `stem`.svg. Each model has one colour; curves of centred vectors are dashed."""
    # The fixed salt makes the ids in an SVG, and so the file, the same each time.
    with matplotlib.rc_context({"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, of_model) in enumerate(curves.items()):
            for fractions, (ending, style) in zip(of_model, _CURVE_STYLES.items(), strict=False):
                percents = [100 * value for value in fractions]
                axes.plot(percents, color=f"C{number}", label=plot_label(name) + ending, **style)
        axes.set_xlabel("layer (0 = embeddings)")
        axes.set_ylabel(measure)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        save_figure(figure, stem)


def plot_label(name: str) -> str:
    """`name` in a form that matplotlib shows literally. Unchanged, `$` would begin a formula, and a leading `_` would
    keep a curve out of the legend."""
    return ("\N{HAIR SPACE}" if name.startswith("_") else "") + name.replace("\\$", "$").replace("$", r"\$")


def terminal(width: int) -> Console:
    """A console on standard output, `width` columns wide if standard output is no terminal. It interprets no markup,
    because a model's name may look like Rich's markup."""
    return Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False, highlight=False)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg under temporary names, then rename; the same figure gives the same bytes."""
    for extension, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        with atomic_write(stem.with_suffix(f".{extension}")) as file:
            figure.savefig(file, format=extension, dpi=150, metadata=metadata)
