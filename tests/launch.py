"""Starting the ranks of a test as a launcher would, and other Python processes: forked, not loaded anew."""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

ROOT = Path(__file__).resolve().parents[1]


# What a line of metrics.jsonl has of the machine and its load; everything else is the same in every run.
TIMED = ("tokens_per_s", "flops_per_s", "peak_fraction", "data_wait", "memory_gib", "seconds_left")

_kept: list[socket.socket] = []  # what keeps the latest ports of `free_port`


def free_port() -> int:
    """A port that the system gives to no other socket until a rank listens there, seconds later: it stays bound here,
    and with SO_REUSEADDR, which torch sets too, a rank can bind it again."""
    _kept.append(socket.socket())
    _kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _kept[-1].bind(("", 0))
    if len(_kept) > 50:
        _kept.pop(0).close()
    return int(_kept[-1].getsockname()[1])


def distributed(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables by which torch's process group finds its other ranks on this machine."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def environment(**variables: object) -> dict[str, str]:
    """This environment with one thread a process and the tools of this interpreter on the PATH."""
    base = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        PYTHONWARNINGS="ignore",
        PYTHONPATH=str(ROOT),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    return base | {key: str(value) for key, value in variables.items()}


# Loaded by the time a process is forked, which saves it five seconds: what comes from elsewhere, nothing of ours.
PRELOADED = (
    "torch._dynamo", "torch.distributed", "torch.utils.tensorboard", "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer", "numba", "tyro", "rich.progress",
    "matplotlib.pyplot", "sentencepiece", "torch.utils.cpp_extension", "safetensors.torch",
    "multiprocessing.spawn",
)  # fmt: skip
# Read while a process starts or by what is loaded: the same for all that are forked.
FIXED = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "PYTHONWARNINGS", "PYTHONPATH", "PYTHONHASHSEED")
# The program that asks for a forked process where a script or a command starts Python itself.
FORKED_PYTHON = Path(__file__).with_name("forked_python")


class Python:
    """`python ARGUMENTS` (-m, -c or a file), forked from a process that has loaded torch and DeepSpeed.

    Even ranks come from one such process and odd ones from another: their hashes of strings differ, as they do where
    every rank starts by itself. Tests of starting itself use `subprocess`.
    """

    _parents: ClassVar[dict[int, socket.socket]] = {}

    def __init__(self, arguments: Sequence[str], **variables: object):
        self.args, self.returncode = list(arguments), None
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        env = environment(**variables)
        number = int(env.get("RANK", 0)) % 2
        env |= self.forking(number)
        request = {"arguments": self.args, "env": env, "folder": str(ROOT)}
        self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "rb") as nothing:
            files = [theirs.fileno(), nothing.fileno(), *(file.fileno() for file in self._files)]
            socket.send_fds(self._parents[number], [json.dumps(request).encode()], files)
        said = self._told.recv(64)
        assert said, f"one of {FIXED} differs: start it with subprocess"
        self.pid = int(said)

    @classmethod
    def forking(cls, number: int = 0) -> dict[str, str]:
        """Variables with which `FORKED_PYTHON` forks its process, and each process that this one starts as Python."""
        if number not in cls._parents:
            cls._parents[number], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, listener:  # it ends when this process has ended
                listener.bind(_address(number))
                listener.listen()
                command = [sys.executable, "-m", "tests.launch", str(listener.fileno())]
                subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=theirs, pass_fds=[listener.fileno()])
        return {"FORKED_PYTHON": _address(number)[1:]}

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._told.recv(64))
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; stdout and stderr."""
        self.wait(timeout)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        return texts[0], texts[1]

    def completed(self, timeout: float | None = None) -> "subprocess.CompletedProcess[str]":
        out, err = self.communicate(timeout)
        return subprocess.CompletedProcess(self.args, self.wait(), out, err)


def python(*arguments: str, **variables: object) -> "subprocess.CompletedProcess[str]":
    """`python ARGUMENTS` to its end."""
    return Python(arguments, **variables).completed()


def catches(process: int, number: signal.Signals) -> bool:
    """Whether the process has set a handler for the signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    found = re.search(r"SigCgt:\s*(\w+)", status)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def run_ranks(world: int, arguments: list[str], timeout: float = 600) -> list["subprocess.CompletedProcess[str]"]:
    """Run `python ARGUMENTS` on `world` ranks and wait for all."""
    port = free_port()
    ranks = [Python(arguments, **distributed(rank, world, port)) for rank in range(world)]
    return [rank.completed(timeout) for rank in ranks]


def _address(number: int) -> str:
    """Where a parent of forked processes listens, in Linux's abstract namespace."""
    return f"\0xlme-tests-{os.getpid()}-{number}"


def _serve(requests: socket.socket, listener: socket.socket) -> None:
    """Fork a process for every request, until the tests have ended."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    fixed = [os.environ.get(name) for name in FIXED]
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        ready, *_ = select.select([requests, listener], [], [])
        source = listener.accept()[0] if requests not in ready else requests
        message, files, *_ = socket.recv_fds(source, 1 << 20, 4)
        if source is requests and not message:
            return
        if source is not requests:  # FORKED_PYTHON's own connection, on which it hears of the process
            files.insert(0, source.detach())
        request = json.loads(message) if message else {}
        if message and [request["env"].get(name) for name in FIXED] == fixed and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            listener.close()
            _fork_and_tell(request, files)
        for file in files:
            os.close(file)


def _fork_and_tell(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Fork the process; send its number and its exit code. It ends with whoever waits for it."""
    child = os.fork()
    if child == 0:
        _become(request, files)
    with socket.socket(fileno=files[0]) as told:
        told.send(str(child).encode())
        ended = os.pidfd_open(child)
        if ended not in select.select([told, ended], [], [])[0]:
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            told.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Do what Python does with these arguments, and end as it ends."""
    arguments = request["arguments"]
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.executable = str(FORKED_PYTHON)
    if "process" in request:
        os.getppid = functools.partial(_parent_of, request["process"])
    while arguments[0] in ("-P", "-u", "-W"):  # warnings are ignored, as FIXED says
        del arguments[: 1 + (arguments[0] == "-W")]
    code = 1
    try:
        match arguments:
            case ["-m", name, *rest]:
                sys.argv = [name, *rest]
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            case ["-c", program, *rest]:
                sys.argv, main = ["-c", *rest], types.ModuleType("__main__")
                sys.modules["__main__"] = main
                exec(compile(program, "<string>", "exec"), main.__dict__)
            case [path, *rest]:
                sys.argv = [path, *rest]
                sys.path.insert(0, str(Path(path).parent))
                runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # threads that are not daemons end first
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[1])))
