"""The step bench: its contenders learn, its processes answer; the scaling bench counts what it says it counts."""

import pytest

from bench.scaling import ScalingCase, axis, sending, worlds
from bench.step import HuggingFaceStep, PeerStep, PlainTorchStep, sized
from bench.workers import Workers
from xlme_ds.counting import flops_per_step

TINY = ScalingCase(layers=2, width=64, tokens=32, vocabulary=600, positions=128)


@pytest.mark.parametrize("contender", [HuggingFaceStep, PlainTorchStep])
def test_peers_learn(contender: type[PeerStep]) -> None:
    """A peer that did not train would be no peer."""
    loop = contender(sized("tiny"))
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
    worker = Workers("bench.step", "--contender", "ours", "--sizes", "tiny")
    answers = [worker.ask()[0] for _ in range(2)]
    worker.close()
    assert all(answer["s"] > 0 for answer in answers) and answers[1]["memory"] >= answers[0]["memory"] > 0
    assert worker.processes[0].returncode == 0


def test_scaling_counts() -> None:
    (found,) = axis("layers", (2,), TINY, rounds=1)
    assert found["flops"] == flops_per_step(TINY.run, 32) and found["predicted_s"] == pytest.approx(found["step_s"])
    (two,) = worlds((2,), TINY, rounds=1)
    # ZeRO-1 sends every gradient and every weight, bf16, half of them to each other; twice for the all-reduce.
    assert two["sent_bytes"] == pytest.approx(3 * 2 * found["parameters"] / 2)
    assert 0 < two["sending_s"] < two["step_s"] and two["predicted_s"] > 0


def test_waiting_is_not_sending() -> None:
    assert sending([{"collectives": [3.0, 0.5]}, {"collectives": [1.0, 2.0]}]) == 1.5
