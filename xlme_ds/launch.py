"""`xlme launch --gpus 8 pretrain …` runs a command on several processes, which DeepSpeed's launcher starts."""

import io
import logging
import os
import re
import shlex
import shutil
import socket
import sys
from contextlib import redirect_stderr
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from pathlib import Path

from .cli import fail, program, take_flag
from .io.arguments import HELP_FLAGS
from .run_commands import LAUNCHED, check_visible_gpus, child_environment, launch_command, visible_gpus

USAGE = f"""usage: xlme launch [--gpus N] [DEEPSPEED OPTIONS] COMMAND --flags

Run COMMAND ({" or ".join(LAUNCHED)}) on N processes of this machine, one per GPU, or on N of each machine that a
hostfile lists. It is `deepspeed --num_gpus N --module xlme_ds.COMMAND --flags`.

  xlme launch --gpus 8 pretrain --recipe base --data mixed --heldout heldout --out runs/base

  --gpus N           processes per machine (default: one per GPU); on a machine without GPUs they run on its CPU cores
  DEEPSPEED OPTIONS  those of `deepspeed --help`: --hostfile FILE, --include HOST:GPU,GPU, --master_port PORT, ...;
                     if there is no ssh, start this command on each machine with --no_ssh --node_rank N
                     --master_addr HOST, and on all with the same --master_port (default: 29500)"""

# Options that choose processes. `--gpus` cannot be combined with the others.
_CHOOSE_PROCESSES = ("--gpus", "--num_gpus", "--num_accelerators", "--include", "-i", "--exclude", "-e")


def command_line(argv: list[str]) -> list[str]:
    """The command line that runs COMMAND, under DeepSpeed's launcher unless `--gpus 1` is the only option. Raises
    ValueError for wrong options, and for a missing hostfile, with which DeepSpeed would train on this machine alone."""
    index = next((index for index, argument in enumerate(argv) if argument in LAUNCHED), None)
    if index is None:
        near = [name for argument in argv for name in get_close_matches(argument, LAUNCHED, n=1)]
        advice = f"did you mean {near[0]}?" if near else "name one, and its flags after it"
        raise ValueError(f"only {' and '.join(LAUNCHED)} can be launched: {advice}")
    options, gpus = take_flag(argv[:index], "--gpus")
    rest, misplaced = take_flag(argv[index:], "--gpus")
    if misplaced is not None:
        right = shlex.join([*options, "--gpus", misplaced, *rest])
        raise ValueError(f"--gpus goes before {argv[index]}: xlme launch {right}")
    if gpus is not None and not (gpus.isdecimal() and int(gpus)):
        raise ValueError(f"--gpus {gpus}: it must be a number of processes, at least 1")
    chosen = next((option for option in options if option.partition("=")[0] in _CHOOSE_PROCESSES), None)
    if gpus is not None and chosen:
        raise ValueError(f"--gpus and {chosen} both choose processes: leave one out")
    visible = visible_gpus()
    uses_launcher = gpus != "1" or bool(options)
    has_hosts = any(option.partition("=")[0] in ("-H", "--hostfile") for option in options)
    if visible and uses_launcher and not (chosen or has_hosts or visible.replace(",", "").isdecimal()):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible}: DeepSpeed's launcher needs the numbers of GPUs, such as 0,1 "
            "(`nvidia-smi -L` lists them): set the variable to these, or use one with --gpus 1"
        )
    if gpus is not None and uses_launcher:
        check_visible_gpus("--gpus", int(gpus))
    for flag in (option.partition("=")[0] for option in options if option.startswith("-")):
        if flag not in _CHOOSE_PROCESSES and get_close_matches(flag, ["--gpus", "--nproc_per_node"], cutoff=0.8):
            raise ValueError(f"there is no {flag}: did you mean --gpus?")
    if options:
        options = [*options, *_check_options(options, argv[index])]
    return launch_command(f"xlme_ds.{argv[index]}", int(gpus) if gpus else None, argv[index + 1 :], options)


