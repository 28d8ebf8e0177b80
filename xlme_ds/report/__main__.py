"""Command line: `python -m xlme_ds.report --run DIR` writes `DIR/report.html`; `xtreme --runs DIR … --out DIR` the
XTREME tables."""

import sys

import tyro

from ..cli import fail, program
from .run_page import write_report
from .xtreme_tables import write_xtreme


def main(arguments: list[str] | None = None) -> None:
    """Write the page and name it; a user's mistake ends in one line on stderr and exit code 2."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["xtreme"]:
            print(tyro.cli(write_xtreme, prog=program("report xtreme"), args=words[1:]))
        else:
            print(tyro.cli(write_report, prog=program("report"), args=words))
    except (ValueError, OSError) as error:
        fail("xlme_ds.report", error)


if __name__ == "__main__":
    main()
