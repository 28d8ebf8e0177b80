"""What the tests ask of the Slurm cluster that minislurm.sh makes on this machine."""

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.launch import ROOT, environment

MINISLURM = Path(__file__).with_name("minislurm.sh")
SLURM_CONF = "/run/minislurm/slurm.conf"
# Variables that centres set for their users, which mean nothing here.
CENTRE = dict.fromkeys(("WORK", "SCRATCH", "DATA", "PROJECT", "STORE", "TASKS", "OUT", "MODEL"), "/nowhere")
# One process on each of two nodes, whatever the script asks for.
SMALL = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=100"]
_PATIENCE = 900  # seconds, far beyond what a loaded machine needs; a hang must not hold the suite


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds; `what` says what did not come."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {_PATIENCE} s"
        time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """A batch job and the file that it prints into."""

    number: int
    log: Path

    def field(self, name: str) -> str:
        """A field of `scontrol show job`, such as JobState or Restarts."""
        shown = slurm("scontrol", "show", "job", "--oneliner", str(self.number))
        found = re.search(rf"\b{name}=(\S*)", shown)
        assert found is not None, shown
        return found[1]

    def said(self) -> str:
        """What it printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, *states: str) -> str:
        """Wait until the job is over, which must be in one of `states`; returns what it printed."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.field("JobState") in over, f"the end of job {self.number}")
        assert self.field("JobState") in states, self.said()
        return self.said()

    def wait_for_restart(self, count: int) -> None:
        """Wait until Slurm has requeued the job `count` times."""
        wait_until(lambda: int(self.field("Restarts")) >= count or self.field("JobState") == "FAILED", "the requeue")
        assert self.field("JobState") != "FAILED", self.said()


@dataclass(frozen=True)
class Cluster:
    """What the tests ask of it."""

    logs: Path

    def submit(self, script: str, *words: object, options: list[str] | None = None, **variables: object) -> Job:
        """`sbatch OPTIONS slurm/SCRIPT WORDS` with environment `variables`, from the root of the repository."""
        output = ["--output", str(self.logs / "%j.out"), *SMALL, *(options or [])]
        said = slurm("sbatch", "--parsable", *output, f"slurm/{script}", *map(str, words), **variables)
        return self.job(said)

    def job(self, number: str) -> Job:
        """The job of that number, submitted with `--output` as `submit` does."""
        return Job(int(number), self.logs / f"{int(number)}.out")

    def fail(self, node: str) -> None:
        """Cut the power of `node`, and have Slurm notice at once."""
        subprocess.run([MINISLURM, "fail", node, "now"], check=True)

    def recover(self, node: str) -> None:
        """Boot it again."""
        subprocess.run([MINISLURM, "recover", node], check=True)


def slurm(*command: str, **variables: object) -> str:
    """Run one of Slurm's commands; returns what it printed."""
    env = environment(SLURM_CONF=SLURM_CONF, **CENTRE, **variables)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
