"""The Triton kernels in Triton's interpreter, on the CPU: writes the largest errors of every case as JSON.

The interpreter is chosen when triton is first imported, hence a process of its own.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from bench.gpu.kernels import KERNELS, expected, launches
from bench.gpu.kernels import inputs as inputs_of_shape
from tests.plan.test_activations import layout, saved_by_a_layer
from tests.small import MODERN, SMALL, model, usual_batch
from xlme_ds.config import EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.engine.build import require_kernels
from xlme_ds.models import attention_triton, gelu_triton, masked_head_triton
from xlme_ds.models.attention import Gate, RelativePositionTable, TritonBias, attention_bias, cpu_attend
from xlme_ds.models.kernel_check import check_kernels
from xlme_ds.models.layers import GeluLinear
from xlme_ds.models.modern import ModernLayer
from xlme_ds.models.tiles import TILINGS_FILE, Tiling
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.plan import activations

# Items that begin and end inside tiles (of 64, in fp32 of 32), at their borders, and reach over them; padding (0)
# behind.
ROWS = {
    "the last tile a part": [[70, 50, 20, 10], [150], [1, 127, 22]],
    "whole tiles": [[64, 64], [100, 28]],
    "less than a tile": [[4, 3], [7]],
}
IN_FP32 = EngineConfig(kind="plain", precision="fp32")
SIZES = {name: replace(SMALL, width=48, kernels=name) for name in ("triton", "torch")}


def segments(rows: list[list[int]]) -> Tensor:
    numbers = [[1, 2, 3, 0][: len(row)] if len(row) > 1 else [1] for row in rows]
    return torch.stack(
        [torch.tensor(n).repeat_interleave(torch.tensor(row)) for n, row in zip(numbers, rows, strict=True)]
    )


def inputs(kind: str, rows: int, tokens: int, dtype: torch.dtype, size: int = 16) -> dict[str, Tensor]:
    """The fused projection's output, the gate's weights and the table of d, as the kind of bias has them."""
    g = torch.Generator().manual_seed(0)
    found = {"qkv": torch.randn(rows, tokens, 3, 2, size, generator=g).to(dtype)}
    if kind == "gated":
        for name, shape in (("update", size), ("reset", size), ("scale", 2)):
            found[name] = torch.randn(shape, generator=g).to(dtype)
    if kind != "none":
        found["table"] = torch.randn(SMALL.relative_buckets, 2, generator=g).to(dtype)
    return {name: value.requires_grad_() for name, value in found.items()}


def gate_of(given: dict[str, Tensor]) -> Gate | None:
    if "update" not in given:
        return None
    gate = Gate(len(given["scale"]), len(given["update"]))
    for name in ("update", "reset", "scale"):
        del gate._parameters[name]
        setattr(gate, name, given[name])
    return gate


def distances_of(given: dict[str, Tensor], tokens: int) -> Tensor | None:
    if "table" not in given:
        return None
    table = RelativePositionTable(2, SMALL.relative_buckets, SMALL.relative_max_distance)
    del table._parameters["weight"]
    table.weight = given["table"]
    return table(tokens)


def run(given: dict[str, Tensor], segments_BT: Tensor, kernels: str, traced: bool = False) -> dict[str, Tensor]:
    size = given["qkv"].shape[-1]
    cfg = replace(SMALL, width=2 * size, heads=2, kernels=kernels)  # type: ignore[arg-type]
    position_bias_HW = distances_of(given, segments_BT.shape[1])
    bias, gate = attention_bias(cfg, segments_BT, position_bias_HW, given["qkv"].dtype), gate_of(given)

    def attend(qkv_BT3HK: Tensor) -> Tensor:
        if isinstance(bias, TritonBias):
            return bias.attend(qkv_BT3HK, gate, 0.0, None)
        q, k, v = qkv_BT3HK.permute(2, 0, 3, 1, 4)
        return cpu_attend(q, k, v, None if gate is None else gate(q), bias).transpose(1, 2)

    if traced:
        attend = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    out = attend(given["qkv"])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * weights).sum(), list(given.values()))
    return {"output": out.detach(), **dict(zip(given, gradients, strict=True))}


def error(rows: list[list[int]], kind: str, dtype: torch.dtype, size: int = 16) -> dict[str, float]:
    """Error of every tensor, relative to the largest number of the plain form in float64."""
    segments_BT = segments(rows)
    given = inputs(kind, *segments_BT.shape, dtype, size)
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    found, expected = run(given, segments_BT, "triton"), run(exact, segments_BT, "torch")
    return {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}


def local(rows: list[list[int]]) -> dict[str, float]:
    """Errors of a local layer of the modern body, output and gradient, against torch's windows in float64."""
    segments_BT = segments(rows)
    given = inputs("none", *segments_BT.shape, torch.float32)["qkv"]
    found = []
    for kernels, qkv in (("triton", given), ("torch", given.detach().double().requires_grad_())):
        cfg = replace(SMALL, width=32, heads=2, kernels=kernels, **MODERN)  # type: ignore[arg-type]
        _, of_local = ModernLayer.shared_inputs(cfg, segments_BT, None, qkv.dtype)
        out = of_local.attend(qkv, None, 0.0, None)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found.append((out.detach(), *torch.autograd.grad((out * weights).sum(), [qkv])))
    pairs = zip(("output", "qkv"), *found, strict=True)
    return {name: float((ours - theirs).abs().max() / theirs.abs().max()) for name, ours, theirs in pairs}


