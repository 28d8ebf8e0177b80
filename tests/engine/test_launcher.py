"""What launchers say about a process, in the words that they say it in."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.launch import ROOT, Python, catches, environment, free_port, python, run_ranks
from tests.slurm.cluster import wait_until
from xlme_ds import run_commands
from xlme_ds.cli import fail, note
from xlme_ds.config import EngineConfig
from xlme_ds.engine import ranks
from xlme_ds.engine.ranks import SharedError, _gpu_index, first_host, start_process_group, torch_variables
from xlme_ds.finetune.__main__ import main as finetune

# Of Slurm 22.05: sbatch --nodes=2 --ntasks-per-node=2, the batch script itself and task 3 of srun in it.
SCRIPT = {"SLURM_JOB_ID": "1234567", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
TASK = SCRIPT | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_srun() -> None:
    found = torch_variables(TASK)
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}
    assert port == torch_variables(TASK | {"SLURM_PROCID": "0"})["MASTER_PORT"] and 10_000 <= int(port) < 30_000
    assert port != torch_variables(TASK | {"SLURM_JOB_ID": "1234568"})["MASTER_PORT"], "two jobs may share a node"
    assert port != torch_variables(TASK | {"SLURM_STEP_ID": "1"})["MASTER_PORT"], "two steps of a job too"
    tries = {torch_variables(TASK | {"SLURM_RESTART_COUNT": str(number)})["MASTER_PORT"] for number in range(20)}
    assert len(tries | {port}) == 20, "a requeued job leaves the port of its last try, which may still be in use"


def test_the_user_may_choose_where_ranks_meet() -> None:
    found = torch_variables(TASK | {"MASTER_ADDR": "n1-ib", "MASTER_PORT": "29500", "PMI_SIZE": "4"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("n1-ib", "29500")


def test_one_process_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that have one know nothing of it, the first process among them: without this nobody would print it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in "23":
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            try:
                _gpu_index()
            except SharedError as error:
                fail("xlme pretrain", error)
        assert left.value.code == 2
    assert capsys.readouterr().err.count("a node has more processes than its 2 visible GPUs") == 1


@pytest.mark.parametrize(("rank", "visible", "number"), [("3", 1, "0"), ("3", 4, "3"), ("0", 2, "0")])
def test_a_process_takes_its_gpu_or_the_only_one_that_it_sees(
    rank: str, visible: int, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under srun --gpus-per-task=1; DeepSpeed reads the variable."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert _gpu_index() == int(number) and os.environ["LOCAL_RANK"] == number


@pytest.mark.parametrize("around", [{}, SCRIPT, TASK | {"SLURM_STEP_NUM_TASKS": "2"}, {"PMI_SIZE": "4"}])
def test_torchs_variables_hold_wherever_they_are_set(around: dict[str, str]) -> None:
    """deepspeed in a batch script; srun of one torchrun a node; mpiexec of a script that sets them."""
    assert torch_variables(around | TORCH) == TORCH


@pytest.mark.parametrize("variables", [{}, SCRIPT | {"SLURM_NTASKS": "1"}, {"PMI_SIZE": "1"}])
def test_a_process_that_is_meant_to_be_alone(variables: dict[str, str]) -> None:
    assert torch_variables(variables) == {}
    alone = SCRIPT | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1"}
    assert torch_variables(alone) == {}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (SCRIPT, "this job has 4 tasks, but srun did not start this process: put srun before python"),
        (
            TASK | TORCH | {"WORLD_SIZE": "1"},
            "srun started 4 processes, but WORLD_SIZE is 1: unset RANK and WORLD_SIZE",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set without LOCAL_RANK and MASTER_ADDR and MASTER_PORT"),
        (TORCH | {"RANK": "x"}, "RANK is 'x': set a number, or unset RANK"),
        (TORCH | {"MASTER_PORT": ""}, "MASTER_PORT is '': set a number, or unset RANK"),
        (TORCH | {"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4: set RANK to a number from 0"),
        ({"PMI_SIZE": "2"}, "mpiexec started 2 processes, but not as one run"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpiexec started 2 processes, but not as one run"),
        (TASK | {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, "mpiexec started 4 processes, but not as one run"),
    ],
)
def test_several_runs_of_one_process_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        torch_variables(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu-[001-004,007],login1", "gpu-001"),
        ("gpu[3,5]", "gpu3"),
        ("login1,gpu-[001-004]", "login1"),
        ("r[1-2]n[03-04]-ib", "r1n03-ib"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def command(**variables: object) -> str:
    """The last line of the command's error, which it must leave with exit code 2."""
    words = ["-m", "xlme_ds.pretrain", "--recipe", "quickstart", "--data", ".", "--out", "nowhere"]
    done = python(*words, **variables)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def test_the_command_says_it_in_a_sentence() -> None:
    assert command(**SCRIPT).startswith("xlme pretrain: error: this job has 4 tasks, but srun did not")


