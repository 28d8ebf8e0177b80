"""A tournament of attention's kernels on one GPU: every legal form of each (tiles, warps, stages) on Base's shape, next
to torch's attention without a bias and FlexAttention with a learned one; each form is checked against float64.

The winners are written as a table for this compute capability: it may take the place of `xlme_ds/models/tilings.json`.
Large's and XL's heads have the same size.
"""

import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xlme_ds.models.attention import item_bounds
from xlme_ds.models.tiles import TABLE, Tiling

Row = dict[str, Any]
SHAPE = 64, 12, 512, 64  # rows, half of them one item and the others pairs; heads, tokens, numbers a head
PRODUCT = 2.0 * 64 * 12 * 512**2 * 64  # operations of Q Kᵀ
TILES = ((64, 32), (32, 64), (64, 64), (128, 32), (32, 128), (128, 64), (64, 128), (64, 16), (16, 64))
KERNELS = ("_forward", "_backward_queries", "_backward_keys", "_backward_distances")
AT_ONCE = 10  # launches that are timed together, or the host's part would count
BOUND = 2e-2  # of the largest number: bf16 rounds several times in a row


def forms(kernel: str) -> list[Tiling]:
    """The forms of a kernel that are tried: as many scores a warp as registers hold, and rows for all of its warps."""
    if kernel == "_backward_distances":
        return [Tiling(side, side, warps, 2) for side, warps in ((64, 4), (64, 8))]
    most, side = (2048, 128) if kernel == "_forward" else (1024, 64 if kernel == "_backward_queries" else 128)
    found = []
    for (queries, keys), warps, stages in itertools.product(TILES, (4, 8), (2, 3, 4)):
        rows = keys if kernel == "_backward_keys" else queries
        if 256 <= queries * keys // warps <= most and rows >= 16 * warps and max(queries, keys) <= side:
            found.append(Tiling(queries, keys, warps, stages))
    return found


