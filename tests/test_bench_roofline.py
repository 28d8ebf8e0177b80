"""The counted step agrees with measured and hand-counted numbers, and never waits for the GPU inside a pass."""

import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from bench.roofline.counted import GPUS, OperationCounter, bytes_moved
from tests.launch import ROOT, environment
from xlme_ds.models.tiles import tiling_of

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA tensors need the compiler g++"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
]

# A process loads torch and DeepSpeed, and all that a case needs of them, for all cases. XLM's width gives heads of 16.
COUNT = """
import gc, importlib, json, os, sys
from dataclasses import replace
import bench.roofline.__main__ as roofline
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from bench.roofline.counted import GPUS, OperationCounter
from bench.roofline.__main__ import Settings, figures
from xlme_ds.recipes import recipe
from xlme_ds.objectives.electra import ElectraObjective
from tests.launch import PRELOADED

SMALL = dict(vocabulary=1200, width=64, heads=4, feed_forward=256, generator_layers=1, discriminator_layers=2,
             max_positions=64, head_chunk=512)

def counted(name, micro_batches=1, gpus=1, settings={}, engine=None, data={}):
    run = recipe(name)
    run = replace(run, model=replace(run.model, **SMALL | settings), data=replace(run.data, micro_batch=2, **data))
    if engine:
        run = replace(run, engine=replace(run.engine, deepspeed=engine))
    return figures(Settings(run, micro_batches=micro_batches, gpus=gpus))

def product(size):
    counter = OperationCounter(GPUS["h200"], {}, str)
    with FakeTensorMode(), counter:
        x, w = (torch.empty(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        torch.addmm(x[0], x, w)
    (totals,) = counter.parts.values()
    return totals

class Reads(ElectraObjective):
    def sums(self, output, batch):
        losses = super().sums(output, batch)
        assert losses.sum().item() == 0
        return losses

for name in (*PRELOADED, "torch._inductor.fx_passes", "xlme_ds.engine.zero"):
    importlib.import_module(name)
gc.freeze()
for line in sys.stdin.read().splitlines():
    case, child = json.loads(line), os.fork()  # DeepSpeed knows one process group in a process
    if child == 0:
        if case.pop("reads", False):
            roofline.objective_of = Reads
        print(json.dumps(product(**case) if "size" in case else counted(**case)), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{case} failed")
"""
TWO = {"micro_batches": 2}
CASES: dict[str, dict[str, Any]] = {
    "base": {"name": "base_zero1", "settings": {"compile": "none"}},
    "base, torch's kernels": {"name": "base_zero1", "settings": {"kernels": "torch"}},
    "two micro-batches": {"name": "base_zero1", "settings": {"compile": "none"}, **TWO},
    "gdes, checkpointing": {
        "name": "base_zero1", "settings": {"embedding_sharing": "gdes", "activation_checkpointing": True},
    },
    "compiled": {"name": "base_zero1", "settings": {"compile": "layers"}},
    "dropout": {"name": "base_zero1", "settings": {"dropout": 0.1, "attention_dropout": 0.1}},
    "zero2": {"name": "large_zero2", "engine": "zero2", "gpus": 4},
    "zero3": {"name": "xl_zero3", "settings": {"vocabulary_blocks": 2}, "gpus": 4, **TWO},
    "xlm": {"name": "xlm"},
    "clm": {"name": "xlm_clm"},
    "camlm": {"name": "ernie_m"},
    "btmlm": {"name": "ernie_m_stage2"},
    "modern": {
        "name": "modern_base_mlm", "data": {"para_rows": 0}, "engine": "zero1",
        "settings": {"max_positions": 512, "local_window": 64, "global_every": 2},
    },
    "a number read in each micro-batch": {"name": "base_zero1", "reads": True},
    "a product": {"size": 4096},
}  # fmt: skip


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    """The figures of every case."""
    lines = "".join(json.dumps(case) + "\n" for case in CASES.values())
    done = subprocess.run(
        [sys.executable, "-c", COUNT], input=lines, cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, figures, strict=True))


