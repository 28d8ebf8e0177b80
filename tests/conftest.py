"""What all tests share."""

import os
import signal
from collections.abc import Iterator

import pytest
from tensorboard.summary.writer import event_file_writer

# Before torch is loaded. Several files run at a time: threads of theirs would spin while they wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from xlme_ds.run_commands import LAUNCHER_VARIABLES

# A reader takes the event files of one second in the order of their names, which end in this process's count of them:
# "10" would come before "9".
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**9)

# Files that take minutes, the longest first, so that all workers of `make test` end together. The two that use Slurm
# are far from each other.
LONG = (
    "slurm/test_rehearsal", "plan/test_memory", "engine/test_parity", "test_bench_gpu", "compare/test_at_scale",
    "train/test_run", "faults/test_campaign", "finetune/test_run", "e2e/test_tutorial", "slurm/test_jobs",
    "e2e/test_quickstart", "test_bench_roofline", "models/test_attention_triton", "test_packaging", "test_stdout",
    "e2e/test_resume", "compare/test_command", "engine/test_offload", "engine/test_elastic", "train/test_branches",
    "data_prep/test_records", "plan/test_planner", "data_prep/test_encode",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(scope="module", autouse=True)
def launcher_variables() -> Iterator[None]:
    """A run in the test's own process sets the launcher's variables, and listens for signals by the descriptor to which
    Python writes their numbers; other files' tests must not inherit either."""
    before = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES}
    yield
    signal.set_wakeup_fd(-1)  # else its listener would end this process 3 s after a signal that a test sends
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
