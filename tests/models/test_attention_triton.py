"""The Triton kernels, in Triton's interpreter, against attention's plain form; and what is said where they do not
fit."""

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.gpu.kernels import BOUND
from tests.launch import ROOT, environment
from tests.small import SMALL, lively
from xlme_ds import models
from xlme_ds.config import EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.engine.build import require_engine
from xlme_ds.models import kernel_check
from xlme_ds.models.attention import TritonBias, item_bounds, item_mask
from xlme_ds.models.encoder import Encoder
from xlme_ds.models.tiles import Tiling, tiling_of, tilings
from xlme_ds.objectives import OBJECTIVES, objective_of
from xlme_ds.recipes import RECIPES
from xlme_ds.validate import validate

WITHOUT = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(WITHOUT, reason="the package triton is not installed")
# Sums of up to 150 terms in another order: 3.7e-6 on one of two processors. fp16 rounds weights, gradients and results
# to 2^-12 of each, several times in a row.
FP32, FP16 = 1e-5, 5e-3
ROWS = ("the last tile a part", "whole tiles", "less than a tile")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("triton") / "errors.json"
    command = [sys.executable, "-m", "tests.models.triton_worker", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@needs_triton
@pytest.mark.parametrize("rows", ROWS)
def test_output_and_all_gradients_in_fp32(measured: Any, rows: str) -> None:
    errors = measured["fp32"][rows]
    assert errors.keys() == {"output", "qkv", "update", "reset", "scale", "table"}
    assert max(errors.values()) < FP32, errors


@needs_triton
@pytest.mark.parametrize("case", ["plain", "none"])
def test_other_inputs(measured: Any, case: str) -> None:
    assert max(measured[case].values()) < FP32, measured[case]


@needs_triton
def test_half_precision(measured: Any) -> None:
    # Were nothing rounded the errors would be fp32's: the comparison would not be of fp16.
    assert 1e-5 < max(measured["fp16"].values()) < FP16, measured["fp16"]


@needs_triton
@pytest.mark.parametrize("rows", ROWS)
def test_local_layers_of_the_modern_body(measured: Any, rows: str) -> None:
    """Windows of 8 tokens, which end inside items and inside tiles."""
    assert max(measured["local"][rows].values()) < FP32, measured["local"][rows]


@needs_triton
@pytest.mark.parametrize("heads", ["heads of 64", "heads of 128"])
def test_heads_of_other_sizes(measured: Any, heads: str) -> None:
    assert max(measured[heads].values()) < FP16, measured[heads]


@needs_triton
@pytest.mark.parametrize("case", ["whole", "parts", "fp16"])
def test_gelu_and_the_sums_of_its_bias(measured: Any, case: str) -> None:
    assert max(measured["gelu"][case].values()) < (FP16 if case == "fp16" else FP32), measured["gelu"][case]


@needs_triton
def test_every_form_of_the_table(measured: Any) -> None:
    """As `bench.gpu` compares the kernels with float64 on a GPU, within its bound: dw is one number a head, in which
    thousands of terms cancel. A number that is not written is NaN."""
    assert len(measured["forms"]) >= 8
    assert all(error < BOUND for errors in measured["forms"].values() for error in errors), measured["forms"]


@needs_triton
def test_tiles_without_a_common_item_are_passed_over(measured: Any) -> None:
    assert all(measured["poisoned"].values()), measured["poisoned"]


@needs_triton
def test_torch_compile_takes_them_as_they_are(measured: Any) -> None:
    assert measured["traced"]


@needs_triton
def test_the_complete_model_by_its_setting(measured: Any) -> None:
    # After three layers and their norms.
    assert 0 < measured["whole model"]["gradients"] < 1e-4
    assert measured["whole model"]["losses"] < 1e-5


@needs_triton
@pytest.mark.parametrize("kind", ["gated", "plain", "none"])
def test_the_planner_counts_saved_bytes(measured: Any, kind: str) -> None:
    kept, counted = measured["kept"][kind]
    assert kept == pytest.approx(counted, abs=64)


def test_bf16_in_the_interpreter_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bf16 products are wrong, and a run on a CPU would train with them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = RunConfig("test", model=ModelConfig(kernels="triton"), engine=EngineConfig(precision="bf16"))
    with pytest.raises(ValueError, match=r"interpreter has no bf16 products: set engine\.precision to fp32"):
        require_engine(run)


@needs_triton
def test_the_check_runs_in_the_interpreter(measured: Any) -> None:
    right, attention = measured["checked before a run"]
    assert right == "" and "kernels of the attention are wrong on this cpu" in attention


def test_the_check_has_rows_that_all_tiles_divide_and_rows_that_none_divides() -> None:
    tiles = [Tiling(*form) for sizes in tilings().values() for forms in sizes.values() for form in forms.values()]
    sizes = {size for tile in [*tiles, tiling_of("", 64, 4)] for size in (tile.queries, tile.keys)}
    assert len(sizes) > 1
    whole, cut = kernel_check._ROW_LENGTHS
    assert not any(whole % size for size in sizes) and all(cut % size for size in sizes)


@needs_triton
def test_wrong_kernels_fail_before_a_run(measured: Any) -> None:
    right, attention, head, gelu = measured["checked"]
    assert right == ""
    assert "kernels of the attention are wrong on this cpu (output by" in attention
    assert "set model.kernels to torch" in attention
    assert "kernels of the vocabulary softmax are wrong" in head and "gradient of" in head
    assert "kernels of the GELU are wrong on this cpu (gradient of x by" in gelu


def test_bounds_agree_with_the_mask() -> None:
    segments_BT = torch.tensor([[1] * 5 + [2] + [3] * 4 + [0] * 2, [1] * 12, [1] * 11 + [0]])
    first_BT, end_BT = item_bounds(segments_BT)
    key_T = torch.arange(12)
    inside_BTT = (first_BT[:, :, None] <= key_T) & (key_T < end_BT[:, :, None])
    assert torch.equal(inside_BTT[:, None], item_mask(segments_BT))


def test_on_the_cpu_the_setting_changes_nothing() -> None:
    cfg = replace(SMALL, width=48)
    outputs = []
    for kernels in ("torch", "triton"):
        encoder = lively(Encoder(replace(cfg, kernels=kernels), 1))  # type: ignore[arg-type]
        x = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(1))
        outputs.append(encoder(x, torch.arange(6)[None], torch.tensor([[1, 1, 1, 2, 2, 0]])))
    assert torch.equal(*outputs)


