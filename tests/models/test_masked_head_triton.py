"""The masked head's Triton kernels, in Triton's interpreter, against the whole softmax in float64."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.launch import ROOT, environment
from xlme_ds import models
from xlme_ds.models.masked_head import triton_kernels, vocabulary_softmax

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
# fp32: sums of up to 140 terms in another order. fp16: the logits' gradient is rounded to 2^-12 of each number, then
# the results; losses and samples come from sums that are not.
FP32, FP16 = 2e-6, 2e-3


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("masked_head") / "measured.json"
    command = [sys.executable, "-m", "tests.models.masked_head_worker", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@needs_triton
@pytest.mark.parametrize("case", ["one block", "many positions", "three blocks", "a position, an id"])
def test_equals_the_full_softmax_in_fp32(measured: Any, case: str) -> None:
    errors = measured["fp32"][case]
    assert errors.keys() >= {"loss", "hidden", "bias", "block 0", "samples", "predictions"}
    assert max(errors.values()) < FP32, errors


@needs_triton
@pytest.mark.parametrize("case", ["many positions", "three blocks"])
def test_temperature_and_z_loss(measured: Any, case: str) -> None:
    """Samples from softmax(logits / τ), the gradient of −log p + z log² Z, and the loss without either."""
    errors = measured["choices"][case]
    assert max(errors.values()) < 2 * FP32, errors  # a tempered share is off by twice as much at τ = 1/2


@needs_triton
@pytest.mark.parametrize("case", ["many positions", "three blocks"])
def test_half_precision(measured: Any, case: str) -> None:
    errors = dict(measured["fp16"][case])
    # The logits were never rounded to fp16 (2^-12 of each), or these would be off by more.
    assert max(errors.pop(name) for name in ("loss", "samples", "predictions")) < FP32, measured["fp16"][case]
    # Were nothing rounded the errors would be fp32's: the comparison would not be of fp16.
    assert 1e-5 < max(errors.values()) < FP16, errors


@needs_triton
def test_samples_at_the_borders_of_groups_and_blocks(measured: Any) -> None:
    *drawn, ids = measured["borders"]
    assert len(set(ids)) == 22
    assert drawn == [ids] * 3


@needs_triton
def test_without_uniforms_nothing_is_drawn(measured: Any) -> None:
    assert measured["undrawn"]


@needs_triton
def test_two_runs_give_the_same_bits(measured: Any) -> None:
    assert measured["twice"]


@needs_triton
def test_the_tables_gradient_goes_into_the_sum_of_an_engine(measured: Any) -> None:
    assert measured["opened"]


@needs_triton
def test_special_tokens_are_never_predicted(measured: Any) -> None:
    assert measured["never"] == {"seen": [], "far": [[200], [0.0, 200.0]]}


@needs_triton
def test_nan_shows_in_the_loss(measured: Any) -> None:
    assert measured["nan"]


@needs_triton
def test_fake_tensors_have_the_shapes_of_real_ones(measured: Any) -> None:
    checks = measured["operators"]
    assert len(checks) == 3
    assert all(set(found.values()) == {"SUCCESS"} for found in checks.values()), checks


def test_on_the_cpu_the_setting_changes_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, table, bias = (torch.randn(*shape, generator=g) for shape in ((9, 16), (300, 16), (300,)))
    targets, uniforms = torch.randint(300, (9,), generator=g), torch.rand(9, generator=g)
    runs = [
        vocabulary_softmax(hidden, [table], bias, targets, uniforms, 128, kernels)
        for kernels in ("auto", "torch", "triton")
    ]
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_a_missing_package_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "xlme_ds.models.masked_head_triton", raising=False)
    monkeypatch.delattr(models, "masked_head_triton", raising=False)
    with pytest.raises(ValueError, match=r"model.kernels triton needs the package triton.* set model.kernels to auto"):
        triton_kernels("triton", torch.zeros(1, 16))
