"""What all tests share."""

import os
from collections.abc import Iterator

import pytest

from xlme_ds.engine.ranks import TORCH_VARIABLES


@pytest.fixture(scope="module", autouse=True)
def launcher_variables() -> Iterator[None]:
    """A run in the test's own process sets the launcher's variables; other files' tests must not inherit them."""
    before = {name: os.environ.get(name) for name in TORCH_VARIABLES}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
