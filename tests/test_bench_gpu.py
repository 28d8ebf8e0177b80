"""bench/gpu.py on the CPU: the same program with tiny sizes, without what a foreign machine may lack."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu import SECTIONS, Report
from bench.gpu_parity import CASES, parity
from bench.gpu_steps import Device
from bench.synthetic import synthetic_batch
from tests.launch import environment, python
from xlme_ds.data.schema import EOS, PAD
from xlme_ds.models import attention, layers

ROOT = Path(__file__).resolve().parents[1]
CPU = Device("cpu")
FOREIGN = (
    "deepspeed",
    "pyarrow",
    "sentencepiece",
    "tyro",
    "transformers",
    "safetensors",
    "matplotlib",
    "psutil",
    "yaml",
)


def measured(out: Path, engine: str, sections: tuple[str, ...] = SECTIONS, absent: tuple[str, ...] = ()) -> dict:
    """The figures of a quick run in a process of its own, in which the modules `absent` cannot be imported."""
    program = (
        f"import sys; sys.modules |= dict.fromkeys({absent}); from bench.gpu import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = f"--device cpu --quick --json --engine {engine} --out {out} --sections {' '.join(sections)}".split()
    if absent:
        command = [sys.executable, "-c", program, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    else:
        done = python("-m", "bench.gpu", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((out / "gpu.json").read_text())
    assert json.loads(done.stdout) == figures
    return figures


def test_runs_with_torch_numpy_and_numba_alone(tmp_path: Path) -> None:
    figures = measured(tmp_path, "auto", absent=FOREIGN)
    assert figures["settings"]["engine"] == "plain" and figures["machine"]["torch"] == torch.__version__
    assert [case["tflops"] > 0 for case in figures["matmul"]] == [True, True]
    assert [(case["case"], case["ok"]) for case in figures["parity"]] == [
        (name, True) for name in CASES for _ in range(2)
    ]
    for case in figures["parity"]:
        # float64 on the other side: an error of exactly 0 everywhere would mean that nothing was compared.
        assert case["error"] > 0 or case["case"] == "token lookup"
    assert {case["recipe"] for case in figures["steps"]} == {"base_zero1", "large_zero2"}
    for case in figures["steps"]:
        assert case["tokens_per_s"] > 0 and case["fraction_of_matmul_peak"] > 0 and 0 < case["padding"] < 0.5
        # λ · 2 ln 2 of an untrained discriminator and 2 ln V of the generator, a few steps later
        assert 70 < case["loss"] < 85
        assert "cannot be imported" in case["planned_memory_gib"]
    (profile,) = figures["profile"]
    assert 0.3 < sum(kernel["share"] for kernel in profile["kernels"]) <= 1
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"## {section}" in text for section in SECTIONS)


def test_steps_under_deepspeed_lose_as_the_plain_ones(tmp_path: Path) -> None:
    runs = [measured(tmp_path / engine, engine, ("steps",))["steps"] for engine in ("deepspeed", "plain")]
    for ours, plain in zip(*runs, strict=True):
        assert ours["planned_memory_gib"] > 0
        assert ours["loss"] == pytest.approx(plain["loss"], rel=5e-3)  # both bf16: docs/engines.md


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.plain_attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: attention.AttentionBias) -> Tensor:
        return right(q, k, v, gate * 1.001 if q.dtype == torch.float32 else gate, bias)

    monkeypatch.setattr(layers, "plain_attend", wrong)
    case = CASES["attention with gated bias and item mask"]
    assert not parity(case, CPU, "fp32")["ok"]
    assert parity(case, CPU, "bf16")["ok"]


def test_nan_is_no_parity() -> None:
    def case(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"fine": torch.ones(2), "broken": torch.tensor([1.0, float("nan") if dtype == torch.float32 else 1.0])}

    assert not parity(case, CPU, "fp32")["ok"] and parity(case, CPU, "bf16")["ok"]


def test_a_case_without_figures_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    def too_large() -> dict:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def broken() -> dict:
        raise RuntimeError("no kernel")

    report = Report(tmp_path, CPU, time.monotonic() + 3600, {"sections": SECTIONS})
    report.run("steps", {"case": 1}, too_large)
    assert report.ok
    report.run("steps", {"case": 2}, broken)
    report.run("steps", {"case": 3}, lambda: {"figure": 4.0})
    assert not report.ok
    report.deadline = time.monotonic()
    report.run("parity", {"case": 4}, lambda: {"figure": 5.0})
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [next(iter(set(case) - {"case", "took_s"})) for case in found["steps"]] == [
        "out_of_memory",
        "failed",
        "figure",
    ]
    assert "left_out" in found["parity"][0] and "figure" not in found["parity"][0]


def test_a_case_that_hangs_or_ends_the_gpu_is_the_last_of_its_process(tmp_path: Path) -> None:
    """Each case says when its program began: the same command begins again after both."""
    program = f"""if True:
        import sys, time
        from bench import gpu
        from bench.gpu_steps import Device
        def broken(device, dtype):
            Device.usable = lambda device: False
            raise RuntimeError("an illegal memory access was encountered")
        def parity(case, device, dtype):
            return {{"began": case(device, dtype), "ok": True}}
        gpu.parity, gpu.DTYPES, start = parity, ("fp32",), time.monotonic()
        gpu.CASES = {{"fine": lambda *_: start, "hangs": lambda *_: time.sleep(600), "breaks": broken,
                     "last": lambda *_: start}}
        flags = "--device cpu --quick --sections parity --patience 0.05 --json --out"
        sys.exit(gpu.main([*flags.split(), {str(tmp_path)!r}]))"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stderr
    fine, hangs, breaks, last = json.loads(done.stdout)["parity"]
    assert json.loads(done.stdout) == json.loads((tmp_path / "gpu.json").read_text())
    assert fine["ok"] and hangs["failed"] == "no end after 3 s" and "illegal memory access" in breaks["failed"]
    assert last["ok"] and last["began"] > fine["began"] + 3


def test_synthetic_rows_are_packed_rows() -> None:
    batch = synthetic_batch((2, 3), 128, 1000)
    assert batch.tokens_BT.shape == (5, 128) and batch.task_B.tolist() == [0, 0, 1, 1, 1]
    assert batch.segments_BT[:2].tolist() == [[1] * 128] * 2 and (batch.segments_BT[2:].max(1).values > 1).all()
    assert ((batch.tokens_BT == PAD) == (batch.segments_BT == 0)).all()
    items = int(batch.segments_BT.max(1).values.sum())
    assert int((batch.tokens_BT == EOS).sum()) == 2 + 2 * (items - 2)  # one a text, two a pair
    assert batch.tokens_BT.max() < 999
