"""Fewer passes over gradients give the same weights as DeepSpeed's own ones, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

WAYS = "spared", "spared, immediate"


@pytest.fixture(scope="module", params=(1, 2))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("bf16") / "out"
    worker = str(Path(__file__).with_name("bf16_gradients_worker.py"))
    done = run_ranks(request.param, [worker, str(out)])
    assert all(one.returncode == 0 for one in done), "\n".join(one.stderr[-3000:] for one in done)
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_weights(ranks: list[dict[str, Any]], way: str) -> None:
    """Steps without a gradient for one layer among them: what the step before left there must not count."""
    for rank in ranks:
        if len(ranks) > 1:
            assert rank[way]["norms"] == rank["as it comes"]["norms"]
            assert rank[way]["weights"] == rank["as it comes"]["weights"]
        else:  # DeepSpeed rounds gradients to bf16 there too, where nothing is sent
            assert rank[way]["norms"] == pytest.approx(rank["as it comes"]["norms"], rel=4e-3)
            assert rank[way]["norms"] != rank["as it comes"]["norms"]
        assert rank[way]["weights"] == ranks[0][way]["weights"]


@pytest.mark.parametrize("way", WAYS)
def test_no_buffer_of_all_gradients_but_what_is_sent(ranks: list[dict[str, Any]], way: str) -> None:
    for rank in ranks:
        assert rank[way]["made"][1:] == [1 if len(ranks) > 1 else 0] * (len(rank[way]["made"]) - 1)
        assert min(rank["as it comes"]["made"][1:]) >= 2