def test_a_missing_package_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty(0)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "xlme_ds.models.attention_triton", raising=False)
    monkeypatch.delattr(models, "attention_triton", raising=False)  # else it is there once another test has imported it
    with pytest.raises(ValueError, match=r"needs the package triton.* set model.kernels to auto"):
        TritonBias(empty, empty, None, None, 1).attend(empty, None, 0.0, None)


def test_other_head_sizes_fail() -> None:
    with pytest.raises(ValueError, match=r"but model.width / model.heads is 8: set model.kernels to auto"):
        validate(RunConfig("test", model=ModelConfig(width=24, heads=3, kernels="triton")))


# Whether a position sees the whole of its item, which is all that the kernels compute.
SEES_ALL = {"electra": True, "mlm": True, "rts": True, "corrective": True, "all_tokens": True}
SEES_ALL |= {"ernie_m": False, "btmlm": False, "clm": False, "mt": False}
RECIPE = {"electra": "base", "mlm": "xlmr", "rts": "base", "corrective": "base", "all_tokens": "xlme_all_tokens"}
RECIPE |= {"ernie_m": "ernie_m", "btmlm": "ernie_m_stage2", "clm": "xlm_clm", "mt": "xlm_mt"}


def test_objectives_with_other_masks_exclude_the_kernels() -> None:
    assert SEES_ALL.keys() == OBJECTIVES.keys()
    for name, sees_all in SEES_ALL.items():
        usual = RECIPES[RECIPE[name]]
        run = replace(usual, model=replace(usual.model, kernels="triton"))
        run = replace(run, objective=ObjectiveConfig(name)) if name in ("rts", "corrective") else run
        fails = pytest.raises(ValueError, match=rf"its whole item, and objective.name {name} does not: set it to auto")
        with nullcontext() if sees_all else fails:
            objective_of(run.objective).check(run)
