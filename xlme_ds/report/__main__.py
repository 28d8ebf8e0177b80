"""Command line: `python -m xlme_ds.report --run DIR` writes `DIR/report.html`; `xtreme --runs DIR … --out DIR` the
XTREME tables."""

import sys

import tyro

from ..cli import fail
from .run_page import write_report
from .xtreme_tables import write_xtreme


def main() -> None:
    """Write the page and name it; a user's mistake ends in one line on stderr and exit code 2."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["xtreme"]:
            print(tyro.cli(write_xtreme, prog="python -m xlme_ds.report xtreme", args=arguments[1:]))
        else:
            print(tyro.cli(write_report, prog="python -m xlme_ds.report", args=arguments))
    except (ValueError, OSError) as error:
        fail("xlme_ds.report", error)


if __name__ == "__main__":
    main()
