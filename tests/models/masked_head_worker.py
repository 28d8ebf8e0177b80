"""The masked head's Triton kernels in Triton's interpreter, on the CPU: writes what is measured of every case as JSON.

The interpreter is chosen when triton is first imported, hence a process of its own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

from xlme_ds.models import masked_head_triton
from xlme_ds.models.masked_head import GROUP_SIZE, MaskedHeadOutput, vocabulary_softmax

# Positions, width, sizes of the blocks: less than a program's positions and more; D a power of two and not; blocks of
# less than a group, of whole groups, and with a rest.
SIZES: dict[str, tuple[int, int, list[int]]] = {
    "one block": (20, 16, [1300]),
    "many positions": (140, 48, [300]),
    "three blocks": (7, 80, [60, 256, 333]),
    "a position, an id": (1, 64, [1]),
}
CHUNK = 256
TEMPERATURE, Z_LOSS = 0.5, 0.05
BELOW_ONE = 1 - 2.0**-24  # the largest uniform that the corruption gives


class Problem:
    """Random inputs; `targets` are the borders of groups and blocks, then random ids."""

    def __init__(self, sizes: tuple[int, int, list[int]], dtype: torch.dtype):
        positions, width, blocks = sizes
        self.g, self.ids = torch.Generator().manual_seed(0), sum(blocks)
        self.hidden = self.random(positions, width).to(dtype).requires_grad_()
        self.blocks = [(self.random(size, width) * 0.2).to(dtype).requires_grad_() for size in blocks]
        self.bias = self.random(self.ids).to(dtype).requires_grad_()
        starts = [sum(blocks[:n]) + first for n, size in enumerate(blocks) for first in range(0, size, GROUP_SIZE)]
        borders = torch.tensor(sorted({*starts, *(start - 1 for start in starts[1:]), self.ids - 1}))
        self.targets = torch.cat([borders, torch.randint(self.ids, (positions,), generator=self.g)])[:positions]
        self.uniforms = torch.rand(positions, generator=self.g)
        self.weights = torch.linspace(0.5, 2.0, positions)  # every position counts, none alike

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g)

    @property
    def inputs(self) -> list[Tensor]:
        return [self.hidden, self.bias, *self.blocks]

    def run(self, temperature: float = 1.0, z_loss: float = 0.0) -> MaskedHeadOutput:
        given = self.hidden, self.blocks, self.bias, self.targets, self.uniforms
        return vocabulary_softmax(*given, CHUNK, "triton", temperature, z_loss)

    def gradients(self, nll_M: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((nll_M * self.weights.to(nll_M.dtype)).sum(), self.inputs))

    def logits(self) -> Tensor:
        """In float64, with all ids at once."""
        table = torch.cat([block.double() for block in self.blocks])
        return self.hidden.double() @ table.t() + self.bias.double()


def outside(sample_M: Tensor, logits_MV: Tensor, uniforms_M: Tensor) -> float:
    """Largest distance of a uniform from the share that its sample has of float64's distribution."""
    cdf_MV = F.pad(logits_MV.detach().softmax(1).cumsum(1), (1, 0))
    before_M, at_M = (cdf_MV.gather(1, (sample_M + one)[:, None]).squeeze(1) for one in (0, 1))
    return float(torch.maximum(before_M - uniforms_M, uniforms_M - at_M).max())


def errors(name: str, dtype: torch.dtype, temperature: float = 1.0, z_loss: float = 0.0) -> dict[str, float]:
    """Errors of loss and gradients, relative to the largest number in float64; `samples`: distance outside their share;
    `predictions`: distance below the highest logit."""
    problem = Problem(SIZES[name], dtype)
    got, logits_MV = problem.run(temperature, z_loss), problem.logits()
    assert got.nll_M.dtype == torch.float32 and got.sample_M.dtype == got.predicted_M.dtype == torch.int64
    expected_M = F.cross_entropy(logits_MV, problem.targets, reduction="none")
    pairs = [(got.nll_M, expected_M)]
    wanted = problem.gradients(expected_M + z_loss * logits_MV.logsumexp(1) ** 2)
    pairs += zip(problem.gradients(got.nll_M), wanted, strict=True)
    names = ["loss", "hidden", "bias", *(f"block {n}" for n in range(len(problem.blocks)))]
    largest = max(float(block.detach().abs().max()) for _, block in pairs[3:])  # a block alone may have nearly none
    scales = [float(theirs.detach().abs().max()) for _, theirs in pairs[:3]] + [largest] * len(problem.blocks)
    found = {
        name: float((ours.double() - theirs).detach().abs().max()) / (scale or 1.0)
        for name, (ours, theirs), scale in zip(names, pairs, scales, strict=True)
    }
    short = logits_MV.amax(1) - logits_MV.gather(1, got.predicted_M[:, None]).squeeze(1)
    return found | {
        "samples": outside(got.sample_M, logits_MV / temperature, problem.uniforms),
        "predictions": float(short.detach().max()),
    }


