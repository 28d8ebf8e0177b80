"""Command line: `python -m xlme_ds.checkpoint list|check|convert|weights --run DIR`, for the checkpoints of a run that
is not running.

Resuming needs none of it: every engine reads every checkpoint as it is.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from ..cli import fail, program
from ..folders import made_whole
from ..trained import (
    CONFIG_FILE,
    MODEL_FOLDER,
    known_vocabulary,
    read_checkpoint,
    read_settings,
    whole_checkpoint,
    write_model,
)
from .checkpoints import seal
from .state_files import (
    StateReader,
    StateWriter,
    checkpoints_of,
    fault_of,
    merge_state,
    read_state,
    state_file,
    state_files,
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    commands: dict[str, Callable[..., Any]] = {"list": listing, "check": check, "convert": convert, "weights": weights}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog=program("checkpoint"), args=arguments)
    except (ValueError, OSError) as error:
        fail("xlme_ds.checkpoint", error)


def listing(run: Path) -> None:
    """Name every checkpoint of a run with its size and the processes that saved it, or what it lacks.

    Args:
        run: Run folder.
    """
    _show(run, checksums=False)


def check(run: Path) -> None:
    """Compare every file of every checkpoint with its checksum; exit code 1 if one is damaged.

    Args:
        run: Run folder.
    """
    if not _show(run, checksums=True):
        sys.exit(1)


def convert(run: Path, out: Path, step: int | None = None) -> None:
    """Write a checkpoint as one file of whole parameters, whatever ranks saved it.

    Put into `checkpoints/` of a run, any engine resumes from it. Needs 0.2 GiB of memory, however
    large the model.

    Args:
        run: Run folder.
        out: Folder to make.
        step: The checkpoint of this step; without it the newest sound one.
    """
    source = whole_checkpoint(run, step)
    with made_whole(out, "--out") as partial:
        writer = StateWriter(partial / state_file(0, 1), buffer_bytes=0)
        merge_state(StateReader(state_files(source)), writer)
        seal(partial, read_state(source) | {"world": 1}, {writer.path.name: writer.result()})
    print(f"{out}: {source.name} as whole parameters")


def weights(run: Path, out: Path, step: int | None = None, vocab: Path | None = None) -> None:
    """Write the model of a checkpoint as a finished run has it: a folder to keep or hand on.

    Evaluation, fine-tuning and export read RUN@STEP themselves.

    Args:
        run: Run folder of pre-training.
        out: Folder to make.
        step: The checkpoint of this step; without it the newest sound one.
        vocab: Folder or file of the vocabulary, where an older version did not put it into the run.
    """
    settings = read_settings(run)
    if settings.task:
        raise ValueError(f"{run} was fine-tuned on {settings.task}: name a run of pre-training")
    vocabulary = known_vocabulary(run, run / MODEL_FOLDER if vocab is None else vocab)
    source = whole_checkpoint(run, step)
    state = read_checkpoint(source, settings)
    with made_whole(out, "--out") as partial:
        shutil.copyfile(run / CONFIG_FILE, partial / CONFIG_FILE)
        write_model(partial / MODEL_FOLDER, state, vocabulary.path)
    print(f"{out}: the model of {source.name}")


def _show(run: Path, checksums: bool) -> bool:
    """Print a line for every checkpoint; True when all are sound."""
    sound = True
    for folder in _all(run):
        fault = fault_of(folder, checksums=checksums)
        sound &= fault is None
        if fault is None:
            size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            print(f"{folder.name}  {size:,.1f} MiB  saved by {read_state(folder)['world']} processes")
        else:
            print(f"{folder.name}  not usable: {fault}")
    return sound


def _all(run: Path) -> list[Path]:
    folders = checkpoints_of(run)
    if not folders:
        raise ValueError(f"{run / 'checkpoints'} has no checkpoint: --run must name a run folder")
    return folders


if __name__ == "__main__":
    main()
