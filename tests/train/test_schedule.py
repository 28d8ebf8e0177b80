"""The learning rate of every schedule, by its formula."""

import pytest
import torch

from xlme_ds.config import OptimizerConfig, ScheduleConfig
from xlme_ds.train.schedule import learning_rate


def test_warm_up_and_decay() -> None:
    cfg = OptimizerConfig(learning_rate=5e-4, warmup_steps=10_000)
    rates = [learning_rate(step, 125_000, cfg) for step in (0, 4_999, 9_999, 10_000, 67_500, 124_999)]
    assert rates == pytest.approx([5e-8, 2.5e-4, 5e-4, 5e-4, 2.5e-4, 5e-4 / 115_000])


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, 100, OptimizerConfig(learning_rate=1e-3, warmup_steps=0)) == pytest.approx(1e-3)


def test_cosine_is_torchs() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
    cfg = OptimizerConfig(learning_rate=3e-4, warmup_steps=10)
    for step in range(10, 100):
        assert learning_rate(step, 100, cfg, ScheduleConfig("cosine")) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_decay_by_the_root() -> None:
    cfg, schedule = OptimizerConfig(learning_rate=1.0, warmup_steps=2), ScheduleConfig("wsd", decay_steps=4)
    rates = [learning_rate(step, 10, cfg, schedule) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])
    assert {learning_rate(step, 10, cfg, ScheduleConfig("wsd")) for step in range(2, 10)} == {1.0}


def test_inverse_root_is_xlms() -> None:
    """lr * sqrt(warm-up / number of the update), as XLM's `adam_inverse_sqrt`; it does not depend on the length."""
    cfg = OptimizerConfig(learning_rate=1e-4, warmup_steps=4000)
    rates = [
        learning_rate(step, steps, cfg, ScheduleConfig("inverse_sqrt")) for step in (3999, 15_999) for steps in (1, 9)
    ]
    assert rates == pytest.approx([1e-4, 1e-4, 5e-5, 5e-5])
    at_once = OptimizerConfig(learning_rate=1e-4, warmup_steps=0)
    assert learning_rate(3, 9, at_once, ScheduleConfig("inverse_sqrt")) == pytest.approx(5e-5)
