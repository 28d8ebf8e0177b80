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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.steps import median_seconds
from bench.measure import Figures
from bench.synthetic import synthetic_batch
from xlme_ds.models.attention import Gate, TorchBias, item_bounds, toeplitz
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
    return [
        Tiling(queries, keys, warps, stages)
        for (queries, keys), warps, stages in itertools.product(TILES, (4, 8), (2, 3, 4))
        if 256 <= queries * keys // warps <= max_scores_per_warp
        and (keys if kernel == "_backward_keys" else queries) >= 16 * warps
        and max(queries, keys) <= max_tile_length
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

    segments_BT = synthetic_batch((rows // 2, rows - rows // 2), tokens, 1000).segments_BT
    first, end = item_bounds(segments_BT.to(device))
    distance = numbers(heads, 2 * tokens - 1)
    gate = numbers(size), numbers(size), numbers(heads)
    return {
        "qkv": numbers(rows, tokens, 3, heads, size), "gate": gate, "skewed": skew(distance, half), "first": first,
        "end": end, "grad": numbers(rows, tokens, heads, size), "distance": distance,
    }  # fmt: skip


class Launch(NamedTuple):
    """A kernel in one form, with its inputs."""

    run: Callable[[], object]
    buffers: Sequence[Tensor]  # the tensors that the kernel writes
    results: Callable[[], Sequence[Tensor]]  # the kernel's results, in the order in which `expected` has them

    def errors(self, exact: Sequence[Tensor]) -> list[float]:
        """max|error| / max|reference| of each result; NaN if the kernel left a number of the result unwritten."""
        for buffer in self.buffers:
            buffer.fill_(math.nan)
        self.run()
        pairs = zip(self.results(), exact, strict=True)
        return [float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]


def launches(tensors: dict[str, Any]) -> dict[str, Callable[[Tiling], Launch]]:
    """By the name of each kernel, a function that returns its `Launch` in a form. A backward kernel reads the outputs
    of the kernels before it."""
    from xlme_ds.models import attention_triton as kernels

    qkv, gate, bounds = tensors["qkv"], tensors["gate"], (tensors["skewed"], tensors["first"], tensors["end"])
    tokens, heads = qkv.shape[1], qkv.shape[3]
    out = kernels._empty_outputs(qkv, gate[0])
    kernels._launch(kernels._forward, qkv, *gate, *bounds, *out)
    delta, grad_qkv = torch.empty_like(out[1]), torch.empty_like(qkv)
    passed = *out[1:], tensors["grad"], delta

    def largest_offset(form: Tiling) -> int:  # the largest distance of a tile from the diagonal, in tiles
        return -(-tokens // form.queries) - 1

    def forward(form: Tiling) -> Launch:
        run = partial(kernels._launch, kernels._forward, qkv, *gate, *bounds, *out, tiling=form)
        return Launch(run, out, lambda: out[:1])

    def queries(form: Tiling) -> Launch:
        # Each block of a kernel writes a part of the parameters' gradients.
        _, _, far, gates, scale = kernels._empty_gradients(qkv, gate[0], bounds[0], largest_offset(form), form)
        arguments = qkv, *gate, *bounds, out[0], *passed, grad_qkv, gates, scale, far
        run = partial(kernels._launch, kernels._backward_queries, *arguments, near=tokens, tiling=form)  # all are near
        grad_q = grad_qkv[:, :, 0]
        results = lambda: (grad_q, gates.sum((0, 1, 2)), scale.sum((0, 2)))  # noqa: E731
        return Launch(run, (delta, grad_q, far, gates, scale), results)

    def keys(form: Tiling) -> Launch:
        arguments = kernels._backward_keys, qkv, *gate, *bounds, *passed, grad_qkv
        run = partial(kernels._launch, *arguments, tiling=form)
        return Launch(run, (grad_qkv[:, :, 1:],), lambda: grad_qkv.unbind(2)[1:])

    def distances(form: Tiling) -> Launch:
        near = largest_offset(form)
        _, grad_d, *_ = kernels._empty_gradients(qkv, gate[0], bounds[0], near, form)
        arguments = kernels._backward_distances, qkv, *gate, *bounds, *passed, grad_d
        run = partial(kernels._launch, *arguments, near=near, tiling=form)
        no_far = grad_d.new_zeros(heads, 2)
        return Launch(run, (grad_d,), lambda: (kernels._by_distance(grad_d.sum(0), no_far, near, tokens),))

    return dict(zip(KERNELS, (forward, queries, keys, distances), strict=True))


def expected(tensors: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Each kernel's results, from the model's attention in float64 on the CPU."""
    qkv, distance, grad = (tensors[name].double().cpu() for name in ("qkv", "distance", "grad"))
    gate = Gate(qkv.shape[3], qkv.shape[4]).double()
    for parameter, value in zip(gate.parameters(), tensors["gate"], strict=True):
        parameter.data = value.double().cpu()
    inputs = [qkv.requires_grad_(), *gate.parameters(), distance.requires_grad_()]
    bias = TorchBias(None, toeplitz(distance), tensors["first"].cpu())  # tokens of an item have the same first token
    out = bias.attend(qkv, gate, 0.0, None)
    gradients = torch.autograd.grad(out, inputs, grad)
    results = [part.to(tensors["qkv"].device) for part in (out.detach(), *gradients)]
    out, grad_qkv, grad_update, grad_reset, grad_scale, grad_distance = results
    grad_q, grad_k, grad_v = grad_qkv.unbind(2)
    return {
        "_forward": [out], "_backward_queries": [grad_q, torch.stack([grad_update, grad_reset]), grad_scale],
        "_backward_keys": [grad_k, grad_v], "_backward_distances": [grad_distance],
    }  # fmt: skip


@functools.cache
def _launches_here() -> dict[str, Callable[[Tiling], Launch]]:
    torch.set_num_threads(1)
    return launches(inputs(torch.device("cuda"), *SHAPE))


def _compile(kernel: str, form: Tiling) -> Figures:
    """Compile a form into the cache that all processes share. Returns an empty dict, or `left_out` with a message if
    the form needs more memory or threads than the GPU has, or `failed` with a message after any other error."""
    try:
        _launches_here()[kernel](form).run()
        torch.cuda.synchronize()
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        return {"left_out" if type(error).__name__ == "OutOfResources" else "failed": message}
    return {}


def autotune(device: torch.device, seconds: float, table: Path) -> Iterator[Figures]:
    """Yield a row of figures for every form, and one for torch's attention. Forms whose turn comes after `seconds` are
    not run; their rows say so.

    If every kernel has a winner, writes a copy of the package's table of forms to `table`, with the winners as the
    entry of this GPU's compute capability.
    """
    started, tensors = time.monotonic(), inputs(device, *SHAPE)
    candidates = [(kernel, form) for kernel in KERNELS for form in candidate_tilings(kernel)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        compiled = dict(zip(candidates, pool.map(_compile, *zip(*candidates, strict=True)), strict=True))
    exact, kernels = expected(tensors), launches(tensors)
    products = {"_forward": 2, "_backward_queries": 3, "_backward_keys": 4, "_backward_distances": 2}  # matrix products
    winners: dict[str, Tiling] = {}
    for kernel in KERNELS:
        rows: dict[Tiling, Figures] = {form: compiled[kernel, form] for form in candidate_tilings(kernel)}
        runs = {}
        for form in [form for form, row in rows.items() if not row]:
            if time.monotonic() - started > seconds:
                rows[form] |= {"left_out": "no time"}
                continue
            launch = kernels[kernel](form)
            errors = launch.errors(exact[kernel])
            rows[form] |= {"error": max(errors), "ok": all(error <= BOUND for error in errors)}
            if rows[form]["ok"]:
                runs[form] = launch.run
        times = median_seconds(device, runs, LAUNCHES, 5, warm_up=0)
        for form, seconds_a_launch in times.items():
            tflops = products[kernel] * PRODUCT_FLOPS / seconds_a_launch / 1e12
            rows[form] |= {"ms": 1000 * seconds_a_launch, "tflops_of_the_square": tflops}
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


def torch_attention(device: torch.device, tensors: dict[str, Any]) -> Figures:
    """Median milliseconds of torch's own attention without bias and mask: forward, and forward with backward."""
    qkv = [part.transpose(1, 2).contiguous().requires_grad_() for part in tensors["qkv"].unbind(2)]
    grad = tensors["grad"].transpose(1, 2).contiguous()
    forward = partial(F.scaled_dot_product_attention, *qkv)

    def forward_backward() -> object:
        return torch.autograd.grad(forward(), qkv, grad)

    forward_backward()
    runs = {"forward_ms": forward, "forward_backward_ms": forward_backward}
    times = median_seconds(device, runs, LAUNCHES, 7, warm_up=0)
    return {"kernel": "torch's attention, no bias, no mask"} | {name: 1000 * times[name] for name in runs}
