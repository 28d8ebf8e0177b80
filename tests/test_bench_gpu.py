"""bench.gpu on the CPU with tiny sizes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu import __main__ as gpu
from bench.gpu.parity import CASES, parity
from bench.roofline.counted import GPUS
from bench.synthetic import synthetic_batch
from tests.launch import environment
from xlme_ds.data.schema import EOS, PAD
from xlme_ds.models import attention

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def measured(out: Path, *flags: str, first: str = "", code: int = 0) -> dict:
    """The figures of a quick run; each of its processes first runs the lines of `first`."""
    (out / "sitecustomize.py").write_text(first)
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--quick", "--json", "--out", str(out / "out"), *flags],
        cwd=ROOT, capture_output=True, text=True, env=environment(PYTHONPATH=f"{out}{os.pathsep}{ROOT}"),
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    figures = json.loads((out / "out" / "gpu.json").read_text())
    assert json.loads(done.stdout) == figures
    return figures


def test_every_section_but_those_of_commands_runs(tmp_path: Path) -> None:
    absent = "import sys; sys.modules['transformers'] = None"
    sections = ["--sections", "matmul", "parity", "steps", "peers", "profile"]
    figures = measured(tmp_path, *sections, "--minutes", "60", "--patience", "30", first=absent)
    assert figures["machine"]["torch"] == torch.__version__
    assert [case["tflops"] > 0 for case in figures["matmul"]] == [True, True]
    assert [(case["case"], case["ok"]) for case in figures["parity"]] == [
        (name, True) for name in CASES for _ in range(2)
    ]
    for case in figures["parity"]:
        # float64 on the other side: an error of exactly 0 everywhere would mean that nothing was compared.
        assert case["error"] > 0 or case["case"] == "token lookup"
    assert {case["recipe"] for case in figures["steps"]} == {"base_zero1", "large_zero2", "modern_base"}
    for case in figures["steps"]:
        assert case["tokens_per_s"] > 0 and case["fraction_of_matmul_peak"] > 0 and 0 < case["padding"] < 0.5
        # λ · 2 ln 2 of an untrained discriminator and 2 ln V of the generator, a few steps later
        assert 70 < case["loss"] < 85 and case["planned_memory_gib"] > 0
    assert [case["left_out"] for case in figures["peers"]] == ["not installed: transformers"]
    (profile,) = figures["profile"]
    assert 0.3 < sum(kernel["share"] for kernel in profile["kernels"]) <= 1
    assert profile["busy_ms"] == pytest.approx(profile["total_ms"], rel=0.2) and profile["launches"] > 1000
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert all(f"## {section} (CPU, " in text for section in ("matmul", "parity", "steps", "peers", "profile"))


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "out" / "work"  # the name that the bench's own folder begins with
    theirs.mkdir(parents=True)
    (theirs / "text").touch()
    measured(tmp_path, "--minutes", "0.0001")
    assert (theirs / "text").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.md", "work"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["-m", "bench.gpu", "--device", "cpu", "--out", str(tmp_path / "file")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is a file, not a folder" in done.stderr


def test_no_time_is_a_mistake(tmp_path: Path) -> None:
    """A bench that leaves everything out must not end with exit code 0."""
    words = ["-m", "bench.gpu", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert done.stderr == "xlme bench gpu: error: --minutes and --patience must be above 0\n"


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.cpu_attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: attention.TorchBias) -> Tensor:
        return right(q, k, v, gate * 1.001 if q.dtype == torch.float32 else gate, bias)

    monkeypatch.setattr(attention, "cpu_attend", wrong)
    case = CASES["layer with gated bias and item mask"]
    assert not parity(case, CPU, "fp32")["ok"]
    assert parity(case, CPU, "bf16")["ok"]


def test_nan_is_no_parity() -> None:
    def case(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"fine": torch.ones(2), "broken": torch.tensor([1.0, float("nan") if dtype == torch.float32 else 1.0])}

    assert not parity(case, CPU, "fp32")["ok"] and parity(case, CPU, "bf16")["ok"]


# Faults of a GPU, simulated: of ten comparisons one hangs, one fails and one crashes.
FAULTS = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import os, time, torch, bench.gpu.parity
    def broken(): raise RuntimeError("an illegal memory access was encountered")
    def in_bf16(right, wrong):
        return lambda device, dtype: wrong() if dtype == torch.bfloat16 else right(device, dtype)
    first = "layer with gated bias and item mask"
    faults = {first: lambda: time.sleep(600), "token lookup": broken, "whole model": os.abort}
    bench.gpu.parity.CASES |= {name: in_bf16(bench.gpu.parity.CASES[name], wrong) for name, wrong in faults.items()}
"""


