"""A tournament of attention's kernels on one GPU: every legal form of each (tiles, warps, stages) on Base's shape, next
to torch's attention without a bias and FlexAttention with a learned one; each form is checked against float64.

The winners are what `xlme_ds/models/tilings.json` holds for this compute capability; Large's and XL's heads have the
same size.
"""

import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xlme_ds.models.attention import item_bounds
from xlme_ds.models.tiles import TABLE, Tiling

Row = dict[str, Any]
ROWS, HEADS, TOKENS, SIZE = 64, 12, 512, 64  # half of the rows are one item, the others pairs
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


def _inputs(device: torch.device) -> dict[str, Any]:
    from xlme_ds.models.attention_triton import skew

    g = torch.Generator().manual_seed(0)
    half = torch.bfloat16

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(half).to(device)

    rng = np.random.default_rng(0)
    segments = np.ones((ROWS, TOKENS), dtype=np.int64)
    for row in segments[ROWS // 2 :]:  # pairs of about 60 tokens
        row[:] = np.searchsorted(np.cumsum(rng.integers(30, 90, 40)), np.arange(TOKENS), side="right") + 1
    first, end = item_bounds(torch.from_numpy(segments).to(device))
    distance = numbers(HEADS, 2 * TOKENS - 1)
    gate = numbers(SIZE), numbers(SIZE), numbers(HEADS)
    return {
        "qkv": numbers(ROWS, TOKENS, 3, HEADS, SIZE), "gate": gate, "skewed": skew(distance, half), "first": first,
        "end": end, "grad": numbers(ROWS, TOKENS, HEADS, SIZE), "distance": distance,
    }  # fmt: skip


def _launches(
    given: dict[str, Any],
) -> dict[str, tuple[Callable[[Tiling], object], Callable[[Tiling], Sequence[Tensor]]]]:
    """By kernel: a launch in a form, and the tensors that it wrote."""
    from xlme_ds.models import attention_triton as kernels

    qkv, gate, bounds = given["qkv"], given["gate"], (given["skewed"], given["first"], given["end"])
    out = kernels._empty_outputs(qkv, gate[0])
    kernels._launch(kernels._forward, qkv, *gate, *bounds, *out)
    passed = *out[1:], given["grad"]
    delta, grad_qkv = torch.empty_like(out[1]), torch.empty_like(qkv)

    @functools.cache
    def shares(form: Tiling) -> tuple[Tensor, ...]:
        return kernels._empty_gradients(qkv, gate[0], bounds[0], TOKENS // form.queries - 1, form)

    def forward(form: Tiling) -> None:
        kernels._launch(kernels._forward, qkv, *gate, *bounds, *out, form=form)

    def queries(form: Tiling) -> None:
        _, _, of_far, of_gates, of_scale = shares(form)
        given = qkv, *gate, *bounds, out[0], *passed, delta, grad_qkv, of_gates, of_scale, of_far
        kernels._launch(kernels._backward_queries, *given, near=TOKENS, form=form)

    def keys(form: Tiling) -> None:
        kernels._launch(kernels._backward_keys, qkv, *bounds, *passed, delta, grad_qkv, gated=True, form=form)

    def distances(form: Tiling) -> None:
        of_d, near = shares(form)[1], TOKENS // form.queries - 1
        given = qkv, *bounds, *passed, delta, of_d
        kernels._launch(kernels._backward_distances, *given, gated=True, near=near, form=form)

    def of_queries(form: Tiling) -> Sequence[Tensor]:
        *_, of_gates, of_scale = shares(form)
        return grad_qkv[:, :, 0], of_gates.sum((0, 1, 2)), of_scale.sum((0, 2))

    def of_distances(form: Tiling) -> Sequence[Tensor]:
        of_d = shares(form)[1].sum(0)
        return (kernels._by_distance(of_d, of_d.new_zeros(HEADS, 2), TOKENS // form.queries - 1, TOKENS),)

    return {
        "_forward": (forward, lambda form: (out[0],)), "_backward_queries": (queries, of_queries),
        "_backward_keys": (keys, lambda form: (grad_qkv[:, :, 1], grad_qkv[:, :, 2])),
        "_backward_distances": (distances, of_distances),
    }  # fmt: skip


def _expected(given: dict[str, Any]) -> dict[str, list[Tensor]]:
    """What each kernel writes, by the formulas in float64, a row at a time."""
    names = ("update", "reset", "scale", "distance")
    u, r, w, d = (each.double().requires_grad_() for each in (*given["gate"], given["distance"]))
    position = torch.arange(TOKENS, device=d.device)
    place = position[None, :] - position[:, None] + TOKENS - 1
    sums = {name: torch.zeros_like(each) for name, each in zip(names, (u, r, w, d), strict=True)}
    outs, grads = [], []
    for n in range(ROWS):
        qkv = given["qkv"][n].double().requires_grad_()
        q, k, v = qkv.permute(1, 2, 0, 3)
        alpha, rho = torch.sigmoid(q @ u), torch.sigmoid(q @ r)
        gate = (1 + alpha + (1 - alpha) * w[:, None] * rho)[..., None]
        seen = (position >= given["first"][n][:, None]) & (position < given["end"][n][:, None])
        scores = torch.where(seen, q @ k.mT / math.sqrt(SIZE) + gate * d[:, place], -math.inf)
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


def _compile(kernel: str, form: Tiling) -> str:
    """Into the cache that all processes share; returns why not, or nothing."""
    try:
        torch.set_num_threads(1)
        _launches(_small)[kernel][0](form)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return ""


_small: dict[str, Any] = {}


def _start() -> None:
    _small.update(_inputs(torch.device("cuda")))


def _medians(runs: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
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


def tournament(device: torch.device, seconds: float = 110.0) -> Iterator[Row]:
    """A row for every form in turn, the winner of each kernel and the peers; nothing begins after `seconds`."""
    started = time.monotonic()
    given = _inputs(device)
    every = [(kernel, form) for kernel in KERNELS for form in forms(kernel)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn"), _start) as pool:
        failures = list(pool.map(_compile, *zip(*every, strict=True)))
    expected, launches = _expected(given), _launches(given)
    flops = {"_forward": 2, "_backward_queries": 3, "_backward_keys": 4, "_backward_distances": 2}
    product = 2.0 * ROWS * HEADS * TOKENS**2 * SIZE
    for kernel in KERNELS:
        runs, rows = {}, {}
        for (name, form), failure in zip(every, failures, strict=True):
            if name != kernel:
                continue
            rows[form] = {"kernel": kernel, "queries": form.queries, "keys": form.keys, "warps": form.warps,
                          "stages": form.stages}  # fmt: skip
            if failure or time.monotonic() - started > seconds:
                rows[form]["failed"] = failure or "no time"
                continue
            launches[kernel][0](form)
            pairs = zip(launches[kernel][1](form), expected[kernel], strict=True)
            errors = [float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]
            rows[form] |= {"error": max(errors), "ok": max(errors) <= BOUND}
            if rows[form]["ok"]:
                runs[form] = partial(launches[kernel][0], form)
        for form, ms in _medians(runs, 5).items():
            rows[form] |= {"ms": ms, "tflops_of_the_square": flops[kernel] * product / ms / 1e9}
        timed = [form for form in rows if "ms" in rows[form]]
        for form in sorted(timed, key=lambda one: rows[one]["ms"])[:1]:
            rows[form]["winner"] = True
        yield from rows.values()
    yield from peers(given)


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
        return score + distance[h, j - i + TOKENS - 1]

    mask = create_block_mask(seen, ROWS, None, TOKENS, TOKENS, device=q.device)
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
            found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}  # type: ignore[dict-item]
        yield {"kernel": name} | found


def written(rows: Sequence[Row], capability: str, table: Path = TABLE) -> None:
    """Put the winners into the table that the kernels read."""
    known = json.loads(table.read_text(encoding="utf-8"))
    winners = {row["kernel"]: [row["queries"], row["keys"], row["warps"], row["stages"]]
               for row in rows if row.get("winner")}  # fmt: skip
    known.setdefault(capability, {})[str(SIZE)] = winners
    table.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
