"""The tables of XTREME as Markdown, CSV and one HTML page."""

import csv
import io
import os
from pathlib import Path

import jinja2

from .xtreme import gather
from .xtreme_tables import Cell, Row, Table, tables

_OURS = "ours"


def write_xtreme(runs: list[Path], out: Path) -> Path:
    """Write xtreme.html, xtreme.md and a CSV file for every table into `out`; return the path of the page.

    Raises ValueError on result files that are damaged or exclude each other; then nothing is written.
    """
    built = tables(gather(runs))
    files = {f"xtreme_{table.name}.csv": to_csv(table) for table in built}
    files["xtreme.md"] = "\n".join(to_markdown(table) for table in built)
    files["xtreme.html"] = to_html(built)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        temporary = out / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, out / name)
    return out / "xtreme.html"


def show(cell: Cell | None, decimals: int) -> str:
    """A cell as text: `68.7 / 50.2`, `61.20 ± 0.40 [5 of 40 languages, 3 seeds]`; an absent one is empty."""
    if cell is None:
        return ""
    spreads = cell.spreads or (None,) * len(cell.values)
    numbers = [
        f"{value:.{decimals}f}" + (f" ± {around:.{decimals}f}" if around is not None else "")
        for value, around in zip(cell.values, spreads, strict=True)
    ]
    return (" / ".join(numbers) + (f" [{', '.join(cell.marks)}]" if cell.marks else "")).lstrip()


def headings(table: Table) -> list[str]:
    """A heading for every column but the system's: `MLQA F1 / EM`."""
    return [f"{heading} {' / '.join(parts)}".strip() for heading, parts in table.columns.values()]


def source(row: Row) -> str:
    """Where a row is from."""
    return f"published: {row.source}" if row.source else _OURS


def to_markdown(table: Table) -> str:
    """The table under a heading, notes below; published rows name their source."""
    rows = [["System", *headings(table), "Source"], ["---", *["---:"] * len(table.columns), "---"]]
    group = ""
    for row in table.rows:
        if row.group != group:
            group = row.group
            rows.append([f"*{group}*", *[""] * len(table.columns), ""])
        name = row.system if row.source else f"**{row.system}**"
        rows.append([name, *(show(row.cells.get(key), table.decimals) for key in table.columns), source(row)])
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join([f"## {table.title}", "", *lines, "", *[f"- {note}" for note in table.notes], ""])


def to_csv(table: Table) -> str:
    """The table with a column for every number; spreads and marks stand in `remarks`."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["system", *(name for key in table.columns for name in _csv_columns(table, key)), "source", "remarks"]
    )
    for row in table.rows:
        numbers: list[str] = []
        for key in table.columns:
            values = row.cells[key].values if key in row.cells else ()
            numbers += [f"{value:.{table.decimals}f}" for value in values]
            numbers += [""] * (len(table.columns[key][1]) - len(values))
        remarks = [
            f"{key}: {show(cell, table.decimals)}" for key, cell in row.cells.items() if cell.marks or any(cell.spreads)
        ]
        writer.writerow([row.system, *numbers, source(row), "; ".join(remarks)])
    return buffer.getvalue()


def _csv_columns(table: Table, key: str) -> list[str]:
    parts = table.columns[key][1]
    return [key] if len(parts) == 1 else [f"{key}_{part}".lower().replace("→", "_") for part in parts]


def to_html(built: list[Table]) -> str:
    """One page that needs no other file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("xtreme.html").render(tables=built, show=show, headings=headings)
