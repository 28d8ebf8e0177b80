import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from data_prep.__main__ import main
from data_prep.parallel import RetryError, TaskError, UserError, _balanced_shares, run_tasks, user_facing_error

HERE = Path(__file__).resolve().parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"
needs_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason="the environment has no mpiexec: install the mpich wheel")


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    sys.path.insert(0, str(HERE))  # worker processes take over sys.path
    return importlib.import_module("parallel_tasks")


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_task_order(
    tasks: ModuleType, processes: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [3, 50, 1, 20, 7]
    monkeypatch.setattr("data_prep.progress._SECONDS_BETWEEN_LINES", 0.0)
    assert run_tasks(tasks.square, numbers, numbers, processes, "squares") == [n * n for n in numbers]
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "squares: 100%"
    assert len(lines) <= 5
    assert run_tasks(tasks.square, [], [], processes, "nothing") == []
    capsys.readouterr()
    assert run_tasks(tasks.square, numbers, numbers, processes, "silent", show_progress=False)[1] == 2500
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_users_mistake_keeps_its_words_and_ours_its_traceback(tasks: ModuleType, processes: int) -> None:
    with pytest.raises(UserError, match=r"^task three does not like its input$"):
        run_tasks(tasks.fail_on, [1, 2, 3, 4], [1, 1, 1, 1], processes, "test")
    with pytest.raises(TaskError, match=r"(?s)Traceback.*in fail_on.*a mistake of ours"):
        run_tasks(tasks.fail_on, [1, 2, 5], [1, 1, 1], processes, "test")


def test_a_failure_ends_the_tasks_that_still_run(tasks: ModuleType) -> None:
    with pytest.raises(UserError, match="the short one failed"):
        run_tasks(tasks.fail_or_sleep, [0, 1, 2], [1, 5, 1], 2, "test")
    assert not multiprocessing.active_children()


def test_no_task_begins_after_one_that_failed() -> None:
    begun: list[int] = []

    def fail_on_two(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise ValueError("two")

    with pytest.raises(UserError, match="two"):
        run_tasks(fail_on_two, [1, 2, 3, 4], [1] * 4, 1, "test")
    assert begun == [1, 2]


@needs_mpi
def test_ranks_begin_no_task_after_one_that_failed_elsewhere(tmp_path: Path) -> None:
    """Of 300 tasks of one rank the second waits until the other rank has failed. A line is one write (`print` makes
    two), between which the other rank cannot write."""
    program = (
        "import sys, time; from pathlib import Path; from data_prep.parallel import on_root, run_tasks\n"
        "folder = Path(sys.argv[1])\n"
        "def do(number):\n"
        "    if number == 1000: (folder / 'failed').touch(); raise ValueError('at once')\n"
        "    while number and not (folder / 'failed').exists(): time.sleep(0.01)\n"
        "    time.sleep(0.1); (folder / str(number)).touch()\n"
        "try: on_root(lambda: run_tasks(do, [1000, *range(300)], [300] + [1] * 300, 1, 'test'))\n"
        "except ValueError as error: sys.stdout.write(f'{error}\\n')\n"
    )
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", program, tmp_path]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(HERE.parents[1])}, capture_output=True, text=True
    )
    assert done.stdout == "at once\n" * 2, done.stderr
    assert len(list(tmp_path.iterdir())) < 150  # the message may take seconds on a busy machine


def test_a_killed_worker_is_an_error_and_no_hang(tasks: ModuleType) -> None:
    with pytest.raises(RetryError, match=r"^a worker of test died with exit code -9:"):
        run_tasks(tasks.killed, [0, 1, 2], [1, 1, 1], 2, "test")
    assert not multiprocessing.active_children()


def test_an_interrupt_is_for_the_parent_alone(tasks: ModuleType) -> None:
    """Else each worker would print a traceback."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for processes, handler in ((1, signal.default_int_handler), (2, signal.SIG_IGN)):
            assert run_tasks(tasks.handler_of_interrupts, [0, 1], [1, 1], processes, "test") == [handler] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_too_many_processes_are_named(tasks: ModuleType) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = set(range(10_000)) - set(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (sorted(free)[16], before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as raised:
            run_tasks(tasks.square, [1] * 40, [1] * 40, 40, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "use fewer processes, or raise the limit of open files" in str(user_facing_error(raised.value))
    assert not multiprocessing.active_children()


def test_ranks_have_about_as_much_to_do() -> None:
    """Each task goes, the largest first, to the rank that has the least: by hand."""
    assert _balanced_shares([2, 5, 3, 3, 1], 2) == [[1, 0], [2, 3, 4]]
    assert _balanced_shares([1, 1], 3) == [[0], [1], []]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl ends the workers")
def test_workers_die_with_a_parent_that_is_killed() -> None:
    """Else they would go on to write into a folder that the next run has taken."""
    program = "import parallel_tasks as t; t.run_tasks(t.work_for_long, [1, 2], [1, 1], 2, 'test')"
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["works\n"] * 2
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "", "no worker lived to say so"


def test_processes_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--data", "nowhere", "--processes", "0"]) == 2
    assert "error: --processes is 0: it must be at least 1\n" in capsys.readouterr().err


def ranks(numbers: list[int], launcher: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])} | variables
    command = [*launcher, sys.executable, str(HERE / "parallel_tasks.py"), *map(str, numbers)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@needs_mpi
def test_every_rank_gets_the_whole_list() -> None:
    done = ranks([10, 1, 2], [str(MPIEXEC), "-n", "3"])
    lines = sorted(done.stdout.splitlines())
    expected = ["again [1, 4]"] * 3 + ["got [10, 1, 2] other"] * 2 + ["got [10, 1, 2] root"]
    assert lines == expected + ["on root: task three does not like its input"] * 3, done.stderr


@needs_mpi
@pytest.mark.parametrize("numbers", [[1, 2, 3, 4], [4, 3, 3, 3]])
def test_every_rank_raises_the_same_error(numbers: list[int]) -> None:
    done = ranks(numbers, [str(MPIEXEC), "-n", "2"])
    lines, words = sorted(done.stdout.splitlines()), "task three does not like its input"
    assert lines == ["again [1, 4]"] * 2 + [f"on root: {words}"] * 2 + [f"shared: {words}"] * 2, done.stderr
    done = ranks([5, 1], [str(MPIEXEC), "-n", "2"])
    assert done.stdout.count("ours: KeyError: 'a mistake of ours'") == 2, done.stderr


@needs_mpi
@pytest.mark.parametrize(
    "again", ["", "time.sleep = lambda seconds: signal.raise_signal(signal.SIGINT)"], ids=["once", "twice"]
)
def test_an_error_of_one_rank_ends_the_others(again: str) -> None:
    """That rank tells it; the others wait for the rank. A second Ctrl-C comes while it waits for its output to be
    read."""
    program = (
        "import os, signal, sys, time; from data_prep import __main__, parallel\n"
        "from data_prep.inspect import verify\n"
        "def do(root):\n"
        "    if os.getpid() != root:\n"
        f"        {again}\n"
        "        raise KeyboardInterrupt\n"
        "def run(config): parallel.run_tasks(do, [os.getpid()] * 2, [1, 1], 1, 'test')\n"
        "verify.run = run; sys.exit(__main__.main(['verify', '--data', 'nowhere']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    told = done.stderr.count("xlme prep verify: interrupted: the same command begins again\n")
    assert (done.returncode, told) == (130, 1), done.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("parallel.progress_bar = None", "TypeError"),
        ("os.dup2(os.open('/dev/full', 1), 1)", "stdout cannot be written"),
    ],
    ids=["outside a task", "stdout is full"],
)
def test_an_error_of_the_root_ends_the_others(fault: str, told: str) -> None:
    """The launcher's forwarder of output is stopped for two seconds, as on a busy machine: it is still told."""
    program = (
        "import os, sys, time; from data_prep import __main__, parallel; from data_prep.inspect import verify\n"
        "from xlme_ds.io.stdout import guard_stdout\n"
        "if parallel.is_root(): exec(sys.argv[1])\n"
        "if parallel.is_root():\n"
        "    os.kill(os.getppid(), 19); os.system(f'(sleep 2; kill -CONT {os.getppid()}) > /dev/null 2>&1 &')\n"
        "guard_stdout()\n"
        "def run(config): parallel.run_tasks(time.sleep, [0.1] * 4, [1] * 4, 1, 'test'); print('done', flush=True)\n"
        "verify.run = run; sys.exit(__main__.main(['verify', '--data', 'nowhere']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", program, fault]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and told in done.stderr, done.stderr


LAUNCHERS = {"PMI": "PMI_SIZE PMI_RANK", "OpenMPI": "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK"}
LAUNCHERS |= {"srun": "SLURM_STEP_NUM_TASKS SLURM_PROCID"}


def test_a_launcher_of_another_mpi_is_told_once() -> None:
    """By the first process, whatever the launcher calls it; the others end with its exit code."""
    command = [sys.executable, "-m", "data_prep", "verify", "--data", "nowhere"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
    plain |= {"PYTHONPATH": str(HERE.parents[1])}
    started = {}
    for launcher, names in LAUNCHERS.items():
        for rank in ("0", "3"):
            own = dict(zip(names.split(), ("4", rank), strict=True))
            started[launcher, rank] = subprocess.Popen(command, env=plain | own, stderr=subprocess.PIPE, text=True)
    for (launcher, rank), process in started.items():
        told = process.communicate()[1]
        words = "xlme prep verify: error: the launcher started 4 processes, but MPI does not connect them: start them "
        assert process.returncode == 2 and told.count(words) == told.count("error") == (rank == "0"), (launcher, told)
