"""`xlme launch --gpus 8 pretrain …` runs a command on several processes, which DeepSpeed's launcher starts."""

import os
import shlex
import sys
from difflib import get_close_matches
from itertools import dropwhile
from pathlib import Path

from .cli import fail, program, take_flag
from .io.arguments import HELP_FLAGS
from .run_commands import LAUNCHED, child_environment, launch_command

USAGE = f"""usage: xlme launch [--gpus N] [DEEPSPEED OPTIONS] COMMAND --flags

Run COMMAND ({" or ".join(LAUNCHED)}) on N processes of this machine, one per GPU, or on N of each machine that a
hostfile lists. It is `deepspeed --num_gpus N --module xlme_ds.COMMAND --flags`.

  --gpus N           processes per machine (default: one per GPU); on a machine without GPUs they run on its CPU cores
  DEEPSPEED OPTIONS  those of `deepspeed --help`: --hostfile FILE, --include HOST:GPU,GPU, --master_port PORT, ...;
                     if there is no ssh, start this command on each machine with --no_ssh --node_rank N
                     --master_addr HOST"""

# Options that choose processes. `--gpus` cannot be combined with the others.
_CHOOSE_PROCESSES = ("--gpus", "--num_gpus", "--num_accelerators", "--include", "-i", "--exclude", "-e")


def command_line(argv: list[str]) -> list[str]:
    """The command line that runs COMMAND, under DeepSpeed's launcher unless `--gpus 1` is the only option. Raises
    ValueError for wrong options, and for a missing hostfile, with which DeepSpeed would train on this machine alone."""
    index = next((index for index, word in enumerate(argv) if word in LAUNCHED), None)
    if index is None:
        near = [name for word in argv for name in get_close_matches(word, LAUNCHED, n=1)]
        advice = f"did you mean {near[0]}?" if near else "name one, and its flags after it"
        raise ValueError(f"only {' and '.join(LAUNCHED)} can be launched: {advice}")
    options, gpus = take_flag(argv[:index], "--gpus")
    rest, misplaced = take_flag(argv[index:], "--gpus")
    if misplaced is not None:
        right = shlex.join([*options, "--gpus", misplaced, *rest])
        raise ValueError(f"--gpus goes before {argv[index]}: xlme launch {right}")
    if gpus is not None and not (gpus.isdecimal() and int(gpus)):
        raise ValueError(f"--gpus {gpus}: it must be a number of processes, at least 1")
    for flag in ("--hostfile", "-H"):
        _, hostfile = take_flag(options, flag)
        if hostfile is not None and not Path(hostfile).is_file():
            raise ValueError(f"{flag} {hostfile} names no file: leave {flag} out to use this machine alone")
    chosen = next((word for word in options if word.partition("=")[0] in _CHOOSE_PROCESSES), None)
    if gpus is not None and chosen:
        raise ValueError(f"--gpus and {chosen} both choose processes: leave one out")
    for flag in (word.partition("=")[0] for word in options if word.startswith("-")):
        if flag not in _CHOOSE_PROCESSES and get_close_matches(flag, ["--gpus", "--nproc_per_node"], cutoff=0.8):
            raise ValueError(f"there is no {flag}: did you mean --gpus?")
    return launch_command(f"xlme_ds.{argv[index]}", int(gpus) if gpus else None, argv[index + 1 :], options)


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by that of `command_line`; a user's mistake ends in one sentence and exit code 2.

    The flags of COMMAND are checked here, because the launcher would add warnings and its own error to COMMAND's error.
    """
    prog = program("launch")
    argv = sys.argv[1:] if arguments is None else arguments
    if not argv or argv[0] in HELP_FLAGS:
        print(USAGE)
        return
    try:
        launcher = command_line(argv)
        name, *flags = dropwhile(lambda word: word not in LAUNCHED, argv)
        if name == "pretrain":
            from .pretrain import check_flags
        else:
            from .finetune.__main__ import check_flags
        prog = f"xlme {name}"
        check_flags(flags)
    except ValueError as error:
        fail(prog, error)
    os.execvpe(launcher[0], launcher, child_environment())


if __name__ == "__main__":
    main()
