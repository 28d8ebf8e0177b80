"""Runs commands as steps of a larger command: makes their environment, starts them, and passes signals on to them.
Commands with several processes are started by DeepSpeed's launcher."""

import errno
import os
import random
import shlex
import signal
import site
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

# Variables by which a launcher's processes meet. torchrun sets the first: its processes meet at torchrun's own store.
# DeepSpeed's launcher sets the second: if it is the number of all processes, on CPUs they meet in a machine's memory. A
# process that neither of the two launchers started would wait there for ever.
MEETING_VARIABLES = ("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_SIZE")
# The variables that a launcher sets for each process that it starts.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED = ("pretrain", "finetune")  # the commands that a launcher starts
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def child_environment() -> dict[str, str]:
    """The environment for a command that this process starts: this process's environment without the variables that a
    launcher set. PATH begins with this Python's folder. PYTHONPATH contains the folder of our packages, unless they are
    installed. PYTHONSAFEPATH keeps Python from importing a file of the current folder that has the name of a module
    that we import."""
    our_folder = str(Path(__file__).resolve().parents[1])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if our_folder not in (*folders, *map(os.path.realpath, site.getsitepackages())):
        folders.append(our_folder)
    added = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONSAFEPATH": "1",
    }
    left_out = {*MEETING_VARIABLES, *LAUNCHER_VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in left_out} | added


# The ports at which processes of a run meet, below those that systems assign by default.
FIRST_PORT = 10_000
PORT_COUNT = 20_000


def free_port() -> int:
    """A port from FIRST_PORT on at which nothing listens. Seconds may pass until a process of ours listens there. In
    this time the system does not give the port to another program, because by default it assigns only higher ports."""
    while True:
        port = random.SystemRandom().randrange(FIRST_PORT, FIRST_PORT + PORT_COUNT)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


def visible_gpus() -> str:
    """The value of CUDA_VISIBLE_DEVICES, without blanks; empty if it is not set or the run is to use CPUs."""
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    return "" if on_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")


def check_visible_gpus(option: str, processes: int) -> None:
    """Raise ValueError if DeepSpeed's launcher, given this number, would take other GPUs than `visible_gpus`."""
    visible, taken = visible_gpus(), [str(index) for index in range(processes)]
    if visible and visible.split(",")[:processes] != taken:
        raise ValueError(
            f"{option} {processes} takes the machine's first GPUs, not those of CUDA_VISIBLE_DEVICES={visible}: leave "
            f"{option} out, or unset the variable"
        )


def launch_command(
    module: str, processes: int | None, arguments: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """The command that runs `module` under DeepSpeed's launcher; one process without `options` needs no launcher.

    `processes`: number of processes, None for one per GPU; `options`: further options of the launcher.
    """
    if processes == 1 and not options:
        return [sys.executable, "-W", "ignore", "-m", module, *arguments]
    port = str(free_port())
    count = [] if processes is None else ["--num_gpus", str(processes)]
    defaults = ["--master_port", port, "--no_local_rank", "--log_level", "error"]  # `options` may replace them
    return ["deepspeed", *count, *defaults, *options, "--module", module, *arguments]


def run(
    command: Sequence[str], environment: Mapping[str, str], quiet: bool = False, log: IO[bytes] | None = None
) -> None:
    """Print `command` and run it; if it fails, exit with the command's code.

    The terminal sends Ctrl-C to the command as well, so this program ignores it. Other signals to stop (SIGTERM,
    SIGUSR1, SIGHUP) are passed on to the command, and this program exits once the command has ended. `log`: a file that
    gets the printed command and the command's stdout and stderr, in place of the terminal; `quiet`: drop the command's
    stdout.
    """
    line = f"$ {shlex.join(command)}\n"
    if log is None:
        print(line, end="", flush=True)
    else:
        log.write(line.encode())
        log.flush()
    output = log or (subprocess.DEVNULL if quiet else None)
    errors = subprocess.STDOUT if log else None
    received: list[int] = []
    unsent: deque[int] = deque()  # the signals in `received` that have not been sent to the command yet
    started: list[subprocess.Popen[bytes]] = []  # has the command's process once it runs

    def pass_on() -> None:
        while started and unsent:
            started[0].send_signal(unsent.popleft())

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        unsent.append(number)
        pass_on()

    handled = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    former_handlers = {number: signal.signal(number, receive) for number in handled}
    try:
        started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=errors))
        pass_on()  # sends the signals that came before the command had started
        former_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = started[0].wait()
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])
    if code:
        sys.exit(code if code > 0 else 128 - code)  # a code below 0: the signal -code killed the command
