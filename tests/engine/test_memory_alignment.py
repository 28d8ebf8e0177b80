"""Every parameter, gradient and master weight begins at a multiple of 128 bytes of its buffer, under any engine: cuBLAS
and the kernels of layer norm take slower code for addresses off the 16-byte grid (docs/results/performance.md)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.rows import write_data

# Three heads, 203 ids in blocks of 68 and a head of one logit: sizes that no power of two divides.
ODD = dict(width=48, heads=3, vocabulary=203, vocabulary_blocks=3)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "electra": dict(embedding_sharing="gdes"),
    "mlm": dict(objective="mlm", language_embeddings=("fr", "en", "de"), masked_head="linear"),
}


def cases(world: int) -> dict[str, dict[str, Any]]:
    found = {}
    for stage in (1, 2, 3):
        for precision in ("bf16", "fp32"):
            engine = dict(deepspeed=f"zero{stage}", precision=precision)
            found[f"zero{stage} {precision}"] = dict(engine=engine, micro_batch=2, **OBJECTIVES["electra"])
    found["zero1, one micro-batch"] = dict(engine=dict(precision="bf16"), micro_batch=8, **OBJECTIVES["mlm"])
    if world == 4:
        engine = dict(kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=2, precision="bf16")
        found |= {
            "dualpipev": dict(
                engine=engine | dict(pipeline_schedule="dualpipev"), micro_batch=1, **OBJECTIVES["electra"]
            )
        }
        found |= {f"pipeline {name}": dict(engine=engine, micro_batch=2, **of) for name, of in OBJECTIVES.items()}
    return {name: ODD | case for name, case in found.items()}


@pytest.mark.parametrize("world", (1, 2, 4))
def test_everything_is_on_the_grid(world: int, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", rows=24)
    (tmp_path / "cases.json").write_text(json.dumps(cases(world)))
    worker = str(Path(__file__).with_name("memory_alignment_worker.py"))
    results = run_ranks(world, [worker, str(tmp_path / "cases.json"), str(data), str(tmp_path / "out")])
    assert all(one.returncode == 0 for one in results), "\n".join(one.stderr[-3000:] for one in results)
    for name in cases(world):
        for rank in range(world):
            found = json.loads((tmp_path / "out" / f"{name}.{rank}.json").read_text())
            assert set(found["parameters"]) <= set(found["names"]) and len(found["parameters"]) > 10
            assert not {key: off for key, off in found["parameters"].items() if off}, (name, rank)
            assert not any(found["gradients"]), (name, rank)
            if not (name.startswith("zero3") and world > 1):  # whose master weights are updated as whole buffers
                assert found["masters"] and not any(found["masters"].values()), (name, rank)