def samples_at_borders() -> list[list[int]]:
    """Ids at both sides of every border of groups and blocks, drawn by uniforms at the begin, in the middle and at the
    end of their share; then what must come out."""
    problem = Problem((22, 16, [60, 256, 900]), torch.float32)
    with torch.no_grad():
        problem.hidden.mul_(0.1)
        problem.bias.mul_(0.2)
    probabilities_MV = problem.logits().softmax(1).detach()
    ids_M1 = problem.targets[:, None]
    ends_M, shares_M = (each.gather(1, ids_M1).squeeze(1) for each in (probabilities_MV.cumsum(1), probabilities_MV))
    drawn = []
    for share in (0.01, 0.5, 0.99):
        problem.uniforms = (ends_M - (1 - share) * shares_M).float()
        drawn.append(problem.run().sample_M.tolist())
    return [*drawn, problem.targets.tolist()]


def undrawn() -> bool:
    """Whether the sample without uniforms is the most likely id, at every position."""
    problem = Problem(SIZES["three blocks"], torch.float32)
    problem.uniforms = None  # type: ignore[assignment]
    got = problem.run()
    return torch.equal(got.predicted_M, problem.logits().argmax(1)) and torch.equal(got.sample_M, got.predicted_M)


def twice() -> bool:
    runs = []
    for _ in range(2):
        problem = Problem(SIZES["three blocks"], torch.float16)
        got = problem.run()
        runs.append([*got, *problem.gradients(got.nll_M)])
    return all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def opened() -> bool:
    """Whether a block with `gradient_adder` gets no gradient from autograd, and every row of it there, once a pass."""
    problem = Problem(SIZES["three blocks"], torch.float32)
    expected = torch.autograd.grad(problem.run().nll_M.sum(), problem.inputs)
    sums = [torch.zeros_like(block) for block in problem.blocks[1:]]
    for block, total in zip(problem.blocks[1:], sums, strict=True):
        block.gradient_adder = lambda total=total: lambda rows, tile: total[rows].add_(tile)  # type: ignore[attr-defined]
    for _ in range(2):
        problem.run().nll_M.sum().backward()
    got = [problem.hidden.grad, problem.bias.grad, problem.blocks[0].grad, *sums]
    assert all(block.grad is None for block in problem.blocks[1:])
    return all(torch.equal(one, 2 * other) for one, other in zip(got, expected, strict=True))  # type: ignore[arg-type]


def never_predicted() -> dict[str, Any]:
    """Ids of bias −1e30 alone in their group, at its begin and end, and a logit 200 above all others."""
    problem = Problem((40, 16, [130, 300]), torch.float32)
    with torch.no_grad():
        problem.bias[:5] = problem.bias[127:131] = problem.bias[-1] = -1e30
    problem.uniforms[:3] = torch.tensor([0.0, BELOW_ONE, 0.5])
    got, finite = problem.run(), problem.logits().isfinite().all()
    assert finite
    seen = {*got.sample_M.tolist(), *got.predicted_M.tolist()}
    with torch.no_grad():
        problem.hidden.zero_()
        problem.bias.zero_()
        problem.bias[200] = 200.0
        problem.targets[:2] = torch.tensor([200, 5])
    far = problem.run()
    return {
        "seen": sorted(seen & {*range(5), *range(127, 131), 429}),
        "far": [sorted({*far.sample_M.tolist(), *far.predicted_M.tolist()}), far.nll_M[:2].tolist()],
    }


def nan() -> bool:
    """Whether NaN shows in the losses of its positions alone, and no id is outside the vocabulary."""
    problem = Problem((9, 16, [130, 70]), torch.float32)
    with torch.no_grad():
        problem.hidden[[2, 8]] = float("nan")
    got = problem.run()
    inside = all(((ids >= 0) & (ids < 200)).all() for ids in (got.sample_M, got.predicted_M))
    return inside and got.nll_M.isnan().nonzero().flatten().tolist() == [2, 8]


def operators() -> dict[str, dict[str, str]]:
    """torch's own checks: that they change no input and that fake tensors have the shapes and types of real ones."""
    problem, tests = Problem(SIZES["three blocks"], torch.float32), ("test_schema", "test_faketensor")
    hidden, blocks, bias = problem.hidden.detach(), [b.detach() for b in problem.blocks], problem.bias.detach()
    groups = torch.tensor([0, 1, 2, 3, 4, 5, 0])
    maximum, threshold = torch.ones(7), torch.zeros(7, dtype=torch.float64)
    cases: dict[Any, tuple[Any, ...]] = {
        masked_head_triton.group_sums: (hidden, blocks, bias, problem.targets, TEMPERATURE),
        masked_head_triton.sample: (hidden, blocks, bias, groups, groups, maximum, threshold, TEMPERATURE),
        masked_head_triton.tile_gradient: (
            hidden,
            blocks[2],
            bias[316:],
            problem.targets,
            maximum,
            maximum,
            316,
            Z_LOSS,
        ),
    }
    return {str(op): torch.library.opcheck(op, given, test_utils=tests) for op, given in cases.items()}


def main() -> None:
    found = {
        "fp32": {name: errors(name, torch.float32) for name in SIZES},
        "fp16": {name: errors(name, torch.float16) for name in ("many positions", "three blocks")},
        "choices": {
            name: errors(name, torch.float32, TEMPERATURE, Z_LOSS) for name in ("many positions", "three blocks")
        },
        "borders": samples_at_borders(),
        "undrawn": undrawn(),
        "twice": twice(),
        "opened": opened(),
        "never": never_predicted(),
        "nan": nan(),
        "operators": operators(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