def _check_options(options: list[str], command: str) -> list[str]:
    """Raise ValueError for options that DeepSpeed's launcher would not understand, for which it would end in a
    traceback, or with which it would train on this machine alone. Returns the options that have to be added."""
    logging.disable(logging.WARNING)  # DeepSpeed remarks on a machine without a GPU
    from .engine.deepspeed_compat import parse_args, parse_inclusion_exclusion  # it takes seconds to load

    logging.disable(logging.NOTSET)
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            parsed, default = parse_args([*options, command]), parse_args([command])
    except SystemExit:
        message = stderr.getvalue().strip().rpartition("error: ")[2]
        if "user_script" in message:
            message = f"an option before {command} has no value"
        elif "unrecognized" in message:
            message += f" before {command}, which takes its own after its name"
        raise ValueError(f"{message}: see `xlme launch --help` and `deepspeed --help`") from None
    if parsed.user_script != command:
        raise ValueError(f"unexpected word {parsed.user_script} before {command}: leave it out")
    if parsed.num_gpus == 0:
        raise ValueError("--num_gpus 0: it must be a number of processes, at least 1")
    if parsed.num_gpus > 0:
        check_visible_gpus("--num_gpus", parsed.num_gpus)
    hosts: dict[str, int] = {}
    if parsed.hostfile != default.hostfile:
        hosts = _hosts(Path(parsed.hostfile))
    elif parsed.no_ssh or parsed.num_nodes > 1:
        raise ValueError("several machines need --hostfile FILE, with a line such as `node0 slots=8` for each")
    if not parsed.no_ssh:
        active = list(parse_inclusion_exclusion(hosts, parsed.include, parsed.exclude)) if hosts else []
        if parsed.num_nodes > 0:
            active = active[: parsed.num_nodes]
        if len(active) != 1 or _is_this_machine(active[0]):
            return []
        if parsed.launcher == "pdsh" and shutil.which("pdsh") is None:
            raise ValueError(
                f"{active[0]} is another machine, which DeepSpeed's launcher reaches by pdsh: install pdsh, or, if it "
                f"is this machine, name it localhost in {parsed.hostfile}"
            )
        return ["--force_multi"]  # without it, DeepSpeed takes a single host for this machine, whatever its name
    if not 0 <= parsed.node_rank < len(hosts):
        raise ValueError(
            f"--node_rank is {parsed.node_rank}: with --no_ssh, give each machine the number of its line in "
            f"{parsed.hostfile}, 0 to {len(hosts) - 1}"
        )
    if not parsed.master_addr:
        raise ValueError(
            f"--no_ssh needs --master_addr, the address of {next(iter(hosts))}, by which the others can reach it"
        )
    return ["--master_port", str(parsed.master_port)]  # by default 29500


def _hosts(hostfile: Path) -> dict[str, int]:
    """The hosts in a hostfile, with their numbers of processes. Raises ValueError for lines that DeepSpeed's launcher
    cannot read."""
    if not hostfile.is_file():
        raise ValueError(f"--hostfile {hostfile} names no file: leave it out to use this machine alone")
    hosts: dict[str, int] = {}
    text = hostfile.read_text(encoding="utf-8")
    if text.startswith("\ufeff"):
        raise ValueError(
            f"{hostfile} begins with a byte order mark, which ssh would take for a part of the first name: save it "
            "without the mark"
        )
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=0*([1-9]\d*)\b", line.strip())
        if match is None:
            raise ValueError(
                f"{hostfile}, line {number}: `{line.strip()}` is not a host and its number of processes, such as "
                "`node0 slots=8`"
            )
        if match[1] in hosts:
            raise ValueError(f"{hostfile}, line {number}: {match[1]} is there twice: write one line for each host")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ValueError(f"{hostfile} names no host: write a line such as `node0 slots=8` for each")
    return hosts


def _is_this_machine(host: str) -> bool:
    """Whether the name `host` leads to an address of this machine: only then can a program listen there."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except (OSError, UnicodeError):  # UnicodeError: a name that no address can have, such as one of ssh's settings
        return False
    return True


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by that of `command_line`; a user's mistake ends in one sentence and exit code 2.

    The flags of COMMAND are checked here, because the launcher would add warnings and its own error to COMMAND's error.
    """
    prog = program("launch")
    argv = sys.argv[1:] if arguments is None else arguments
    if not argv or not HELP_FLAGS.isdisjoint(takewhile(lambda argument: argument not in LAUNCHED, argv)):
        print(USAGE)
        return
    try:
        launcher = command_line(argv)
        name, *flags = dropwhile(lambda argument: argument not in LAUNCHED, argv)
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
