"""Fewer passes over gradients give the same weights as DeepSpeed's own ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launch import run_ranks
from xlme_ds.engine.bf16_gradients import _accumulate, split_param_groups

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
        assert min(rank[way]["norms"]) < 0.5 < max(rank[way]["norms"]), "one is not clipped"
        if len(ranks) > 1:  # each rank looks at its own part
            assert rank[way]["norms"] == pytest.approx(rank["as it comes"]["norms"], rel=1e-6)
            assert rank[way]["masters"] == pytest.approx(rank["as it comes"]["masters"], rel=1e-5, abs=1e-7)
        else:  # DeepSpeed rounds gradients to bf16 there too, where nothing is sent
            assert rank[way]["norms"] == pytest.approx(rank["as it comes"]["norms"], rel=4e-3)
            assert rank[way]["norms"] != rank["as it comes"]["norms"]
        assert rank[way]["weights"] == ranks[0][way]["weights"]


def test_bf16_gradients_of_one_micro_batch_lose_nothing(ranks: list[dict[str, Any]]) -> None:
    """They are what the backward pass gives; norm and clipping are computed in another order."""
    for rank in ranks:
        assert rank["halved"]["norms"] == pytest.approx(rank["one micro-batch"]["norms"], rel=1e-5)
        assert rank["halved"]["masters"] == pytest.approx(rank["one micro-batch"]["masters"], rel=1e-4, abs=1e-6)
        assert rank["halved"]["weights"] == ranks[0]["halved"]["weights"]


def test_groups_are_sent_from_the_last_layer_to_the_first() -> None:
    """Of at most 12 elements, or of one parameter; both tables last, each with the settings of its group."""
    module = nn.Module()
    for name in ("embedding_0", "difference_0"):
        module.register_parameter(name, nn.Parameter(torch.zeros(4)))
    module.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
    module.head = nn.Linear(2, 4)
    names = {parameter: name for name, parameter in module.named_parameters()}
    biases = [parameter for parameter, name in names.items() if name.endswith("bias")]
    others = [parameter for parameter in names if all(parameter is not bias for bias in biases)]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    split_param_groups(optimizer, module, 12)
    assert [" ".join(names[each] for each in group["params"]) for group in optimizer.param_groups] == [
        "head.weight",
        "layers.2.weight layers.1.weight",
        "head.bias layers.2.bias layers.1.bias layers.0.bias",
        "layers.0.weight",
        "difference_0 embedding_0",
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0, 0.1, 0.1]
    assert [group["late"] for group in optimizer.param_groups] == [False] * 4 + [True]


def test_a_frequent_tokens_rows_add_up_in_float32() -> None:
    """In bf16 the sum of ones would end at 256."""
    total = torch.ones(4, 2, dtype=torch.bfloat16)
    rows, ones = torch.tensor([[2] * 1000 + [0]]), torch.ones(1001, 2, dtype=torch.bfloat16)
    _accumulate(total, torch.sparse_coo_tensor(rows, ones, total.shape, check_invariants=True))
    assert total[:, 0].tolist() == [2, 1, 1000, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gradient_is_added_slice_by_slice(dtype: torch.dtype) -> None:
    """More than two slices, of which the last is shorter, from a tensor that is not contiguous."""
    part = torch.arange(3 * 2**18 - 6).remainder(251).view(-1, 3).bfloat16().t()
    total = torch.ones(part.shape, dtype=dtype)
    _accumulate(total, part)
    assert torch.equal(total.double(), (part.to(dtype) + 1).double())


@pytest.mark.parametrize("way", (*WAYS, "halved"))
def test_no_buffer_of_all_gradients_but_what_is_sent(ranks: list[dict[str, Any]], way: str) -> None:
    """Which is what stands there, if that is bf16."""
    sent = 1 if len(ranks) > 1 and way != "halved" else 0
    for rank in ranks:
        assert rank[way]["made"][1:] == [sent] * (len(rank[way]["made"]) - 1)
        assert min(rank["as it comes"]["made"][1:]) >= 2