MISSPELT = "xlme pretrain: error: there is no --train.stepz: did you mean --train.steps?"


def test_rank_0_prints_a_mistake_though_another_rank_found_it_first() -> None:
    """srun and DeepSpeed's launcher end all ranks as soon as one has failed."""
    words = ["--recipe", "quickstart", "--data", "a", "--out", "b", "--train.stepz", "3"]
    # It waits longer than a loaded machine needs for the other.
    patient = "from xlme_ds import cli; from xlme_ds.pretrain import main; cli._RANK_0_SECONDS = 600; main()"
    first = Python(["-c", patient, *words], RANK=1, SLURM_PROCID=1)
    wait_until(
        lambda: first.poll() or (catches(first.pid, signal.SIGUSR1) and not catches(first.pid, signal.SIGTERM)),
        "rank 1 to wait",
    )
    rank_0 = python("-m", "xlme_ds.pretrain", *words, RANK=0)
    assert (rank_0.returncode, rank_0.stderr.strip()) == (2, MISSPELT) and first.poll() is None
    first.send_signal(signal.SIGTERM)
    assert first.wait() == -signal.SIGTERM and not first.communicate()[1]


def test_a_mistake_that_rank_0_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of settings that another node lacks."""
    monkeypatch.setenv("RANK", "1")
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit) as left:
        fail("xlme pretrain", ValueError("no such file"))
    said = capsys.readouterr().err
    assert (left.value.code, said, len(waited)) == (2, "xlme pretrain: error: no such file\n", 1)
    with pytest.raises(SystemExit):
        fail("xlme pretrain", SharedError("all ranks have it"))
    assert not capsys.readouterr().err and len(waited) == 1


@pytest.mark.parametrize(
    ("variables", "prints"),
    [({}, True), ({"SLURM_PROCID": "0"}, True), ({"SLURM_PROCID": "1"}, False), ({"RANK": "1"}, False),
     ({"RANK": "0", "SLURM_PROCID": "1"}, True)],
)  # fmt: skip
def test_a_remark_and_a_list_are_printed_by_rank_0(
    variables: dict[str, str], prints: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By srun's number where no launcher has given torch's."""
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    note("a remark")
    assert bool(capsys.readouterr().err) == prints
    note("a remark", here=True)
    assert capsys.readouterr().err == "a remark\n"
    finetune(["--task", "ner", "--model", "base", "--data", "data", "--out", "out", "--seeds", "1", "2", "--list"])
    assert capsys.readouterr().out == "out/seed1\nout/seed2\n" * prints


