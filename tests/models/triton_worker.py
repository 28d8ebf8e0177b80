"""The Triton kernels in Triton's interpreter, on the CPU: writes the largest errors of every case as JSON.

The interpreter is chosen when triton is first imported, hence a process of its own.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.plan.test_activations import kept_by_a_layer, layout
from tests.small import SMALL, model, usual_batch
from xlme_ds.config import ObjectiveConfig
from xlme_ds.models.attention import ItemBias, plain_attend, shared_bias, triton_attend
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.plan import activations

# Items that begin and end inside tiles (of 64, in fp32 of 32), at their borders, and reach over them; padding (0)
# behind.
ROWS = {
    "the last tile a part": [[70, 50, 20, 10], [150], [1, 127, 22]],
    "whole tiles": [[64, 64], [100, 28]],
    "less than a tile": [[4, 3], [7]],
}
SIZES = {"triton": replace(SMALL, width=48, attention="triton"), "sdpa": replace(SMALL, width=48)}


def segments(rows: list[list[int]]) -> Tensor:
    numbers = [[1, 2, 3, 0][: len(row)] if len(row) > 1 else [1] for row in rows]
    return torch.stack(
        [torch.tensor(n).repeat_interleave(torch.tensor(row)) for n, row in zip(numbers, rows, strict=True)]
    )


def inputs(kind: str, rows: int, tokens: int, dtype: torch.dtype, fused: bool) -> dict[str, Tensor]:
    """q, k, v (views of one tensor, as a fused projection gives them, or not), gate and d, as the kind of bias has
    them."""
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(rows, tokens, 3, 2, 16, generator=g).to(dtype)
    found = dict(zip("qkv", qkv.permute(2, 0, 3, 1, 4), strict=True))
    if not fused:
        found["q"] = found["q"].contiguous()
    if kind == "gated":
        found["gate"] = (torch.rand(rows, 2, tokens, 1, generator=g) * 2).to(dtype)
    if kind != "none":
        found["distance"] = torch.randn(2, 2 * tokens - 1, generator=g)
    return {name: value.requires_grad_() for name, value in found.items()}


def run(given: dict[str, Tensor], segments_BT: Tensor, kernel: str, traced: bool = False) -> dict[str, Tensor]:
    bias = shared_bias(kernel, segments_BT, given.get("distance"), given["q"].dtype)
    attend = triton_attend if isinstance(bias, ItemBias) else plain_attend
    if traced:
        attend = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    out = attend(given["q"], given["k"], given["v"], given.get("gate"), bias)  # type: ignore[arg-type]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * weights).sum(), list(given.values()))
    return {"output": out.detach(), **dict(zip(given, gradients, strict=True))}


def error(rows: list[list[int]], kind: str, dtype: torch.dtype, fused: bool) -> dict[str, float]:
    """Of every tensor, over the largest number of the plain form's in float64."""
    segments_BT = segments(rows)
    given = inputs(kind, *segments_BT.shape, dtype, fused)
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    found, expected = run(given, segments_BT, "triton"), run(exact, segments_BT, "sdpa")
    return {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}


def poisoned() -> dict[str, bool]:
    """Items of whole tiles, every number of the second one NaN: a tile of two items that was computed would spread
    them."""
    segments_BT = segments([[64, 64]])
    given = inputs("gated", 1, 128, torch.float32, True)
    with torch.no_grad():
        for name in ("q", "k", "v", "gate"):
            given[name][:, :, 64:] = float("nan")
    found = run(given, segments_BT, "triton")
    return {name: bool(found[name][:, :, :64].isfinite().all()) for name in ("output", "q", "k", "v", "gate")}


def traced() -> bool:
    """Whether torch.compile takes the kernels into one graph, and they give the same bits there."""
    segments_BT = segments(ROWS["less than a tile"])
    ours, eager = (
        run(inputs("gated", *segments_BT.shape, torch.float32, True), segments_BT, "triton", how)
        for how in (True, False)
    )
    return all(torch.equal(ours[name], value) for name, value in eager.items())


def whole_model() -> dict[str, float]:
    """Losses, and the gradients of all parameters as one vector, of the two kernels."""
    objective, batch = ElectraObjective(ObjectiveConfig()), usual_batch()
    found = {}
    for name in SIZES:
        one = model(width=48, attention=name)
        output = one(batch)
        losses = objective.sums(output, batch) / objective.counts(batch)
        (losses * objective.weights).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None])
        found[name] = losses.detach(), gradients
    pairs = zip(("losses", "gradients"), found["triton"], found["sdpa"], strict=True)
    return {name: float((ours - theirs).abs().max() / theirs.abs().max()) for name, ours, theirs in pairs}


def kept() -> dict[str, list[float]]:
    """Bytes that a layer keeps for its backward pass, and what the planner says."""
    cases = {kind: replace(SIZES["triton"], relative_bias=kind) for kind in ("gated", "plain", "none")}  # type: ignore[arg-type]
    return {
        kind: [kept_by_a_layer(cfg, torch.float32, "cpu"), activations.layer(layout(cfg, 4, True))]
        for kind, cfg in cases.items()
    }


def main() -> None:
    found = {
        "fp32": {name: error(rows, "gated", torch.float32, True) for name, rows in ROWS.items()},
        "fp16": {name: error(rows, "gated", torch.float16, True) for name, rows in ROWS.items()},
        "separate q, k, v": error(ROWS["whole tiles"], "gated", torch.float32, False),
        "plain": error(ROWS["whole tiles"], "plain", torch.float32, True),
        "none": error(ROWS["whole tiles"], "none", torch.float32, True),
        "poisoned": poisoned(),
        "traced": traced(),
        "whole model": whole_model(),
        "kept": kept(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
