"""Attention against a loop over the paper's equations (XLM-E section 3.3), and the gates' gradients by differences."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from tests.small import SMALL, lively
from xlme_ds.models import attention_cpu
from xlme_ds.models.attention import (
    Gate,
    RelativePositionTable,
    TorchBias,
    attention_bias,
    causal_mask,
    cpu_attend,
    fused_attend,
    item_mask,
    relative_position_bucket,
    toeplitz,
    uses_triton,
)
from xlme_ds.models.layers import Attention
from xlme_ds.models.tiles import Tiling, tiling_of, use_tilings


def t5_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """T5's definition for one distance j − i, with a margin for borders that floating point just misses."""
    half = buckets // 2
    exact = half // 2
    sign = half if distance > 0 else 0
    size = abs(distance)
    if size < exact:
        return sign + size
    logarithmic = math.log(size / exact) / math.log(max_distance / exact) * (half - exact)
    return sign + min(half - 1, exact + math.floor(logarithmic + 1e-9))


@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (128, 256), (16, 64), (8, 12), (4, 8), (6, 9), (8, 3)]
)
def test_bucket_is_t5s(buckets: int, max_distance: int) -> None:
    distance = torch.arange(-1200, 1201)
    ours = relative_position_bucket(distance, buckets, max_distance)
    assert ours.tolist() == [t5_bucket(d, buckets, max_distance) for d in distance.tolist()]
    theirs = T5Attention._relative_position_bucket(distance, True, buckets, max_distance)
    assert torch.equal(ours, theirs)


def naive_attention(
    attention: Attention, table: Tensor | None, x_BTD: Tensor, segments_BT: Tensor, max_distance: int
) -> Tensor:
    """The paper's equations, one number at a time, in Python floats."""
    rows, tokens, width = x_BTD.shape
    size = width // attention.heads
    projected = (x_BTD @ attention.qkv.weight.t() + attention.qkv.bias).tolist()
    context = torch.zeros(rows, tokens, width, dtype=torch.float64)
    for b in range(rows):
        for h in range(attention.heads):

            def part(j: int, which: int, b: int = b, h: int = h) -> list[float]:
                start = which * width + h * size
                return projected[b][j][start : start + size]

            for i in range(tokens):
                q = part(i, 0)
                visible = [j for j in range(tokens) if segments_BT[b, j] == segments_BT[b, i]]
                scores = []
                for j in visible:
                    score = dot(q, part(j, 1)) / math.sqrt(size)
                    if table is not None:
                        score += relative_bias(
                            attention.gate, h, q, float(table[t5_bucket(j - i, len(table), max_distance), h])
                        )
                    scores.append(math.exp(score))
                for j, score in zip(visible, scores, strict=True):
                    for k, value in enumerate(part(j, 2)):
                        context[b, i, h * size + k] += score / sum(scores) * value
    return context @ attention.output.weight.t() + attention.output.bias


def relative_bias(gate: Gate | None, head: int, q: list[float], d: float) -> float:
    """r_{i-j} = d + g_update·d + (1 − g_update)·w·g_reset·d, or d alone without a gate."""
    if gate is None:
        return d
    g_update, g_reset = (1 / (1 + math.exp(-dot(q, vector.tolist()))) for vector in (gate.update, gate.reset))
    return d + g_update * d + (1 - g_update) * float(gate.scale[head]) * g_reset * d


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


SEGMENTS = torch.tensor([[1] * 5 + [2] * 4 + [3] * 3 + [0] * 2, [1] * 14])