@pytest.mark.parametrize(
    ("error", "expected", "prints"),
    [
        (dist.DistStoreError("Timed out after 1861 seconds"), "rank 1 waited 31 minutes for .* 2 at h:5: ", True),
        (dist.DistNetworkError("the client socket has timed out"), "rank 1 waited 31 minutes", True),
        (dist.DistNetworkError("EADDRINUSE"), "port 5 of h, .*, is in use by another program: choose", False),
        (dist.DistNetworkError("no route"), "^no route$", None),
        (ValueError("no such folder"), "^no such folder$", False),
    ],
)  # fmt: skip
def test_processes_that_do_not_meet(
    error: Exception, expected: str, prints: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank that waited in vain prints that, as the others may not exist; of other errors one rank of a node."""
    import deepspeed

    def fails(*arguments: object, **settings: object) -> None:
        raise error

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
    monkeypatch.setattr(deepspeed, "init_distributed", fails)
    for name, value in (TORCH | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match=expected) as raised:
        start_process_group(EngineConfig(), 30)
    assert isinstance(raised.value, SharedError) == (prints is not None)
    assert getattr(raised.value, "prints", None) == prints


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_slow_meeting_is_told_once_a_node(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import deepspeed

    timers: list[threading.Thread] = []

    def meet(*arguments: object, **settings: object) -> None:
        timers[:] = [thread for thread in threading.enumerate() if thread not in before]
        for timer in timers if told else ():
            timer.join()
        raise ValueError("met")

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
    monkeypatch.setattr(deepspeed, "init_distributed", meet)
    for name, value in (TORCH | {"LOCAL_RANK": rank, "MASTER_ADDR": "h", "MASTER_PORT": "5"}).items():
        monkeypatch.setenv(name, value)
    for limit, told in ((0.05, rank == "0"), (600, False)):
        monkeypatch.setattr(ranks, "_SLOW_SECONDS", limit)
        before = threading.enumerate()
        with pytest.raises(SharedError, match="met"):
            start_process_group(EngineConfig(), 30)
        for timer in timers:
            timer.join(timeout=60)
            assert not timer.is_alive(), "what was quick is never told"
        said = "rank 3 waits for the others of 4 at h:5; if no launcher started it, "
        err = capsys.readouterr().err
        assert len(timers) == (rank == "0") and err.startswith(said * told) and err.count("\n") == told


def test_a_port_in_use() -> None:
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        said = command(**alone, MASTER_PORT=port)
    assert said.startswith(f"xlme pretrain: error: port {port} of 127.0.0.1, where the processes meet, is in use"), said


def test_a_store_of_torchrun_that_is_not_its_own() -> None:
    """A process that is started in a script of torchrun's, whose variables it has."""
    assert ". has no mono/: name the folder" in command(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none")


def test_ranks_of_srun_meet_whatever_another_launcher_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torchrun's variable all would wait for its store, with DeepSpeed's for memory of one machine."""
    import deepspeed

    def meet(*arguments: object, **settings: object) -> None:
        raise ValueError(str({"TORCHELASTIC_USE_AGENT_STORE", "LOCAL_SIZE"} & os.environ.keys()))

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
    monkeypatch.setattr(deepspeed, "init_distributed", meet)
    for name in TORCH:  # set again by `start_process_group`
        monkeypatch.setenv(name, "")
        del os.environ[name]
    for name, value in (TASK | {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SharedError, match=r"^set\(\)$"):
        start_process_group(EngineConfig(), 30)


def test_no_place_for_extensions() -> None:
    said = command(TORCH_EXTENSIONS_DIR="/proc/sys/nowhere")  # not even for root
    assert "extensions cannot be compiled in /proc/sys/nowhere/" in said and "set TORCH_EXTENSIONS_DIR" in said, said


# A rank without torch: writes its parent and that one's parent, and what asked it to stop, if anything does within the
# seconds given.
RANK = """
import os, sys, time
from pathlib import Path
from xlme_ds.train.stop import StopRequest
stop, folder = StopRequest(), Path(sys.argv[-2])
parent = os.getppid()
above = Path(f"/proc/{parent}/stat").read_text().split()[3]
def write(ending, text):  # a file that is there is whole
    (folder / f"{os.getpid()}.tmp").write_text(text)
    (folder / f"{os.getpid()}.tmp").rename(folder / f"{os.getpid()}.{ending}")
write("started", f"{parent} {above}")
end = time.monotonic() + float(sys.argv[-1])
while stop.received is None and time.monotonic() < end:
    time.sleep(0.05)
write("stopped", str(stop.received))
"""


def written(folder: Path, ending: str, number: int) -> list[str]:
    """What `number` files with that ending hold, once they are there."""
    deadline = time.monotonic() + 300  # far beyond what a loaded machine needs
    while len(found := sorted(folder.glob(f"*.{ending}"))) < number:
        assert time.monotonic() < deadline, f"{found} of {number} {ending}"
        time.sleep(0.05)
    return [path.read_text() for path in found]


def deepspeed(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The real launcher with two such ranks; its process, and its child's number."""
    (folder / "rank.py").write_text(RANK)
    words = [
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        str(folder / "rank.py"),
        str(folder),
        "100",
    ]
    runner = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (launch, above), (same, _) = (line.split() for line in written(folder, "started", 2))
    assert launch == same and int(above) == runner.pid
    return runner, int(launch)


def kill_runner(runner: int, launch: int) -> None:
    os.kill(runner, signal.SIGTERM)


def kill_launch(runner: int, launch: int) -> None:
    os.kill(launch, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_runner, kill_launch])
def test_ranks_stop_when_deepspeeds_launcher_has_gone(tmp_path: Path, kill: Callable[[int, int], None]) -> None:
    """`deepspeed` dies of a signal and leaves its child; killed, the child leaves the ranks."""
    runner, launch = deepspeed(tmp_path)
    kill(runner.pid, launch)
    assert written(tmp_path, "stopped", 2) == ["SIGTERM", "SIGTERM"]
    assert runner.wait(timeout=60) == (-signal.SIGTERM if kill is kill_runner else 0)


def test_other_parents_may_go(tmp_path: Path) -> None:
    """A run in the background of a shell that ends, as with nohup."""
    command = [sys.executable, "-c", RANK, str(tmp_path), "3"]
    shell = subprocess.Popen(
        ["bash", "-c", '"$@" & read', "bash", *command], cwd=ROOT, env=environment(), stdin=subprocess.PIPE
    )
    [parents] = written(tmp_path, "started", 1)
    assert parents.split()[0] == str(shell.pid)
    shell.communicate()
    assert written(tmp_path, "stopped", 1) == ["None"]


def test_a_free_port_is_below_those_of_the_system_and_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("", run_commands.free_port()))
        first, other = busy.getsockname()[1], run_commands.free_port()
        drawn = iter([first, first, other])
        bounds = []

        def draw(_: object, low: int, high: int) -> int:
            bounds.append((low, high))
            return next(drawn)

        monkeypatch.setattr(run_commands.random.SystemRandom, "randrange", draw)
        monkeypatch.setattr(run_commands, "PORT_COUNT", 19_000)
        assert run_commands.free_port() == other
    assert 10_000 <= first < 30_000 and bounds == [(10_000, 29_000)] * 3


# Under NCCL, leaving the group may wait for all ranks, so a rank that fails alone must not do it. With gloo nothing
# waits, so the ranks print whether they leave.
FAILS = """
import sys
import torch.distributed as dist
from xlme_ds.config import EngineConfig
from xlme_ds.engine.ranks import SharedError, process_group
leave = dist.destroy_process_group
dist.destroy_process_group = lambda group=None: (print("leaves"), leave(group))
with process_group(EngineConfig("deepspeed", "zero1"), 1) as (rank, _):
    if sys.argv[1] == "shared":
        raise SharedError("of all ranks")
    if rank == 1:
        raise RuntimeError("CUDA out of memory")
    dist.barrier()
"""


def test_a_rank_that_fails_alone_ends_without_the_others() -> None:
    shared = run_ranks(2, ["-c", FAILS, "shared"])
    assert [(rank.returncode, rank.stdout.split()) for rank in shared] == [(1, ["leaves"])] * 2, shared
    waiting, failed = run_ranks(2, ["-c", FAILS, "alone"])
    assert (failed.returncode, failed.stdout) == (1, "") and "RuntimeError: CUDA out of memory" in failed.stderr
    assert waiting.returncode == 1, "gloo tells it that the other is gone; under NCCL its launcher ends it"
