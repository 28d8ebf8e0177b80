"""The step bench: its contenders learn, its processes answer; the scaling bench counts what it says it counts."""

import subprocess
import sys
from dataclasses import replace

import pytest

from bench.scaling import Settings, axis, computed, sending, worlds
from bench.scaling_rank import Case
from bench.step import Worker, run_config
from bench.step_contenders import HuggingFace, Loop, PlainTorch
from tests.launch import ROOT, environment
from xlme_ds.counting import flops_per_step

TINY = Case(layers=2, width=64, tokens=32, vocabulary=600, positions=128)


@pytest.mark.parametrize("contender", [HuggingFace, PlainTorch])
def test_peers_learn(contender: type[Loop]) -> None:
    """A peer that did not train would be no peer."""
    loop = contender(run_config("tiny"))
    losses: list[float] = []
    original = loop.loss

    def noted(*arguments):  # type: ignore[no-untyped-def]
        value = original(*arguments)
        losses.append(value.item())
        return value

    loop.loss = noted  # type: ignore[method-assign]
    for group in loop.optimizer.param_groups:
        group["lr"] = 3e-3
    for _ in range(8):
        loop.step()
    assert losses[-1] < losses[0] - 0.1


def test_a_contender_answers() -> None:
    worker = Worker("ours", "tiny")
    answers = [worker.step() for _ in range(2)]
    worker.close()
    assert all(answer["s"] > 0 for answer in answers) and answers[1]["memory"] >= answers[0]["memory"] > 0
    assert all(0 < answer["generator"] < 1 for answer in answers)
    assert worker.process.returncode == 0


SHARE = """
import sys
from dataclasses import replace
from bench.step import run_config
from bench.step_contenders import Ours
run = run_config("tiny")
layers = dict(zip(("generator_layers", "discriminator_layers"), map(int, sys.argv[1:])))
ours = Ours(replace(run, model=replace(run.model, **layers)))
for _ in range(3):
    ours.step()
print(ours.generator_share)
"""


def test_the_generators_share_is_what_it_takes() -> None:
    """Of a model that is hardly more than a generator the most, the other way round the least."""
    shares = []
    for layers in (("12", "1"), ("1", "12")):
        done = subprocess.run(
            [sys.executable, "-c", SHARE, *layers], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        shares.append(float(done.stdout.split()[-1]))
    assert shares[0] > 0.6 and shares[1] < 0.5


def test_scaling_counts() -> None:
    (found,) = axis("layers", (2,), TINY, rounds=1)
    assert found["flops"] == flops_per_step(TINY.run, 32) and found["predicted_s"] == found["step_s"]
    (two,) = worlds((2,), TINY, rounds=1)
    # ZeRO-1 sends every gradient and every weight, bf16, half of them to each other; twice for the all-reduce.
    assert two["sent_bytes"] == pytest.approx(3 * 2 * found["parameters"] / 2)
    assert 0 < two["sending_s"] < two["step_s"] and two["predicted_s"] > 0


def test_waiting_is_not_sending() -> None:
    assert sending([{"collectives": [3.0, 0.5]}, {"collectives": [1.0, 2.0]}]) == 1.5


def test_computed_curve() -> None:
    rows = computed(Settings())
    for zero in ("zero1", "zero2", "zero3"):
        values = [row["efficiency"] for row in rows if row["zero"] == zero]
        assert values == sorted(values, reverse=True) and values[-1] > 0.5
    assert computed(replace(Settings(), bandwidth=1.0))[0]["efficiency"] < rows[0]["efficiency"]
