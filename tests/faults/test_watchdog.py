"""A process that stands still, in Python or outside of it, ends with its stacks; one that gets on does not; collectives
wait longer."""

import subprocess
import sys

import pytest

from tests.launch import ROOT, environment, run_ranks

PROGRAM = """
import ctypes, sys, time
from xlme_ds.train import stop
stop._GRACE = 3.0
dog = stop.Watchdog(1 / 30, rank=3)  # 2 s: a busy machine may wake this process a second late
def getting_on():
    for number in range(25):
        time.sleep(0.1)
        dog.beat(f"taking step {number}")
def standing_still():
    time.sleep(60)
def inside_c_code_that_keeps_the_interpreter():
    ctypes.PyDLL(None).sleep(60)
getting_on()
if sys.argv[1] != "closed":
    globals()[sys.argv[1]]()
dog.close()
time.sleep(3)
"""


def run(what: str) -> tuple[int, str]:
    """Exit code, 0 where nothing ends the program before it does so itself, and what it said."""
    command = [sys.executable, "-c", PROGRAM, what]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    return done.returncode, done.stderr


def test_a_run_that_gets_on_or_is_over_is_left_alone() -> None:
    assert run("closed") == (0, "")


def test_standing_still() -> None:
    code, said = run("standing_still")
    assert code == 1
    assert "rank 3 stood still for 0.0333333 minutes (train.watchdog_minutes) while taking step 24" in said
    assert "in standing_still" in said, said


@pytest.mark.skipif(sys.platform != "linux", reason="PyDLL(None) is libc's sleep on Linux")
def test_where_no_thread_of_python_runs() -> None:
    code, said = run("inside_c_code_that_keeps_the_interpreter")
    assert code == 1
    assert "Timeout (0:00:0" in said and "in inside_c_code" in said, said


# Every group that DeepSpeed makes for a pipeline, and those of ours: (rank, seconds that a collective of it waits).
GROUPS = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from xlme_ds.config import EngineConfig
from xlme_ds.engine.ranks import exit_now, start_process_group
rank, world = start_process_group(EngineConfig(), float(sys.argv[1]))
from deepspeed.pipe import PipelineModule
before = len(dist.distributed_c10d._world.pg_map)
PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=world)
groups = list(dist.distributed_c10d._world.pg_map)
assert len(groups) >= before + 3, "the world's and the stages' own"
for group in groups:
    print("waits", group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
dist.barrier()
exit_now()
"""


@pytest.mark.parametrize(("world", "minutes", "least"), [(2, 45, 45 * 60 + 30), (1, 0, 12 * 3600)])
def test_collectives_wait_until_the_watchdog_has_spoken(world: int, minutes: int, least: int) -> None:
    """torch waits 30 minutes, on GPUs 10, DeepSpeed 10: ranks that wait would end before the one that hangs says
    where."""
    for done in run_ranks(world, ["-c", GROUPS, str(minutes)]):
        assert done.returncode == 0, done.stderr
        waits = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("waits ")]
        assert waits and min(waits) >= least, waits