def waits_in_passes(figures: dict[str, Any]) -> list[str]:
    """Places inside the forward and backward passes where the host waits."""
    return [place for place in figures["host_syncs"] if place.startswith("passes: ")]


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if "name" in case and "reads" not in case])
def test_the_host_never_waits_inside_a_micro_batch(counted: dict[str, dict[str, Any]], case: str) -> None:
    # And no operation mixed devices: fake tensors raise where one does.
    assert waits_in_passes(counted[case]) == []
    assert counted[case]["host_syncs_per_step"] <= 12


def test_a_number_read_inside_a_micro_batch_is_found(counted: dict[str, dict[str, Any]]) -> None:
    (place,) = waits_in_passes(counted["a number read in each micro-batch"])
    assert place.startswith("passes: a number read")


def test_a_product_takes_what_was_measured(counted: dict[str, dict[str, Any]]) -> None:
    """On an H200 790 TFLOP/s without a bias."""
    tflop = 2 * 4096**3 / 1e12
    assert tflop / counted["a product"]["ms"] * 1e3 == pytest.approx(790, rel=0.1)


def test_operations_of_the_products(counted: dict[str, dict[str, Any]]) -> None:
    """Counted by hand for the small model: torch's attention, full rows."""
    tokens, width, inner, layers, row = 4 * 64, 64, 256, 3, 64
    scores = 2 * tokens * row * width  # a product of queries and keys, or of weights and values
    head = 2 * tokens * width * (width + 1)
    parts = counted["base, torch's kernels"]["by_part"]
    attention = sum(parts[f"{name}: attention"]["tflops"] for name in ("generator", "discriminator"))
    feed_forward = sum(parts[f"{name}: feed-forward"]["tflops"] for name in ("generator", "discriminator"))
    assert feed_forward * 1e12 == pytest.approx(layers * 3 * 2 * tokens * width * 2 * inner)
    # Backward torch's kernel has five products, the scores' once more.
    assert attention * 1e12 == pytest.approx(layers * (3 * 2 * tokens * width * 4 * width + 7 * scores), rel=0.02)
    assert parts["replaced head"]["tflops"] * 1e12 == pytest.approx(3 * head, rel=0.02)


def test_operations_of_local_layers(counted: dict[str, dict[str, Any]]) -> None:
    """By hand: of n tiles of keys a tile of queries reads itself and its neighbours, where the layer is local."""
    rows, row, width, tile = 2, 512, 64, tiling_of("_forward", 64, 2).queries
    n = row // tile
    scores = 9 * 2 * rows * row**2 * width  # of two products forward and seven backward
    products = 3 * 2 * rows * row * 4 * width**2
    (found,) = (part["tflops"] for name, part in counted["modern"]["by_part"].items() if name.endswith(": attention"))
    assert n > 3 and found * 1e12 == pytest.approx(2 * products + scores * (1 + (3 * n - 2) / n**2), rel=0.02)


def test_compiled_layers_have_the_same_products_in_less_time(counted: dict[str, dict[str, Any]]) -> None:
    eager, compiled = counted["base"], counted["compiled"]
    assert compiled["tflops"] == pytest.approx(eager["tflops"]) and compiled["kernels"] == eager["kernels"]
    assert compiled["milliseconds"] < eager["milliseconds"]
    faster = {part for part, where in eager["by_part"].items() if compiled["by_part"][part]["ms"] < where["ms"]}
    layers = {f"{side}: {part}" for side in ("generator", "discriminator") for part in ("attention", "feed-forward")}
    assert layers < faster and not faster & {"masked head", "replaced head", "optimizer", "reading"}


