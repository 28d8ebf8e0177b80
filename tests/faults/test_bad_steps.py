"""A step with a loss or gradient that is not finite, or a spike, leaves every engine as if it had never been, bit for
bit."""

import json
from pathlib import Path

import pytest

from tests.faults.bad_steps_worker import BAD, STEPS
from tests.launch import run_ranks
from tests.rows import write_data


def zero(stage: int, **settings: object) -> dict[str, object]:
    return dict(deepspeed=f"zero{stage}") | settings


PIPE = dict(kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=2)
CASES: dict[int, dict[str, dict[str, object]]] = {
    1: {"plain": dict(kind="plain")},
    2: {
        **{f"zero{stage}": zero(stage) for stage in (1, 2, 3)},
        "bf16 zero1": zero(1, precision="bf16"),
        "bf16 zero1, gradients too": zero(1, precision="bf16", gradient_precision="bf16"),
        "bf16 zero2": zero(2, precision="bf16"),  # the one in which DeepSpeed would take the step
        "pipeline": PIPE,
        "dualpipev": PIPE | dict(pipeline_schedule="dualpipev"),
    },
}
NAMES = [(world, name) for world, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad_steps")
    data = write_data(folder / "data", rows=96)
    for world, cases in CASES.items():
        (folder / f"{world}.json").write_text(json.dumps(cases))
        worker = str(Path(__file__).with_name("bad_steps_worker.py"))
        results = run_ranks(world, [worker, str(folder / f"{world}.json"), str(data), str(folder)])
        assert all(r.returncode == 0 for r in results), "\n".join(r.stdout[-500:] + r.stderr[-3000:] for r in results)
    return folder


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_state_is_as_if_the_step_had_never_been(out: Path, world: int, name: str) -> None:
    for rank in range(world):
        disturbed, alone = ((out / f"{name} {kind} {rank}.state").read_bytes() for kind in ("disturbed", "alone"))
        assert disturbed == alone, rank


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_the_engine_says_so_and_names_the_rows(out: Path, world: int, name: str) -> None:
    ranks = [json.loads((out / f"{name} disturbed {rank}.json").read_text()) for rank in range(world)]
    assert all(said == ranks[0] for said in ranks)
    for step, (applied, finite, suspects) in enumerate(ranks[0]):
        assert applied == (step not in BAD), step
        assert finite == (BAD.get(step) not in ("gradient", "loss")), step
        assert bool(suspects) == (BAD.get(step) == "loss"), step
    assert len(ranks[0]) == STEPS
    (row,) = ranks[0][3][2]
    # The second micro-batch (of 2 of the step's 8 rows) of the last share; replicas of a pipeline are the shares there.
    first = 24 + (6 if "zero" in name else 2)
    assert row == f"mono {first}-{first + 1}, para {first}-{first + 1}"
