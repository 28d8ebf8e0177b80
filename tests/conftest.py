"""What all tests share."""

import os
import signal
from collections.abc import Iterator

import pytest
from tensorboard.summary.writer import event_file_writer

# Before torch is loaded. Two files run at a time on two cores: threads of theirs would spin while they wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from xlme_ds.run_commands import LAUNCHER_VARIABLES

# A reader takes the event files of one second in the order of their names, which end in this process's count of them:
# "10" would come before "9".
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**9)

# Files that take minutes, the longest first: `make test` runs two files at a time, and both ends come together.
LONG = (
    "engine/test_parity", "slurm/test_rehearsal", "plan/test_memory", "finetune/test_run", "e2e/test_resume",
    "engine/test_elastic", "compare/test_command", "engine/test_offload", "faults/test_campaign",
    "e2e/test_one_encoder", "slurm/test_jobs", "test_bench_roofline", "e2e/test_quickstart",
    "engine/test_optimizer_rule", "faults/test_bad_steps", "compare/test_at_scale", "engine/test_sums",
    "data_prep/test_encode",
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
