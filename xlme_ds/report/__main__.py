"""Command line: `python -m xlme_ds.report --run DIR` writes `DIR/report.html`; `xtreme --runs DIR … --out DIR` the
XTREME tables."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from ..cli import fail
from .page import write_report
from .xtreme_page import write_xtreme


@dataclass(frozen=True)
class ReportConfig:
    """Write the report page of a run; `xtreme --help` tells of the XTREME tables."""

    run: Path
    """Run folder: reads config.json, metrics.jsonl, heldout.jsonl, retrieval.json, samples.json and languages.json."""


@dataclass(frozen=True)
class XtremeConfig:
    """Write the XTREME tables, ours beside published ones: xtreme.html, xtreme.md and a CSV file for every table."""

    runs: list[Path]
    """Folders in which, or below which, fine-tuning left scores.json and `xlme_ds.evaluate` tatoeba.json and
    align.json."""
    out: Path
    """Folder to write into."""


def main() -> None:
    """Write the page and name it; a user's mistake ends in one line on stderr and exit code 2."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["xtreme"]:
            tables = tyro.cli(XtremeConfig, prog="python -m xlme_ds.report xtreme", args=arguments[1:])
            print(write_xtreme(tables.runs, tables.out))
        else:
            print(write_report(tyro.cli(ReportConfig, prog="python -m xlme_ds.report", args=arguments).run))
    except (ValueError, OSError) as error:
        fail("xlme_ds.report", error)


if __name__ == "__main__":
    main()
