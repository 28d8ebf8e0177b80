"""Finds the fastest form of each attention kernel on one GPU. A form is a choice of tile, warps and pipeline stages.

The results of each form are compared with a float64 reference, on inputs of Base's shape. Forms whose errors are small
enough are timed, and so is torch's attention. The fastest forms are written into a copy of
`xlme_ds/models/tilings.json`, as the entry of this GPU's compute capability. They also serve Large and XL, whose heads
have the same size.
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

from bench.gpu.steps import Device
from bench.measure import Figures, by_turns
from xlme_ds.models.attention import item_bounds
from xlme_ds.models.tiles import TILINGS_FILE, Tiling

SHAPE = 64, 12, 512, 64  # rows (half hold one item, half several), heads, tokens, size of a head
PRODUCT_FLOPS = 2.0 * 64 * 12 * 512**2 * 64  # operations of the product Q Kᵀ, as if every query saw all keys
# (queries, keys) of a tile
TILES = ((64, 32), (32, 64), (64, 64), (128, 32), (32, 128), (128, 64), (64, 128), (64, 16), (16, 64))
KERNELS = ("_forward", "_backward_queries", "_backward_keys", "_backward_distances")
LAUNCHES = 10  # launches that are timed together, so that the host's time for a launch hardly counts
BOUND = 2e-2  # largest max|error| / max|reference| that passes: the kernels round to bf16 several times in a row


def candidate_tilings(kernel: str) -> list[Tiling]:
    """The forms of a kernel to try. A tile's scores must fit into the registers. Except in `_backward_distances`, every
    warp needs at least 16 of the tile's queries (in `_backward_keys`, of its keys)."""
    if kernel == "_backward_distances":
        return [Tiling(64, 64, warps, stages) for warps, stages in itertools.product((4, 8), (2, 3))]
    max_scores_per_warp = 2048 if kernel == "_forward" else 1024
    max_tile_length = 64 if kernel == "_backward_queries" else 128  # the most queries, and the most keys
    candidates = (
        Tiling(queries, keys, warps, stages)
        for (queries, keys), warps, stages in itertools.product(TILES, (4, 8), (2, 3, 4))
    )
    return [
        form
        for form in candidates
        if 256 <= form.queries * form.keys // form.warps <= max_scores_per_warp
        and (form.keys if kernel == "_backward_keys" else form.queries) >= 16 * form.warps
        and max(form.queries, form.keys) <= max_tile_length
    ]


