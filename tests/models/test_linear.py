"""The linear map whose weights' gradient is computed in pieces, against torch's own in float64."""

import pytest
import torch
from torch import Tensor, nn

from xlme_ds.models import layers
from xlme_ds.models.layers import Linear


@pytest.mark.parametrize("tokens", [1, 12, 100])
def test_gradients_are_torchs(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens in 8 pieces, the largest number, of 13; the last piece is smaller."""
    monkeypatch.setattr(layers, "_PIECE_TOKENS", 12)
    torch.manual_seed(0)
    ours, whole = Linear(6, 5).to(torch.bfloat16), nn.Linear(6, 5).double()
    whole.load_state_dict(ours.state_dict())
    pieces: list[Tensor] = []
    for map_ in (ours, whole):
        x = torch.linspace(-1, 1, tokens * 6).view(1, tokens, 6).bfloat16().to(map_.weight.dtype).requires_grad_()
        out = map_(x)
        (out.double() ** 2 @ torch.arange(5.0).double()).sum().backward()
        assert x.grad is not None
        pieces += [out, x.grad, map_.weight.grad, map_.bias.grad]
    for mine, exact in zip(pieces[:4], pieces[4:], strict=True):
        assert float(((mine - exact).abs().max() / exact.abs().max()).detach()) < 0.02  # roundings by 2^-9


def test_weights_learn_alone() -> None:
    """The input may need no gradient."""
    ours = Linear(6, 5).to(torch.bfloat16)
    ours(torch.ones(2, 3, 6, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(ours.weight.grad, torch.full((5, 6), 6, dtype=torch.bfloat16))
