"""Pre-train a model on one process; `xlme launch --gpus N pretrain …` starts one on each of several GPUs. A second call
with the same --out resumes the run. A signal to stop (Ctrl-C, SIGTERM) saves a checkpoint; the exit code is then 0.

  xlme pretrain --recipe quickstart --data runs/first/data/train --heldout runs/first/data/heldout --out runs/second

With `--branch RUN@STEP` a new run starts with the weights and the optimizer's state of that checkpoint. If it also has
the flags `--schedule.name wsd --schedule.decay-steps N`, it takes N steps, over which its learning rate falls.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from .cli import fail, parse, program, take_flag
from .config import RunConfig
from .io.arguments import HELP_FLAGS
from .io.folders import require_folder
from .train.stop import StopRequest


@dataclass(frozen=True)
class Pretrain:
    """Arguments of the command."""

    data_folders: Annotated[tuple[Path, ...], tyro.conf.arg(name="data")]
    """Folder that `xlme prep mix` wrote. If several are given, they are read one after the other (data.phase_steps)."""
    out: Path
    """Run folder; an existing one is resumed."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    branch: Annotated[Path | None, tyro.conf.arg(metavar="RUN@STEP")] = None
    """In place of --recipe: a new run with that run's settings, from its checkpoint of that step."""
    heldout: Path | None = None
    """Folder of `xlme prep mix` with text kept out of training, for evaluation."""
    dry_run: bool = False
    """Check everything, open the data, count memory and operations, and stop: nothing is written."""
    profile: int = 0
    """Measure the time of each operation in this many steps, after the first three, and write it to `profile/` in the
    run folder; 0: none."""


def check_flags(argv: list[str]) -> None:
    """Check a command line without looking for its folders. A mistake raises ValueError or ends the program. If the
    command line asks for help, print the help and exit."""
    argv, branch = take_flag(argv, "--branch")
    # Default settings take the place of the settings of RUN@STEP, whose folder is not opened.
    branch_config = None if branch is None else RunConfig(name="custom")
    parse(program("pretrain"), Pretrain, __doc__ or "", argv, branch_config)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    # The number of masked positions differs between batches, so blocks of fixed sizes would fragment a GPU's memory.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # torch reads it once, when it is loaded
    argv = sys.argv[1:] if arguments is None else arguments
    flags = {argument.partition("=")[0].replace("_", "-") for argument in argv}
    # A signal to stop may come at any time, so `StopRequest` catches it before torch is loaded. Help and a dry run have
    # nothing to save.
    stop = None if {*HELP_FLAGS, "--dry-run"} & flags else StopRequest()
    try:
        argv, branch = take_flag(argv, "--branch")
        branch_config = None
        if branch is not None:
            from .train.run_folder import read_branch_config  # it loads torch

            _, out_name = take_flag(argv, "--out")
            branch_config = read_branch_config(Path(branch), None if out_name is None else Path(out_name))
        command = parse(program("pretrain"), Pretrain, __doc__ or "", argv, branch_config)
        if branch_config is not None and command.run.start != branch_config.start:
            raise ValueError(f"--branch {branch} sets start.*: leave out all options of start, or --branch")
        if branch is not None and "--schedule.decay-steps" in flags and "--train.steps" not in flags:
            parent_step = int(command.run.start.folder.rpartition("@")[2])
            steps = parent_step + command.run.schedule.decay_steps
            command = replace(command, run=replace(command.run, train=replace(command.run.train, steps=steps)))
        for folder in (*command.data_folders, command.heldout):  # a missing one is reported before torch is loaded
            if folder is not None:
                require_folder(folder, "name the folder that `xlme prep mix` wrote")
    except (ValueError, OSError) as error:
        fail("xlme pretrain", error)
    from .api import dry_run, pretrain
    from .engine.ranks import SharedError

    try:
        run, data, out, heldout = command.run, command.data_folders, command.out, command.heldout
        if command.dry_run:
            dry_run(run, data, out, heldout, command.profile)
        else:
            pretrain(run, data, out, heldout, stop, command.profile)
    except SharedError as error:  # any other error is a bug of ours, and keeps its traceback
        fail("xlme pretrain", error)


if __name__ == "__main__":
    main()
    from .engine.ranks import exit_now

    exit_now()
