"""Stage `stats`: what was encoded and what training will see of it, by language and by pair: tables and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.parallel import on_root
from data_prep.progress import shown
from data_prep.stats_lengths import length_histograms, median
from data_prep.stats_losses import loss_tables
from data_prep.stats_page import Section, html
from data_prep.stats_table import TITLES, columns, lines_of, total
from data_prep.store import write_file
from xlme_ds.data.schema import TASKS, read_manifest


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


def run(config: StatsConfig) -> None:
    """Print the tables and write `stats.html`. Raises ValueError when the two folders do not belong together."""
    tasks = on_root(lambda: _tasks(config.data))
    sections = [_section(config, task) for task in tasks]
    on_root(lambda: _show(config, sections))


def _tasks(data: Path) -> list[str]:
    tasks = [task for task in TASKS if (data / task / "manifest.json").exists()]
    if not tasks:
        raise ValueError(f"{data} holds neither mono/manifest.json nor para/manifest.json: run mix to its end first")
    return tasks


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
        rows = [line.cells() for line in (*section.lines, total(section.lines))]
        histograms = list(section.lengths.values())
        medians = [f"{median(counts):,}+" for counts in (*histograms, np.sum(histograms, axis=0))]
        rows = [(*cells, middle) for cells, middle in zip(rows, medians, strict=True)]
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
