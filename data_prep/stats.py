"""Stage `stats`: what was encoded and what training will see of it, by language and by pair: a table and a page."""

from dataclasses import dataclass
from pathlib import Path

from data_prep.executor import on_root
from data_prep.stats_page import html
from data_prep.stats_table import TITLES, columns, lines_of, total
from xlme_ds.data.schema import TASKS, read_manifest


@dataclass(frozen=True)
class StatsConfig:
    """Show size, tokens, unknown rate, tokens per character, sampling shares and repeats by language and by pair."""

    encoded: Path
    """Folder that `encode` wrote."""
    data: Path
    """Folder that `mix` wrote from it."""
    out: Path
    """Output folder: stats.html."""


def run(config: StatsConfig) -> None:
    """Print the tables and write `stats.html`. Raises ValueError when the two folders do not belong together."""
    on_root(lambda: _run(config))


def _run(config: StatsConfig) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    tables = {
        task: lines_of(config.encoded, config.data, task)
        for task in TASKS
        if (config.data / task / "manifest.json").exists()
    }
    if not tables:
        raise ValueError(
            f"{config.data} holds neither mono/manifest.json nor para/manifest.json: run mix to its end first"
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has room for every column
    for task, lines in tables.items():
        table = Table(title=TITLES[task], title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for number, heading in enumerate(columns(task)):
            table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
        for line in (*lines, total(lines)):
            table.add_row(*line.cells(), style="bold" if line.name == "all" else None)
        console.print(table)
    config.out.mkdir(parents=True, exist_ok=True)
    page = config.out / "stats.html"
    page.write_text(html(tables, read_manifest(config.data / next(iter(tables)))), encoding="utf-8")
    console.print(f"open {page}", soft_wrap=True)