def inputs(
    device: torch.device, rows: int, heads: int, tokens: int, size: int, half: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """What the kernels read of so many rows of a shape."""
    from xlme_ds.models.attention_triton import skew

    g = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(half).to(device)

    rng = np.random.default_rng(0)
    segments = np.ones((rows, tokens), dtype=np.int64)
    for row in segments[rows // 2 :]:  # pairs of about 60 tokens
        row[:] = np.searchsorted(np.cumsum(rng.integers(30, 90, tokens)), np.arange(tokens), side="right") + 1
    first, end = item_bounds(torch.from_numpy(segments).to(device))
    distance = numbers(heads, 2 * tokens - 1)
    gate = numbers(size), numbers(size), numbers(heads)
    return {
        "qkv": numbers(rows, tokens, 3, heads, size), "gate": gate, "skewed": skew(distance, half), "first": first,
        "end": end, "grad": numbers(rows, tokens, heads, size), "distance": distance,
    }  # fmt: skip


class Launch(NamedTuple):
    """A kernel, in any form: what starts it, the buffers that it fills, and what they say, as `expected` does."""

    run: Callable[[Tiling], None]
    buffers: Callable[[Tiling], Sequence[Tensor]]
    results: Callable[[Tiling], Sequence[Tensor]]

    def errors(self, form: Tiling, exact: Sequence[Tensor]) -> list[float]:
        """Of each result over its largest number; NaN where the kernel left a number out."""
        for buffer in self.buffers(form):
            buffer.fill_(math.nan)
        self.run(form)
        pairs = zip(self.results(form), exact, strict=True)
        return [float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]


def launches(given: dict[str, Any]) -> dict[str, Launch]:
    """By the kernels' names; the backward ones read what the ones before them wrote."""
    from xlme_ds.models import attention_triton as kernels

    qkv, gate, bounds = given["qkv"], given["gate"], (given["skewed"], given["first"], given["end"])
    heads, tokens = qkv.shape[3], qkv.shape[1]

    def near(form: Tiling) -> int:
        return -(-tokens // form.queries) - 1

    out = kernels._empty_outputs(qkv, gate[0])
    kernels._launch(kernels._forward, qkv, *gate, *bounds, *out)
    passed = *out[1:], given["grad"]
    delta, grad_qkv = torch.empty_like(out[1]), torch.empty_like(qkv)

    @functools.cache
    def shares(form: Tiling) -> tuple[Tensor, ...]:
        return kernels._empty_gradients(qkv, gate[0], bounds[0], near(form), form)

    def forward(form: Tiling) -> None:
        kernels._launch(kernels._forward, qkv, *gate, *bounds, *out, form=form)

    def queries(form: Tiling) -> None:
        _, _, of_far, of_gates, of_scale = shares(form)
        given = qkv, *gate, *bounds, out[0], *passed, delta, grad_qkv, of_gates, of_scale, of_far
        kernels._launch(kernels._backward_queries, *given, near=tokens, form=form)

    def keys(form: Tiling) -> None:
        kernels._launch(kernels._backward_keys, qkv, *bounds, *passed, delta, grad_qkv, gated=True, form=form)

    def distances(form: Tiling) -> None:
        given = qkv, *bounds, *passed, delta, shares(form)[1]
        kernels._launch(kernels._backward_distances, *given, gated=True, near=near(form), form=form)

    def of_queries(form: Tiling) -> Sequence[Tensor]:
        *_, of_gates, of_scale = shares(form)
        return grad_qkv[:, :, 0], of_gates.sum((0, 1, 2)), of_scale.sum((0, 2))

    def of_distances(form: Tiling) -> Sequence[Tensor]:
        of_d = shares(form)[1].sum(0)
        return (kernels._by_distance(of_d, of_d.new_zeros(heads, 2), near(form), tokens),)

    return {
        "_forward": Launch(forward, lambda form: out, lambda form: out[:1]),
        "_backward_queries": Launch(queries, lambda form: (delta, grad_qkv[:, :, 0], *shares(form)[2:]), of_queries),
        "_backward_keys": Launch(keys, lambda form: (grad_qkv[:, :, 1:],), lambda form: grad_qkv.unbind(2)[1:]),
        "_backward_distances": Launch(distances, lambda form: shares(form)[1:2], of_distances),
    }


def expected(given: dict[str, Any]) -> dict[str, list[Tensor]]:
    """What each kernel writes, by the formulas in float64, a row at a time."""
    names = ("update", "reset", "scale", "distance")
    u, r, w, d = (each.double().requires_grad_() for each in (*given["gate"], given["distance"]))
    rows, tokens, _, _, size = given["qkv"].shape
    position = torch.arange(tokens, device=d.device)
    place = position[None, :] - position[:, None] + tokens - 1
    sums = {name: torch.zeros_like(each) for name, each in zip(names, (u, r, w, d), strict=True)}
    outs, grads = [], []
    for n in range(rows):
        qkv = given["qkv"][n].double().requires_grad_()
        q, k, v = qkv.permute(1, 2, 0, 3)
        alpha, rho = torch.sigmoid(q @ u), torch.sigmoid(q @ r)
        gate = (1 + alpha + (1 - alpha) * w[:, None] * rho)[..., None]
        seen = (position >= given["first"][n][:, None]) & (position < given["end"][n][:, None])
        scores = torch.where(seen, q @ k.mT / math.sqrt(size) + gate * d[:, place], -math.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1)
        *small, of_qkv = torch.autograd.grad(out, [u, r, w, d, qkv], given["grad"][n].double())
        for total, part in zip(sums.values(), small, strict=True):
            total += part
        outs.append(out.detach())
        grads.append(of_qkv)
    of_q, of_k, of_v = torch.stack(grads).unbind(2)
    gates = torch.stack([sums["update"], sums["reset"]])
    return {
        "_forward": [torch.stack(outs)], "_backward_queries": [of_q, gates, sums["scale"]],
        "_backward_keys": [of_k, of_v], "_backward_distances": [sums["distance"]],
    }  # fmt: skip


def _compile(kernel: str, form: Tiling) -> Row:
    """Into the cache that all processes share; says so where it does not fit the GPU, or fails."""
    try:
        torch.set_num_threads(1)
        launches(_small)[kernel].run(form)
        torch.cuda.synchronize()
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        return {"left_out" if type(error).__name__ == "OutOfResources" else "failed": words}
    return {}


_small: dict[str, Any] = {}


def _start() -> None:
    _small.update(inputs(torch.device("cuda"), *SHAPE))


def _medians(runs: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Milliseconds of each, by turns; each is warm."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(AT_ONCE):
                run()
            end.record()
            end.synchronize()
            times[key].append(begin.elapsed_time(end) / AT_ONCE)
    return {key: float(np.median(values)) for key, values in times.items()}


def tournament(device: torch.device, seconds: float, table: Path) -> Iterator[Row]:
    """A row for every form in turn, and the peers; nothing begins after `seconds`. The winners go into `table`."""
    started, given = time.monotonic(), inputs(device, *SHAPE)
    every = [(kernel, form) for kernel in KERNELS for form in forms(kernel)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn"), _start) as pool:
        compiled = dict(zip(every, pool.map(_compile, *zip(*every, strict=True)), strict=True))
    exact, found = expected(given), launches(given)
    products = {"_forward": 2, "_backward_queries": 3, "_backward_keys": 4, "_backward_distances": 2}
    winners: dict[str, Tiling] = {}
    for kernel in KERNELS:
        rows: dict[Tiling, Row] = {form: compiled[kernel, form] for form in forms(kernel)}
        for form in [form for form, row in rows.items() if not row]:
            if time.monotonic() - started > seconds:
                rows[form] |= {"left_out": "no time"}
            else:
                errors = found[kernel].errors(form, exact[kernel])
                rows[form] |= {"error": max(errors), "ok": all(error <= BOUND for error in errors)}
        runs = {form: partial(found[kernel].run, form) for form, row in rows.items() if row.get("ok")}
        times = _medians(runs, 5)
        for form, ms in times.items():
            rows[form] |= {"ms": ms, "tflops_of_the_square": products[kernel] * PRODUCT / ms / 1e9}
        if times:
            winners[kernel] = min(times, key=lambda form: times[form])
            rows[winners[kernel]]["winner"] = True
        yield from ({"kernel": kernel} | form._asdict() | row for form, row in rows.items())
    if len(winners) == len(KERNELS):
        _write(winners, table)
    yield from peers(given)


def _write(winners: dict[str, Tiling], table: Path) -> None:
    """The package's table of forms, with the winners of this GPU's compute capability."""
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    known.setdefault(capability, {})[str(SHAPE[-1])] = winners
    table.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def peers(given: dict[str, Any]) -> Iterator[Row]:
    """Torch's flash attention without bias and mask, and FlexAttention with d and the items' mask; d has a gradient."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (each.transpose(1, 2).contiguous().requires_grad_() for each in given["qkv"].unbind(2))
    grad, first, end = given["grad"].transpose(1, 2).contiguous(), given["first"], given["end"]
    distance = given["distance"].float().requires_grad_()
    # The forms that torch would take do not fit into a multiprocessor's memory with a bias that it reads.
    sides = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}
    flex = partial(torch.compile(flex_attention, dynamic=False), kernel_options=sides | {"num_stages": 2})

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= first[b, i]) & (j < end[b, i])

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + distance[h, j - i + tokens - 1]

    rows, tokens = first.shape
    mask = create_block_mask(seen, rows, None, tokens, tokens, device=q.device)
    ways: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "torch's attention, no bias, no mask": (lambda: F.scaled_dot_product_attention(q, k, v), [q, k, v]),
        "FlexAttention, distances without a gate": (
            lambda: flex(q, k, v, score_mod=biased, block_mask=mask), [q, k, v, distance]
        ),
    }  # fmt: skip
    for name, (run, wanted) in ways.items():
        try:
            both = partial(lambda run, wanted: torch.autograd.grad(run(), wanted, grad), run, wanted)
            for each in (run, both, run, both):
                each()
            found = _medians({"forward_ms": run, "forward_backward_ms": both}, 7)
        except Exception as error:
            found = {"left_out": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}  # type: ignore[dict-item]
        yield {"kernel": name} | found
