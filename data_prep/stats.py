"""Stage `stats`: what was encoded and what training will see of it, by language and by pair: tables and a page."""

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.parallel import on_root
from data_prep.progress import shown
from data_prep.stats_tables import (
    EDGES,
    TITLES,
    Line,
    LossTable,
    columns,
    length_histograms,
    lines_of,
    loss_tables,
    median,
    total,
)
from data_prep.store import write_file
from xlme_ds.data.schema import TASKS, Manifest, read_manifest

_BEFORE, _AFTER = "#b8c4d6", "#1f5fa8"
_REASONS = ("#1f5fa8", "#e08a3c", "#6aa84f", "#b8548c", "#8a7fc0", "#c9b03c", "#4fa5a5", "#999999")
_SVG_STYLE = {
    "svg.hashsalt": "stats",
    "svg.fonttype": "path",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class StatsConfig:
    """Show size, tokens, lengths, losses, unknown rate, tokens per character, sampling shares and repeats."""

    encoded: Path
    """Folder that `encode` wrote."""
    data: Path
    """Folder that `mix` wrote from it."""
    out: Path
    """Output folder: stats.html."""
    processes: int = 1
    """Local processes that read lengths. Not used under MPI."""


class Section(NamedTuple):
    """The numbers of one task: a line a language, lengths by language in the same order, and losses."""

    task: str
    lines: list[Line]
    lengths: dict[str, np.ndarray]
    losses: list[LossTable]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Cells of every line, and of their sum at the end."""
        return [line.cells() for line in (*self.lines, total(self.lines))]


def run(config: StatsConfig) -> None:
    """Print the tables and write `stats.html`. Raises ValueError when the two folders do not belong together."""
    tasks = on_root(lambda: [task for task in TASKS if (config.data / task / "manifest.json").exists()])
    if not tasks:
        raise ValueError(
            f"{config.data} holds neither mono/manifest.json nor para/manifest.json: run mix to its end first"
        )
    sections = [_section(config, task) for task in tasks]
    on_root(lambda: _show(config, sections))


def _section(config: StatsConfig, task: str) -> Section:
    lines = on_root(lambda: lines_of(config.encoded, config.data, task))
    encoded = on_root(lambda: read_manifest(config.encoded / task))
    lengths = length_histograms(config.encoded / task, encoded, config.processes)
    return Section(task, lines, {line.name: lengths[line.name] for line in lines}, loss_tables(encoded))


def _show(config: StatsConfig, sections: Sequence[Section]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file has room for every column
    for section in sections:
        histograms = [*section.lengths.values(), np.sum(list(section.lengths.values()), axis=0)]
        medians = [f"{median(histogram):,}+" for histogram in histograms]
        rows = [(*cells, middle) for cells, middle in zip(section.rows, medians, strict=True)]
        console.print(_table(TITLES[section.task], (*columns(section.task), "median tokens"), rows))
        for losses in section.losses:
            console.print(_table(losses.title, losses.columns, losses.rows))
    page = config.out / "stats.html"
    write_file(page, html(sections, read_manifest(config.data / sections[0].task)).encode(), config.out)
    console.print(f"open {shown(str(page))}", soft_wrap=True, markup=False)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> object:
    """A table of the terminal; its last row is the sum."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row, style="bold" if row is rows[-1] else None)
    return table


def html(sections: Sequence[Section], mixed: Manifest) -> str:
    """The page, with its plots, in one file that needs nothing else."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["inline"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    template = (Path(__file__).parent / "stats.html.jinja").read_text(encoding="utf-8")
    plots = {"share_plot": share_plot, "length_plot": length_plot, "loss_plot": loss_plot}
    return environment.from_string(template).render(
        sections=sections, mixed=mixed, titles=TITLES, columns=columns, **plots
    )


def share_plot(lines: Sequence[Line], alpha: float) -> bytes:
    """Shares before and after α (log scale), repeats, unknown rate, tokens per character; an SVG image."""
    with _figure(len(lines), 7.2) as (figure, image):
        shares, repeats, unknown, density = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1.4, 1, 1.4])
        x = range(len(lines))
        before, after = [line.share_before for line in lines], [line.share_after for line in lines]
        shares.vlines(x, before, after, color="#cccccc")
        shares.scatter(x, before, s=16, color=_BEFORE, label="natural (α = 1)", zorder=2)
        shares.scatter(x, after, s=16, color=_AFTER, label=f"sampled (α = {alpha:g})", zorder=3)
        shares.set_yscale("log")
        shares.set_ylabel("share of the data")
        shares.legend(frameon=False, loc="upper right")
        for axes, values, label in (
            (repeats, [line.repeat for line in lines], "repeats"),
            (unknown, [100 * line.unknown_rate for line in lines], "unknown, %"),
            (density, [line.tokens_per_character for line in lines], "tokens / char"),
        ):
            axes.bar(x, values, color=_AFTER, width=0.7)
            axes.set_ylabel(label)
        repeats.axhline(1, color="#888888", linewidth=0.7, linestyle=":")
        _name(density, [line.name for line in lines])
        for axes in (shares, repeats, unknown, density):
            _rule(axes)
        figure.align_ylabels()
    return image.getvalue()


def length_plot(histograms: dict[str, np.ndarray]) -> bytes:
    """Lengths in tokens (log scale): of all records as bars, and the share of each bin in every language as shade."""
    counts = np.stack(list(histograms.values()), axis=1)
    used = np.flatnonzero(counts.sum(1))
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    shares = counts[low:high] / np.maximum(counts.sum(0), 1)
    with _figure(counts.shape[1], 3.6) as (figure, image):
        each, every = figure.subplots(1, 2, sharey=True, width_ratios=[6, 1])
        each.imshow(shares, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        _name(each, list(histograms))
        octaves = [at for at in range(low, high) if EDGES[at] & (EDGES[at] - 1) == 0]
        each.set_yticks([at - low for at in octaves], [f"{EDGES[at]:,}" for at in octaves])
        each.set_ylabel("tokens, from")
        every.barh(range(high - low), counts[low:high].sum(1), color=_AFTER, height=0.9)
        every.set_xlabel("records")
        every.tick_params(axis="x", rotation=90)
    return image.getvalue()


def loss_plot(table: LossTable) -> bytes:
    """Share of what was read that each reason lost, stacked, by language."""
    with _figure(len(table.losses), 3.2) as (figure, image):
        axes = figure.subplots()
        base = np.zeros(len(table.losses))
        for number, reason in enumerate(table.reasons):
            height = np.array([loss.percent(reason) for loss in table.losses])
            color = _REASONS[number % len(_REASONS)]
            axes.bar(range(len(height)), height, bottom=base, color=color, width=0.7, label=reason)
            base += height
        axes.set_ylabel("lost, %")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=8, borderpad=0)
        _rule(axes)
        _name(axes, [loss.name for loss in table.losses])
    return image.getvalue()


def _rule(axes: Any) -> None:
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _name(axes: Any, names: Sequence[str]) -> None:
    """Names along the x axis."""
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_xlim(-0.8, len(names) - 0.2)


@contextmanager
def _figure(columns: int, height: float) -> Iterator[tuple[Any, io.BytesIO]]:
    """A figure to draw into, `height` in inches, and where its SVG image will be: the same bytes each time."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SVG_STYLE):
        size = (max(7.0, 0.155 * columns + 1.6), height)
        figure, image = Figure(figsize=size, layout="constrained"), io.BytesIO()
        yield figure, image
        figure.savefig(image, format="svg", dpi=110, metadata={"Date": None})
