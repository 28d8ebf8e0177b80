"""Command line: `python -m xlme_ds.report --run DIR` writes `DIR/report.html`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from .page import write_report


@dataclass(frozen=True)
class ReportConfig:
    """Write the report page of a run."""

    run: Path
    """Run folder: reads config.json, metrics.jsonl, heldout.jsonl, retrieval.json, samples.json and languages.json."""


def main() -> None:
    """Write the page and name it; a user's mistake ends in one line on stderr and exit code 1."""
    config = tyro.cli(ReportConfig, prog="python -m xlme_ds.report")
    try:
        print(write_report(config.run))
    except ValueError as error:
        print(f"xlme_ds.report: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