def test_rates_follow_from_the_time_of_a_process(counted: dict[str, dict[str, Any]]) -> None:
    """Four processes share a step's rows and operations; text first, pairs second."""
    for case, rows in (("base", [2, 2]), ("two micro-batches", [4, 4]), ("zero2", [2, 2]), ("modern", [2, 0])):
        found = counted[case]
        tokens = sum(rows) * (512 if case == "modern" else 64)
        assert found["rows"] == rows and found["milliseconds"] >= found["gpu_milliseconds"] > 0
        assert found["tokens_per_s"] == pytest.approx(tokens / found["milliseconds"] * 1e3), case
        for total, key in (("gpu_milliseconds", "ms"), ("kernels",) * 2, ("gigabytes",) * 2, ("tflops",) * 2):
            assert found[total] == pytest.approx(sum(part[key] for part in found["by_part"].values())), (case, key)
        assert found["host_syncs_per_step"] == sum(found["host_syncs"].values())
    one, two = (
        counted[case]["fraction_of_peak"] * counted[case]["milliseconds"] for case in ("base", "two micro-batches")
    )
    assert two == pytest.approx(2 * one) and one > 0


def test_kernels_of_a_micro_batch(counted: dict[str, dict[str, Any]]) -> None:
    """Of three layers, two heads and the tables. The optimizer's depend on how gradients are summed, not on a pass."""
    one, two = (
        sum(where["kernels"] for part, where in counted[case]["by_part"].items() if part != "optimizer")
        for case in ("base", "two micro-batches")
    )
    assert 0 < two - one <= 500


def test_each_kernel_of_an_operator_takes_the_floor_and_the_gap() -> None:
    counter = OperationCounter(GPUS["h200"], {}, lambda module: "part")
    counter.phase = "step"
    for kernels in (1, 8):
        counter.add("sort", 0.0, 1.0, kernels, "bf16_matmul")
    assert counter.parts["step"]["ms"] == pytest.approx(9 * (3e-3 + 3e-3)), "3 µs of each"


def test_bytes_by_hand() -> None:
    """Tables of 100 and states of 4 vectors, each of 8 floats, 32 bytes; three ids of 8 bytes."""
    x, y, table, rows = (torch.zeros(count, 8) for count in (4, 4, 100, 3))
    ids, aten = torch.zeros(3, dtype=torch.int64), torch.ops.aten
    expected: list[tuple[Any, tuple[Any, ...], dict[str, Any], int]] = [
        (aten.add.Tensor, (x, y[:1].expand(4, 8)), {}, (4 + 1 + 4) * 32),  # an expanded vector is read once
        (aten.add_.Tensor, (x, y), {}, (4 + 4 + 4) * 32),
        (aten.copy_.default, (x, y), {}, (4 + 4) * 32),  # what is overwritten is not read
        (aten.mul.out, (x, y), {"out": torch.zeros(4, 8)}, (4 + 4 + 4) * 32),
        (aten.embedding.default, (table, ids), {}, (3 + 3) * 32 + 3 * 8),
        (aten.index_add_.default, (table, 0, ids, rows), {}, 3 * (3 * 32 + 3 * 8)),
        (aten.index_put.default, (table, [ids], rows), {}, 2 * 100 * 32 + 3 * (3 * 32 + 3 * 8)),
        (aten.cumsum.default, (x, 0), {}, 2 * (4 + 4) * 32),
    ]
    for function, arguments, named, size in expected:
        name = function._schema.name.removeprefix("aten::")
        assert bytes_moved(name, function, arguments, named, function(*arguments, **named)) == size, name


def test_rates_of_other_gpus_are_in_the_proportion_of_their_data_sheets() -> None:
    h200, h100, a100 = (GPUS[name] for name in ("h200", "h100", "a100"))
    assert h100["memory"] == pytest.approx(h200["memory"] * 3.35 / 4.8) and h100["bf16_matmul"] == h200["bf16_matmul"]
    for rate in ("bf16_matmul", "float32_matmul", "masked_head", "attention_forward", "attention_backward"):
        assert a100[rate] == pytest.approx(h200[rate] * 312 / 989), rate
    assert a100["sheet_bf16"] == 312e12
