"""Stage `stats` prints tables and writes a page about the encoded text and the rows of every language and pair."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from data_prep.inspect.stats_plots import dropped_text_plot, length_plot, share_plot
from data_prep.inspect.stats_tables import (
    DroppedTextTable,
    StatsLine,
    dropped_text_tables,
    length_histograms,
    median,
    stats_lines,
    total,
)
from data_prep.progress import printable
from data_prep.store import mixed_tasks, write_file
from xlme_ds.data.schema import Manifest, read_manifest

TITLES = {"mono": "Languages", "para": "Language pairs"}


@dataclass(frozen=True)
class StatsConfig:
    """Show size, tokens, lengths, dropped text, unknown rate, tokens per character, sampling shares and repeats."""

    encoded: Path
    """Folder that `encode` wrote."""
    data: Path
    """Folder that `mix` wrote from the encoded folder."""
    out: Path
    """Folder for the page, stats.html."""
    processes: int = 1
    """Worker processes on this machine. Not used under MPI."""


class Section(NamedTuple):
    """The numbers of one task. For each language or pair, `lines` has a line and `lengths` a histogram of lengths;
    `dropped_text` are tables of lost text. `mixed` is the manifest of the task's rows."""

    task: str
    lines: list[StatsLine]
    lengths: dict[str, np.ndarray]
    dropped_text: list[DroppedTextTable]
    mixed: Manifest

    @property
    def rows(self) -> list[dict[str, str]]:
        """One dict per table row, from a column's heading to the row's cell. The last row is the sum."""
        return [line.cells(self.task, bool(self.mixed.packed_unit)) for line in (*self.lines, total(self.lines))]


def run(config: StatsConfig) -> None:
    """Print the tables and write `stats.html`. Raises ValueError if `config.data` was not mixed from
    `config.encoded`."""
    sections = [_section(config, task) for task in mixed_tasks(config.data)]
    page = config.out / "stats.html"  # written before the tables are printed, because `head` may end the output early
    write_file(page, html(sections).encode(), config.out)
    width = None if Console().is_terminal else 160
    console = Console(width=width, markup=False, emoji=False)  # without markup, because names may have brackets
    for section in sections:
        histograms = [*section.lengths.values(), np.sum(list(section.lengths.values()), axis=0)]
        medians = ({"median tokens": f"{median(histogram):,}+"} for histogram in histograms)
        rows = [cells | median_cell for cells, median_cell in zip(section.rows, medians, strict=True)]
        _print_table(console, TITLES[section.task], rows)
        for dropped_text in section.dropped_text:
            _print_table(console, dropped_text.title, dropped_text.rows)
    console.print(f"open {printable(str(page))}", soft_wrap=True, markup=False)


def _section(config: StatsConfig, task: str) -> Section:
    lines = stats_lines(config.encoded, config.data, task)
    encoded, mixed = read_manifest(config.encoded / task), read_manifest(config.data / task)
    lengths = length_histograms(config.encoded / task, encoded, config.processes)
    return Section(task, lines, {line.name: lengths[line.name] for line in lines}, dropped_text_tables(encoded), mixed)


def _print_table(console: Console, title: str, rows: Sequence[dict[str, str]]) -> None:
    """Print rows of cells by column heading; the last row is the sum. If the table is wider than the console, the
    console becomes as wide, because Rich cuts off numbers that do not fit."""
    first, *others = rows[0]
    columns = Column(first, no_wrap=True), *(Column(heading, justify="right") for heading in others)
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row.values(), style="bold" if row is rows[-1] else None)
    width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.width = max(console.width, width)
    console.print(table)


def html(sections: Sequence[Section]) -> str:
    """The page as HTML. The plots are inside the page, so that it needs no other file."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["inline"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.get_template("stats.html.jinja").render(
        sections=sections,
        titles=TITLES,
        share_plot=share_plot,
        length_plot=length_plot,
        dropped_text_plot=dropped_text_plot,
    )
