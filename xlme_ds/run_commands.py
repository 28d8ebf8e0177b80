"""Commands that are steps of a larger one: each is printed before it runs."""

import os
import shlex
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

# By this torchrun has its processes meet at a store of its own: those that it did not start wait there for ever.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # a launcher's, for each process
LAUNCHED = ("pretrain", "finetune")  # the commands that a launcher starts
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def environment() -> dict[str, str]:
    """Ours, with the programs of this Python's folder first; Python imports nothing from the current folder, which may
    hold a module of any name, and these packages from where they are; a launcher's variables are not theirs."""
    ours, places = str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if ours not in (*places, *map(os.path.realpath, site.getsitepackages())):
        places.append(ours)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONSAFEPATH": "1"}
    path["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    launchers = (AGENT_STORE, *TORCH_VARIABLES)
    return {name: value for name, value in os.environ.items() if name not in launchers} | path


def launch(module: str, processes: int | None, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command that runs `module` on processes of DeepSpeed's launcher, or alone.

    `processes`: None for one a GPU; `options`: further ones of the launcher.
    """
    if processes == 1 and not options:
        return [sys.executable, "-W", "ignore", "-m", module, *arguments]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    number = [] if processes is None else ["--num_gpus", str(processes)]
    quiet = ["--master_port", port, "--no_local_rank", "--log_level", "error"]
    return ["deepspeed", *number, *quiet, *options, "--module", module, *arguments]


def run(
    command: Sequence[str], environment: Mapping[str, str], quiet: bool = False, log: IO[bytes] | None = None
) -> None:
    """Run one step; leaves with its exit code when it fails. Ctrl-C reaches the step, which saves and ends by itself;
    other signals to stop (of a job that must end, of a lost terminal) are passed on to it, and this program ends after
    it. `log` gets the command, stdout and stderr in place of the terminal; `quiet` drops stdout."""
    line = f"$ {shlex.join(command)}\n"
    if log is None:
        print(line, end="", flush=True)
    else:
        log.write(line.encode())
        log.flush()
    output, errors = (log, subprocess.STDOUT) if log is not None else (subprocess.DEVNULL if quiet else None, None)
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    heard = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])
    if code:
        sys.exit(code if code > 0 else 128 - code)