def poisoned() -> dict[str, bool]:
    """Items of whole tiles, every number of the second one NaN: a tile of two items that was computed would spread
    them."""
    segments_BT = segments([[64, 64]])
    given = inputs("gated", 1, 128, torch.float32)
    with torch.no_grad():
        given["qkv"][:, 64:] = float("nan")
    found = run(given, segments_BT, "triton")
    return {name: bool(found[name][:, :64].isfinite().all()) for name in ("output", "qkv")}


def traced() -> bool:
    """Whether torch.compile takes the kernels into one graph, and they give the same bits there."""
    segments_BT = segments(ROWS["less than a tile"])
    ours, eager = (
        run(inputs("gated", *segments_BT.shape, torch.float32), segments_BT, "triton", how) for how in (True, False)
    )
    layer, x = GeluLinear(32, 48), torch.randn(60, 32, generator=torch.Generator().manual_seed(0))
    one_graph = torch.compile(GeluLinear.forward, fullgraph=True, backend="aot_eager")
    of_gelu = []
    for forward in (one_graph, GeluLinear.forward):
        out = forward(layer, x, True)
        of_gelu.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    same = all(torch.equal(traced, eager) for traced, eager in zip(*of_gelu, strict=True))
    return same and all(torch.equal(ours[name], value) for name, value in eager.items())


def whole_model() -> dict[str, float]:
    """Losses, and the gradients of all parameters as one vector, of the two kernels."""
    objective, batch = ElectraObjective(ObjectiveConfig()), usual_batch()
    found = {}
    for name in SIZES:
        one = model(width=48, kernels=name)
        output = one(batch)
        losses = objective.sums(output, batch) / objective.counts(batch)
        (losses * objective.weights).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None])
        found[name] = losses.detach(), gradients
    pairs = zip(("losses", "gradients"), found["triton"], found["torch"], strict=True)
    return {name: float((ours - theirs).abs().max() / theirs.abs().max()) for name, ours, theirs in pairs}


def forms() -> dict[str, list[float]]:
    """Errors of each kernel for every tile of the table, every output NaN before; the interpreter has neither warps nor
    stages. Rows of one item and of several: a program of the distances has two rows of one item, one of each kind, or
    the last row, after which is one more."""
    given = inputs_of_shape(torch.device("cpu"), 6, 2, 192, 16, torch.float16)
    given |= {name: given[name][:5] for name in ("qkv", "first", "end", "grad")}
    exact, launched = expected(given), launches(given)
    table = json.loads(TILINGS_FILE.read_text())
    kinds = [kind for sizes in table.values() for of in sizes.values() for kind in of.items()]
    every = {(kernel, *form[:2]): Tiling(*form) for kernel, form in kinds}
    order = sorted(every, key=lambda tile: KERNELS.index(tile[0]))  # each reads what the ones before it wrote
    return {str(tile): launched[tile[0]](every[tile]).errors(exact[tile[0]]) for tile in order}


