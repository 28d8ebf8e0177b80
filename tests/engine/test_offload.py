"""What cannot be offloaded is said; and the road of an XL step, with all state on the disk, on a model of toy size.

Offloading to the CPU's memory is in the matrix of test_parity.py.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.cpp_extension import _get_build_directory

from bench.levers import Settings, cases
from tests.engine.worker import tiny
from tests.launch import environment, run_ranks
from tests.rows import write_data
from xlme_ds.engine.build import check_engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"offload_optimizer": "nvme"}, "needs engine.nvme_folder"),
        ({"kind": "pipeline", "offload_optimizer": "cpu"}, "engine.kind pipeline offloads nothing"),
        ({"gradient_precision": "bf16", "precision": "fp32"}, "is for engine.kind deepspeed computing in bf16"),
    ],
)
def test_a_setting_that_no_engine_runs(engine: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny(engine, 8)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"offload_parameters": "cpu"}, "is ZeRO-1, which offloads the optimizer to cpu and nothing else"),
        ({"gradient_precision": "bf16", "precision": "bf16", "deepspeed": "zero2"}, "bf16 needs ZeRO-1 or ZeRO-3: set it to zero1"),
        (
            {"gradient_precision": "bf16", "precision": "bf16", "offload_optimizer": "cpu"},
            "bf16 needs ZeRO-3 where engine.offload_optimizer is set",
        ),
    ],
)
def test_a_setting_that_needs_another_stage(engine: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_engine(replace(tiny({}, 8).engine, **engine))


def test_every_lever_is_a_legal_run(tmp_path: Path) -> None:
    runs = cases(Settings(nvme_folder=str(tmp_path)))
    for run in runs.values():
        check_engine(run.validate().engine)
    assert len({str(run) for run in runs.values()}) == len(runs) == 7


@pytest.fixture
def async_io() -> None:
    if not list(Path(_get_build_directory("async_io", verbose=False)).glob("*.so")):
        pytest.skip("DeepSpeed's async_io is not compiled, which takes minutes: `make xl-step` does it")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_disk_changes_no_loss(tmp_path: Path, async_io: None, precision: str) -> None:
    data = write_data(tmp_path / "data", rows=96)
    engine = dict(kind="deepspeed", deepspeed="zero3_offload", precision=precision)
    disk = dict(offload_optimizer="nvme", offload_parameters="nvme", nvme_folder=str(tmp_path / "swap"))
    cases = {"memory": dict(engine=engine, micro_batch=4), "disk": dict(engine=engine | disk, micro_batch=4)}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    worker = str(Path(__file__).with_name("worker.py"))
    (result,) = run_ranks(1, [worker, str(tmp_path / "cases.json"), str(data), str(tmp_path / "out")])
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [json.loads((tmp_path / "out" / f"{name}.json").read_text())["loss"] for name in cases]
    # The gradient norm is summed in other groups; its last bit may move a weight over a border of bf16's rounding.
    assert losses[1] == pytest.approx(losses[0], rel={"fp32": 1e-6, "bf16": 1e-4}[precision])


def test_steps_with_all_state_on_the_disk(tmp_path: Path, async_io: None) -> None:
    data = write_data(tmp_path / "data", rows=16)
    sizes = "vocabulary 200 width 32 heads 4 feed-forward 64 generator-layers 1 discriminator-layers 3 max-positions 32"
    words = sizes.split()
    flags = [word for name, value in zip(words[::2], words[1::2], strict=True) for word in (f"--model.{name}", value)]
    command = [sys.executable, "-m", "bench.xl_step", "--out", str(tmp_path / "xl"), "--data", str(data), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()
    first, second = (
        words.split()[-1] for words in last.replace(" without a stop", "").replace(" after loading", "").split(",")
    )
    assert first == second  # to the 6 digits printed; float32 sums run in the same order in both
    assert not list((tmp_path / "xl").rglob("*.swp"))
