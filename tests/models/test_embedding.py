"""Lookup in a table of one or several blocks against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from xlme_ds.models.encoder import lookup


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 3, 50])
def test_lookup_is_torchs_embedding(dtype: torch.dtype, blocks: int) -> None:
    g = torch.Generator().manual_seed(0)
    table = torch.randn(50, 6, generator=g).to(dtype)
    ids = torch.randint(50, (4, 9), generator=g)
    ids[0, :3] = torch.tensor([0, 49, 49])
    weight = torch.randn(4, 9, 6, generator=g).to(dtype)
    ours = table.clone().requires_grad_()
    out = lookup(ids, list(ours.split(-(-50 // blocks))))
    (grad,) = torch.autograd.grad((out * weight).sum(), ours)
    exact = table.double().requires_grad_()
    expected = F.embedding(ids, exact)
    (expected_grad,) = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert out.dtype == grad.dtype == dtype
    assert torch.equal(out.double(), expected)
    # Sums of at most a few rows in float32 or better, rounded once to the table's type.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, atol=4 * torch.finfo(torch.float32).eps, rtol=eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_sparse_gradients_are_added_to_a_dense_one(dtype: torch.dtype, first: bool) -> None:
    """In whatever order they come; the sum is a dense tensor, as engines want it."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(50, 6, generator=g).to(dtype).requires_grad_()
    ids = torch.randint(50, (2, 40), generator=g)
    grads = []
    for sparse in (True, False):
        parts = [
            (table.tanh() * 3).sum(),
            lookup(ids[0], [table], sparse).square().sum(),
            lookup(ids[1], [table], sparse).sum(),
        ]
        table.grad = None
        sum(parts if first else parts[::-1]).backward()  # type: ignore[union-attr]
        assert table.grad is not None and not table.grad.is_sparse
        grads.append(table.grad.clone())
    torch.testing.assert_close(*grads, atol=0, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("sparse", [False, True])
def test_bf16_gradient_of_a_frequent_token(sparse: bool) -> None:
    """5,000 rows of one token: the running bf16 sum of torch's own backward stops growing at 256 times an addend."""
    table = torch.zeros(10, 4, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.full((50, 100), 7)
    ids[0, 0] = 3
    (of_torch,) = torch.autograd.grad(F.embedding(ids, table).sum(), table)
    assert of_torch[7].tolist() == [256.0] * 4, "torch adds otherwise now: is a backward of our own still needed?"
    for blocks in (1, 2):
        (grad,) = torch.autograd.grad(lookup(ids, list(table.split(10 // blocks)), sparse).sum(), table)
        grad = grad.to_dense()
        assert (grad[7].double() - 4999).abs().max() <= 4999 * 2.0**-9  # one rounding to bf16
        assert grad[3].tolist() == [1.0] * 4
        assert not grad[[0, 1, 2, 4, 5, 6, 8, 9]].any()
