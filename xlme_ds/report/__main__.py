"""Command line: `python -m xlme_ds.report --run DIR` writes `DIR/report.html`; `xtreme --runs DIR … --out DIR` the
XTREME tables."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from ..cli import fail
from .run_page import write_report
from .xtreme_tables import write_xtreme


@dataclass(frozen=True)
class ReportSettings:
    """Write the report page of a run; `xtreme --help` explains the XTREME tables."""

    run: Path
    """Run folder: reads config.json, metrics.jsonl, heldout.jsonl, retrieval.json, samples.json and languages.json."""


@dataclass(frozen=True)
class XtremeSettings:
    """Write the XTREME tables, ours next to published ones: xtreme.html, xtreme.md and a CSV file for every table."""

    runs: list[Path]
    """Folders with, at any depth, the scores.json of fine-tuning and the tatoeba.json and align.json of
    `xlme_ds.evaluate`."""
    out: Path
    """Folder to write into."""


def main() -> None:
    """Write the page and name it; a user's mistake ends in one line on stderr and exit code 2."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["xtreme"]:
            tables = tyro.cli(XtremeSettings, prog="python -m xlme_ds.report xtreme", args=arguments[1:])
            print(write_xtreme(tables.runs, tables.out))
        else:
            print(write_report(tyro.cli(ReportSettings, prog="python -m xlme_ds.report", args=arguments).run))
    except (ValueError, OSError) as error:
        fail("xlme_ds.report", error)


if __name__ == "__main__":
    main()
