"""`xlme report --run PATH` writes `PATH/report.html`. For an unfinished run, example sentences and retrieval scores are
first computed from its newest checkpoint.
`xlme report --runs PATH PATH …` writes a page that compares several runs.
`xlme report xtreme --runs PATH … --out PATH` writes the XTREME tables.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ..cli import fail, note, program
from ..io.errors import in_words
from ..io.help import call_from_command_line
from .run_files import require_page, require_run
from .run_page import write_report
from .runs_page import write_comparison
from .xtreme_tables import write_xtreme

_USAGE = """xlme report (--run PATH | --runs PATH [PATH ...]) [--out PATH]
       xlme report xtreme --runs PATH [PATH ...] --out PATH"""


def main(arguments: list[str] | None = None) -> None:
    """Write the page and print its path. A user's mistake ends in one line on stderr and exit code 2."""
    options = sys.argv[1:] if arguments is None else arguments
    try:
        if options[:1] == ["xtreme"]:
            print(call_from_command_line(write_xtreme, program("report xtreme"), options[1:]))
        elif options and not options[0].startswith("-"):
            raise ValueError(
                f"unexpected argument {options[0]}: did you mean --run {options[0]}, or `xlme report xtreme`?"
            )
        else:
            print(call_from_command_line(write_page, program("report"), options, usage=_USAGE))
    except (ValueError, OSError) as error:
        fail("xlme report", error)


def write_page(run: Path | None = None, runs: tuple[Path, ...] = (), out: Path | None = None) -> Path:
    """Write the report page of a run (--run), or a page that compares several runs (--runs).

    With the word xtreme first, the command writes the XTREME tables; `xlme report xtreme --help` lists its flags.

    For an unfinished run, the example sentences and the retrieval scores are first computed from its newest checkpoint.

    Args:
        run: Folder of a run, finished, running or stopped.
        runs: Folders of several runs, in place of --run. The page has their results, the settings in which they differ,
            and their curves in shared charts.
        out: File of the page; without it, `report.html` in the folder of the run, or `runs.html` for several runs.

    Returns:
        The path of the page.
    """
    if (run is None) == (not runs):
        raise ValueError("name one run with --run, or several with --runs")
    if run is None:
        return write_comparison(runs, out or Path("runs.html"))
    require_run(run)
    if out is not None:
        require_page(out)
    if problem := _update(run):
        note(problem)
    return write_report(run, out)


def write_report_in_child(folder: str, parent: str) -> None:
    """Draw the page of the run in `folder`, in a child of the training process with the id `parent`. The child also
    ends when its parent has ended, and on SIGTERM."""
    run = Path(folder)

    def stop(*_: object) -> None:
        sys.exit(143)  # an exception, so that `atomic_write` deletes the temporary file that it is writing

    def end_with_parent() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(143)  # Python has not called `stop` yet if the main thread is still in a long call of a library

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        problem = _update(run)
        write_report(run)
        if problem:
            raise ValueError(problem)
    except (ValueError, OSError) as error:
        fail("xlme report", error)


def _update(run: Path) -> str | None:
    """Update the example sentences and the retrieval scores of an unfinished run. Returns a message if that failed,
    else None."""
    if (run / "finished.json").exists() or not (run / "checkpoints").is_dir():
        return None
    from ..evaluate.report_data import update_report_data  # imported late: it loads torch

    try:
        update_report_data(run)
    except (ValueError, KeyError, OSError) as error:
        return f"the example sentences and retrieval scores of {run} are not updated: {in_words(error)}"
    return None


if __name__ == "__main__":
    main()
