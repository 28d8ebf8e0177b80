"""A Slurm cluster of two nodes on this machine, where it can be had: root, and Slurm's packages."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import MINISLURM, Cluster

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "ip")


@pytest.fixture(scope="module")  # not the session: another process's files wait for the lock
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("a Slurm cluster on this machine needs root")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: tests/slurm/minislurm.sh install")
    with open("/run/minislurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a machine has one such cluster
        started = subprocess.run([MINISLURM, "start", "2"], capture_output=True, text=True)
        assert started.returncode == 0, started.stderr
        try:
            yield Cluster(tmp_path_factory.mktemp("slurm"))
        finally:
            subprocess.run([MINISLURM, "stop"], check=True)