@pytest.mark.parametrize("kind", ["gated", "plain", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_equals_the_papers_equations(kind: str, dtype: torch.dtype) -> None:
    cfg = replace(SMALL, relative_bias=kind, relative_max_distance=7)  # the rows reach past the last bucket's start
    attention = lively(Attention(cfg)).double()
    table = lively(
        RelativePositionTable(cfg.heads, cfg.relative_buckets, cfg.relative_max_distance), 1, std=1.0
    ).double()
    x = torch.randn(*SEGMENTS.shape, cfg.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    used = None if kind == "none" else table.weight.detach()
    with torch.no_grad():
        expected = naive_attention(attention, used, x, SEGMENTS, cfg.relative_max_distance)
        attention, table = attention.to(dtype), table.to(dtype)
        distance = None if kind == "none" else table(SEGMENTS.shape[1])
        actual = attention(x.to(dtype), attention_bias(cfg, SEGMENTS, distance, dtype))
    # Rounding of sums of ~30 terms of size ~1: a few hundred units in the last place.
    bound = 1e-12 if dtype == torch.float64 else 3e-5
    torch.testing.assert_close(actual.double(), expected, atol=bound, rtol=0)


def test_when_attention_runs_in_the_triton_kernels() -> None:
    """They know items, four sizes of heads, and no dropout; `auto` takes them for 16 bits on a GPU alone."""
    of_size = {size: replace(SMALL, width=2 * size, heads=2) for size in range(8, 257, 8)}
    assert [size for size in of_size if uses_triton(of_size[size], item_mask, True, True)] == [16, 32, 64, 128]
    auto = replace(SMALL, width=64, heads=2)
    for cfg, on_gpu, half, taken in (
        (auto, True, True, True), (auto, True, False, False), (auto, False, True, False),
        (replace(auto, kernels="triton"), True, False, True), (replace(auto, kernels="triton"), False, True, False),
        (replace(auto, kernels="torch"), True, True, False), (replace(auto, dropout=0.1), True, True, True),
    ):  # fmt: skip
        assert uses_triton(cfg, item_mask, on_gpu, half) == taken, (cfg.kernels, on_gpu, half)
        assert not uses_triton(cfg, causal_mask, on_gpu, half)
        assert not uses_triton(replace(cfg, attention_dropout=0.1), item_mask, on_gpu, half)


def test_the_bias_matters() -> None:
    """The three kinds differ clearly on these weights, so the comparison above can tell them apart."""
    outputs = []
    x = torch.randn(*SEGMENTS.shape, SMALL.width, generator=torch.Generator().manual_seed(2))
    for kind in ("gated", "plain", "none"):
        cfg = replace(SMALL, relative_bias=kind)
        table = lively(RelativePositionTable(cfg.heads, cfg.relative_buckets, cfg.relative_max_distance), 1, std=1.0)
        distance = None if kind == "none" else table(SEGMENTS.shape[1])
        outputs.append(lively(Attention(cfg))(x, attention_bias(cfg, SEGMENTS, distance, x.dtype)))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[a] - outputs[b]).abs().max() > 0.05


def test_gradients_of_the_gated_bias_by_finite_differences() -> None:
    cfg = replace(SMALL, width=4, heads=2, feed_forward=4, relative_buckets=8, relative_max_distance=7)
    attention = lively(Attention(cfg), std=0.6).double()
    table = lively(
        RelativePositionTable(cfg.heads, cfg.relative_buckets, cfg.relative_max_distance), 1, std=0.6
    ).double()
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 0]])
    x = torch.randn(
        1, 7, cfg.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True
    )
    assert attention.gate is not None
    names = ["gate.update", "gate.reset", "gate.scale", "qkv.weight", "qkv.bias"]  # qkv carries q
    parameters = dict(attention.named_parameters())

    def run(d: Tensor, x: Tensor, *values: Tensor) -> Tensor:
        distance = torch.func.functional_call(table, {"weight": d}, (7,))
        replaced = dict(zip(names, values, strict=True))
        return torch.func.functional_call(attention, replaced, (x, attention_bias(cfg, segments, distance, x.dtype)))

    inputs = [
        table.weight.detach().requires_grad_(),
        x,
        *(parameters[name].detach().requires_grad_() for name in names),
    ]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-7)
    grads = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    assert all(grad.abs().max() > 1e-3 for grad in grads), "a gradient is too small for the check to mean anything"


def explicit_attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, bias: TorchBias) -> Tensor:
    """The formula, its gradients torch's own."""
    distance = torch.zeros(()) if bias.position_bias_HTT is None else bias.position_bias_HTT
    bias_BHTT = torch.where(bias.allowed_B1TT, distance if gate is None else distance * gate, float("-inf"))
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias_BHTT).softmax(-1) @ v


