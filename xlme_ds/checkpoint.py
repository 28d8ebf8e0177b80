"""Command line: `python -m xlme_ds.checkpoint list|check|convert --run DIR`, for the checkpoints of a run that is not running.

Resuming needs none of it: every engine reads every checkpoint as it is.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from .engine.state import merge_state
from .engine.statefile import StateReader, StateWriter, state_file
from .train.checkpoint import Checkpoints, complete, find_fault, read_state


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    commands: dict[str, Callable[..., Any]] = {"list": listing, "check": check, "convert": convert}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m xlme_ds.checkpoint", args=arguments)
    except (ValueError, OSError) as error:
        print(f"xlme_ds.checkpoint: error: {error}", file=sys.stderr)
        sys.exit(2)


def listing(run: Path) -> None:
    """Name every checkpoint of a run with its size and the processes that saved it, or what it lacks.

    Args:
        run: Run folder.
    """
    _show(run, checksums=False)


def check(run: Path) -> None:
    """The same, with every file read and compared with its checksum; exit code 1 when a checkpoint is damaged.

    Args:
        run: Run folder.
    """
    if not _show(run, checksums=True):
        sys.exit(1)


def convert(run: Path, out: Path, step: int | None = None) -> None:
    """Write a checkpoint as one file of whole parameters, without a trace of the ranks that saved it.

    Any engine resumes from it, put into `checkpoints/` of a run, as from the other. Needs 0.2 GiB of memory, however large the model.

    Args:
        run: Run folder.
        out: Folder to make.
        step: The checkpoint of this step; without it the newest sound one.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: choose another --out")
    source = _chosen(run, step)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    writer = StateWriter(partial / state_file(0, 1), buffer_bytes=0)
    merge_state(StateReader(source), writer)
    complete(partial, read_state(source) | {"world": 1}, {writer.path.name: writer.result()})
    print(f"{out}: {source.name} as whole parameters")


def _show(run: Path, checksums: bool) -> bool:
    """Print a line for every checkpoint; True when all are sound."""
    sound = True
    for folder in _all(run):
        fault = find_fault(folder, checksums=checksums)
        sound &= fault is None
        if fault is None:
            size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            print(f"{folder.name}  {size:,.1f} MiB  saved by {read_state(folder)['world']} processes")
        else:
            print(f"{folder.name}  not usable: {fault}")
    return sound


def _chosen(run: Path, step: int | None) -> Path:
    for folder in reversed(_all(run)):
        if step is None or folder.name == f"step_{step:08d}":
            fault = find_fault(folder)
            if fault is None:
                return folder
            print(f"{folder} is left out: {fault}", file=sys.stderr)
    raise ValueError(
        f"{run} has no usable checkpoint{'' if step is None else f' of step {step}'}: see the command `list`"
    )


def _all(run: Path) -> list[Path]:
    folders = Checkpoints(run, 1, 0).all()
    if not folders:
        raise ValueError(f"{run / 'checkpoints'} has no checkpoint: --run must name a run folder")
    return folders


if __name__ == "__main__":
    main()
