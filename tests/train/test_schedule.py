"""The learning rate at the ends of its two lines."""

import pytest

from xlme_ds.config import OptimizerConfig
from xlme_ds.train.loop import learning_rate


def test_warm_up_and_decay() -> None:
    cfg = OptimizerConfig(learning_rate=5e-4, warmup_steps=10_000)
    rates = [learning_rate(step, 125_000, cfg) for step in (0, 4_999, 9_999, 10_000, 67_500, 124_999)]
    assert rates == pytest.approx([5e-8, 2.5e-4, 5e-4, 5e-4, 2.5e-4, 5e-4 / 115_000])


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, 100, OptimizerConfig(learning_rate=1e-3, warmup_steps=0)) == pytest.approx(1e-3)