@pytest.mark.parametrize("kind", ["gated", "plain", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", [cpu_attend, fused_attend])
def test_both_forms_equal_the_explicit_one(form: Any, dtype: torch.dtype, kind: str) -> None:
    """Values and the gradients of everything, with padding; of distances also when they come in another type."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, 14, 8, generator=g).to(dtype).requires_grad_() for _ in range(3)]
    if kind != "none":
        inputs.append(torch.randn(3, 14, 14, generator=g).to(dtype).requires_grad_())
    if kind == "gated":
        inputs.append((torch.rand(2, 3, 14, 1, generator=g) * 2).to(dtype).requires_grad_())
    weights = torch.randn(2, 3, 14, 8, generator=g)
    results = []
    for function, used in ((form, dtype), (explicit_attend, torch.float64)):
        q, k, v, *more = (value.to(used) for value in inputs)
        bias = TorchBias(item_mask(SEGMENTS), more[0] if more else None)
        out = function(q, k, v, more[1] if len(more) > 1 else None, bias)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True)])
    bound = 1e-12 if dtype == torch.float64 else 3e-2  # bf16: a few roundings by 2^-9 of numbers up to 4
    for ours, explicit in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), explicit.double(), atol=bound, rtol=bound)


@pytest.mark.parametrize("kind", ["gated", "plain", "none"])
@pytest.mark.parametrize("room", [2**20, 8 * 60])
@pytest.mark.parametrize(("cost", "apart"), [(0, 7), (100, 6), (150, 2), (10**9, 0)])
def test_items_and_rows_in_tiles_equal_the_explicit_form(
    kind: str, cost: int, apart: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All items by themselves, those of some rows, none of them; in tiles of all heads and of one."""
    segments = torch.tensor([[1] * 5 + [2] * 4 + [3] * 3 + [0] * 2, [1] * 14, [1] * 7 + [2] * 7])
    monkeypatch.setattr(attention_cpu, "_TILE_COST", cost / torch.get_num_threads())
    monkeypatch.setattr(attention_cpu, "TILE_BYTES", room // torch.get_num_threads())
    items = attention_cpu.items_of(segments)
    rows = attention_cpu._items_and_rows(items, 3, 3, 14, 10**6)[1]
    assert len([one for one in items if one[0] not in rows]) == apart
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 3, 14, 8, generator=g).double().requires_grad_() for _ in range(3)]
    if kind != "none":
        inputs.append(torch.randn(3, 27, generator=g).double().requires_grad_())
    if kind == "gated":
        inputs.append((torch.rand(3, 3, 14, 1, generator=g) * 2).double().requires_grad_())
    weights = torch.randn(3, 3, 14, 8, generator=g)
    results = []
    for function, seen in ((cpu_attend, (None, segments)), (explicit_attend, (item_mask(segments), None))):
        q, k, v, *more = inputs
        bias = TorchBias(seen[0], toeplitz(more[0]) if more else None, seen[1])
        out = function(q, k, v, more[1] if len(more) > 1 else None, bias)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for ours, explicit in zip(*results, strict=True):
        torch.testing.assert_close(ours, explicit, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cost", [0, 10**9])
def test_gradients_of_distances_add_up_in_float32(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 640 items of two tokens, all of one sign: in bf16 the sum would stop at 256 times one gradient."""
    monkeypatch.setattr(attention_cpu, "_TILE_COST", cost)
    segments = torch.arange(16).repeat_interleave(2).expand(40, 32)
    q, k, v = (torch.zeros(40, 1, 32, 4, dtype=torch.bfloat16) for _ in range(3))
    v[:, :, 1::2] = 1  # more weight for the second token of an item gives more
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        distance = torch.zeros(1, 63, dtype=dtype).requires_grad_()
        bias = TorchBias(None, toeplitz(distance), segments)
        cpu_attend(q.to(dtype), k.to(dtype), v.to(dtype), None, bias).sum().backward()
        assert distance.grad is not None
        found.append(distance.grad.double())
    torch.testing.assert_close(*found, atol=0, rtol=0.01)


def test_a_tiling_is_that_of_the_gpu_or_of_any() -> None:
    """By the size of a head; a GPU may have been timed for one of the two sizes, and float32 takes small tiles."""
    of = {name: {"_forward": [queries, 1, 2, 3]} for queries, name in enumerate("abc")}
    tiling_of("_forward", 64, 2, "8.0")
    use_tilings({"default": {"64": of["a"], "128": of["b"]}, "9.0": {"64": of["c"]}})
    try:
        for head_size, capability, queries in (
            (16, "default", 0), (64, "8.0", 0), (65, "8.0", 1), (128, "9.0", 1), (64, "9.0", 2),
        ):  # fmt: skip
            assert tiling_of("_forward", head_size, 2, capability) == Tiling(queries, 1, 2, 3)
        assert tiling_of("_forward", 64, 4, "9.0") == Tiling(32, 32, 4, 2)
    finally:
        use_tilings({})