def inputs(
    device: torch.device, rows: int, heads: int, tokens: int, size: int, half: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The kernels' inputs by name, drawn at random: `qkv`, `gate` (the gate's three weights), `distance` (the bias of
    each distance), `skewed` (a skewed copy of that bias), `first` and `end` (the bounds of each token's item), and
    `grad` (the output's gradient)."""
    from xlme_ds.models.attention_triton import skew

    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(half).to(device)

    rng = np.random.default_rng(0)
    segments = np.ones((rows, tokens), dtype=np.int64)
    for row in segments[rows // 2 :]:  # several items of about 60 tokens
        row[:] = np.searchsorted(np.cumsum(rng.integers(30, 90, tokens)), np.arange(tokens), side="right") + 1
    first, end = item_bounds(torch.from_numpy(segments).to(device))
    distance = numbers(heads, 2 * tokens - 1)
    gate = numbers(size), numbers(size), numbers(heads)
    return {
        "qkv": numbers(rows, tokens, 3, heads, size), "gate": gate, "skewed": skew(distance, half), "first": first,
        "end": end, "grad": numbers(rows, tokens, heads, size), "distance": distance,
    }  # fmt: skip


class Launch(NamedTuple):
    """Three functions of one kernel, whose inputs are fixed. Each function takes a form."""

    run: Callable[[Tiling], None]
    buffers: Callable[[Tiling], Sequence[Tensor]]  # the tensors that the kernel writes
    results: Callable[[Tiling], Sequence[Tensor]]  # the kernel's results, in the order in which `expected` has them

    def errors(self, form: Tiling, exact: Sequence[Tensor]) -> list[float]:
        """max|error| / max|reference| of each result; NaN if the kernel left a number of the result unwritten."""
        for buffer in self.buffers(form):
            buffer.fill_(math.nan)
        self.run(form)
        pairs = zip(self.results(form), exact, strict=True)
        return [float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]


def launches(tensors: dict[str, Any]) -> dict[str, Launch]:
    """The `Launch` of each kernel, by its name. A backward kernel reads the outputs of the kernels before it."""
    from xlme_ds.models import attention_triton as kernels

    qkv, gate, bounds = tensors["qkv"], tensors["gate"], (tensors["skewed"], tensors["first"], tensors["end"])
    heads, tokens = qkv.shape[3], qkv.shape[1]

    def largest_offset(form: Tiling) -> int:  # the largest distance of a tile from the diagonal, in tiles
        return -(-tokens // form.queries) - 1

    out = kernels._empty_outputs(qkv, gate[0])
    kernels._launch(kernels._forward, qkv, *gate, *bounds, *out)
    passed = *out[1:], tensors["grad"]
    delta, grad_qkv = torch.empty_like(out[1]), torch.empty_like(qkv)

    @functools.cache
    def parts(form: Tiling) -> tuple[Tensor, ...]:  # each block of a kernel writes a part of the parameters' gradients
        return kernels._empty_gradients(qkv, gate[0], bounds[0], largest_offset(form), form)

    def forward(form: Tiling) -> None:
        kernels._launch(kernels._forward, qkv, *gate, *bounds, *out, tiling=form)

    def queries(form: Tiling) -> None:
        _, _, grad_far, grad_gates, grad_scale = parts(form)
        tensors = qkv, *gate, *bounds, out[0], *passed, delta, grad_qkv, grad_gates, grad_scale, grad_far
        kernels._launch(kernels._backward_queries, *tensors, near=tokens, tiling=form)  # no key is this far away

    def keys(form: Tiling) -> None:
        kernels._launch(kernels._backward_keys, qkv, *bounds, *passed, delta, grad_qkv, gated=True, tiling=form)

    def distances(form: Tiling) -> None:
        tensors = qkv, *bounds, *passed, delta, parts(form)[1]
        kernels._launch(kernels._backward_distances, *tensors, gated=True, near=largest_offset(form), tiling=form)

    def query_results(form: Tiling) -> Sequence[Tensor]:
        *_, grad_gates, grad_scale = parts(form)
        return grad_qkv[:, :, 0], grad_gates.sum((0, 1, 2)), grad_scale.sum((0, 2))

    def distance_results(form: Tiling) -> Sequence[Tensor]:
        grad_d = parts(form)[1].sum(0)
        return (kernels._by_distance(grad_d, grad_d.new_zeros(heads, 2), largest_offset(form), tokens),)

    return {
        "_forward": Launch(forward, lambda form: out, lambda form: out[:1]),
        "_backward_queries": Launch(queries, lambda form: (delta, grad_qkv[:, :, 0], *parts(form)[2:]), query_results),
        "_backward_keys": Launch(keys, lambda form: (grad_qkv[:, :, 1:],), lambda form: grad_qkv.unbind(2)[1:]),
        "_backward_distances": Launch(distances, lambda form: parts(form)[1:2], distance_results),
    }


def expected(tensors: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Each kernel's results, computed in float64 from the formulas, one row at a time."""
    names = ("update", "reset", "scale", "distance")
    u, r, w, d = (value.double().requires_grad_() for value in (*tensors["gate"], tensors["distance"]))
    rows, tokens, _, _, size = tensors["qkv"].shape
    position = torch.arange(tokens, device=d.device)
    distance_index = position[None, :] - position[:, None] + tokens - 1
    sums = {name: torch.zeros_like(value) for name, value in zip(names, (u, r, w, d), strict=True)}
    outs, grads = [], []
    for n in range(rows):
        qkv = tensors["qkv"][n].double().requires_grad_()
        q, k, v = qkv.permute(1, 2, 0, 3)
        alpha, rho = torch.sigmoid(q @ u), torch.sigmoid(q @ r)
        gate = (1 + alpha + (1 - alpha) * w[:, None] * rho)[..., None]
        seen = (position >= tensors["first"][n][:, None]) & (position < tensors["end"][n][:, None])
        scores = torch.where(seen, q @ k.mT / math.sqrt(size) + gate * d[:, distance_index], -math.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1)
        *parameter_gradients, qkv_gradient = torch.autograd.grad(out, [u, r, w, d, qkv], tensors["grad"][n].double())
        for gradient_sum, gradient in zip(sums.values(), parameter_gradients, strict=True):
            gradient_sum += gradient
        outs.append(out.detach())
        grads.append(qkv_gradient)
    grad_q, grad_k, grad_v = torch.stack(grads).unbind(2)
    gates = torch.stack([sums["update"], sums["reset"]])
    return {
        "_forward": [torch.stack(outs)], "_backward_queries": [grad_q, gates, sums["scale"]],
        "_backward_keys": [grad_k, grad_v], "_backward_distances": [sums["distance"]],
    }  # fmt: skip


def _compile(kernel: str, form: Tiling) -> Figures:
    """Compile a form into the cache that all processes share. Returns an empty dict, or `left_out` with a message if
    the form needs more memory or threads than the GPU has, or `failed` with a message after any other error."""
    try:
        torch.set_num_threads(1)
        launches(_process_inputs)[kernel].run(form)
        torch.cuda.synchronize()
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        return {"left_out" if type(error).__name__ == "OutOfResources" else "failed": message}
    return {}


_process_inputs: dict[str, Any] = {}  # filled once by each process that compiles


def _make_inputs() -> None:
    _process_inputs.update(inputs(torch.device("cuda"), *SHAPE))


def _launch_repeatedly(run: Callable[[], object]) -> None:
    for _ in range(LAUNCHES):
        run()


def _medians(device: Device, runs: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Median milliseconds of one launch, for each of `runs`. The runs take turns."""
    launched = {key: partial(device.once, partial(_launch_repeatedly, run)) for key, run in runs.items()}
    turns = by_turns(launched, rounds, warm_up=0)
    return {key: 1000 * float(np.median([turn[key] for turn in turns])) / LAUNCHES for key in runs}


def autotune(device: Device, seconds: float, table: Path) -> Iterator[Figures]:
    """Yield a row of figures for every form, and one for torch's attention. Forms whose turn comes after `seconds` are
    not run; their rows say so.

    If every kernel has a winner, writes a copy of the package's table of forms to `table`, with the winners as the
    entry of this GPU's compute capability.
    """
    started, tensors = time.monotonic(), inputs(device.torch, *SHAPE)
    candidates = [(kernel, form) for kernel in KERNELS for form in candidate_tilings(kernel)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn"), _make_inputs) as pool:
        compiled = dict(zip(candidates, pool.map(_compile, *zip(*candidates, strict=True)), strict=True))
    exact, kernels = expected(tensors), launches(tensors)
    products = {"_forward": 2, "_backward_queries": 3, "_backward_keys": 4, "_backward_distances": 2}  # matrix products
    winners: dict[str, Tiling] = {}
    for kernel in KERNELS:
        rows: dict[Tiling, Figures] = {form: compiled[kernel, form] for form in candidate_tilings(kernel)}
        for form in [form for form, row in rows.items() if not row]:
            if time.monotonic() - started > seconds:
                rows[form] |= {"left_out": "no time"}
            else:
                errors = kernels[kernel].errors(form, exact[kernel])
                rows[form] |= {"error": max(errors), "ok": all(error <= BOUND for error in errors)}
        runs = {form: partial(kernels[kernel].run, form) for form, row in rows.items() if row.get("ok")}
        times = _medians(device, runs, 5)
        for form, ms in times.items():
            rows[form] |= {"ms": ms, "tflops_of_the_square": products[kernel] * PRODUCT_FLOPS / ms / 1e9}
        if times:
            winners[kernel] = min(times, key=lambda form: times[form])
            rows[winners[kernel]]["winner"] = True
        yield from ({"kernel": kernel} | form._asdict() | row for form, row in rows.items())
    if len(winners) == len(KERNELS):
        forms_by_gpu = json.loads(TILINGS_FILE.read_text(encoding="utf-8"))
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        forms_by_gpu.setdefault(capability, {})[str(SHAPE[-1])] = winners
        table.write_text(json.dumps(forms_by_gpu, indent=1) + "\n", encoding="utf-8")
    yield torch_attention(device, tensors)


def torch_attention(device: Device, tensors: dict[str, Any]) -> Figures:
    """Median milliseconds of torch's own attention without bias and mask: forward, and forward with backward."""
    q, k, v = (part.transpose(1, 2).contiguous().requires_grad_() for part in tensors["qkv"].unbind(2))
    grad = tensors["grad"].transpose(1, 2).contiguous()

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward_backward() -> object:
        return torch.autograd.grad(forward(), (q, k, v), grad)

    forward_backward()
    times = _medians(device, {"forward_ms": forward, "forward_backward_ms": forward_backward}, 7)
    return {"kernel": "torch's attention, no bias, no mask"} | times