def test_a_case_that_hangs_fails_or_crashes_costs_no_other(tmp_path: Path) -> None:
    figures = measured(tmp_path, "--sections", "parity", "--patience", "0.25", first=FAULTS, code=1)
    got = {(case["case"], case["dtype"]): case.get("failed", case.get("ok")) for case in figures["parity"]}
    assert got.pop(("layer with gated bias and item mask", "bf16")) == "no end after 15 s"
    assert got.pop(("token lookup", "bf16")) == "RuntimeError: an illegal memory access was encountered"
    assert got.pop(("whole model", "bf16")) == "the process ended with code -6"
    assert len(got) == 7 and set(got.values()) == {True}


def test_nothing_begins_after_the_time_given(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path, {})
    common = {"device": "cpu", "quick": True, "folder": str(tmp_path)}
    bench = gpu.Bench(report, common, deadline=time.monotonic(), patience=600)
    bench.run("matmul", {"dtype": "fp32"})
    bench.end()
    assert report.figures["matmul"] == [{"dtype": "fp32", "left_out": "the time given by --minutes is up"}]


def test_a_case_that_the_time_given_cuts_is_no_failure(tmp_path: Path) -> None:
    """The first comparison sleeps past the end."""
    figures = measured(tmp_path, "--sections", "parity", "--minutes", "0.3", first=FAULTS)
    assert {case.get("left_out") for case in figures["parity"]} == {"the time given by --minutes is up"}


def test_memory_that_is_too_little_is_no_failure(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path, {})
    report.add("steps", {"case": 1, "out_of_memory": "CUDA out of memory"})
    assert report.ok
    report.add("steps", {"case": 2, "failed": "RuntimeError: no kernel"})
    assert not report.ok and "no kernel" in (tmp_path / "gpu.md").read_text()


def test_synthetic_rows_are_packed_rows() -> None:
    batch = synthetic_batch((2, 3), 128, 1000)
    assert batch.tokens_BT.shape == (5, 128) and batch.task_B.tolist() == [0, 0, 1, 1, 1]
    assert batch.segments_BT[:2].tolist() == [[1] * 128] * 2 and (batch.segments_BT[2:].max(1).values > 1).all()
    assert ((batch.tokens_BT == PAD) == (batch.segments_BT == 0)).all()
    items = int(batch.segments_BT.max(1).values.sum())
    assert int((batch.tokens_BT == EOS).sum()) == 2 + 2 * (items - 2)  # one a text, two a pair
    assert batch.tokens_BT.max() < 999


def test_rates_of_another_gpu_are_the_same_shares_of_its_data_sheet() -> None:
    """Of TFLOP/s and TB/s that NVIDIA publishes, dense bf16."""
    h200, sheets = GPUS["h200"], {"h200": (989, 4.8), "h100": (989, 3.35), "a100": (312, 2.0)}
    for name, (peak, memory) in sheets.items():
        of = GPUS[name]
        assert of["memory"] / h200["memory"] == pytest.approx(memory / 4.8)
        for rate in ("bf16_matmul", "torch_attention"):
            assert of[rate] / h200[rate] == pytest.approx(peak / 989)
        assert of["sheet_bf16"] == pytest.approx(peak * 1e12)
