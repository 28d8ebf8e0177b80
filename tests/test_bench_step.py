"""The step bench: its contenders learn, and its processes answer."""

from itertools import count

import pytest
import torch

from bench.measure import Worker, by_turns
from bench.peers.steps import HuggingFaceStep, PeerStep, PlainTorchStep
from bench.step import sized


@pytest.mark.parametrize("contender", [HuggingFaceStep, PlainTorchStep])
@torch.random.fork_rng()
def test_peers_learn(contender: type[PeerStep]) -> None:
    """A peer that did not train would be no peer. It draws from torch's own generator, in which other tests drew."""
    torch.manual_seed(0)
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


def test_rounds_that_warm_up_do_not_count() -> None:
    ours, peer = count(1), count(11)
    expected = [{"ours": n, "peer": 10 + n} for n in (3, 4, 5)]
    assert by_turns({"ours": lambda: next(ours), "peer": lambda: next(peer)}, 3, warm_up=2) == expected
    assert by_turns({"ours": lambda: 1}, 3, deadline=0.0) == [], "the time was up after a round that warms up"


def test_a_contender_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    worker = Worker("bench.step", "ours", "tiny")
    answers = [worker.ask() for _ in range(2)]
    worker.close()
    assert all(answer["wall"] > 0 for answer in answers) and answers[1]["memory"] >= answers[0]["memory"] > 0
    assert worker.process.exitcode == 0
