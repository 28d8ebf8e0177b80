"""Command line: `python -m xlme_ds.checkpoint list|check|convert|weights --run DIR`, for the checkpoints of a run that
is not running.

Resuming needs none of it: every engine reads every checkpoint as it is.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro

from ..cli import fail, program
from ..folders import made_whole
from ..objectives import objective_of
from ..trained import CONFIG_FILE, MODEL_FOLDER, known_vocabulary, read_settings, write_model
from .checkpoints import Checkpoints, find_fault, read_state, seal, state_files
from .state_files import KINDS, StateReader, StateWriter, merge_state, state_file


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
    source = _chosen(run, step)
    with made_whole(out, "--out") as partial:
        writer = StateWriter(partial / state_file(0, 1), buffer_bytes=0)
        merge_state(StateReader(state_files(source)), writer)
        seal(partial, read_state(source) | {"world": 1}, {writer.path.name: writer.result()})
    print(f"{out}: {source.name} as whole parameters")


def weights(run: Path, out: Path, step: int | None = None, vocab: Path | None = None) -> None:
    """Write the model of a checkpoint as a finished run has it: a folder that evaluation, fine-tuning and export read.

    Args:
        run: Run folder of pre-training.
        out: Folder to make.
        step: The checkpoint of this step; without it the newest sound one.
        vocab: Folder or file of the vocabulary; a finished run has it itself.
    """
    settings = read_settings(run)
    if settings.task:
        raise ValueError(f"{run} was fine-tuned on {settings.task}: name a run of pre-training")
    vocabulary = known_vocabulary(run, run / MODEL_FOLDER if vocab is None else vocab)
    source = _chosen(run, step)
    reader = StateReader(state_files(source))
    with torch.device("meta"):
        state = objective_of(settings.objective).build(settings.model).state_dict()
    for name, there in state.items():
        state[name] = torch.empty(there.shape)
        reader.read(name, KINDS[0], 0, state[name].view(-1))
    with made_whole(out, "--out") as partial:
        shutil.copyfile(run / CONFIG_FILE, partial / CONFIG_FILE)
        write_model(partial / MODEL_FOLDER, state, vocabulary.path)
    print(f"{out}: the model of {source.name}")


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