def kept() -> dict[str, list[float]]:
    """Bytes that a layer keeps for its backward pass, and what the planner says."""
    cases = {kind: replace(SIZES["triton"], relative_bias=kind) for kind in ("gated", "plain", "none")}  # type: ignore[arg-type]
    return {
        kind: [
            saved_by_a_layer(cfg, torch.float32, "cpu"),
            activations.uncheckpointed_layer_bytes(layout(cfg, 4, True)),
        ]
        for kind, cfg in cases.items()
    }


def gelu(tokens: int, inputs: int, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Errors of a linear map with GELU: output and gradients, against the plain form in float64. Rows of three tokens:
    the kernel reads them as one."""
    g = torch.Generator().manual_seed(0)
    layer, x = GeluLinear(inputs, size).to(dtype), torch.randn(tokens // 3, 3, inputs, generator=g).to(dtype)
    x.requires_grad_()
    exact, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    weights = torch.randn(tokens // 3, 3, size, generator=g).to(dtype)
    found = []
    for one, given, triton in ((layer, x, True), (exact, exact_x, False)):
        out = one(given, triton)
        out.backward(weights.to(out.dtype))
        found.append([out.detach(), given.grad, one.weight.grad, one.bias.grad])
    pairs = zip(("output", "x", "weight", "bias"), *found, strict=True)
    return {name: float((ours - theirs).abs().max() / theirs.abs().max()) for name, ours, theirs in pairs}


def checked(check: Callable[[ModelConfig], None], wrong: int = 3) -> list[str]:
    """Results of the check before a run: for the kernels as they are, and for up to three wrong ones."""
    cfg, said = replace(SIZES["triton"], vocabulary=1000), []
    right = attention_triton.attend, masked_head_triton.tile_gradient, gelu_triton._gradients
    wrong_attention = lambda *given: right[0](*given) * 1.1  # noqa: E731
    wrong_head = lambda *given: tuple(each * 1.1 for each in right[1](*given))  # noqa: E731
    wrong_gelu = lambda *given: tuple(each * 1.1 for each in right[2](*given))  # noqa: E731
    cases = right, (wrong_attention, *right[1:]), (right[0], wrong_head, right[2]), (*right[:2], wrong_gelu)
    for attend, gradient, of_gelu in cases[: 1 + wrong]:
        attention_triton.attend, masked_head_triton.tile_gradient, gelu_triton._gradients = attend, gradient, of_gelu
        try:
            check(cfg)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    attention_triton.attend, masked_head_triton.tile_gradient, gelu_triton._gradients = right
    return said


def main() -> None:
    found = {
        "fp32": {name: error(rows, "gated", torch.float32) for name, rows in ROWS.items()},
        "fp16": error(ROWS["the last tile a part"], "gated", torch.float16),
        "heads of 64": error(ROWS["whole tiles"], "gated", torch.float16, 64),
        "heads of 128": error(ROWS["the last tile a part"][:1], "gated", torch.float16, 128),
        "plain": error(ROWS["whole tiles"], "plain", torch.float32),
        "none": error(ROWS["whole tiles"], "none", torch.float32),
        "forms": forms(),
        "local": {name: local(rows) for name, rows in ROWS.items()},
        "gelu": {
            "whole": gelu(768, 32, 128, torch.float32),
            "parts": gelu(300, 24, 200, torch.float32),
            "fp16": gelu(768, 32, 128, torch.float16),
        },
        "poisoned": poisoned(),
        "traced": traced(),
        "whole model": whole_model(),
        "kept": kept(),
        "checked": checked(lambda cfg: check_kernels(cfg, torch.device("cpu"), torch.float16)),
        "checked before a run": checked(lambda cfg: require_kernels(RunConfig("test", model=cfg, engine=IN_FP32)), 1),
    }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
